from __future__ import annotations

import pytest
import torch

from stagewright import codecs
from stagewright.codecs.builtin.stateful import open_channel


def exchange(name: str, values: torch.Tensor, order: list[int], ends: tuple[object, ...] | None = None):  # type: ignore[no-untyped-def]
    """One step of two micro-batches of three samples; the receiver decodes them in another order."""
    sender, receiver = ends or (open_channel(codecs.get(name)), open_channel(codecs.get(name)))
    messages = {
        index: sender.encode(values[3 * index : 3 * index + 3], index, range(3 * index, 3 * index + 3))
        for index in (0, 1)
    }
    decoded = {}
    for index in order:
        part = values[3 * index : 3 * index + 3]
        decoded[index] = receiver.decode(
            messages[index], part.shape, part.dtype, index, range(3 * index, 3 * index + 3)
        )
    for end in (sender, receiver):
        end.finish_step()
    return torch.cat([decoded[0], decoded[1]]), (sender, receiver)


def error(decoded: torch.Tensor, values: torch.Tensor) -> float:
    return float((decoded - values).norm() / values.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_error_shrinks_each_time_a_sample_is_seen(dtype: torch.dtype) -> None:
    values = torch.randn(6, 4, 16).to(dtype)
    ends, errors = None, []
    for step in range(4):
        decoded, ends = exchange("delta(block4)", values, [1, 0] if step % 2 else [0, 1], ends)
        errors.append(error(decoded.float(), values.float()))
    assert errors[0] > 0.05
    assert errors[1] < errors[0] / 8
    assert errors[3] < (1e-3 if dtype is torch.float32 else 4e-3)


def test_a_new_sample_is_sent_as_the_inner_codec_would() -> None:
    values = torch.randn(6, 4, 16)
    decoded, _ = exchange("delta(block4)", values, [0, 1])
    plain = codecs.get("block4")
    expected = torch.cat([plain.decode(plain.encode(value), value.shape, value.dtype) for value in values.split(3)])
    assert torch.equal(decoded, expected)


def test_delta_state_is_bounded_and_both_ends_evict_the_same_samples() -> None:
    values = torch.randn(6, 4, 16)  # 256 bytes a sample: 1KiB holds four of six
    decoded, ends = exchange("delta(block4,1KiB)", values, [1, 0])
    for end in ends:
        assert sum(value.numel() * 4 for name, value in end.state().items() if name != "last") == 1024
    assert set(ends[0].state()) == set(ends[1].state())
    for _ in range(5):
        decoded, ends = exchange("delta(block4,1KiB)", values, [0, 1], ends)
        assert error(decoded, values) < 0.15


def test_feedback_removes_the_mean_error_over_many_steps() -> None:
    values = torch.randn(6, 4, 16)
    ends, total = None, torch.zeros_like(values)
    for _ in range(40):
        decoded, ends = exchange("feedback(block4)", values, [0, 1], ends)
        total += decoded
    plain, _ = exchange("block4", values, [0, 1])
    assert error(total / 40, values) < error(plain, values) / 10


@pytest.mark.parametrize("name", ["delta(block4)", "feedback(block4)"])
def test_frozen_channels_neither_use_nor_change_their_state(name: str) -> None:
    values = torch.randn(6, 4, 16)
    _, ends = exchange(name, values, [0, 1])
    before = [{key: value.clone() for key, value in end.state().items()} for end in ends]
    for end in ends:
        end.frozen = True
    plain, _ = exchange("block4", values * 2, [0, 1])
    decoded, _ = exchange(name, values * 2, [0, 1], ends)
    assert torch.equal(decoded, plain)
    for end, old in zip(ends, before, strict=True):
        state = end.state()
        state.pop("last", None), old.pop("last", None)
        assert all(torch.equal(state[key], value) for key, value in old.items())


@pytest.mark.parametrize("name", ["delta(block4)", "feedback(block4)", "block4"])
def test_state_is_restored(name: str) -> None:
    values = torch.randn(6, 4, 16)
    _, ends = exchange(name, values, [0, 1])
    copies = tuple(open_channel(codecs.get(name)) for _ in ends)
    for copy, end in zip(copies, ends, strict=True):
        copy.load_state({key: value.clone() for key, value in end.state().items()})
    again = torch.randn(6, 4, 16)
    assert torch.equal(exchange(name, again, [0, 1], ends)[0], exchange(name, again, [1, 0], copies)[0])


def test_an_overflow_does_not_persist() -> None:
    values = torch.randn(6, 4, 16)
    broken = values.clone()
    broken[0, 0, 0] = torch.inf
    for name in ("delta(block4)", "feedback(block4)"):
        decoded, ends = exchange(name, broken, [0, 1])
        assert not decoded.isfinite().all()
        decoded, ends = exchange(name, values, [0, 1], ends)
        assert decoded.isfinite().all()


def test_tensors_whose_rows_are_not_samples_are_stored_whole() -> None:
    sender, receiver = (open_channel(codecs.get("delta(block4)")) for _ in range(2))
    values = torch.randn(5, 30)
    for step in range(2):
        message = sender.encode(values, 0, [1, 2, 3])
        decoded = receiver.decode(message, values.shape, values.dtype, 0, [1, 2, 3])
        assert error(decoded, values) < (0.2, 0.02)[step]
        sender.finish_step(), receiver.finish_step()
