"""Records are safetensors and JSON, and damaged ones are refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.verification.steps import build, make_batch

import stagewright as sw
from stagewright.errors import UsageError
from stagewright.verification.assembly import Key, load_step
from stagewright.verification.record import read_recording


def test_a_record_has_every_kind_of_tensor(tmp_path: Path) -> None:
    model, (x, y) = build(), make_batch()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with sw.verify(model, folder=tmp_path):
        hidden = model(x)
        torch.nn.functional.cross_entropy(hidden, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    step = load_step(read_recording(tmp_path))

    def value(*key: str) -> torch.Tensor:
        return step.pieces[Key(*key)][0][0].value  # type: ignore[arg-type]

    gradient = value("gradient", "0", "weight")
    assert torch.equal(value("parameter", "0", "weight"), before)
    assert torch.equal(value("parameter after", "0", "weight"), model[0].weight)
    assert torch.allclose(before - 0.5 * gradient, model[0].weight)
    assert torch.equal(value("input", "", "args[0]"), x)
    assert torch.equal(value("output", "", ""), hidden)
    assert torch.equal(value("local gradient", "0", "weight"), gradient)
    assert value("output gradient", "2", "").shape == (8, 16)


def test_without_a_folder_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGEWRIGHT_VERIFY", raising=False)
    model = build()
    with sw.verify(model):
        assert not model[0]._forward_hooks


def test_only_the_asked_step_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_VERIFY", str(tmp_path))
    monkeypatch.setenv("STAGEWRIGHT_VERIFY_STEP", "2")
    model, (x, _) = build(), make_batch()
    for step in range(4):
        with sw.verify(model, step=step):
            model(x + step)
    assert [rank.step for rank in read_recording(tmp_path).ranks] == [2]
    assert torch.equal(load_step(read_recording(tmp_path)).pieces[Key("input", "", "args[0]")][0][0].value, x + 2)


def test_recomputation_is_recorded_once(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    model, (x, _) = build(), make_batch()
    with sw.verify(model, folder=tmp_path):
        checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()
    step = load_step(read_recording(tmp_path))
    assert {len(pieces[0]) for key, pieces in step.pieces.items() if key.kind == "output"} == {1}


def test_an_exception_is_in_the_record(tmp_path: Path) -> None:
    model, (x, _) = build(), make_batch()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), sw.verify(model, folder=tmp_path):
        model(x[:, :3])
    (record,) = read_recording(tmp_path).ranks
    assert (record.last_module, record.error.partition(":")[0]) == ("0", "RuntimeError")


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not a record"), ('{"format": 9}', "format 9, expected 1"), ("[]", "not a record")]
)
def test_damaged_records_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_recording(tmp_path)


def test_a_damaged_tensor_file_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    model, (x, _) = build(), make_batch()
    with sw.verify(model, folder=tmp_path):
        model(x)
    assert json.loads((tmp_path / "rank-0.json").read_text())["format"] == 1
    (tmp_path / "rank-0.safetensors").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(UsageError, match="can't read"):
        load_step(read_recording(tmp_path))
