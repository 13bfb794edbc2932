"""What a benchmark found, as a file that says where it comes from: its command and its machine beside its figures.

    {"command": "python benchmarks/codec_cpu.py --plain", "machine": "2 cores of …; torch …", "begun": "2026-…", …}

Files in `docs/measured/` are such; figures of pages are made from them (`docs/make_measured_figures.py`).
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
_PLACES = ("-o", "--out", "--output")  # where a record goes is no part of how it was made


def write_record(path: str | Path, found: Mapping[str, Any]) -> None:
    """Write what was found; again and again, where a benchmark that is ended early is to leave what it has."""
    about = {
        "command": command_of(sys.argv),
        "machine": machine_text(),
        "begun": _BEGUN.isoformat(timespec="seconds"),
    }
    Path(path).write_text(json.dumps({**about, **found}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def command_of(words: Sequence[str]) -> str:
    """As it is typed in the repository's root, without the file that it writes.

    >>> command_of(["/home/me/benchmarks/codec_cpu.py", "--plain", "--output", "a.json"])
    'python benchmarks/codec_cpu.py --plain'
    """
    script, *rest = words
    kept, skip = [], False
    for word in rest:
        if not skip and not word.startswith(tuple(f"{place}=" for place in _PLACES)) and word not in _PLACES:
            kept.append(word)
        skip = word in _PLACES
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *kept])


def machine_text() -> str:
    """This machine and its versions, as studies tell theirs."""
    from stagewright.machine.machine import probe_machine

    found = probe_machine().to_dict()
    gpus = "".join(f", {gpu['name']}" for gpu in found["gpus"])
    return f"{_CORES} cores of {found['processor']}{gpus}; torch {found['versions']['torch']}"
