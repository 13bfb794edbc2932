"""The streamed baseline: equal to the whole one, in a fraction of its memory, and as strict."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.engine.parity.spooled_tensors import SpooledTensors

MIB = 2**20


def make_model(kind: str) -> Any:
    """Tied weights and dropout; a model without; experts in files of their own; batch norm, whose statistics change."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": 30, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=16, **common)
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
            **common,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
            num_local_experts=4, **common,
        )  # fmt: skip
        return transformers.MixtralForCausalLM(config)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("models")

    def get(kind: str) -> str:
        if not (root / kind).exists():
            make_model(kind).save_pretrained(root / kind, max_shard_size="20kB")
        return str(root / kind)

    return get


KINDS = [(kind, *bound) for kind in ("gpt2", "llama", "resnet") for bound in (("float32", 1e-6), ("float64", 1e-12))]


@pytest.mark.parametrize(("kind", "dtype", "limit"), [*KINDS, ("mixtral", "float32", 1e-6)])
def test_equals_the_whole_baseline(
    pool_of: Any, folder_of: Any, tmp_path: Path, kind: str, dtype: str, limit: float
) -> None:
    (result,) = pool_of(1).run("streamed_jobs:compare_baselines", folder_of(kind), str(tmp_path / "spool"), dtype, True)
    errors = {name: result[name] for name in ("loss", "gradients", "buffers", "outputs")}
    assert max(errors.values()) < limit, errors
    assert result["is_streamed"] == (False, True)
    assert result["num_gradients"] == len(list((tmp_path / "spool").iterdir())) >= 20
    assert result["same_changes"]
    assert (result["num_changed"] > 0) is (kind == "resnet")


def test_inference(pool_of: Any, folder_of: Any, tmp_path: Path) -> None:
    (result,) = pool_of(1).run(
        "streamed_jobs:compare_baselines", folder_of("gpt2"), str(tmp_path / "spool"), "float64", False
    )
    assert max(result["loss"], result["outputs"]) < 1e-12
    assert result["num_gradients"] == 0


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pipeline=2", {"cuts": ("transformer.h.1",)}),
        ("tensor=2", {}),
        ("data=2", {"shard": True}),
        ("data=2", {}),
        ("pipeline=2", {"cuts": ("transformer.h.1",), "training": False}),
    ],
    ids=["pipeline", "tensor", "fsdp", "data", "inference"],
)
def test_parity_of_plans(pool_of: Any, folder_of: Any, tmp_path: Path, mesh: str, options: dict[str, Any]) -> None:
    """With gradients that are clipped by the norm of the baseline's."""
    arguments = (folder_of("gpt2"), str(tmp_path / "spool"), mesh, "nothing", options)
    for report in pool_of(2).run("streamed_jobs:check", *arguments):
        assert report.equal, report
        assert report.streamed
        assert report.max_error <= 1e-5


@pytest.mark.parametrize("spoil", ["drop_gradient", "swap_microbatches", "change_scale"])
def test_a_spoiled_step_is_caught(pool_of: Any, folder_of: Any, tmp_path: Path, spoil: str) -> None:
    options = {"cuts": ("transformer.h.1",)}
    arguments = (folder_of("gpt2"), str(tmp_path / "spool"), "pipeline=2", spoil, options)
    for report in pool_of(2).run("streamed_jobs:check", *arguments):
        assert not report.equal


PEAK = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import torch.distributed as dist
from jobs import context_of
from streamed_jobs import example_of, spec_of
from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parity.check import baseline_of
from stagewright.spec.plan import Plan

def counter(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
plan = Plan(model=spec_of(sys.argv[1]), batch=2, baseline="streamed")
context = context_of(0, "serial")
model = load_model(plan, context, hollow=sys.argv[3] == "streamed")
graph = capture_for(plan, model)
Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
before = counter("VmHWM")
baseline = baseline_of(plan, model, graph, context, folder=Path(sys.argv[2]))
after = counter("VmHWM")
largest = max(tensor.nbytes for tensor in baseline.gradients.values())
print(before, after, sum(parameter.nbytes for parameter in model.module.parameters()), len(baseline.gradients), largest)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="VmHWM can't be reset here")
def test_peak_memory_is_that_of_a_unit(tmp_path: Path) -> None:
    """The peak rises by less than a quarter of the model, which has 24 blocks of 12 MiB."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=512, n_layer=24, n_head=8, vocab_size=30, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    support = str(Path(__file__).parents[1] / "support")
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {support!r})\n{PEAK}"]
    done = subprocess.run(
        [*words, str(tmp_path / "gpt2"), str(tmp_path / "spool"), "streamed"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after, model_bytes, num_gradients, largest = map(int, done.stdout.split()[-5:])
    assert model_bytes > 280 * MIB
    assert num_gradients > 24 * 12
    assert after - before < model_bytes / 4, f"{(after - before) / MIB:.0f} of {model_bytes / MIB:.0f} MiB"
    assert largest < 5 * MIB


def test_spooled_tensors(tmp_path: Path) -> None:
    tensors = SpooledTensors(tmp_path / "spool")
    value = torch.arange(6.0).view(2, 3)
    tensors.add("a.weight", value.t())
    tensors.add("b", torch.tensor(1, dtype=torch.bfloat16))
    assert list(tensors) == ["a.weight", "b"]
    assert "b" in tensors
    assert "c" not in tensors
    assert torch.equal(tensors["a.weight"], value.t())
    assert tensors["b"].dtype == torch.bfloat16
    assert tensors["b"] is not tensors["b"]
