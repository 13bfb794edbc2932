"""Each worker reads its own part of the weights from files: the same training as with the whole model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.spec.plan import Mesh

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("pipeline=2", {"cuts": ("transformer.h.1",)}),
    ("data=2", {"shard": True}),
    ("data=2,pipeline=2", {"shard": True, "cuts": ("transformer.h.1",)}),
    ("tensor=2", {}),
    ("data=2", {}),
]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2 with tied weights in several files."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=4,
        n_head=2,
        vocab_size=30,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="20kB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return f"hf:{folder}"


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), LAYOUTS, ids=["pipeline", "fsdp", "fsdp-pipeline", "tensor", "ddp"])
def test_training_equals_that_of_a_whole_model(pool_of: Any, gpt2: str, mesh: str, options: dict[str, Any]) -> None:
    from hollow_jobs import compare_states

    (expected,) = pool_of(1).run("hollow_jobs:train", gpt2, "serial", False)
    results = pool_of(Mesh.parse(mesh).num_workers).run("hollow_jobs:train", gpt2, mesh, True, **options)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert compare_states(result["state"], expected["state"]) < 1e-4
        assert result["hollow"] == 0
        assert result["loaded_bytes"] < 1000 < expected["loaded_bytes"]
        share = result["held_bytes"] / result["whole_bytes"]
        assert share < 0.9 or (mesh == "data=2" and not options)


@pytest.mark.slow
def test_a_checkpoint_is_read_in_parts(pool_of: Any, gpt2: str, tmp_path: Path) -> None:
    """Resuming leaves the weights in the checkpoint until each worker reads its part, optimizer states too."""
    saved = str(tmp_path / "step-1")
    pool_of(1).run("hollow_jobs:save", gpt2, saved)
    (expected,) = pool_of(1).run("hollow_jobs:train", gpt2, "serial", False, saved)
    for result in pool_of(2).run("hollow_jobs:train", gpt2, "pipeline=2", True, saved, cuts=("transformer.h.1",)):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert result["loaded_bytes"] < 1000
