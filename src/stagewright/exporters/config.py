"""What an exporter takes and returns.

Plan + names of each stage's units ─► exporter ─► files, a command, and what the tool can't express
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.spec.activation_checkpointing import describe_offload
from stagewright.spec.plan import Plan

_LAYER = re.compile(r"(?:^|.*\.)(?:layers|layer|h|blocks|block)\.(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedConfig:
    """The configuration of another tool that runs the same plan."""

    tool: str
    """The tool, with the version whose parser accepts the files."""
    files: dict[str, str]
    """Contents by file name."""
    command: str
    """The command that starts the run."""
    omitted: tuple[str, ...] = ()
    """Parts of the plan that the tool can't express or does differently, one sentence each."""

    def write(self, folder: str | Path) -> list[Path]:
        """Write the files into a folder and return their paths."""
        paths = [Path(folder) / name for name in self.files]
        for path, content in zip(paths, self.files.values(), strict=True):
            save_text(content, path)
        return paths

    def to_dict(self) -> dict[str, Any]:
        return {"tool": self.tool, "files": self.files, "command": self.command, "omitted": list(self.omitted)}

    def __str__(self) -> str:
        files = [f"# {name}\n{content.rstrip()}" for name, content in self.files.items()]
        return "\n\n".join([*files, self.command, *self.omitted])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportInput:
    """A resolved plan with the modules of its stages."""

    plan: Plan
    stages: tuple[tuple[str, ...], ...]
    """For each pipeline stage, in order, the names of its units."""
    plan_path: str = "plan.toml"
    """The plan's file, for commands that read it."""

    def __post_init__(self) -> None:
        if len(self.stages) != self.plan.num_stages:
            raise UsageError(f"the plan has {self.plan.num_stages} stages, but {len(self.stages)} lists of units")

    @property
    def microbatch_size(self) -> int:
        """Samples in a micro-batch; refused where micro-batches differ in size."""
        parts = self.plan.mesh.data * self.plan.microbatches
        size, rest = divmod(self.plan.batch, parts)
        if rest:
            raise UsageError(
                f"a batch of {self.plan.batch} is not divisible by {self.plan.mesh.data} replicas × "
                f"{self.plan.microbatches} micro-batches, which other trainers require; choose another --batch"
            )
        return size

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the numbers of its transformer layers; refused for models without numbered layers."""
        numbers = tuple(
            tuple(int(match[1]) for match in map(_LAYER.match, names) if match is not None) for names in self.stages
        )
        flat = [number for stage in numbers for number in stage]
        if not flat or flat != list(range(len(flat))):
            raise UsageError(
                f"the model {self.plan.model.name!r} is not a stack of numbered transformer layers, so its stages "
                "can't be written as ranges of layers; use --export torchrun"
            )
        return numbers


def common_omissions(plan: Plan) -> list[str]:
    """List what no other trainer has, or not by unit: offload, compressed links, batch norm over all micro-batches."""
    omitted = []
    if describe_offload(plan) != "none":
        omitted.append("Activations stay on the device: offload of units has no counterpart.")
    if any(name != "none" for name in _names(plan.codec) + _names(plan.codec_backward or ())):
        omitted.append(f"Links are not compressed: codec = {plan.codec!r} has no counterpart.")
    if plan.batch_norm == "deferred":
        omitted.append(
            "Batch norm's running statistics are per micro-batch: batch_norm = 'deferred' has no counterpart."
        )
    if plan.mesh.pipeline > 1 and plan.resolved_placement == "client-server":
        omitted.append("Stages are placed in order: the client-server placement has no counterpart.")
    return omitted


def _names(codec: str | Sequence[str]) -> list[str]:
    return [codec] if isinstance(codec, str) else list(codec)
