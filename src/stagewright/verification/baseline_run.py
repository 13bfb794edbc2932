"""Run the baseline's step function several times in one process: exactly, repeated, and with perturbed rounding.

python -m stagewright.verification.baseline_run serial.py:step FOLDER NUM_PERTURBED
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagewright.errors import StagewrightError, UnknownName, UsageError
from stagewright.user_code import find, one_line
from stagewright.verification.context import FOLDER_VARIABLE, ROUNDING_VARIABLE


def load_function(target: str) -> Callable[[], Any]:
    """Return the function that ``FILE.py:FUNCTION`` or ``package.module:function`` names."""
    source, colon, name = target.rpartition(":")
    if not colon or not source:
        raise UsageError(f"--baseline {target}: names no function; write FILE.py:FUNCTION, like serial.py:step")
    if not source.endswith(".py"):
        function: Any = find(target, "baseline", "function")
    else:
        path = Path(source)
        if not path.is_file():
            raise UsageError(f"--baseline {target}: there is no file {path} in {Path.cwd()}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.resolve().parent))
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        if not hasattr(module, name):
            raise UnknownName("function", name, [n for n in vars(module) if not n.startswith("_")], f"(in {path})")
        function = getattr(module, name)
    if not callable(function):
        raise UsageError(f"--baseline {target}: {name} is not a function")
    return function  # type: ignore[no-any-return]


def run_all(target: str, folder: Path, num_perturbed: int) -> None:
    """Run the function with a record of each run."""
    function = load_function(target)
    runs = [("exact", ""), ("repeated", ""), *((f"rounding-{n}", str(n)) for n in range(1, num_perturbed + 1))]
    for name, rounding in runs:
        os.environ[FOLDER_VARIABLE] = str(folder / name)
        os.environ[ROUNDING_VARIABLE] = rounding
        function()
        if not (folder / name / "rank-0.json").is_file():
            raise UsageError(
                f"--baseline {target}: it recorded no step; run the step in `with sw.verify(model, step=0):`, "
                "and ask for another step with --step"
            )


def main() -> None:
    """Run from the command line of this module; an error is one line on standard error."""
    target, folder, num_perturbed = sys.argv[1:4]
    try:
        run_all(target, Path(folder), int(num_perturbed))
    except StagewrightError as error:
        sys.exit(f"stagewright: {error}")
    except Exception as error:  # anything that user code may raise
        sys.exit(f"stagewright: the baseline {target} failed: {one_line(error)}")


if __name__ == "__main__":
    main()
