"""The run folder of an attached job: created at its first step, finished from its metrics."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from stagewright.attachment.summary import summarize
from stagewright.files.atomic import save_text
from stagewright.runs.result import RunResult, Status
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.trace.attached import MARKER

COMMAND_VARIABLE = "STAGEWRIGHT_ATTACH_COMMAND"
"""The launcher's command, as a JSON list."""


def create_folder(root: Path, name: str, num_ranks: int, batch: int, *, path: str | None = None) -> RunFolder:
    """Create the run folder; ``path`` is the link by which the launcher finds it."""
    plan = Plan(model=ModelSpec(name=name), batch=batch, mesh=Mesh(data=num_ranks), microbatches=1, steps=1)
    folder = RunFolder.create(root, plan)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    command = json.loads(os.environ.get(COMMAND_VARIABLE, "null")) or [sys.executable, *sys.argv]
    content = {"command": command, "num_ranks": num_ranks, "device": device, "torch": torch.__version__}
    save_text(json.dumps(content, indent=1) + "\n", folder.path / MARKER)
    if path is not None:
        save_text(os.path.abspath(folder.path) + "\n", Path(path))
    return folder


def finish_folder(folder: RunFolder, *, failed: bool = False, error: str | None = None) -> None:
    """Write result.json from the metrics of all ranks."""
    summary = summarize(folder)
    status: Status = "failed" if failed else "done"
    plan = folder.plan()
    result = RunResult.of_plan(
        plan,
        status=status,
        stages=1,
        training=True,
        samples_per_s=summary.samples_per_s,
        peak_memory_bytes=summary.peak_memory_bytes,
        error=error,
        run=str(folder.path),
        extra={"attached": summary.to_dict()},
    )
    folder.finish(status, result)
