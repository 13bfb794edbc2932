"""The output file of a benchmark: its figures, with its command and machine.

    {"command": "python benchmarks/codec_cpu.py --plain", "machine": "2 cores of …; torch …", "begun": "2026-…", …}

The files in `docs/measured/` are such records; figures on pages are generated from them
(`docs/make_measured_figures.py`).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stagewright.cluster.device import available_cores

__all__ = ["command_of", "machine_text", "write_record"]

_BEGUN = datetime.now(UTC)
_CORES = len(available_cores())  # before a benchmark pins itself to some of them
_OUTPUT_OPTIONS = ("-o", "--out", "--output", "--keep")


def write_record(path: str | Path, figures: Mapping[str, Any], machine: str | None = None) -> None:
    """Write the record; call it after each result, so that a benchmark that is stopped early leaves its results.

    ``machine``: its description, for a process that must not use CUDA; else it is looked up.
    """
    source = {
        "command": command_of(sys.argv),
        "machine": machine or machine_text(),
        "begun": _BEGUN.isoformat(timespec="seconds"),
    }
    Path(path).write_text(json.dumps({**source, **figures}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def command_of(words: Sequence[str]) -> str:
    """Return the command as typed in the repository root, without its output file or folder.

    >>> command_of(["/home/me/benchmarks/codec_cpu.py", "--plain", "--output", "a.json"])
    'python benchmarks/codec_cpu.py --plain'
    """
    script, *rest = words
    kept, skip = [], False
    for word in rest:
        is_output = word.partition("=")[0] in _OUTPUT_OPTIONS
        if not skip and not is_output:
            kept.append(word)
        skip = is_output and "=" not in word
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *kept])


def machine_text() -> str:
    """Describe this machine and its versions, as studies do."""
    from stagewright.machine.machine import probe_machine

    machine = probe_machine().to_dict()
    gpus = "".join(f", {gpu['name']}" for gpu in machine["gpus"])
    return f"{_CORES} cores of {machine['processor']}{gpus}; torch {machine['versions']['torch']}"
