from __future__ import annotations

import pytest
import torch

from stagewright import codec
from stagewright.codecs.builtin.stateful import open_channel


def exchange(name: str, values: torch.Tensor, order: list[int], ends: tuple[object, ...] | None = None):  # type: ignore[no-untyped-def]
    """One step of two micro-batches of three samples; the receiver takes them in another order."""
    sender, receiver = ends or (open_channel(codec.get(name)), open_channel(codec.get(name)))
    messages = {at: sender.encode(values[3 * at : 3 * at + 3], at, range(3 * at, 3 * at + 3)) for at in (0, 1)}
    found = {}
    for at in order:
        part = values[3 * at : 3 * at + 3]
        found[at] = receiver.decode(messages[at], part.shape, part.dtype, at, range(3 * at, 3 * at + 3))
    for end in (sender, receiver):
        end.finish_step()
    return torch.cat([found[0], found[1]]), (sender, receiver)


def error(found: torch.Tensor, values: torch.Tensor) -> float:
    return float((found - values).norm() / values.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_comes_closer_every_time_a_sample_is_seen(dtype: torch.dtype) -> None:
    values = torch.randn(6, 4, 16).to(dtype)
    ends, errors = None, []
    for step in range(4):
        found, ends = exchange("delta(block4)", values, [1, 0] if step % 2 else [0, 1], ends)
        errors.append(error(found.float(), values.float()))
    assert errors[0] > 0.05
    assert errors[1] < errors[0] / 8
    assert errors[3] < (1e-3 if dtype is torch.float32 else 4e-3)


def test_a_new_sample_is_sent_as_the_inner_codec_would() -> None:
    values = torch.randn(6, 4, 16)
    found, _ = exchange("delta(block4)", values, [0, 1])
    plain = codec.get("block4")
    expected = torch.cat([plain.decode(plain.encode(one), one.shape, one.dtype) for one in values.split(3)])
    assert torch.equal(found, expected)


def test_a_deltas_memory_has_an_end_and_both_ends_forget_the_same() -> None:
    values = torch.randn(6, 4, 16)  # 256 bytes a sample: 1KiB holds four of six
    found, ends = exchange("delta(block4,1KiB)", values, [1, 0])
    for end in ends:
        assert sum(one.numel() * 4 for name, one in end.state().items() if name != "last") == 1024
    assert set(ends[0].state()) == set(ends[1].state())
    for _ in range(5):
        found, ends = exchange("delta(block4,1KiB)", values, [0, 1], ends)
        assert error(found, values) < 0.15


def test_feedback_makes_the_mean_of_many_steps_right() -> None:
    values = torch.randn(6, 4, 16)
    ends, total = None, torch.zeros_like(values)
    for _ in range(40):
        found, ends = exchange("feedback(block4)", values, [0, 1], ends)
        total += found
    plain, _ = exchange("block4", values, [0, 1])
    assert error(total / 40, values) < error(plain, values) / 10


@pytest.mark.parametrize("name", ["delta(block4)", "feedback(block4)"])
def test_frozen_channels_neither_use_nor_change_their_memory(name: str) -> None:
    values = torch.randn(6, 4, 16)
    _, ends = exchange(name, values, [0, 1])
    before = [{key: one.clone() for key, one in end.state().items()} for end in ends]
    for end in ends:
        end.frozen = True
    plain, _ = exchange("block4", values * 2, [0, 1])
    found, _ = exchange(name, values * 2, [0, 1], ends)
    assert torch.equal(found, plain)
    for end, old in zip(ends, before, strict=True):
        state = end.state()
        state.pop("last", None), old.pop("last", None)
        assert all(torch.equal(state[key], one) for key, one in old.items())


@pytest.mark.parametrize("name", ["delta(block4)", "feedback(block4)", "block4"])
def test_a_memory_is_put_back(name: str) -> None:
    values = torch.randn(6, 4, 16)
    _, ends = exchange(name, values, [0, 1])
    copies = tuple(open_channel(codec.get(name)) for _ in ends)
    for copy, end in zip(copies, ends, strict=True):
        copy.load_state({key: one.clone() for key, one in end.state().items()})
    again = torch.randn(6, 4, 16)
    assert torch.equal(exchange(name, again, [0, 1], ends)[0], exchange(name, again, [1, 0], copies)[0])


def test_one_overflow_does_not_stay() -> None:
    values = torch.randn(6, 4, 16)
    broken = values.clone()
    broken[0, 0, 0] = torch.inf
    for name in ("delta(block4)", "feedback(block4)"):
        found, ends = exchange(name, broken, [0, 1])
        assert not found.isfinite().all()
        found, ends = exchange(name, values, [0, 1], ends)
        assert found.isfinite().all()


def test_tensors_whose_rows_are_no_samples_are_remembered_as_a_whole() -> None:
    sender, receiver = (open_channel(codec.get("delta(block4)")) for _ in range(2))
    values = torch.randn(5, 30)
    for step in range(2):
        message = sender.encode(values, 0, [1, 2, 3])
        found = receiver.decode(message, values.shape, values.dtype, 0, [1, 2, 3])
        assert error(found, values) < (0.2, 0.02)[step]
        sender.finish_step(), receiver.finish_step()
