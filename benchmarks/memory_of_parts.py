"""Train a model of 3 billion parameters on four workers, none of which ever holds more than its own part.

    python benchmarks/memory_of_parts.py --mesh tensor=4                         # 14 GiB of memory, 6 of disk
    python benchmarks/memory_of_parts.py --mesh tensor=4 --momentum 0.9 --resume --saved-under pipeline=4 # 18 of disk
    python benchmarks/memory_of_parts.py --layers 4                              # a smaller model

The weights (bfloat16, random) are written to safetensors files, one for each layer, as a Hugging Face folder. Each
worker captures the model without weights, reads its part from the files and runs training steps with SGD. With
--resume it steps the optimizer in backward, writes a checkpoint, and new processes resume from it. The peak of each
process is the kernel's (VmHWM in /proc/self/status: it includes Python, torch and mapped files); its part is the bytes
of its parameters, gradients and optimizer states. Exits with code 3 if a peak exceeds 1.2 times the part; the peak of
the processes that write the checkpoint is recorded apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # for the workers: freed tensors go back to the system

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from record import write_record
from stagewright.cluster.device import Device, usable_cores
from stagewright.engine.parallel.model import load_model
from stagewright.engine.parallel.trainer import Trainer
from stagewright.engine.worker.context import make_context
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.model import Batch

WORKERS = 4
BATCH, TOKENS = 4, 8
LIMIT = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the workers do."""

    folder: str
    mesh: str
    num_layers: int
    steps: int
    momentum: float
    in_backward: bool
    save: bool
    resume: bool = False

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint."""
        return Path(self.folder) / "checkpoint" / "step"


def main() -> int:
    """Write the model, train it and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="number of layers, a multiple of 4")
    parser.add_argument("--steps", type=int, default=2, help="training steps")
    parser.add_argument("--mesh", default=f"pipeline={WORKERS}", help=f"axes of the {WORKERS} workers")
    parser.add_argument("--saved-under", metavar="MESH", help="axes of the workers that write it; default: the same")
    parser.add_argument("--resume", action="store_true", help="write a checkpoint, resume it in new processes")
    parser.add_argument("--momentum", type=float, default=0.0, help="of SGD; more than 0 adds 6 GiB of states")
    parser.add_argument("-o", "--output", type=Path, default=Path("memory_of_parts.json"))
    parser.add_argument("--folder", help="where to write the weights, 6 GiB; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        num_parameters = write_model(Path(folder), options.layers)
        job = Job(
            folder=folder,
            mesh=options.mesh,
            num_layers=options.layers,
            steps=options.steps,
            momentum=options.momentum,
            in_backward=options.resume,
            save=options.resume,
        )
        saving = run_workers(replace(job, mesh=options.saved_under or job.mesh)) if options.resume else None
        rows = run_workers(replace(job, save=False, resume=options.resume))
    print(
        f"{num_parameters / 1e9:.2f} B parameters, {num_parameters * 2 / 2**30:.2f} GiB of weights, {WORKERS} workers"
    )
    for phase, phase_rows in (("until the checkpoint is written", saving), ("resumed", rows)):
        if phase_rows is not None:
            print_rows(phase_rows, phase if saving else "")
    worst = max(row["peak_bytes"] / row["part_bytes"] for row in rows)
    figures: dict[str, Any] = {
        "parameters": num_parameters,
        "mesh": options.mesh,
        "saved_under": options.saved_under,
        "limit": LIMIT,
        "worst": worst,
    }
    write_record(options.output, {**figures, "workers": rows, **({"saving": saving} if saving else {})})
    return 0 if worst <= LIMIT else 3


def print_rows(rows: list[dict[str, Any]], phase: str) -> None:
    """Print the memory of each worker."""
    print(f"worker  part GiB  peak GiB  peak / part  imports GiB  loss    {phase}")
    for rank, row in enumerate(rows):
        ratio = row["peak_bytes"] / row["part_bytes"]
        numbers = [row[name] / 2**30 for name in ("part_bytes", "peak_bytes")]
        imports = row["import_bytes"] / 2**30
        print(
            f"{rank:6}  {numbers[0]:8.2f}  {numbers[1]:8.2f}  {ratio:11.2f}  {imports:11.2f}  {row['losses'][-1]:.4f}"
        )


def write_model(folder: Path, num_layers: int) -> int:
    """Write the configuration and the weights, a layer at a time; return the number of parameters."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=2560,
        intermediate_size=8704,
        num_hidden_layers=num_layers,
        num_attention_heads=20,
        num_key_value_heads=20,
        vocab_size=32000,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    parts: dict[str, list[str]] = {}
    for name in shapes:
        parts.setdefault(name.split(".")[2] if ".layers." in name else name.split(".")[-2], []).append(name)
    normal = (
        torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 0.02
    ).bfloat16()  # a prime: rows differ
    for part, names in parts.items():
        weights = {
            name: torch.ones(shapes[name], dtype=torch.bfloat16)
            if "norm" in name
            else normal.repeat(shapes[name].numel() // len(normal) + 1)[: shapes[name].numel()].view(shapes[name])
            for name in names
        }
        save_file(weights, folder / f"model-{part}.safetensors", {"format": "pt"})
    return sum(shape.numel() for shape in shapes.values())


def run_workers(job: Job) -> list[dict[str, Any]]:
    """Run the workers and return the row of each."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.SimpleQueue()
    workers = [context.Process(target=work, args=(rank, port, job, results)) for rank in range(WORKERS)]
    for worker in workers:
        worker.start()
    rows = dict(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    return [rows[rank] for rank in range(WORKERS)]


def work(rank: int, port: int, job: Job, results: Any) -> None:
    """Train on one worker and report its memory."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(WORKERS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORKERS)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORKERS)
    core = min(usable_cores())
    device = Device.parse(f"cpu:{core}")
    mesh = Mesh.parse(job.mesh)
    each = job.num_layers // mesh.pipeline
    plan = Plan(
        model=ModelSpec(name=f"hf:{job.folder}", sequence_length=TOKENS),
        mesh=mesh,
        cuts=tuple(f"model.layers.{each * (stage + 1) - 1}" for stage in range(mesh.pipeline - 1)),
        batch=BATCH,
        microbatches=1 if job.in_backward or mesh.pipeline == 1 else BATCH,
        schedule="1f1b",
        precision="bf16",
        devices=(str(device),) * WORKERS,
        optimizer=OptimizerSpec(name="sgd", learning_rate=0.01, momentum=job.momentum),
        optimizer_in_backward=job.in_backward,
        vocab_parallel=mesh.tensor > 1,
    )
    import_module("transformers.models.llama.modeling_llama")
    import_bytes = peak_bytes()
    context = make_context(plan.mesh, rank, device)
    model = load_model(plan, context, hollow=True)
    assert model.weights is not None, "the weights must stay in their files"
    trainer = Trainer(plan, model, context)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    if job.resume:
        trainer.load(job.checkpoint)
    losses = [trainer.step(batch).loss for _ in range(job.steps)]
    if job.save:
        trainer.save(job.checkpoint)
    parameters = list(trainer.runner.part.module.parameters())
    assert trainer.optimizer is not None
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad for parameter in parameters]
    part = sum(tensor.nbytes for tensor in (*parameters, *gradients, *states) if isinstance(tensor, torch.Tensor))
    row = {"part_bytes": part, "peak_bytes": peak_bytes(), "import_bytes": import_bytes, "losses": losses}
    results.put((rank, row))
    dist.barrier()
    dist.destroy_process_group()


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far, by the kernel's counter."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
