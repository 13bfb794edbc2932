"""The record of one step: for each rank a safetensors file with tensors and a JSON file that says what they are.

    FOLDER/rank-0.json  rank-0.safetensors  rank-1.json …

Reading a record runs no code from it: neither format can contain any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.files.json_values import from_json, to_json
from stagewright.verification.layout import Layout

FORMAT = 1

Kind: TypeAlias = Literal[
    "parameter",  # before the step
    "buffer",  # before the step
    "input",
    "output",
    "output gradient",
    "local gradient",  # what backward accumulated on this rank, before a reduction by DDP
    "gradient",  # what the optimizer step used
    "parameter after",
    "buffer after",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One recorded tensor."""

    key: str
    """Its name in the safetensors file."""
    kind: Kind
    module: str
    """Name in the plain model; empty for the model itself."""
    name: str
    """Which tensor of the module: a parameter's or buffer's own name, or where it is in the arguments or the result."""
    order: int
    """Sequence number in the step."""
    forward_pass: int = 0
    """Which forward pass of the model: micro-batches are several passes."""
    call: int = 0
    """Which call of the module in this pass."""
    source: str = ""
    """For an input: the key of the output that is the same tensor object."""
    layout: Layout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """What a module is."""

    type: str
    training: bool
    dropout: float = 0.0
    """Its dropout probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank recorded."""

    rank: int
    world_size: int
    step: int
    replica: int | None
    """Data-parallel coordinate, if the script or its wrapper says so."""
    entries: tuple[Entry, ...]
    modules: Mapping[str, ModuleInfo]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of shared parameters → the first name."""
    shards: Mapping[str, str] = field(default_factory=dict)
    """How modules are sharded, as the script describes it: name pattern → column, row, column:N."""
    error: str = ""
    """The exception that ended the step, if any."""
    last_module: str = ""
    """The module that ran when the step ended with an exception."""
    format: int = FORMAT


def save_record(folder: Path, record: RankRecord, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the files of one rank; the JSON file is written last, so that it marks a complete record."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / f"rank-{record.rank}.safetensors")
    save_text(json.dumps(to_json(record)), folder / f"rank-{record.rank}.json")


@dataclass(frozen=True, slots=True)
class Recording:
    """The records of all ranks of one step."""

    folder: Path
    ranks: tuple[RankRecord, ...]

    def load(self, rank: int, keys: list[str] | None = None) -> dict[str, torch.Tensor]:
        """Read the tensors of a rank."""
        path = self.folder / f"rank-{rank}.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in (keys if keys is not None else file.keys())}
        except (OSError, SafetensorError) as error:
            raise UsageError(f"can't read {path}: {error}; record the step again") from None


def read_recording(folder: str | Path) -> Recording:
    """Read the records in a folder."""
    folder = Path(folder)
    files = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    if not files:
        raise UsageError(
            f"{folder}: no record of a step; the script must run its step in `with sw.verify(model):` "
            "and end that block without being killed"
        )
    return Recording(folder, tuple(_read_rank(path) for path in files))


def _read_rank(path: Path) -> RankRecord:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise UsageError(f"{path}: format {content.get('format')!r}, expected {FORMAT}; record the step again")
        return from_json(RankRecord, content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a record of a step ({error}); record the step again") from None
