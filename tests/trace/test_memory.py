"""Memory over a step: when it was most, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runs import pipeline_run
from stagewright.errors import UsageError
from stagewright.runs import RunFolder
from stagewright.trace.memory import peak_sentence, read_memory


def moment(time: float, doing: str, **sizes: int) -> dict[str, Any]:
    every = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "buffers", "other"), 0)
    return {"time_s": 50 + time, **every, "parameters": 1024, **sizes, "doing": doing}


def memory_of(folder: RunFolder, rows: list[dict[str, Any]]) -> Any:
    folder.worker(0).write_memory(rows)
    folder.worker(1).write_memory([moment(-7, "between steps")])
    return read_memory(folder)[0]


def test_several_microbatches_at_once(tmp_path: Path) -> None:
    rows = [
        moment(0, "forward stage 0 micro-batch 0", activations=100),
        moment(1, "forward stage 0 micro-batch 1", activations=4096),
        moment(2, "backward stage 0 micro-batch 0", activations=4096, gradients=1024),
        moment(3, "forward stage 0 micro-batch 2", activations=4096, gradients=1024),
        moment(3.5, "forward stage 0 micro-batch 2", activations=6144, gradients=1024),
        moment(4, "optimizer", gradients=1024),
    ]
    memory = memory_of(pipeline_run(tmp_path), rows)
    assert memory.peak.total_bytes == 8 * 1024
    assert [one.time_s for one in memory.moments] == [0, 1, 2, 3, 3.5, 4], "worker 1's clock is 7 s behind"
    assert peak_sentence(memory) == (
        "worker 0 peaks at 8.00 KiB, 3.50 s into the step, in forward stage 0 micro-batch 2: activations 6.00 KiB, "
        "parameters 1.00 KiB, gradients 1.00 KiB; 2 micro-batches are between forward and backward then, so the "
        "activations of all of them are saved"
    )


def test_recomputation(tmp_path: Path) -> None:
    rows = [
        moment(0, "forward stage 0 micro-batch 0", activations=64),
        moment(1, "backward stage 0 micro-batch 0", activations=64),
        moment(1.5, "backward stage 0 micro-batch 0", activations=4096),
    ]
    assert "recomputation inside backward" in peak_sentence(memory_of(pipeline_run(tmp_path), rows))


def test_inference_keeps_nothing(tmp_path: Path) -> None:
    assert "constant memory" in peak_sentence(memory_of(pipeline_run(tmp_path), [moment(0, "loaded")]))


def test_memory_that_was_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no memory of worker 0 over time"):
        read_memory(pipeline_run(tmp_path))
