"""What workers do in the tests of training; run by ``pool`` (first argument: the rank) or by the launcher."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.cluster.device import Device
from stagewright.engine.jobs.train import run_training
from stagewright.engine.parallel.evaluation import in_eval_mode
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.trainer import Trainer
from stagewright.engine.worker import broadcast
from stagewright.engine.worker.context import WorkerContext, make_context
from stagewright.errors import UsageError
from stagewright.runs.run_folder import RunFolder
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.model import Batch, Model

SIZES = (12, 12, 12, 5, 1)  # the last ones are partial: fewer samples than micro-batches, and than replicas


class Small(nn.Module):
    """Tied weights, batch norm, dropout, a parameter outside all units, and a layer that nothing uses."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4))
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) * self.scale
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden))


def small(norm: bool = False) -> Model:
    """The model with a batch of 12 samples, always the same."""
    torch.manual_seed(0)
    module = Small(norm=norm)

    def make(count: int) -> Batch:
        generator = torch.Generator().manual_seed(count)
        ids = torch.randint(0, 20, (count,), generator=generator)
        return Batch(args=(ids,), target=(ids * 7 + 3) % 20)

    example = make(12)
    return Model(
        name="small",
        module=module,
        args=example.args,
        target=example.target,
        loss=nn.functional.cross_entropy,
        batch_size=12,
        make_example=make,
    )


