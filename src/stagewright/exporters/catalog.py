"""The tools that a plan can be exported to."""

from __future__ import annotations

from collections.abc import Callable

from stagewright.errors import UnknownName, UsageError
from stagewright.exporters.config import ExportedConfig, ExportInput
from stagewright.exporters.data_parallel import export_accelerate, export_deepspeed
from stagewright.exporters.megatron import export_megatron
from stagewright.exporters.torchtitan import export_torchtitan


def export_torchrun(source: ExportInput) -> ExportedConfig:
    """Return the command that runs the plan itself, under torchrun."""
    workers = source.plan.mesh.num_workers
    command = f"torchrun --nproc-per-node {workers} -m stagewright worker {source.plan_path}"
    return ExportedConfig(tool="torchrun", files={}, command=command)


EXPORTERS: dict[str, Callable[[ExportInput], ExportedConfig]] = {
    "torchtitan": export_torchtitan,
    "megatron": export_megatron,
    "accelerate": export_accelerate,
    "deepspeed": export_deepspeed,
    "torchrun": export_torchrun,
}


def export_plan(source: ExportInput, tool: str) -> ExportedConfig:
    """Return a plan as the configuration of a tool."""
    if tool not in EXPORTERS:
        raise UnknownName("tool to export to", tool, EXPORTERS)
    if source.plan.mesh.tensor_degrees and tool != "torchrun":
        raise UsageError(
            f"{source.plan.mesh} has a tensor degree for each stage, which {tool} can't express: use --export torchrun"
        )
    return EXPORTERS[tool](source)
