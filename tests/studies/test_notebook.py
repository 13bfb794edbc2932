"""The notebook is a valid one, its cells run, and it holds the outputs of a run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from program import run_script

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_and_has_its_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code)
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert ("outputs" in cell) == (cell["cell_type"] == "code")
        for output in cell.get("outputs", ()):
            assert output["output_type"] in ("stream", "execute_result"), "an error, or what Jupyter does not know"


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path: Path, tmp_path: Path, shared_cache: Path) -> None:
    environment = {**os.environ, "STAGEWRIGHT_CACHE": str(shared_cache)}
    done = run_script(FOLDER / "run.py", path, "--check", cwd=tmp_path, env=environment, timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_notebook_that_does_not_work_is_found(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": ["assert 1 == 2"], "outputs": []}
    (tmp_path / "bad.ipynb").write_text(json.dumps({"cells": [cell], "nbformat": 4, "nbformat_minor": 5}))
    done = run_script(FOLDER / "run.py", tmp_path / "bad.ipynb", "--check", cwd=tmp_path)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr
