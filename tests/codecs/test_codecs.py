"""Properties of every codec: error bound, size, determinism, and rejection of corrupt messages."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings, strategies as st

from stagewright import codecs
from stagewright.codecs.catalog import EXAMPLES
from stagewright.codecs.header import checksum, header_bytes
from stagewright.codecs.kernels import select as kernels
from stagewright.errors import CorruptMessage, UsageError

NAMES = [*EXAMPLES, "topk:0.5", "topk:100", "sort1+0", "sort4+8", "lowrank:1"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.tuples(st.integers(1, 700))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any shape and type; even, heavy-tailed, sparse, shifted or constant values of any size."""
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["normal", "heavy", "sparse", "shifted", "constant", "integers"]))
    values = torch.randn(shape, generator=generator)
    if kind == "heavy":
        values = values**5
    elif kind == "sparse":
        values = values.relu() * (torch.rand(shape, generator=generator) < 0.3)
    elif kind == "shifted":
        values = values * 1e-3 + 7.7
    elif kind == "constant":
        values = torch.full(shape, draw(st.sampled_from([0.0, -0.0, 0.1, -3.3])))
    elif kind == "integers":
        values = values.round()
    most = 2.0 if dtype is torch.float16 else 28.0
    values = values * 10 ** draw(st.floats(-most, most))
    return (values.clamp(-6e4, 6e4) if dtype is torch.float16 else values).to(dtype)  # heavy tails go beyond


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(values=tensors())
def test_a_round_trip_is_within_the_stated_bound(name: str, values: torch.Tensor) -> None:
    codec = codecs.get(name)
    message = codec.encode(values)
    assert message.dtype is torch.uint8
    assert message.shape == (codec.num_bytes(values.shape, values.dtype),)
    decoded = codec.decode(message, values.shape, values.dtype)
    assert (decoded.shape, decoded.dtype) == (values.shape, values.dtype)
    assert bool(((decoded.float() - values.float()).abs() <= codec.bound(values)).all())
    assert torch.equal(codec.encode(values.clone()), message)
    assert torch.equal(
        codec.encode(values, checked=False)[header_bytes(values.ndim) :], message[header_bytes(values.ndim) :]
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("block", "hadamard"))])
@settings(max_examples=60, deadline=None)
@given(
    values=tensors(), broken=st.lists(st.sampled_from([math.inf, -math.inf, math.nan, 3e38, -0.0, 1e-40]), max_size=3)
)
def test_kernels_match_plain_torch(name: str, values: torch.Tensor, broken: list[float]) -> None:
    if kernels.kernel_names()["cpu"] == "torch":
        pytest.skip("numba is not installed")
    codec = codecs.get(name)
    for at, value in enumerate(broken):
        if values.numel():
            values.view(-1)[(at * 37) % values.numel()] = value
    message = codec.encode(values)
    decoded = codec.decode(message, values.shape, values.dtype)
    with kernels.plain_torch():
        assert torch.equal(codec.encode(values), message)
        expected = codec.decode(message, values.shape, values.dtype)
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(decoded.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", ["block8", "block6", "block4", "hadamard8", "hadamard4", "lloyd3", "lloyd2"])
@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_a_block_with_nan_or_inf_decodes_as_nan_and_no_other_is_affected(name: str, broken: float) -> None:
    values = torch.randn(200)
    values[70] = broken
    codec = codecs.get(name)
    decoded = codec.decode(codec.encode(values), values.shape, values.dtype)
    assert decoded[64:128].isnan().all()
    assert torch.equal(decoded.isnan().nonzero().view(-1), torch.arange(64, 128))


def test_nan_and_inf_in_codecs_without_blocks() -> None:
    values = torch.tensor([1.0, math.inf, -math.inf, math.nan, 5.0, 0.5, 0.25, 0.125, 2.0, 3.0])
    for name in ("none", "bf16", "topk:40"):
        decoded = codecs.get(name).decode(codecs.get(name).encode(values), values.shape, values.dtype)
        assert torch.equal(decoded[1:4].nan_to_num(7.0), values[1:4].nan_to_num(7.0))
        assert decoded[4] == 5.0
    decoded = codecs.get("fp8").decode(codecs.get("fp8").encode(values), values.shape, values.dtype)
    assert decoded.isnan().tolist() == [False, True, True, True] + [False] * 6
    assert codecs.get("lowrank:2").decode(codecs.get("lowrank:2").encode(values), (10,), torch.float32).isnan().all()
    decoded = codecs.get("sort3+1").decode(codecs.get("sort3+1").encode(values), values.shape, values.dtype)
    assert decoded[[1, 2, 3]].isnan().all()


def test_a_message_of_zeros_cannot_lose_its_checksum() -> None:
    codec = codecs.get("block6")
    message = codec.encode(torch.tensor(0.0))
    message[7] = 0  # flag: no checksum
    with pytest.raises(CorruptMessage):
        codec.decode(message, (), torch.float32)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(values=tensors(), data=st.data())
def test_a_changed_byte_is_detected_and_never_crashes(name: str, values: torch.Tensor, data: st.DataObject) -> None:
    codec = codecs.get(name)
    message = codec.encode(values)
    at = data.draw(st.integers(0, message.numel() - 1))
    broken = message.clone()
    broken[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptMessage):
        codec.decode(broken, values.shape, values.dtype)
    for wrong in (
        message[:-1],
        message[: at // 2],
        torch.cat((message, message[:3])),
        message.view(1, -1),
        message.float(),
    ):
        with pytest.raises(CorruptMessage):
            codec.decode(wrong, values.shape, values.dtype)
        with pytest.raises(CorruptMessage):
            codec.decode(wrong, values.shape, values.dtype, checked=False)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(values=tensors(), seed=st.integers(0, 2**31))
def test_a_forged_payload_gives_numbers_or_an_error(name: str, values: torch.Tensor, seed: int) -> None:
    """Random bytes with the right checksum: whatever they mean, nothing but a tensor or CorruptMessage comes of it."""
    codec = codecs.get(name)
    message = codec.encode(values)
    start = header_bytes(values.ndim)
    noise = torch.randint(0, 256, (message.numel() - start,), generator=torch.Generator().manual_seed(seed))
    message[start:] = noise.to(torch.uint8)
    message[24:32] = torch.frombuffer(bytearray(struct.pack("<q", int(checksum(message[start:])))), dtype=torch.uint8)
    for checked in (True, False):
        try:
            decoded = codec.decode(message, values.shape, values.dtype, checked=checked)
        except CorruptMessage:
            continue
        assert (decoded.shape, decoded.dtype) == (values.shape, values.dtype)


def test_a_message_of_another_kind_is_rejected_with_both_values() -> None:
    values = torch.randn(3, 40)
    message = codecs.get("block4").encode(values)
    with pytest.raises(CorruptMessage, match="its codec is"):
        codecs.get("hadamard4").decode(message, (3, 40), torch.float32)
    with pytest.raises(CorruptMessage, match=r"its shape is \(3, 40\), expected \(40, 3\)"):
        codecs.get("block4").decode(message, (40, 3), torch.float32)
    with pytest.raises(CorruptMessage, match="its dtype is 0, expected 1"):
        codecs.get("block4").decode(message, (3, 40), torch.bfloat16)
    with pytest.raises(UsageError, match="codecs accept float32, bfloat16, float16, not int64"):
        codecs.get("block4").encode(torch.arange(3))


def test_sizes_match_the_names() -> None:
    shape, values = (32, 128, 768), 32 * 128 * 768
    bits = {"none": 32, "bf16": 16, "fp8": 8.125, "block8": 8.5, "block6": 6.5, "block4": 4.5, "hadamard8": 8.5}
    bits |= {"hadamard4": 4.5, "lloyd3": 3.25, "lloyd2": 2.25}
    for name, each in bits.items():
        assert codecs.get(name).num_bytes(shape, torch.float32) == 64 + values * each / 8
    for name, each in {"sort12+4": 16, "sort9+3": 12, "sort6+2": 8, "sort3+1": 4}.items():
        groups = 2 ** int(name.partition("+")[2])
        assert codecs.get(name).num_bytes(shape, torch.float32) == 64 + -(-(values * each // 8 + groups * 8) // 16) * 16
    assert codecs.get("lowrank:8").num_bytes(shape, torch.float32) == 64 + 2 * 8 * (4096 + 768)


def test_published_errors_are_reproduced() -> None:
    """Relative root mean square errors of the reference table: heavy tails, and values between 0 and 6."""
    generator = torch.Generator().manual_seed(0)

    def error(name: str, values: torch.Tensor) -> float:
        codec = codecs.get(name)
        decoded = codec.decode(codec.encode(values), values.shape, values.dtype)
        return float((decoded - values).norm() / values.norm())

    normal = torch.randn(64, 1024, generator=generator)
    assert error("block4", normal) == pytest.approx(0.09, abs=0.005)
    assert error("lloyd3", normal) == pytest.approx(0.18, abs=0.01)
    assert error("lloyd2", normal) == pytest.approx(0.335, abs=0.01)
    heavy = normal * torch.randn(64, 1024, generator=generator).abs() ** 2
    assert error("hadamard4", heavy) < 0.6 * error("block4", heavy)
    relu6 = normal.clamp(0, 6)
    assert error("block4", relu6) < error("hadamard4", relu6)
    assert error("sort3+1", heavy) > 3 * error("hadamard4", heavy)


def test_low_rank_tensors_keep_bf16_errors() -> None:
    left, right = torch.randn(48, 5), torch.randn(5, 64)
    values = (left @ right).view(6, 8, 64)
    codec = codecs.get("lowrank:5")
    decoded = codec.decode(codec.encode(values), values.shape, values.dtype)
    assert float((decoded - values).norm() / values.norm()) < 0.01


def test_sort_is_the_published_algorithm() -> None:
    """Against a slow rendering of its definition, code by code."""
    values = torch.randn(130)
    ordered, places = values.sort()
    expected = torch.zeros(130)
    for group in torch.arange(130).tensor_split(4):
        members = ordered[group]
        step = (members.max() - members.min()) / 63
        expected[places[group]] = members.min() + ((members - members.min()) / step).round() * step
    codec = codecs.get("sort6+2")
    assert torch.allclose(codec.decode(codec.encode(values), (130,), torch.float32), expected, atol=1e-6)


def test_preallocated_buffers() -> None:
    values = torch.randn(5, 100)
    for name in ("block4", "sort3+1"):
        codec = codecs.get(name)
        room = torch.empty(codec.num_bytes(values.shape, values.dtype), dtype=torch.uint8)
        assert codec.encode(values, out=room) is room
        target = torch.empty_like(values)
        assert codec.decode(room, values.shape, values.dtype, out=target) is target
        odd = torch.cat((torch.zeros(1, dtype=torch.uint8), room))[1:]
        assert torch.equal(codec.decode(odd, values.shape, values.dtype), target)
        with pytest.raises(UsageError, match="needs"):
            codec.encode(values, out=room[:-16])
        assert torch.equal(codec.encode(values.t().contiguous().t()), room)
