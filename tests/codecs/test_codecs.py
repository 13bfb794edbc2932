"""The laws of every codec: its bound, its size, the same bytes for the same tensor, and no trust in what arrives."""

from __future__ import annotations

import math
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright import codec
from stagewright.codecs import registry
from stagewright.codecs.base import Codec
from stagewright.codecs.header import checksum, header_bytes
from stagewright.codecs.kernels import select as kernels
from stagewright.codecs.name import EXAMPLES, CodecName, check_codec
from stagewright.errors import CorruptMessage, UnknownName, UsageError
from stagewright.spec.plan_file import plan_from_table

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
    one = codec.get(name)
    message = one.encode(values)
    assert message.dtype is torch.uint8
    assert message.shape == (one.num_bytes(values.shape, values.dtype),)
    again = one.decode(message, values.shape, values.dtype)
    assert (again.shape, again.dtype) == (values.shape, values.dtype)
    assert bool(((again.float() - values.float()).abs() <= one.bound(values)).all())
    assert torch.equal(one.encode(values.clone()), message)
    assert torch.equal(
        one.encode(values, checked=False)[header_bytes(values.ndim) :], message[header_bytes(values.ndim) :]
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("block", "hadamard"))])
@settings(max_examples=60, deadline=None)
@given(
    values=tensors(), broken=st.lists(st.sampled_from([math.inf, -math.inf, math.nan, 3e38, -0.0, 1e-40]), max_size=3)
)
def test_fast_kernels_give_the_bytes_of_plain_torch(name: str, values: torch.Tensor, broken: list[float]) -> None:
    if kernels.kernel_names()["cpu"] == "torch":
        pytest.skip("numba is not installed")
    one = codec.get(name)
    for at, value in enumerate(broken):
        if values.numel():
            values.view(-1)[(at * 37) % values.numel()] = value
    message = one.encode(values)
    found = one.decode(message, values.shape, values.dtype)
    with kernels.plain_torch():
        assert torch.equal(one.encode(values), message)
        expected = one.decode(message, values.shape, values.dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", ["block8", "block6", "block4", "hadamard8", "hadamard4", "lloyd3", "lloyd2"])
@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_a_block_with_a_broken_value_arrives_as_nan_and_no_other_is_touched(name: str, broken: float) -> None:
    values = torch.randn(200)
    values[70] = broken
    one = codec.get(name)
    found = one.decode(one.encode(values), values.shape, values.dtype)
    assert found[64:128].isnan().all()
    assert torch.equal(found.isnan().nonzero().view(-1), torch.arange(64, 128))


def test_broken_values_where_no_blocks_are() -> None:
    values = torch.tensor([1.0, math.inf, -math.inf, math.nan, 5.0, 0.5, 0.25, 0.125, 2.0, 3.0])
    for name in ("none", "bf16", "topk:40"):
        found = codec.get(name).decode(codec.get(name).encode(values), values.shape, values.dtype)
        assert torch.equal(found[1:4].nan_to_num(7.0), values[1:4].nan_to_num(7.0))
        assert found[4] == 5.0
    found = codec.get("fp8").decode(codec.get("fp8").encode(values), values.shape, values.dtype)
    assert found.isnan().tolist() == [False, True, True, True] + [False] * 6
    assert codec.get("lowrank:2").decode(codec.get("lowrank:2").encode(values), (10,), torch.float32).isnan().all()
    found = codec.get("sort3+1").decode(codec.get("sort3+1").encode(values), values.shape, values.dtype)
    assert found[[1, 2, 3]].isnan().all()


def test_a_message_of_zeros_can_not_lose_its_checksum() -> None:
    one = codec.get("block6")
    message = one.encode(torch.tensor(0.0))
    message[7] = 0  # says: I carry none
    with pytest.raises(CorruptMessage):
        one.decode(message, (), torch.float32)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(values=tensors(), data=st.data())
def test_a_changed_byte_is_found_and_never_crashes(name: str, values: torch.Tensor, data: st.DataObject) -> None:
    one = codec.get(name)
    message = one.encode(values)
    at = data.draw(st.integers(0, message.numel() - 1))
    broken = message.clone()
    broken[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptMessage):
        one.decode(broken, values.shape, values.dtype)
    for wrong in (
        message[:-1],
        message[: at // 2],
        torch.cat((message, message[:3])),
        message.view(1, -1),
        message.float(),
    ):
        with pytest.raises(CorruptMessage):
            one.decode(wrong, values.shape, values.dtype)
        with pytest.raises(CorruptMessage):
            one.decode(wrong, values.shape, values.dtype, checked=False)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(values=tensors(), seed=st.integers(0, 2**31))
def test_a_forged_payload_gives_numbers_or_an_error(name: str, values: torch.Tensor, seed: int) -> None:
    """Random bytes with the right checksum: whatever they mean, nothing but a tensor or CorruptMessage comes of it."""
    one = codec.get(name)
    message = one.encode(values)
    start = header_bytes(values.ndim)
    noise = torch.randint(0, 256, (message.numel() - start,), generator=torch.Generator().manual_seed(seed))
    message[start:] = noise.to(torch.uint8)
    message[24:32] = torch.frombuffer(bytearray(struct.pack("<q", int(checksum(message[start:])))), dtype=torch.uint8)
    for checked in (True, False):
        try:
            found = one.decode(message, values.shape, values.dtype, checked=checked)
        except CorruptMessage:
            continue
        assert (found.shape, found.dtype) == (values.shape, values.dtype)


def test_a_message_of_another_kind_is_refused_with_both_values() -> None:
    values = torch.randn(3, 40)
    message = codec.get("block4").encode(values)
    with pytest.raises(CorruptMessage, match="its codec is"):
        codec.get("hadamard4").decode(message, (3, 40), torch.float32)
    with pytest.raises(CorruptMessage, match=r"its shape is \(3, 40\) instead of \(40, 3\)"):
        codec.get("block4").decode(message, (40, 3), torch.float32)
    with pytest.raises(CorruptMessage, match="its dtype is 0 instead of 1"):
        codec.get("block4").decode(message, (3, 40), torch.bfloat16)
    with pytest.raises(UsageError, match="takes float32, bfloat16, float16, not int64"):
        codec.get("block4").encode(torch.arange(3))


def test_sizes_are_what_the_names_say() -> None:
    shape, values = (32, 128, 768), 32 * 128 * 768
    bits = {"none": 32, "bf16": 16, "fp8": 8.125, "block8": 8.5, "block6": 6.5, "block4": 4.5, "hadamard8": 8.5}
    bits |= {"hadamard4": 4.5, "lloyd3": 3.25, "lloyd2": 2.25}
    for name, each in bits.items():
        assert codec.get(name).num_bytes(shape, torch.float32) == 64 + values * each / 8
    for name, each in {"sort12+4": 16, "sort9+3": 12, "sort6+2": 8, "sort3+1": 4}.items():
        groups = 2 ** int(name.partition("+")[2])
        assert codec.get(name).num_bytes(shape, torch.float32) == 64 + -(-(values * each // 8 + groups * 8) // 16) * 16
    assert codec.get("lowrank:8").num_bytes(shape, torch.float32) == 64 + 2 * 8 * (4096 + 768)


def test_published_errors_are_reproduced() -> None:
    """Relative root mean square errors of the reference table: heavy tails, and values between 0 and 6."""
    generator = torch.Generator().manual_seed(0)

    def error(name: str, values: torch.Tensor) -> float:
        one = codec.get(name)
        again = one.decode(one.encode(values), values.shape, values.dtype)
        return float((again - values).norm() / values.norm())

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
    one = codec.get("lowrank:5")
    again = one.decode(one.encode(values), values.shape, values.dtype)
    assert float((again - values).norm() / values.norm()) < 0.01


def test_sort_is_the_published_algorithm() -> None:
    """Against a slow rendering of its definition, code by code."""
    values = torch.randn(130)
    ordered, places = values.sort()
    expected = torch.zeros(130)
    for group in torch.arange(130).tensor_split(4):
        members = ordered[group]
        step = (members.max() - members.min()) / 63
        expected[places[group]] = members.min() + ((members - members.min()) / step).round() * step
    one = codec.get("sort6+2")
    assert torch.allclose(one.decode(one.encode(values), (130,), torch.float32), expected, atol=1e-6)


def test_buffers_of_ones_own() -> None:
    values = torch.randn(5, 100)
    for name in ("block4", "sort3+1"):
        one = codec.get(name)
        room = torch.empty(one.num_bytes(values.shape, values.dtype), dtype=torch.uint8)
        assert one.encode(values, out=room) is room
        target = torch.empty_like(values)
        assert one.decode(room, values.shape, values.dtype, out=target) is target
        odd = torch.cat((torch.zeros(1, dtype=torch.uint8), room))[1:]
        assert torch.equal(one.decode(odd, values.shape, values.dtype), target)
        with pytest.raises(UsageError, match="needs"):
            one.encode(values, out=room[:-16])
        assert torch.equal(one.encode(values.t().contiguous().t()), room)


@pytest.fixture
def halves() -> Iterator[str]:
    @registry.register("halves")
    class Halves(Codec):
        """Half-precision values."""

        def __init__(self, name: CodecName) -> None:
            super().__init__(name.text)

        def payload_bytes(self, shape: object, dtype: torch.dtype) -> int:
            return 2 * math.prod(shape)  # type: ignore[arg-type]

        def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
            data = values.view(-1).half().view(torch.uint8)
            payload[: data.numel()] = data
            payload[data.numel() :] = 0

        def read(self, payload: torch.Tensor, shape: object, dtype: torch.dtype) -> torch.Tensor:
            return payload[: self.payload_bytes(shape, dtype)].clone().view(torch.half).to(dtype).view(shape)  # type: ignore[arg-type]

    yield "halves"
    del registry._KINDS["halves"]
    registry.get.cache_clear()


def test_a_codec_of_ones_own(halves: str) -> None:
    one = codec.get(halves)
    values = torch.randn(7, 3)
    assert torch.allclose(one.decode(one.encode(values), (7, 3), torch.float32), values, atol=1e-2)
    assert halves in codec.codec_names()
    check_codec("delta(halves)")
    assert codec.get("delta(halves)").num_bytes((7, 3), torch.float32) == one.num_bytes((7, 3), torch.float32)
    with pytest.raises(UsageError, match="'halves' exists already"):
        registry.register("halves")(lambda name: one)


OWN = """
import torch
from stagewright import codec

class Half(codec.Codec):
    def __init__(self, name):
        super().__init__(name.text)
        self.numbers = name.numbers

    def payload_bytes(self, shape, dtype):
        return 2 * torch.Size(shape).numel()

    def write(self, values, payload):
        payload.zero_()
        payload[: 2 * values.numel()] = values.reshape(-1).half().view(torch.uint8)

    def read(self, payload, shape, dtype):
        return payload[: self.payload_bytes(shape, dtype)].clone().view(torch.half).to(dtype).view(tuple(shape))

class Unfinished(codec.Codec):
    pass

class Fails(Half):
    def __init__(self, name):
        raise ValueError("no such setting")

class Other:
    pass

number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_codecs.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "my_broken_codec.py").write_text("x = 1 / 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    sys.modules.pop("my_codecs", None)
    registry.get.cache_clear()


def test_a_codec_named_with_its_module(own_module: None) -> None:
    """Alone, with a number, and inside others; a plan that names it is read."""
    values = torch.randn(7, 3)
    for name in ("my_codecs:Half", "my_codecs:Half:3", "feedback(my_codecs:Half)", "delta(my_codecs:Half,1MiB)"):
        check_codec(name)
        one = codec.get(name)
        assert one.name == name
        assert one.num_bytes((7, 3), torch.float32) == 64 + 48
    plain = codec.get("my_codecs:Half:3")
    assert plain.numbers == (3,)  # type: ignore[attr-defined]
    assert torch.allclose(plain.decode(plain.encode(values), (7, 3), torch.float32), values, atol=1e-2)
    table = {"batch": 8, "microbatches": 4, "model": {"name": "mlp-mnist"}, "mesh": {"pipeline": 2}}
    plan = plan_from_table({**table, "codec": "bf16", "codec_backward": "feedback(my_codecs:Half)"})
    assert plan.codec_of(0, backward=True) == "feedback(my_codecs:Half)"
    with pytest.raises(UsageError, match=r"the plan: no module named 'not_mine' for the codec 'not_mine:Half'"):
        plan_from_table({**table, "codec": "not_mine:Half"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("not_mine:Half", r"no module named 'not_mine' for the codec 'not_mine:Half'; looked in "),
        ("my_broken_codec:Half", r"'my_broken_codec' does not import: ZeroDivisionError.*my_broken_codec.py, line 1"),
        ("my_codecs:Halb", r"unknown codec 'Halb'; did you mean 'Half'"),
        ("my_codecs.py:Half", r"'my_codecs.py' is a file, not a module; write my_codecs:Half"),
        ("my_codecs:", r"names no Codec; write package.module:Codec"),
        ("my_codecs:Other", r"'my_codecs:Other' is the class Other, not a codec; name a class that inherits from"),
        ("my_codecs:number", r"'my_codecs:number' is a value of type int, not a codec"),
        ("my_codecs:Unfinished", r"the codec 'my_codecs:Unfinished' can't be made: TypeError: Can't instantiate"),
        ("my_codecs:Fails", r"the codec 'my_codecs:Fails' can't be made: ValueError: no such setting \(.*my_codecs.py"),
        ("delta(my_codecs:Fails)", r"can't be made: ValueError: no such setting"),
        ("my_codecs:Half:x", "unknown codec"),
        ("topk:ten", "unknown codec 'topk:ten'"),
    ],
)
def test_what_can_go_wrong_with_ones_own(own_module: None, name: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_codec(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("blok4", "did you mean 'block4'"),
        ("block5", "known of this kind: block8, block6, block4"),
        ("sort3", "write sort3+1"),
        ("sort15+3", "at most 16"),
        ("lowrank:0", "at least 1"),
        ("topk:0", "above 0 and at most 100"),
        ("delta(delta(block4))", "only a plain codec inside"),
        ("delta", "write delta(block4)"),
        ("delta(block4,much)", "is not a size"),
        ("feedback(block4,1GiB)", "takes no option"),
        ("Block 4!", "unknown codec"),
        ("delta(blok4)", "unknown codec"),
    ],
)
def test_wrong_names_say_what_is_right(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("(", r"\(").replace(")", r"\)").replace("+", r"\+")):
        check_codec(name)
    with pytest.raises((UsageError, UnknownName)):
        codec.get(name)


def test_names_are_taken_apart() -> None:
    assert CodecName.parse("sort3+1").numbers == (3, 1)
    assert CodecName.parse("topk:2.5").numbers == (2.5,)
    wrapped = CodecName.parse("delta( lowrank:8, 512MiB )")
    assert (wrapped.kind, wrapped.inner, wrapped.option) == ("delta", CodecName.parse("lowrank:8"), "512MiB")
    for name in EXAMPLES:
        check_codec(name)
        assert codec.get(name).name == name
        assert codec.get(name).summary
        assert pickle.loads(pickle.dumps(codec.get(name))) is codec.get(name)
    check_codec("auto")


def test_names_need_no_torch_and_codecs_neither_numba_nor_triton() -> None:
    code = (
        "import sys; from stagewright.codecs.name import check_codec; check_codec('block4')\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['numba'] = sys.modules['triton'] = None\n"
        "import os; os.environ['STAGEWRIGHT_CODEC_KERNELS'] = 'torch'\n"
        "import torch; from stagewright import codec; c = codec.get('hadamard4'); x = torch.randn(100)\n"
        "assert (c.decode(c.encode(x), (100,), x.dtype) - x).abs().max() < 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
