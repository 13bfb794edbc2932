"""Run a command whose Python processes attach themselves: ``stagewright attach -- torchrun … train.py``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stagewright.attachment.attach import FOLDER_VARIABLE, STEPS_VARIABLE
from stagewright.attachment.folder import COMMAND_VARIABLE, finish_folder
from stagewright.errors import UsageError
from stagewright.runs.run_folder import RunFolder

ROOT_VARIABLE = "STAGEWRIGHT_ATTACH_ROOT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """How the command ended."""

    code: int
    folder: RunFolder | None
    """None if no optimizer stepped."""


def launch(command: Sequence[str], root: Path, profile_steps: Sequence[int]) -> Launched:
    """Run the command with its output on ours; then finish its run folder."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if shutil.which(command[0], path=programs) is None:
        raise UsageError(f"there is no program {command[0]!r}; give its path: stagewright attach -- torchrun train.py")
    package = Path(__file__).resolve().parents[2]
    folders = [str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH", ""), str(package)]
    with tempfile.TemporaryDirectory(prefix="stagewright-attach-") as scratch:
        link = Path(scratch) / "folder"
        environment = {
            "KINETO_LOG_LEVEL": "99",  # the profiler's start and stop would appear between the lines of the command
            **os.environ,
            "PATH": programs,
            "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder),
            FOLDER_VARIABLE: str(link),
            ROOT_VARIABLE: str(root.absolute()),
            COMMAND_VARIABLE: json.dumps(list(command)),
        }
        if profile_steps:
            environment[STEPS_VARIABLE] = ",".join(map(str, profile_steps))
        process = subprocess.Popen(list(command), env=environment)
        code = _wait(process)
        folder = RunFolder.open(link.read_text(encoding="utf-8").strip()) if link.is_file() else None
    if folder is not None and next(folder.metrics(0), None) is not None:
        error = None if code == 0 else f"the command ended with exit code {code}"
        finish_folder(folder, failed=code != 0, error=error)
    return Launched(code=code, folder=folder)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the command; Ctrl-C reaches it too, and it ends by itself."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code
