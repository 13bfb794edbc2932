"""``stagewright attach -- COMMAND`` on a script that knows nothing of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.slow
def test_an_unchanged_torchrun_job_is_recorded_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["attach", "--profile-steps", "4", "--json", "--root", str(tmp_path / "runs"), "--", "torchrun"]
    words += ["--nproc-per-node", "2", "--master-port", str(20_000 + os.getpid() % 10_000), str(script)]

    done = subprocess.run(
        [sys.executable, "-m", "stagewright", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CODE": "0", "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["num_ranks"] == 2
    assert content["step"]["mesh"] == "data=2"
    assert len(content["step"]["workers"]) == 2
    assert sum(row["share"] for row in content["step"]["rows"]) == pytest.approx(1.0, abs=0.01)
    assert any("all-reduce (data)" in row["name"] for row in content["step"]["rows"])


def test_a_missing_program_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stagewright", "attach", "--", "no-such-program"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )

    assert done.returncode == 2
    assert done.stderr.startswith("stagewright: there is no program 'no-such-program'")
