"""Files of tensors that are written one after another: any dtype and shape, as safetensors reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from stagewright.engine.state.tensor_file import TensorStream, write_tensors
from stagewright.errors import RunError


def test_what_is_written_is_read(tmp_path: Path) -> None:
    dtypes = (torch.bool, torch.float64, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.float8_e4m3fn)
    tensors = {f"{dtype}.{width}": (torch.randn(3, width) * 9).to(dtype) for dtype in dtypes for width in (0, 1, 5)}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "transposed": torch.randn(4, 6).T,
        "part": torch.arange(9)[2:5],
        "ä\n": torch.ones(1),
    }
    path = tmp_path / "file.safetensors"
    digest = write_tensors(path, TensorStream.of(tensors), {"scalars": '{"a": 1}'})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(loaded[name].flatten().view(torch.uint8), value.flatten().view(torch.uint8)), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "scalars": '{"a": 1}'}


def test_an_empty_file_is_read(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file.safetensors", TensorStream.of({}))
    assert load_file(tmp_path / "file.safetensors") == {}


def test_each_tensor_is_made_after_the_one_before_is_written(tmp_path: Path) -> None:
    path, sizes = tmp_path / "file.safetensors", []

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            sizes.append(path.stat().st_size)
            yield str(number), torch.full((2**16,), float(number))

    shapes = {str(number): ((2**16,), torch.float32) for number in range(3)}
    write_tensors(path, TensorStream(shapes=shapes, values=values()))
    assert sizes[2] - sizes[1] == 2**18
    assert load_file(path)["2"].unique().tolist() == [2.0]


def test_what_can_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"w is of torch\.complex128, which safetensors does not have"):
        write_tensors(tmp_path / "file", TensorStream.of({"w": torch.ones(1, dtype=torch.complex128)}))
    with pytest.raises(RunError, match=r"can't write .*nowhere"):
        write_tensors(tmp_path / "nowhere" / "file", TensorStream.of({"w": torch.ones(1)}))
