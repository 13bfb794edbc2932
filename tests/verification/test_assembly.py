"""Tensor-parallel shards and pipeline stages are put together from shapes and names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.verification.steps import build, make_batch, record_baseline, save
from torch import nn

from stagewright.verification.assembly import load_step, make_baseline, match_rows, relative_error
from stagewright.verification.diagnosis import diagnose
from stagewright.verification.module_names import map_name
from stagewright.verification.record import read_recording
from stagewright.verification.recorder import Recorder


def test_micro_batches_on_stages_are_matched_by_names_and_rows(tmp_path: Path) -> None:
    record_baseline(tmp_path / "baseline")
    model, (x, y) = build(), make_batch()
    stages = [nn.Sequential(*model[:3]), nn.Sequential(*model[3:])]
    recorders = [Recorder([stages[0]], [None], None), Recorder([stages[1]], [{"0": "3", "1": "4"}], None)]
    for recorder in recorders:
        recorder.start()
    for rows in (range(4), range(4, 8)):
        output = stages[1](stages[0](x[list(rows)]))
        (nn.functional.cross_entropy(output, y[list(rows)]) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for rank, recorder in enumerate(recorders):
        recorder.finish()
        recorder.stop()
        save(tmp_path / "candidate", recorder, rank, 2)
    verdict = diagnose(tmp_path / "baseline", tmp_path / "candidate")
    assert verdict.same, verdict.summary()
    assert {tensor.module for tensor in verdict.tensors if tensor.phase == "forward"} == {"", "0", "1", "2", "3", "4"}


@pytest.mark.parametrize("count", [1, 2])
def test_fused_column_shards_need_their_number_of_blocks(count: int, tmp_path: Path) -> None:
    """Two fused projections, each sharded by itself: without the description the blocks are in another order."""
    record_baseline(tmp_path / "baseline", lambda: nn.Sequential(build()[0]))
    x, _ = make_batch()
    whole = build()[0]
    for rank in range(2):
        part = nn.Linear(8, 8)
        for name in ("weight", "bias"):
            blocks = getattr(whole, name).detach().chunk(2)
            setattr(part, name, nn.Parameter(torch.cat([block.chunk(2)[rank] for block in blocks])))
        model = nn.Sequential(part)
        recorder = Recorder([model], [None], None)
        recorder.start()
        model(x)
        recorder.stop()
        save(tmp_path / "candidate", recorder, rank, 2, shards={"*": f"column:{count}"})
    verdict = diagnose(tmp_path / "baseline", tmp_path / "candidate")
    wrong = {(tensor.phase, tensor.module) for tensor in verdict.tensors if tensor.is_wrong and tensor.error < 100}
    assert wrong == ({("before the step", "0"), ("forward", "0"), ("forward", "")} if count == 1 else set())
    assert (verdict.cause is not None and verdict.cause.name == "wrong shard order") == (count == 1)


def test_samples_that_no_rank_has_are_counted(tmp_path: Path) -> None:
    record_baseline(tmp_path / "baseline")
    model, (x, _) = build(), make_batch()
    recorder = Recorder([model], [None], None)
    recorder.start()
    model(x[[6, 2, 4]])
    recorder.stop()
    save(tmp_path / "candidate", recorder, 0, 1)
    baseline = make_baseline(load_step(read_recording(tmp_path / "baseline" / "exact")))
    rows = match_rows(baseline, load_step(read_recording(tmp_path / "candidate")))
    assert rows.by_rank == {0: [[6, 2, 4]]}
    assert rows.problem.startswith("5 of 8 samples")


def test_names_of_stages_are_mapped_by_their_longest_known_head() -> None:
    names = {"0": "3", "0.attn": "x"}
    assert [map_name(name, names) for name in ("0", "0.fc", "0.attn.q", "1", "")] == ["3", "3.fc", "x.q", "1", ""]
    assert map_name("fc", "layers.2") == "layers.2.fc"
    assert map_name("fc", lambda name: name.upper()) == "FC"


def test_errors_of_shapes_integers_and_nan() -> None:
    one = torch.tensor([1.0, float("nan")])
    assert relative_error(one, one, 1.0) == 0.0
    assert relative_error(one, torch.tensor([1.0, 2.0]), 1.0) == float("inf")
    assert relative_error(torch.tensor([3.0]), torch.tensor([1.0]), 4.0) == 0.5
    assert relative_error(torch.tensor([1]), torch.tensor([2]), 1.0) == float("inf")
    assert relative_error(torch.zeros(2), torch.zeros(3), 1.0) == float("inf")


def test_other_module_names_are_not_taken_for_equal(tmp_path: Path) -> None:
    record_baseline(tmp_path / "baseline")
    model, (x, y) = nn.Sequential(nn.Sequential(build())), make_batch()
    recorder = Recorder([model], [None], None)
    recorder.start()
    nn.functional.cross_entropy(model(x), y).backward()
    recorder.finish()
    recorder.stop()
    save(tmp_path / "candidate", recorder, 0, 1)
    verdict = diagnose(tmp_path / "baseline", tmp_path / "candidate")
    assert not verdict.same
    assert verdict.cause is not None
    assert verdict.cause.name == "module names differ"
