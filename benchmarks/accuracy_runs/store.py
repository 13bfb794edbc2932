"""Packed data and weights: written once from a data folder, unpacked on the machine that trains.

    data folder ── pack ──► PACKED/1 text, weights   PACKED/2, PACKED/3 images     each below 45 MB, to be copied
    PACKED ── unpack ──► STORE: arrays (.npy), token ids (.npz), folders of weights, which workers read

Images are the first ones of each class, in the order of the data set; nothing is lost in packing but word embeddings of
words that do not occur, and 16-bit rounding of convolutions.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from accuracy_runs.lossless_images import compress, decompress

_CHUNK = 4500
_NUM_CHUNKS = 10
_SECOND_PART = 6
"""Chunks of training images in the second part; the third has the rest, and the test images."""
_TEXT = {"rte": (("sentence1", "sentence2"), 160), "cola": (("sentence",), 32)}
_MODELS = {"mobilenet-v2": "mobilenetv2-imagenet", "minilm-l6": "minilm-l6"}
_ROWS = "rows"
_EMBEDDING = "embeddings.word_embeddings.weight"


def pack(data: Path, output: Path, limit: int | None = None) -> None:
    """Pack the data sets and weights of a data folder; `limit` keeps fewer samples of each split, for tests."""
    parts = [output / str(number) for number in (1, 2, 3)]
    for part in parts:
        part.mkdir(parents=True, exist_ok=True)
    _pack_text(data, parts[0], limit)
    _pack_weights(data, parts[0])
    for split in ("train", "test"):
        images, labels = _read_images(data, split, limit)
        size = _CHUNK if split == "train" else 5000
        for number in range(min(_NUM_CHUNKS, -(-len(images) // size))):
            part = parts[1] if split == "train" and number < _SECOND_PART else parts[2]
            path, chosen = part / f"cifar10-{split}-{number:02}.npz", slice(number * size, (number + 1) * size)
            if not path.exists():
                np.savez(path, **compress(images[chosen]), labels=labels[chosen])  # type: ignore[arg-type]


def unpack(packed: Path, store: Path) -> None:
    """Unpack what is new below a folder of packed files."""
    store.mkdir(parents=True, exist_ok=True)
    files = [path for path in sorted(packed.rglob("*.npz")) if not (store / f"{path.stem}.done").exists()]
    with ProcessPoolExecutor() as pool:
        list(pool.map(_unpack_file, files, [store] * len(files)))


def samples_in(store: Path) -> tuple[str, ...]:
    """Return the names of the samples that are in a store with the weights of their model."""
    images = all(list(store.glob(f"cifar10-{split}-*.images.npy")) for split in ("train", "test"))
    has_text, has_weights = (store / "text.npz").exists(), {name: (store / name).is_dir() for name in _MODELS}
    return (
        *(["cifar10"] if images and has_weights["mobilenet-v2"] else []),
        *(["cola", "rte"] if has_text and has_weights["minilm-l6"] else []),
    )


def read_images(store: Path, split: str) -> tuple[Any, Any]:
    """Return images [n, 3, 32, 32] in uint8 and their labels, of all chunks in the store."""
    paths = sorted(store.glob(f"cifar10-{split}-*.images.npy"))
    images = np.concatenate([np.load(path) for path in paths])
    labels = np.concatenate([np.load(str(path).replace(".images.", ".labels.")) for path in paths])
    return images, labels.astype(np.int64)


def read_text(store: Path, task: str, split: str) -> dict[str, Any]:
    """Return token ids, attention mask, token types and labels of a split."""
    with np.load(store / "text.npz") as content:
        names = ("input_ids", "attention_mask", "token_type_ids", "labels")
        return {name: content[f"{task}-{split}-{name}"].astype(np.int64) for name in names}


def _unpack_file(path: Path, store: Path) -> None:
    if path.stem == "text":
        shutil.copyfile(path, store / path.name)
    elif path.stem in _MODELS:
        _unpack_weights(path, store / path.stem)
    else:
        with np.load(path) as content:
            packed = dict(content)
        np.save(store / f"{path.stem}.images.npy", np.ascontiguousarray(decompress(packed).transpose(0, 3, 1, 2)))
        np.save(store / f"{path.stem}.labels.npy", packed["labels"])
    (store / f"{path.stem}.done").touch()


def _read_images(data: Path, split: str, limit: int | None) -> tuple[Any, Any]:
    """Decode the images of a split; classes alternate, each in its original order."""
    from PIL import Image
    from pyarrow import parquet

    tables = [parquet.read_table(path) for path in sorted((data / "cifar10").glob(f"{split}-*.parquet"))]
    labels = np.concatenate([table.column("label").to_numpy() for table in tables])
    cells = [cell for table in tables for cell in table.column("img").to_pylist()]
    count = min(limit or len(labels), _CHUNK * _NUM_CHUNKS)
    order = _round_robin(labels)[:count]
    images = [np.asarray(Image.open(io.BytesIO(cells[index]["bytes"])).convert("RGB")) for index in order]
    return np.stack(images), labels[order].astype(np.uint8)


def _round_robin(labels: Any) -> Any:
    rank = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        rank[members] = np.arange(len(members))
    return np.argsort(rank, kind="stable")


def _pack_text(data: Path, part: Path, limit: int | None) -> None:
    import transformers
    from pyarrow import parquet

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(data / _MODELS["minilm-l6"]), local_files_only=True)
    arrays: dict[str, Any] = {}
    for task, (columns, length) in _TEXT.items():
        for split in ("train", "validation"):
            table = parquet.read_table(next((data / "glue" / task).glob(f"{split}-*.parquet"))).slice(0, limit)
            texts = [table.column(name).to_pylist() for name in columns]
            encoded = tokenizer(
                *texts, padding="max_length", truncation=True, max_length=length, return_token_type_ids=True
            )
            arrays[f"{task}-{split}-labels"] = table.column("label").to_numpy().astype(np.uint8)
            for name, dtype in (("input_ids", np.uint16), ("attention_mask", np.uint8), ("token_type_ids", np.uint8)):
                arrays[f"{task}-{split}-{name}"] = np.array(encoded[name], dtype=dtype)
    np.savez_compressed(part / "text.npz", **arrays)


def _pack_weights(data: Path, part: Path) -> None:
    """Keep 16 bits of matrices, and only the word embeddings that occur."""
    from safetensors.numpy import load_file

    with np.load(part / "text.npz") as text:
        words = np.unique(np.concatenate([text[name].ravel() for name in text.files if name.endswith("input_ids")]))
    for name, folder in _MODELS.items():
        tensors = load_file(data / folder / "model.safetensors")
        tensors = {key: value for key, value in tensors.items() if not key.startswith("classifier.")}
        packed = {key: value.astype(np.float16) if value.ndim > 1 else value for key, value in tensors.items()}
        if _EMBEDDING in packed:
            packed |= {_EMBEDDING: packed[_EMBEDDING][words], _ROWS: words.astype(np.int64)}
            packed["size"] = np.array(len(tensors[_EMBEDDING]))
        config = json.loads((data / folder / "config.json").read_text(encoding="utf-8"))
        config = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
        packed["config"] = np.frombuffer(json.dumps(config).encode(), dtype=np.uint8)
        np.savez(part / f"{name}.npz", **packed)


def _unpack_weights(path: Path, folder: Path) -> None:
    from safetensors.numpy import save_file

    with np.load(path) as content:
        tensors = {key: content[key] for key in content.files}
    config = tensors.pop("config").tobytes()
    if _ROWS in tensors:
        rows, size = tensors.pop(_ROWS), int(tensors.pop("size"))
        embedding = np.zeros((size, tensors[_EMBEDDING].shape[1]), dtype=np.float16)
        embedding[rows] = tensors[_EMBEDDING]
        tensors[_EMBEDDING] = embedding
    folder.mkdir(parents=True, exist_ok=True)
    floats = {key: value.astype(np.float32) if value.dtype == np.float16 else value for key, value in tensors.items()}
    save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes(config)


def total_bytes(folder: Path, parts: Sequence[str] = ("1", "2", "3")) -> dict[str, int]:
    """Return the size of each part."""
    return {part: sum(path.stat().st_size for path in (folder / part).glob("*.npz")) for part in parts}