def transformer() -> Model:
    """A model whose layers can be divided, without dropout: masks of divided layers are each worker's own."""
    model = ModelSpec(name="digits-vit").load(batch=12)
    for module in model.module.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def language() -> Model:
    """A GPT-2 whose embedding is its head too, and whose layers can be divided; without dropout."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=30, n_positions=6, use_cache=False, bos_token_id=1, eos_token_id=2,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    module = hf.GPT2LMHeadModel(config).train()

    def make(count: int) -> Batch:
        ids = torch.randint(0, 30, (count, 6), generator=torch.Generator().manual_seed(count))
        return Batch(args=(ids,), target=(ids * 7 + 3) % 30)

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())

    example = make(12)
    return Model(
        name="language",
        module=module,
        args=example.args,
        target=example.target,
        loss=loss,
        batch_size=12,
        make_example=make,
    )


def make_trainer(
    rank: int,
    mesh: str,
    schedule: str = "1f1b",
    microbatches: int = 4,
    norm: bool = False,
    name: str = "small",
    **more: Any,
) -> Trainer:
    """A model under a plan, cut evenly."""
    sizes = Mesh.parse(mesh)
    optimizer = more.pop("optimizer", "adamw")
    plan = Plan(
        model=ModelSpec(name="small"),
        batch=12,
        mesh=sizes,
        microbatches=microbatches,
        schedule=schedule,  # type: ignore[arg-type]
        optimizer=OptimizerSpec(name=optimizer, learning_rate=0.02, momentum=0.9 if optimizer == "sgd" else 0.0),
        devices=("cpu:0",) * sizes.num_workers,
        **more,
    )
    model = small(norm) if name == "small" else language() if name == "language" else transformer()
    num_stages = sizes.pipeline * (SCHEDULES[plan.schedule].stages_per_worker if sizes.pipeline > 1 else 1)
    calls = capture_for(plan, model).calls
    cuts = tuple(calls[len(calls) * at // num_stages - 1].name for at in range(1, num_stages))
    plan = Plan(**{name: getattr(plan, name) for name in plan.__dataclass_fields__} | {"cuts": cuts})
    context: WorkerContext = make_context(sizes, rank, Device.parse("cpu:0"))
    return Trainer(plan, model, context)


class Allocations(TorchDispatchMode):
    """The most that was held at once of tensors that are made meanwhile.

    Copies to the host are not a device's, and workers that share memory keep a few buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {key for key, _ in self._storages((args, kwargs))}
        found = function(*args, **kwargs)
        if function not in (torch.ops.aten._to_copy.default, torch.ops.aten.from_file.default):
            made = {key: storage for key, storage in self._storages(found) if key not in given}
            self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
            self._alive |= {key: (StorageWeakRef(one), one.nbytes()) for key, one in made.items()}
            self.most_bytes = max(self.most_bytes, sum(num_bytes for _, num_bytes in self._alive.values()))
        return found

    def _storages(self, value: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
        for one in pytree.tree_leaves(value):
            if type(one) in (torch.Tensor, nn.Parameter):  # others only wrap one
                yield one.untyped_storage()._cdata, one.untyped_storage()


def gathering(rank: int, mesh: str, **more: Any) -> dict[str, Any]:
    """What a worker must have room for, beside its part, to give the whole state; where each tensor is large."""
    trainer = make_trainer(rank, mesh, name="vit", **more)
    pieces, broadcast.BUCKET_BYTES = broadcast.BUCKET_BYTES, 1
    with Allocations() as made:
        state = trainer.state_dict()
    own = {one.untyped_storage().data_ptr() for one in trainer.runner.part.module.parameters() if not more.get("shard")}
    sizes = [one.numel() * one.element_size() for one in state.values()]
    part = trainer._state
    owned = part.stream_owned((name, name, value) for name, value in part.held().items())
    with Allocations() as written:
        num_tensors = [sum(1 for _ in stream.values) for stream in (part.stream_all(), owned)]
    broadcast.BUCKET_BYTES = pieces
    return {
        "most": made.most_bytes,
        "most_written": written.most_bytes,
        "num_tensors": num_tensors,
        "num_names": len(part.owners),
        "largest": max(sizes),
        "total": sum(sizes),
        "shared": any(one.untyped_storage().data_ptr() in own for one in state.values()),
        "names": list(state) == list(trainer.model.module.state_dict()),
        "places": sorted({str(one.device) for one in state.values()}),
    }


def training(
    rank: int,
    mesh: str,
    schedule: str = "1f1b",
    microbatches: int = 4,
    *,
    sizes: tuple[int, ...] = SIZES,
    load: str | None = None,
    save: str | None = None,
    export: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Some steps with an evaluation after each; losses of both, and the state at the end."""
    trainer = make_trainer(rank, mesh, schedule, microbatches, **more)
    content = trainer.load(load) if load else None
    before = trainer.evaluate(trainer.model.example(7)).loss
    losses, evaluations, results = [], [], 0
    for size in sizes:
        step = trainer.step(trainer.model.example(size))
        losses.append(step.loss)
        evaluation = trainer.evaluate(trainer.model.example(7))
        evaluations.append(evaluation.loss)
        results += sum(len(one) for one in evaluation.outputs)
    if save:
        trainer.save(save, content={"note": "kept"})
    if export:
        trainer.export(export)
    state = {name: value.numpy() for name, value in trainer.state_dict().items()}
    training = [one.training for one in trainer.model.module.modules()]
    return {
        "losses": losses,
        "evaluations": evaluations,
        "before": before,
        "results": results,
        "state": state,
        "training": all(training),
        "content": content,
        "step": trainer.step_number,
    }


def predicting(rank: int, mesh: str, schedule: str = "1f1b", *, count: int, **more: Any) -> dict[str, Any]:
    """The results of a long stream, how far it was read ahead, and what the caller's turn is like."""
    trainer = make_trainer(rank, mesh, schedule, **more)
    read = 0

    def batches() -> Iterator[Batch | tuple[torch.Tensor, ...]]:
        nonlocal read
        for size in islice(cycle((12, 12, 5, 1)), count):
            read += 1
            batch = trainer.model.example(size)
            yield batch if read % 2 else batch.args

    results, ahead, turns = [], 0, set()
    for number, one in enumerate(trainer.predict(batches()), start=1):
        results.append([chunk.numpy() for chunk in one])
        ahead = max(ahead, read - number)
        turns.add((torch.is_grad_enabled(), trainer.model.module.training))
    return {"results": results, "ahead": ahead, "turns": turns, "has_outputs": trainer.has_outputs}


def finite(rank: int, mesh: str, sizes: tuple[int, ...]) -> list[int]:
    """How many samples a stream of these batches gives, batch by batch, here; then a step works as before."""
    trainer = make_trainer(rank, mesh)
    found = [sum(map(len, one)) for one in trainer.predict(trainer.model.example(size) for size in sizes)]
    trainer.step(trainer.model.example(12))
    return found


def left_early(rank: int, mesh: str) -> str:
    """What a step says after the first result of an endless stream was taken and no more."""
    trainer = make_trainer(rank, mesh)
    for _ in trainer.predict(trainer.model.example(12) for _ in cycle((1,))):
        break
    dist.barrier()  # or what was sent goes with this worker before the other has it
    try:
        trainer.step(trainer.model.example(12))
    except UsageError as error:
        return str(error)
    return ""


def refused(rank: int) -> None:
    """A tensor is no tuple of arguments."""
    trainer = make_trainer(rank, "serial")
    next(trainer.predict([torch.zeros(2)]))  # type: ignore[list-item]


def plain_results(rank: int, sizes: tuple[int, ...], **more: Any) -> list[Any]:
    """The plain model's results in eval mode."""
    model = small(**more)
    with in_eval_mode(model.module), torch.no_grad():
        return [model.module(*model.example(size).args).numpy() for size in sizes]


def plain(rank: int, *, norm: bool = False) -> dict[str, Any]:
    """Evaluation of the plain model in eval mode, without the engine."""
    model = small(norm)
    batch = model.example(7)
    with in_eval_mode(model.module), torch.no_grad():
        return {"loss": float(model.loss(model.module(*batch.args), batch.target))}


def run(rank: int, plan: Plan, folder: str) -> tuple[list[float], dict[str, Any]]:
    """A whole training job in this worker; the losses of its steps and its result."""
    run_folder = RunFolder(Path(folder))
    run_training(plan, make_context(plan.mesh, rank, Device.parse("cpu:0")), run_folder)
    losses = [line["loss"] for line in run_folder.metrics(rank) if line["kind"] == "step"]
    return losses, json.loads((run_folder.worker(0).path / "result.json").read_text())


def dies(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Trains; the last worker is killed in the middle of its fifth step."""
    original = Trainer.step

    def step(self: Trainer, batch: Any) -> Any:
        if self.step_number == 4 and context.rank == context.mesh.num_workers - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, batch)

    Trainer.step = step  # type: ignore[method-assign]
    run_training(plan, context, run_folder)


def middle_cut(name: str) -> str:
    """The unit in the middle of a named model."""
    spec = ModelSpec(name=name)
    calls = capture_for(Plan(model=spec, batch=4), spec.load(batch=4)).calls
    return calls[len(calls) // 2 - 1].name


def killed_before_step_4(plan: Plan, context: WorkerContext, folder: RunFolder) -> None:
    """Worker 1 is killed before its fourth step, as often as the file in the environment says."""
    count = Path(os.environ["STAGEWRIGHT_TEST_KILLS"])
    left = int(count.read_text())
    if context.rank == 1 and left:
        step = Trainer.step

        def killed(trainer: Trainer, *args: Any, **options: Any) -> Any:
            if trainer.step_number == 3:
                count.write_text(str(left - 1))
                os.kill(os.getpid(), signal.SIGKILL)
            return step(trainer, *args, **options)

        Trainer.step = killed  # type: ignore[method-assign]
    run_training(plan, context, folder)
