"""Train one worker's part of a model: steps, evaluation, checkpoints, the full state.

    capture in train and eval mode ─► who holds what ─► stages of this worker (frees the rest) ─► optimizer
    step(batch)   evaluate(batch)   predict(batches)
    save(path) / load(path), under any other plan too   export(path)   state_dict()

Every worker gets the same whole batch and must call the same methods in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.batch.splitter import ReplicaShare
from stagewright.engine.parallel.distributed_state import DistributedState
from stagewright.engine.parallel.evaluation import Evaluation, Evaluator, in_eval_mode
from stagewright.engine.parallel.model import capture_for, cut_indices
from stagewright.engine.parallel.optimizer import MakeOptimizer
from stagewright.engine.parallel.resolve import finalize_plan
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.state.checkpoint import Checkpoint, write_checkpoint
from stagewright.engine.state.tensor_file import write_tensors
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.user_loop import UserLoop
from stagewright.errors import UsageError
from stagewright.files.stored_tensor import StoredTensor
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.cpu_offload import offloaded
from stagewright.machine.host_memory import release_freed_memory
from stagewright.machine.out_of_memory import explain_oom
from stagewright.spec.plan import OptimizerSpec, Plan
from stagewright.spec.unequal_devices import replica_sizes
from stagewright.zoo.model import Batch, Model

P = ParamSpec("P")
T = TypeVar("T")


def _report_faults(method: Callable[Concatenate[Trainer, P], T]) -> Callable[Concatenate[Trainer, P], T]:
    """In a user's training loop, report a failure in this method to the user and the other workers."""

    @functools.wraps(method)
    def call(self: Trainer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with contextlib.nullcontext() if self._loop is None else self._loop.inside():
            return method(self, *args, **kwargs)

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one training step."""

    loss: float
    """Loss of the whole batch before the optimizer step, the same on every worker."""
    step: int
    """Number of steps including this one."""
    num_samples: int
    """Samples of the whole batch."""
    seconds: float
    """Duration on this worker."""
    waited_s: float
    """Part of it that this worker waited for P2P receives."""
    gradient_norm: float | None = None
    """Gradient norm before clipping, the same on every worker; None if the plan does not clip."""


class Trainer:
    """Trains one worker's part of a model; every method must be called on every worker."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        context: WorkerContext,
        *,
        optimizer: MakeOptimizer | OptimizerSpec | None = None,
        count_items: Callable[[Batch], float] | None = None,
        loop: UserLoop | None = None,
        write_plan: Callable[[Plan], object] | None = None,
    ) -> None:
        self._loop = loop
        with explain_oom(f"worker {context.rank}", lambda: activity.action, plan.memory_bytes):
            activity.begin("capture")
            with offloaded(model.module, context.torch_device):
                graph = capture_for(plan, model)
                _try_batch_sizes(graph, model, plan)
                with in_eval_mode(model.module):
                    evaluation_graph = capture_for(plan, model)
                    _try_batch_sizes(evaluation_graph, model, plan)
            plan = finalize_plan(plan, model, graph, context, write_plan=write_plan)
        activity.begin("build stages")
        self.plan, self.model, self.context = plan, model, context
        self._state = DistributedState(graph, cut_indices(graph, plan.cuts), plan.stage_workers, context, model.weights)
        self.runner = StepRunner(plan, model, context, graph, count_items)
        self._state.bind(self.runner.part)
        self._evaluator = Evaluator(self.runner, evaluation_graph)
        self.optimizer = self.runner.make_optimizer(optimizer)
        """This worker's optimizer; None if it has nothing to train. Learning rates may be changed between steps."""
        if self.optimizer is not None:
            self.runner.memory.follow_optimizer(self.optimizer)
        release_freed_memory()

    @property
    def step_number(self) -> int:
        """Number of steps so far."""
        return self.runner.step_number

    @property
    def has_outputs(self) -> bool:
        """Whether this worker holds the last stage, and so the model's outputs."""
        return self.runner.part.stage_workers[-1] == self.context.pipeline

    @_report_faults
    def step(self, batch: Batch | ReplicaShare | Sequence[Any]) -> StepResult:
        """Run forward, backward and the optimizer step on one batch, which may be smaller than the others.

        A list of ``Batch`` is taken as the micro-batches of one step; they may differ in shape.
        """
        start = time.perf_counter()
        whole_batch = as_batches(batch)
        self.runner.part.zero_gradients()
        with self.runner.memory.explain_oom():
            result = self.runner.train_step(whole_batch)
            norm = self.runner.optimizer_step(self.optimizer)
        loss = self.runner.total_loss(result)
        return StepResult(
            loss=loss,
            step=self.step_number,
            num_samples=self.runner.splitter.count_samples(whole_batch),
            seconds=time.perf_counter() - start,
            waited_s=result.waited_s,
            gradient_norm=None if norm is None else float(norm),
        )

    @_report_faults
    def evaluate(self, batch: Batch | ReplicaShare | Sequence[Any]) -> Evaluation:
        """Return loss and outputs of one batch in eval mode; changes nothing."""
        with self.runner.memory.explain_oom():
            return self._evaluator.evaluate(as_batches(batch))

    def predict(self, batches: Iterable[Batch | Sequence[Any]]) -> Iterator[list[Any]]:
        """Yield the model's outputs for a stream of batches in eval mode, which may be endless; changes nothing.

        The pipeline fills once, not for each batch, and little is read ahead. A batch is a ``Batch`` or a tuple of the
        model's arguments, without a target, the same on every worker. Each result is a list: the outputs of this
        replica's micro-batches on the worker of the last stage (``has_outputs``), empty on the other workers.
        """
        source = batches if self._loop is None else self._loop.outside(batches)
        results = self._evaluator.stream(as_batch(batch, has_target=False) for batch in source)
        while (result := self._next(results)) is not None:
            yield result

    @_report_faults
    def _next(self, results: Iterator[list[Any]]) -> list[Any] | None:
        return next(results, None)

    @_report_faults
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a full copy of the model's state on the host, on every worker; tied names share one tensor.

        It is gathered tensor by tensor: a device needs memory for one more tensor.
        """
        activity.begin("gather state")
        full = self._state.gather_all()
        return {name: full[canonical] for name, canonical in self._state.canonical.items()}

    @_report_faults
    def save(self, path: str | Path, *, content: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint atomically; ``content`` is the caller's JSON data, which ``load`` returns."""
        activity.begin("checkpoint", step=self.step_number)
        state = self._state
        tensors: list[tuple[str, str, torch.Tensor]] = []
        scalars: dict[str, Any] = {}
        for key, values in self._optimizer_values().items():
            key_tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
            key_scalars = {name: value for name, value in values.items() if name not in key_tensors}
            tensors += ((f"{key}/{name}", name, value) for name, value in key_tensors.items())
            scalars |= {f"{key}/{name}": value for name, value in state.owned(key_scalars).items()}
        kind = type(self.optimizer).__name__ if self.optimizer is not None else None
        write_checkpoint(
            path,
            rank=self.context.rank,
            barrier=self._barrier,
            model=state.stream_owned((name, name, value) for name, value in state.held().items()),
            optimizer=state.stream_owned(tensors),
            scalars=scalars,
            codec=self.runner.codecs.state() if self.runner.codecs is not None else {},
            content={
                "step": self.step_number,
                "seed": self.plan.seed,
                "mesh": str(self.plan.mesh),
                "optimizer": {"kind": kind, "groups": _group_options(self.optimizer)},
                "codec": _codec_setting(self.plan),
                "caller": dict(content or {}),
            },
        )

    @_report_faults
    def load(self, path: str | Path, *, optimizer_options: bool = True) -> dict[str, Any]:
        """Resume from a checkpoint of any plan; return the ``content`` that was saved with it.

        ``optimizer_options``: also restore the learning rate and other optimizer options.
        """
        activity.begin("load checkpoint")
        saved, state = Checkpoint.open(path), self._state
        saved.verify(self.context.rank, self.context.mesh.num_workers)
        saved_names, names = saved.model_names(), set(state.owners)
        if saved_names != names:
            raise UsageError(
                f"the checkpoint {path} is not of this model: it lacks {_list_some(names - saved_names)} and has "
                f"{_list_some(saved_names - names)}, which the model does not have"
            )
        step, about = saved.content.get("step"), saved.content.get("optimizer")
        if not isinstance(step, int) or not isinstance(about, dict) or not isinstance(about.get("groups"), list):
            raise UsageError(f"{saved.path / 'index.json'} is damaged: its content needs step and optimizer")
        kind = about.get("kind")
        if self.optimizer is not None and kind not in (None, type(self.optimizer).__name__):
            raise UsageError(
                f"the checkpoint {path} was made with the optimizer {kind}, not {type(self.optimizer).__name__}; "
                "use the same one, or start from its weights alone"
            )
        for name, target in state.held().items():
            state.load(name, target, saved.stored_model_tensor(name))
        if self.optimizer is not None:
            self._load_optimizer(saved)
            groups = about["groups"]
            if optimizer_options and len(groups) == len(self.optimizer.param_groups):
                for group, options in zip(self.optimizer.param_groups, groups, strict=True):
                    values = options.items()
                    group.update({name: tuple(value) if isinstance(value, list) else value for name, value in values})
        if self.runner.codecs is not None:  # codec state belongs to the same links only
            has_same_links = saved.content.get("codec") == _codec_setting(self.plan)
            self.runner.codecs.load_state(saved.codec_state(self.context.rank) if has_same_links else {})
        self.runner.step_number = step
        release_freed_memory()
        self._barrier()
        return saved.caller

    @_report_faults
    def export(self, path: str | Path) -> Path:
        """Write ``model.safetensors`` (and the configuration of a transformers model) into a folder."""
        folder = Path(path)
        activity.begin("gather state")
        tensors = self._state.stream_all()
        if self.context.rank:
            for _ in tensors.values:  # send what worker 0 writes
                pass
        else:
            folder.mkdir(parents=True, exist_ok=True)
            partial_file = folder / ".model.safetensors.partial"
            write_tensors(partial_file, tensors)
            os.replace(partial_file, folder / "model.safetensors")
            config: Any = getattr(self.model.module, "config", None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)
        self._barrier()
        return folder / "model.safetensors"

    def _optimizer_values(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state of this worker's parameters, by state key and parameter name."""
        values: dict[str, dict[str, Any]] = {}
        if self.optimizer is not None:
            shards = self.runner.part.shards
            for name, parameter in self._trained().items():
                stepped = parameter if shards is None else shards.shard(parameter)
                for key, value in self.optimizer.state.get(stepped, {}).items():
                    if shards is not None and isinstance(value, torch.Tensor):
                        value = shards.distributed(parameter, value)
                    values.setdefault(key, {})[name] = value
        return dict(sorted(values.items()))

    def _load_optimizer(self, saved: Checkpoint) -> None:
        """Load this worker's shards; step counts, scalars, stay on the CPU unless the optimizer is on-device."""
        assert self.optimizer is not None
        self.optimizer.state.clear()
        on_device = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
        shards = self.runner.part.shards
        for name, parameter in self._trained().items():
            stepped = parameter if shards is None else shards.shard(parameter)
            for key, value in saved.stored_optimizer_state(name).items():
                if isinstance(value, StoredTensor):
                    shard = self._state.read_state(name, value, parameter)
                    if shards is not None and shard.shape == parameter.shape:
                        shard = shards.own(shard)
                    value = shard.to(parameter.device) if shard.ndim or on_device else shard
                self.optimizer.state[stepped][key] = value

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this worker trains, by canonical name."""
        held = self._state.held().items()
        return {name: value for name, value in held if isinstance(value, nn.Parameter) and value.requires_grad}

    def _barrier(self) -> None:
        if self.plan.mesh.num_workers > 1:
            before = activity.switch("barrier")  # a hang is blamed on the worker that is not here
            dist.barrier()
            activity.switch(before)


def as_batches(batch: Batch | ReplicaShare | Sequence[Any]) -> Batch | ReplicaShare | list[Batch]:
    """Convert the argument of a step: a share or a list of batches stays one, anything else is one batch."""
    if isinstance(batch, ReplicaShare):
        return batch
    if isinstance(batch, (list, tuple)) and batch and all(isinstance(part, Batch) for part in batch):
        return list(batch)
    return as_batch(batch)


def as_batch(batch: Batch | Sequence[Any], *, has_target: bool = True) -> Batch:
    """Convert a tuple of the model's arguments, followed by the target if there is one, into a batch."""
    if isinstance(batch, Batch):
        return batch
    if not isinstance(batch, (tuple, list)) or len(batch) < 1 + has_target:
        content = "arguments and the target, (x, target)" if has_target else "arguments, (x,)"
        raise UsageError(
            f"a batch is a stagewright.zoo.Batch, or a tuple of the model's {content}; not {type(batch).__name__}"
        )
    if not has_target:
        return Batch(args=tuple(batch))
    *args, target = batch
    return Batch(args=tuple(args), target=target)


def _try_batch_sizes(graph: UnitGraph, model: Model, plan: Plan) -> None:
    """Check a graph's branches for likely micro-batch sizes while the whole model is on this worker."""
    counts = [-(-size // plan.microbatches) for size in replica_sizes(plan, plan.batch)]
    for size in sorted({1, 2, *(max(1, count - less) for count in counts for less in (0, 1))} if graph.dynamic else ()):
        batch = model.example(size)
        with contextlib.suppress(UsageError):  # raised again when a batch of this size comes
            graph.flatten(batch.args, batch.kwargs)


def _codec_setting(plan: Plan) -> dict[str, Any]:
    """Return everything that the state of link codecs depends on."""
    cuts = range(plan.num_stages - 1)
    names = [[plan.codec_of(cut, backward=backward) for cut in cuts] for backward in (False, True)]
    return {"mesh": str(plan.mesh), "cuts": list(plan.cuts), "microbatches": plan.microbatches, "names": names}


def _group_options(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return the options of an optimizer's parameter groups that JSON can hold."""
    if optimizer is None:
        return []
    return [
        {name: list(value) if isinstance(value, tuple) else value for name, value in group.items() if _is_plain(value)}
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _list_some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return f"{', '.join(listed[:3])}{', …' if len(listed) > 3 else ''}" if listed else "nothing"
