from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.user_code import find

_SHADOWING = ("profile", "queue", "argparse", "csv", "json")

_FORK_SERVER = """
import multiprocessing, os
from stagewright.engine.launch import fork_server
fork_server._PRELOADED = ("profile", "queue", "csv")
fork_server.start_fork_server()
with fork_server.forked_workers():
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
process.join()
print(process.exitcode)
"""


@pytest.fixture
def shadows(tmp_path: Path) -> Path:
    """Return a folder of files with names of the standard library, each of which raises."""
    for name in _SHADOWING:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported instead of the standard library')\n")
    return tmp_path


def _run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    ran = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    return ran.stdout + ran.stderr


def test_files_named_like_the_standard_library_do_not_replace_it(shadows: Path) -> None:
    assert "no runs in runs" in _run(shadows, "-m", "stagewright", "runs")


def test_the_fork_server_imports_the_standard_library(shadows: Path) -> None:
    (shadows / "script.py").write_text(_FORK_SERVER)
    assert _run(shadows, "-P", "script.py") == "0\n"


def test_a_model_in_such_a_file_is_refused_with_its_name(shadows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shadows)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UsageError, match=r"profile\.py has the name of Python's own module 'profile'.*rename it"):
        find("profile:make", "model", "factory")
