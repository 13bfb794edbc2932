"""Run our program as a person does, without paying for its imports every time.

    run_program(["split", "digits-vit"], cwd=folder)       as `stagewright split digits-vit` in that folder

One process a test session has imported torch, transformers and our own code, and has computed nothing; each run is a
copy of it (multiprocessing's fork server, the one that the launcher uses), and so are the workers that the run starts.
What depends on a fresh interpreter (how fast `--help` is, what it imports) is tested with one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any

TIME_LIMIT_S = 300


def run_program(
    words: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, check: bool = False
) -> CompletedProcess[str]:
    """Run `stagewright` with some arguments; what it printed and its exit code."""
    return run_copy(_program, [str(word) for word in words], cwd=cwd, env=env, check=check)


def run_script(path: Path, *words: str | Path, **options: Any) -> CompletedProcess[str]:
    """Run a Python file with some arguments; options as of `run_copy`."""
    return run_copy(_script, str(path), [str(word) for word in words], **options)


def run_copy(
    function: Callable[..., Any],
    *args: Any,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    timeout_s: float = TIME_LIMIT_S,
) -> CompletedProcess[str]:
    """Run a function of a module in a fresh copy of the imported process, in a session of its own."""
    from stagewright.engine.launch.fork_server import forked_workers

    folder, environment = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory(prefix="stagewright-test-") as scratch:
        out, err = Path(scratch, "out"), Path(scratch, "err")
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_begin, args=(function, args, folder, environment, str(out), str(err)))
        with forked_workers():
            process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            assert process.pid is not None
            os.killpg(process.pid, 9)
            process.join()
            raise TimeoutExpired(str(args), timeout_s)
        texts = [file.read_text(encoding="utf-8", errors="replace") if file.exists() else "" for file in (out, err)]
        done = CompletedProcess(args, process.exitcode, *texts)
        process.close()
    if check:
        assert done.returncode == 0, done.stderr
    return done


def _begin(
    function: Callable[..., Any], args: Any, folder: str, environment: dict[str, str], out: str, err: str
) -> None:
    os.setsid()
    # Whatever is started from here is a copy of the same process; asked for its state, it would start another.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    forkserver.ensure_running = lambda: None  # the same method under its other name
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    function(*args)


def _script(path: str, words: list[str]) -> None:
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")


def _program(words: list[str]) -> None:
    from stagewright.cli.app import main

    sys.argv = ["stagewright", *words]
    main()
