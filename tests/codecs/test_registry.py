"""Codecs by name: registered ones, users' own in modules, wrong names, and what an import needs."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stagewright import codecs
from stagewright.codecs import registry
from stagewright.codecs.base import Codec
from stagewright.codecs.catalog import EXAMPLES
from stagewright.codecs.name import CodecName
from stagewright.codecs.registry import check_codec
from stagewright.errors import UnknownName, UsageError
from stagewright.spec.local_check import check_user_code
from stagewright.spec.plan_file import plan_from_table


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
    del registry._FACTORIES["halves"]
    registry.get.cache_clear()


def test_registered_codec(halves: str) -> None:
    codec = codecs.get(halves)
    values = torch.randn(7, 3)
    assert torch.allclose(codec.decode(codec.encode(values), (7, 3), torch.float32), values, atol=1e-2)
    assert halves in codecs.codec_names()
    check_codec("delta(halves)")
    assert codecs.get("delta(halves)").num_bytes((7, 3), torch.float32) == codec.num_bytes((7, 3), torch.float32)
    with pytest.raises(UsageError, match="'halves' exists already"):
        registry.register("halves")(lambda name: codec)


CUSTOM_MODULE = """
import torch
from stagewright import codecs

class Half(codecs.Codec):
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

class Unfinished(codecs.Codec):
    pass

class Fails(Half):
    def __init__(self, name):
        raise ValueError("no such setting")

class Other:
    pass

number = 3
"""


@pytest.fixture
def custom_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_codecs.py").write_text(CUSTOM_MODULE, encoding="utf-8")
    (tmp_path / "my_broken_codec.py").write_text("x = 1 / 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    sys.modules.pop("my_codecs", None)
    registry.get.cache_clear()


def test_a_codec_named_with_its_module(custom_module: None) -> None:
    """Alone, with a number, and inside others; a plan that names it is read."""
    values = torch.randn(7, 3)
    for name in ("my_codecs:Half", "my_codecs:Half:3", "feedback(my_codecs:Half)", "delta(my_codecs:Half,1MiB)"):
        check_codec(name)
        codec = codecs.get(name)
        assert codec.name == name
        assert codec.num_bytes((7, 3), torch.float32) == 64 + 48
    plain = codecs.get("my_codecs:Half:3")
    assert plain.numbers == (3,)  # type: ignore[attr-defined]
    assert torch.allclose(plain.decode(plain.encode(values), (7, 3), torch.float32), values, atol=1e-2)
    table = {"batch": 8, "microbatches": 4, "model": {"name": "mlp-mnist"}, "mesh": {"pipeline": 2}}
    plan = plan_from_table({**table, "codec": "bf16", "codec_backward": "feedback(my_codecs:Half)"})
    assert plan.codec_of(0, backward=True) == "feedback(my_codecs:Half)"
    missing = plan_from_table({**table, "codec": "not_mine:Half"})
    with pytest.raises(UsageError, match=r"no module named 'not_mine' for the codec 'not_mine:Half'"):
        check_user_code(missing)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("not_mine:Half", r"no module named 'not_mine' for the codec 'not_mine:Half'; searched "),
        ("my_broken_codec:Half", r"'my_broken_codec' does not import: ZeroDivisionError.*my_broken_codec.py, line 1"),
        ("my_codecs:Halb", r"unknown codec 'Halb'; did you mean 'Half'"),
        ("my_codecs.py:Half", r"'my_codecs.py' is a file, not a module; write my_codecs:Half"),
        ("my_codecs:", r"names no Codec; write package.module:Codec"),
        ("my_codecs:Other", r"'my_codecs:Other' is the class Other, not a codec; name a class that inherits from"),
        ("my_codecs:number", r"'my_codecs:number' is a value of type int, not a codec"),
        ("my_codecs:Unfinished", r"cannot create the codec 'my_codecs:Unfinished': TypeError: Can't instantiate"),
        ("my_codecs:Fails", r"cannot create the codec 'my_codecs:Fails': ValueError: no such setting \(.*my_codecs.py"),
        ("delta(my_codecs:Fails)", r"ValueError: no such setting"),
        ("my_codecs:Half:x", "unknown codec"),
        ("topk:ten", "unknown codec 'topk:ten'"),
    ],
)
def test_errors_of_custom_codecs(custom_module: None, name: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_codec(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("blok4", "did you mean 'block4'"),
        ("block5", "codecs of this kind: block8, block6, block4"),
        ("sort3", "write sort3+1"),
        ("sort15+3", "at most 16"),
        ("lowrank:0", "at least 1"),
        ("topk:0", "above 0 and at most 100"),
        ("delta(delta(block4))", "only a stateless codec inside"),
        ("delta", "write delta(block4)"),
        ("delta(block4,much)", "is not a size"),
        ("feedback(block4,1GiB)", "takes no option"),
        ("Block 4!", "unknown codec"),
        ("delta(blok4)", "unknown codec"),
    ],
)
def test_wrong_names_suggest_valid_ones(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("(", r"\(").replace(")", r"\)").replace("+", r"\+")):
        check_codec(name)
    with pytest.raises((UsageError, UnknownName)):
        codecs.get(name)


def test_names_are_parsed() -> None:
    assert CodecName.parse("sort3+1").numbers == (3, 1)
    assert CodecName.parse("topk:2.5").numbers == (2.5,)
    wrapped = CodecName.parse("delta( lowrank:8, 512MiB )")
    assert (wrapped.kind, wrapped.inner, wrapped.option) == ("delta", CodecName.parse("lowrank:8"), "512MiB")
    for name in EXAMPLES:
        check_codec(name)
        assert codecs.get(name).name == name
        assert codecs.get(name).summary
        copy = pickle.loads(pickle.dumps(codecs.get(name)))
        assert (type(copy), copy.name) == (type(codecs.get(name)), name)
        assert torch.equal(copy.encode(torch.ones(70)), codecs.get(name).encode(torch.ones(70)))
    check_codec("auto")


def test_names_need_no_torch_and_codecs_neither_numba_nor_triton() -> None:
    code = (
        "import sys; from stagewright.codecs.registry import check_codec; check_codec('block4')\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['numba'] = sys.modules['triton'] = None\n"
        "import os; os.environ['STAGEWRIGHT_CODEC_KERNELS'] = 'torch'\n"
        "import torch; from stagewright import codecs; c = codecs.get('hadamard4'); x = torch.randn(100)\n"
        "assert (c.decode(c.encode(x), (100,), x.dtype) - x).abs().max() < 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
