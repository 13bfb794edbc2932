#!/usr/bin/env bash
# Build the wheel and the sdist, install the wheel into an empty environment without any extra, and use it:
# doctor, a model of one's own compared on two workers, its report page.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-.venv/bin/python}" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/dist" .
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$work"/dist/*.whl
cd "$work"
unset PYTHONPATH
cat >shop.py <<'MODEL'
import torch
from torch import nn


def net():
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(256, 10)), (torch.randn(64, 256),)
MODEL
venv/bin/stagewright doctor
venv/bin/stagewright compare shop:net --devices 2 --batch 64
venv/bin/stagewright compare mlp-mnist --devices 2
venv/bin/stagewright report runs -o page.html
grep -q "shop:net" page.html
echo "the wheel works: $(ls "$work/dist")"
