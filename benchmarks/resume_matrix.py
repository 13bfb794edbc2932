"""Save under each of ten layouts and resume under each: losses must continue as in an uninterrupted run.

    python benchmarks/resume_matrix.py --output docs/measured/resume_matrix.json       # 100 pairs

A GPT-2 with tied weights and AdamW is trained for two steps and saved; then two more steps are run from the checkpoint.
The numbers of a pair are the largest relative difference of a loss from four steps on a single device, and the largest
difference of an optimizer state, relative to the largest value of its tensor. As a control, one pair resumes without
optimizer states. Exits with code 3 if a number exceeds 1e-6, or if the control's loss does not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
import torch.distributed as dist
from torch import nn

from record import write_record
from stagewright.cluster.device import Device, usable_cores
from stagewright.engine.parallel.parallelize import parallelize
from stagewright.engine.state.checkpoint import Checkpoint
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan

TOLERANCE = 1e-6
BATCH, TOKENS, VOCABULARY = 8, 6, 30
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "serial": ("serial", {}),
    "data": ("data=2", {}),
    "FSDP": ("data=2", {"shard": True}),
    "HSDP": ("data=4", {"shard": True, "fsdp_shards": 2}),
    "tensor": ("tensor=2", {}),
    "pipeline": ("pipeline=2", {"cuts": ("transformer.h.1",)}),
    "zero-bubble": (
        "pipeline=2",
        {
            "cuts": ("transformer.h.0", "transformer.h.1", "transformer.h.2"),
            "schedule": "interleaved-zero-bubble",
            "recompute": "always",
        },
    ),
    "data × pipeline": ("data=2,pipeline=2", {"cuts": ("transformer.h.1",)}),
    "FSDP × pipeline": ("data=2,pipeline=2", {"cuts": ("transformer.h.1",), "shard": True}),
    "tensor × pipeline": ("tensor=2,pipeline=2", {"cuts": ("transformer.h.1",)}),
}


def main() -> int:
    """Run all pairs and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("resume_matrix.json"))
    options = parser.parse_args()
    sizes = sorted({Mesh.parse(mesh).num_workers for mesh, _ in LAYOUTS.values()})
    with tempfile.TemporaryDirectory() as folder:
        expected = run_workers(1, "uninterrupted", folder)["serial"]
        for size in sizes:
            run_workers(size, "save", folder)
        found: dict[str, Any] = {}
        for size in sizes:
            found |= run_workers(size, "resume", folder)
        control = max_error(run_workers(1, "forget", folder)["serial"], expected[2:])
        whole = Path(folder) / "uninterrupted"
        states = {
            before: {after: max_state_error(Path(folder) / f"{before} - {after}", whole) for after in LAYOUTS}
            for before in LAYOUTS
        }
    pairs = {before: {after: max_error(found[after][before], expected[2:]) for after in LAYOUTS} for before in LAYOUTS}
    worst = max(error for row in pairs.values() for error in row.values())
    worst_state = max(error for row in states.values() for error in row.values())
    width = max(map(len, LAYOUTS)) + 2
    print("saved / resumed".ljust(width) + "".join(name.rjust(width) for name in LAYOUTS))
    for before, row in pairs.items():
        print(before.ljust(width) + "".join(f"{row[after]:.1e}".rjust(width) for after in LAYOUTS))
    figures = {"losses": expected, "tolerance": TOLERANCE, "worst": worst, "worst_state": worst_state}
    write_record(options.output, {**figures, "without_states": control, "pairs": pairs, "states": states})
    print(f"largest difference of a loss {worst:.1e}, of an optimizer state {worst_state:.1e}")
    print(f"without optimizer states the losses differ by {control:.1e}; wrote {options.output}")
    return 0 if max(worst, worst_state) <= TOLERANCE < control else 3


def max_error(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(loss - value) / abs(value) for loss, value in zip(losses, expected, strict=True))


def max_state_error(path: Path, expected: Path) -> float:
    """Return the largest difference of an optimizer state of two checkpoints, relative to its largest value."""
    saved, whole = Checkpoint.open(path), Checkpoint.open(expected)
    errors = [0.0]
    for name in sorted(whole.model_names()):
        states, wanted = saved.optimizer_state(name), whole.optimizer_state(name)
        assert states.keys() == wanted.keys(), name
        for key, value in wanted.items():
            full = torch.as_tensor(value).double()
            difference = (torch.as_tensor(states[key]).double() - full).abs().max()
            errors.append(float(difference / full.abs().max().clamp_min(1e-300)))
    return max(errors)


def run_workers(size: int, job: str, folder: str) -> dict[str, Any]:
    """Run a job on new workers and return the result of worker 0."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.SimpleQueue()
    workers = [context.Process(target=work, args=(rank, size, port, job, folder, results)) for rank in range(size)]
    for worker in workers:
        worker.start()
    result: dict[str, Any] = results.get()
    for worker in workers:
        worker.join()
    return result


def work(rank: int, size: int, port: int, job: str, folder: str, results: Any) -> None:
    """Run a job under every layout of this number of workers."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    result: dict[str, Any] = {}
    for name, (mesh, options) in LAYOUTS.items():
        if Mesh.parse(mesh).num_workers == size and (job not in ("uninterrupted", "forget") or name == "serial"):
            result[name] = run_layout(name, mesh, options, job, Path(folder))
    if rank == 0:
        results.put(result)
    dist.destroy_process_group()


def run_layout(name: str, mesh: str, options: dict[str, Any], job: str, folder: Path) -> Any:
    """Train four steps; or two, and save; or load the checkpoint of each layout and train two.

    "forget": load one without its optimizer states.
    """
    shape = Mesh.parse(mesh)
    core = min(usable_cores())
    plan = Plan(
        model=ModelSpec(name="gpt2"),
        mesh=shape,
        batch=BATCH,
        microbatches=4 if shape.pipeline > 1 else 4 // shape.data,
        devices=(str(Device.parse(f"cpu:{core}")),) * shape.num_workers,
        optimizer=OptimizerSpec(name="adamw", learning_rate=0.02),
        **options,
    )
    trainer = parallelize(make_model(), (*batch(0),), plan=plan, loss=loss)
    if job == "uninterrupted":
        losses = [trainer.step(batch(step)).loss for step in range(4)]
        trainer.save(folder / "uninterrupted")
        return losses
    if job == "save":
        for step in range(2):
            trainer.step(batch(step))
        trainer.save(folder / name)
        return None
    if job == "forget":
        trainer.load(folder / "serial")
        assert trainer.optimizer is not None
        trainer.optimizer.state.clear()
        return [trainer.step(batch(step)).loss for step in (2, 3)]
    resumed = {}
    for before in LAYOUTS:
        trainer.load(folder / before)
        resumed[before] = [trainer.step(batch(step)).loss for step in (2, 3)]
        trainer.save(folder / f"{before} - {name}")
    return resumed


def make_model() -> nn.Module:
    """Build the model, always with the same weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=4,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids and targets of a step."""
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))
    return ids, (ids * 7 + 3) % VOCABULARY


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Average the cross entropy over tokens."""
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


if __name__ == "__main__":
    sys.exit(main())
