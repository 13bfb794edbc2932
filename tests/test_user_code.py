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
    paths = [str(folder / "libraries"), str(Path(__file__).parents[1] / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    return ran.stdout + ran.stderr


def test_files_named_like_the_standard_library_do_not_replace_it(shadows: Path) -> None:
    assert "no runs in runs" in _run(shadows, "-m", "stagewright", "runs")


def test_the_fork_server_imports_the_standard_library(shadows: Path) -> None:
    (shadows / "script.py").write_text(_FORK_SERVER)
    assert _run(shadows, "-P", "script.py") == "0\n"


def test_the_fork_server_runs_without_a_library_that_fails(tmp_path: Path) -> None:
    """As transformers does beside a torchvision that does not match torch."""
    (tmp_path / "libraries" / "transformers").mkdir(parents=True)
    (tmp_path / "libraries" / "transformers" / "__init__.py").write_text("raise RuntimeError('no operator nms')\n")
    script = _FORK_SERVER.replace('"profile", "queue", "csv"', '"stagewright.engine.launch.preload_libraries",')
    (tmp_path / "script.py").write_text(script)
    assert _run(tmp_path, "-P", "script.py") == "0\n"


def test_a_model_in_such_a_file_is_refused_with_its_name(shadows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shadows)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UsageError, match=r"profile\.py has the name of Python's own module 'profile'.*rename it"):
        find("profile:make", "model", "factory")
