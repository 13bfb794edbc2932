"""A model that is larger than the memory of any process: parity is checked under the kernel's limit.

Each worker is in a memory control group of its own, smaller than the model. Under the same limit, a process that builds
the whole model is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

MIB = 2**20
WORKERS = 4
JOB = str(Path(__file__).parents[1] / "support" / "limited_jobs.py")
CGROUP = Path("/sys/fs/cgroup")


def current_group() -> Path | None:
    """Return the folder of this process's memory group, in which it may make others; None if there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        folder = CGROUP / ("memory" if controllers else "") / path.lstrip("/")
        if "memory" in controllers.split(",") and os.access(folder, os.W_OK):
            return folder
        with contextlib.suppress(OSError):
            enabled = (folder / "cgroup.subtree_control").read_text().split()
            if not controllers and "memory" in enabled and os.access(folder, os.W_OK):
                return folder
    return None


@pytest.fixture
def make_group() -> Iterator[Callable[[int], Path]]:
    """Make memory groups with a limit in bytes, without swap."""
    parent = current_group()
    if parent is None:
        pytest.skip("this process can't make memory control groups here (it takes root, and a writable /sys/fs/cgroup)")
    folders: list[Path] = []

    def make(limit: int) -> Path:
        folder = parent / f"stagewright-test-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir()
            folders.append(folder)
            is_second = (folder / "memory.max").exists()
            (folder / ("memory.max" if is_second else "memory.limit_in_bytes")).write_text(str(limit))
            for name, value in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", limit)):
                with contextlib.suppress(OSError):  # a kernel without swap accounting
                    if (folder / name).exists():
                        (folder / name).write_text(str(value))
        except OSError as error:
            pytest.skip(f"this process can't make memory control groups here: {error}")
        return folder

    yield make
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def write_model(folder: Path, num_layers: int, width: int) -> int:
    """Write a Llama, a file for each layer; return the bytes of its weights in float32.

    The files are in bfloat16: weights of the model's own dtype would stay mapped, which the kernel can take back.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=num_layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=64, max_position_embeddings=16, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in transformers.LlamaForCausalLM(config).named_parameters()}
    few = (
        torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    )  # a prime: rows differ
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in shapes.items():
        repeated = few.repeat(shape.numel() // len(few) + 1)[: shape.numel()].view(shape)
        layer = name.split(".")[2] if ".layers." in name else "rest"
        layers.setdefault(layer, {})[name] = torch.ones(shape, dtype=torch.bfloat16) if "norm" in name else repeated
        if len(layers[layer]) == sum(f".layers.{layer}." in other for other in shapes):
            save_file(layers[layer], folder / f"model-{layer}.safetensors", {"format": "pt"})
            layers[layer] = {}
    save_file(layers["rest"], folder / "model-rest.safetensors", {"format": "pt"})
    index = {name: f"model-{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors" for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(4 * shape.numel() for shape in shapes.values())


def start(group: Path, *words: str) -> subprocess.Popen[str]:
    """Start a job in a group."""
    command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", sys.executable, JOB, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("training", "num_layers", "limit"), [(False, 20, 720 * MIB), (True, 40, 1560 * MIB)], ids=["inference", "training"]
)
def test_parity_under_a_limit_smaller_than_the_model(
    make_group: Any, tmp_path: Path, training: bool, num_layers: int, limit: int
) -> None:
    model_bytes = write_model(tmp_path / "model", num_layers, width=896)
    assert limit < model_bytes
    each = num_layers // WORKERS
    cuts = ",".join(f"model.layers.{each * (stage + 1) - 1}" for stage in range(WORKERS - 1))

    words = (str(tmp_path), "0", "serial", "", str(training), "whole")
    whole = start(make_group(limit), *words)
    _, text = whole.communicate(timeout=500)
    assert whole.returncode == -signal.SIGKILL, text

    mesh = f"pipeline={WORKERS}"
    workers = [
        start(make_group(limit), str(tmp_path), str(rank), mesh, cuts, str(training), "auto") for rank in range(WORKERS)
    ]
    try:
        results = [worker.communicate(timeout=500) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (output, errors) in zip(workers, results, strict=True):
        assert worker.returncode == 0, errors or f"ended by signal {-worker.returncode}"
        row = json.loads(output.splitlines()[-1])
        assert row["baseline"] == "streamed", "chosen because the limit is smaller than the model"
        assert row["available"] < limit
        assert row["held"] < model_bytes / 2
        assert row["report"]["equal"], row
        assert row["report"]["streamed"]
        assert row["report"]["loss"] < 1e-6
