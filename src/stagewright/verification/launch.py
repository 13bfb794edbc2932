"""Run the baseline and the candidate as programs that record a step."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagewright.errors import RunError, UsageError
from stagewright.verification.context import FOLDER_VARIABLE, STEP_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """How a program ended."""

    code: int | None
    """None if it was stopped at its time limit."""
    output: str
    """The end of its output."""


def record_baseline(target: str, folder: Path, *, step: int, num_perturbed: int, timeout_s: float) -> None:
    """Run the baseline's function and record it exactly, repeated and with perturbed rounding."""
    words = [sys.executable, "-m", "stagewright.verification.baseline_run", target, str(folder), str(num_perturbed)]
    done = run_program(words, {STEP_VARIABLE: str(step)}, timeout_s)
    if done.code is None:
        raise RunError(f"the baseline {target} did not end within {timeout_s:g} s; raise --time-limit")
    if done.code:
        lines = [line for line in done.output.splitlines() if line.startswith("stagewright: ")]
        raise UsageError(lines[-1].removeprefix("stagewright: ") if lines else f"the baseline failed:\n{done.output}")


def record_candidate(command: str, folder: Path, *, step: int, timeout_s: float) -> ProgramResult:
    """Run the candidate's command with recording switched on."""
    words = shlex.split(command)
    if not words:
        raise UsageError("--candidate: the command is empty; give one like 'torchrun --nproc-per-node 2 train.py'")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if shutil.which(words[0], path=path) is None:
        raise UsageError(f"--candidate: there is no program {words[0]!r}; give its path")
    return run_program(words, {FOLDER_VARIABLE: str(folder), STEP_VARIABLE: str(step), "PATH": path}, timeout_s)


def run_program(words: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> ProgramResult:
    """Run a program in a session of its own; at its time limit the whole session is stopped."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        code: int | None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _stop(process)
        output.seek(max(0, output.seek(0, os.SEEK_END) - 20_000))
        return ProgramResult(code=code, output=output.read().decode("utf-8", "replace"))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a session: first politely, so that torchrun ends its workers."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
