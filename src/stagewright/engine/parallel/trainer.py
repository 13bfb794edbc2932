"""A worker's part of a model in training: steps, evaluation, checkpoints, the full state.

    capture in train and in eval mode ─► who holds what ─► stages of this worker (frees the rest) ─► optimiser
    step(batch)   evaluate(batch)   predict(batches)
    save(path) / load(path), under any other plan too   export(path)   state_dict()

Every worker is given the same whole batch and must call the same methods in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.jobs.measure import make_optimizer
from stagewright.engine.parallel.codec_choice import with_chosen_codecs
from stagewright.engine.parallel.evaluation import Evaluation, Evaluator, in_eval_mode
from stagewright.engine.parallel.ownership import HeldState
from stagewright.engine.parallel.replica import Replica, capture_for, cut_indices
from stagewright.engine.parallel.resolve import agreed_cuts
from stagewright.engine.state.checkpoint import Checkpoint, write_checkpoint, write_safetensors
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.user_loop import OwnLoop
from stagewright.errors import UsageError
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.cpu_offload import visiting
from stagewright.machine.out_of_memory import refusals
from stagewright.spec.plan import OptimizerSpec, Plan
from stagewright.zoo.model import Batch, Model

__all__ = ["MakeOptimizer", "StepResult", "Trainer", "as_batch"]

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

P = ParamSpec("P")
T = TypeVar("T")


def _told(method: Callable[Concatenate[Trainer, P], T]) -> Callable[Concatenate[Trainer, P], T]:
    """In a loop of one's own, what fails in this method is told to the user and to the other workers."""

    @functools.wraps(method)
    def call(self: Trainer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with contextlib.nullcontext() if self._loop is None else self._loop.inside():
            return method(self, *args, **kwargs)

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came of one step."""

    loss: float
    """Of the whole batch, before the parameters changed; the same on every worker."""
    step: int
    """Steps done, this one included."""
    num_samples: int
    """Samples of the whole batch."""
    seconds: float
    """How long it took on this worker."""
    waited_s: float
    """Of these, how long this worker waited for messages of its neighbours."""
    gradient_norm: float | None = None
    """Of the whole model's gradient before it was clipped, the same on every worker; None where the plan clips none."""


class Trainer:
    """One worker's part of a model in training; every method must be called on every worker."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        context: WorkerContext,
        *,
        optimizer: MakeOptimizer | OptimizerSpec | None = None,
        loop: OwnLoop | None = None,
    ) -> None:
        self._loop = loop
        with refusals(f"worker {context.rank}", lambda: activity.action, plan.memory_bytes):
            activity.begin("capture")
            with visiting(model.module, context.torch_device):
                graph = capture_for(plan, model)
                _try_sizes(graph, model, plan)
                with in_eval_mode(model.module):
                    evaluation_graph = capture_for(plan, model)
                    _try_sizes(evaluation_graph, model, plan)
            if not plan.cuts and plan.num_stages > 1:
                activity.begin("split")
                plan = replace(plan, cuts=agreed_cuts(plan, model, graph, context))
            example = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
            plan = with_chosen_codecs(plan, model, graph, context, example)
        activity.begin("build stages")
        self.plan, self.model, self.context = plan, model, context
        self._state = HeldState(graph, cut_indices(graph, plan.cuts), plan.stage_workers, context)
        self.replica = Replica(plan, model, context, graph)
        self._state.bind(self.replica)
        self._evaluator = Evaluator(self.replica, evaluation_graph)
        parameters = [one for one in self.replica.module.parameters() if one.requires_grad]
        spec = plan.optimizer if optimizer is None else optimizer
        make = (lambda found: make_optimizer(spec, list(found))) if isinstance(spec, OptimizerSpec) else spec
        self.optimizer: torch.optim.Optimizer | None = make(parameters) if parameters else None
        """This worker's own; None where it has nothing to train. Learning rates may be changed between steps."""
        if self.optimizer is not None:
            self.replica.memory.follow_optimizer(self.optimizer)

    @property
    def step_number(self) -> int:
        """Steps done."""
        return self.replica.step_number

    @property
    def has_outputs(self) -> bool:
        """Whether this worker holds the last stage, and so the model's results."""
        return self.replica.stage_workers[-1] == self.context.pipeline

    @_told
    def step(self, batch: Batch | Sequence[Any]) -> StepResult:
        """Forward, backward and the optimiser's step on one batch, which may be smaller than the others."""
        start = time.perf_counter()
        whole = as_batch(batch)
        self.replica.zero_gradients()
        with self.replica.memory.refusals():
            outcome = self.replica.train_step(whole)
            norm = self.replica.change_parameters(self.optimizer)
        loss = self.replica.total_loss(outcome)
        return StepResult(
            loss=loss,
            step=self.step_number,
            num_samples=self.replica.dealer.size_of(whole),
            seconds=time.perf_counter() - start,
            waited_s=outcome.waited_s,
            gradient_norm=None if norm is None else float(norm),
        )

    @_told
    def evaluate(self, batch: Batch | Sequence[Any]) -> Evaluation:
        """Loss and results of one batch in eval mode; nothing changes."""
        with self.replica.memory.refusals():
            return self._evaluator.evaluate(as_batch(batch))

    def predict(self, batches: Iterable[Batch | Sequence[Any]]) -> Iterator[list[Any]]:
        """The model's results for a stream of batches in eval mode, which may have no end; nothing changes.

        The pipeline is filled once, not for each batch, and little is read ahead. A batch is a ``Batch`` or a tuple of
        the model's arguments, without a target, the same on every worker. For each there is a list: the results of its
        micro-batches, of this replica, where the last stage is (``has_outputs``); empty on the other workers.
        """
        given = batches if self._loop is None else self._loop.outside(batches)
        results = self._evaluator.stream(one if isinstance(one, Batch) else _inputs(one) for one in given)
        while (result := self._next(results)) is not None:
            yield result

    @_told
    def _next(self, results: Iterator[list[Any]]) -> list[Any] | None:
        return next(results, None)

    @_told
    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the plain model's state in full, on the host, on every worker; tied names share one tensor.

        It is gathered tensor by tensor: a device needs room for one more than it holds.
        """
        activity.begin("gather state")
        found = self._state.everything()
        return {name: found[canonical] for name, canonical in self._state.canonical.items()}

    @_told
    def save(self, path: str | Path, *, content: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint, at once; ``content`` is what the caller wants to find again, as JSON knows it."""
        activity.begin("checkpoint", step=self.step_number)
        state = self._state
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        for key, values in self._optimizer_values().items():
            is_tensor = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
            tensors |= {f"{key}/{name}": value for name, value in state.owned_in_full(is_tensor).items()}
            rest = {name: value for name, value in values.items() if name not in is_tensor}
            scalars |= {f"{key}/{name}": value for name, value in state.owned(rest).items()}
        kind = type(self.optimizer).__name__ if self.optimizer is not None else None
        write_checkpoint(
            path,
            rank=self.context.rank,
            together=self._together,
            model=state.owned_in_full(state.held()),
            optimizer=tensors,
            scalars=scalars,
            codec=self.replica.codecs.state() if self.replica.codecs is not None else {},
            content={
                "step": self.step_number,
                "seed": self.plan.seed,
                "mesh": str(self.plan.mesh),
                "optimizer": {"kind": kind, "groups": _groups(self.optimizer)},
                "codec": _codec_setting(self.plan),
                "caller": dict(content or {}),
            },
        )

    @_told
    def load(self, path: str | Path, *, optimizer_options: bool = True) -> dict[str, Any]:
        """Go on from a checkpoint of any plan; what its ``save`` was given as ``content``.

        ``optimizer_options``: also take its learning rate and the like; False keeps those of this trainer.
        """
        activity.begin("load checkpoint")
        saved, state = Checkpoint.open(path), self._state
        there, here = saved.model_names(), set(state.owners)
        if there != here:
            raise UsageError(
                f"the checkpoint {path} is not of this model: it lacks {_some(here - there)} and holds "
                f"{_some(there - here)}, which the model has not"
            )
        kind = saved.content["optimizer"]["kind"]
        if self.optimizer is not None and kind not in (None, type(self.optimizer).__name__):
            raise UsageError(
                f"the checkpoint {path} was made with the optimiser {kind}, not {type(self.optimizer).__name__}; "
                "use the same one, or start from its weights alone"
            )
        for name, target in state.held().items():
            state.put(name, target, saved.model_tensor(name))
        if self.optimizer is not None:
            self._load_optimizer(saved)
            if optimizer_options:
                _take_groups(self.optimizer, saved.content["optimizer"]["groups"])
        if self.replica.codecs is not None:  # what links remember is of use to the same links alone
            same = saved.content.get("codec") == _codec_setting(self.plan)
            self.replica.codecs.load_state(saved.codec_state(self.context.rank) if same else {})
        self.replica.step_number = int(saved.content["step"])
        self._together()
        caller: dict[str, Any] = saved.content["caller"]
        return caller

    @_told
    def export(self, path: str | Path) -> Path:
        """Write ``model.safetensors`` (and the configuration of a transformers model) into a folder."""
        folder = Path(path)
        activity.begin("gather state")
        found = self._state.everything(wanted=self.context.rank == 0)
        if self.context.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            hidden = folder / ".model.safetensors.partial"
            write_safetensors(hidden, found)
            os.replace(hidden, folder / "model.safetensors")
            config: Any = getattr(self.model.module, "config", None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)
        self._together()
        return folder / "model.safetensors"

    def _optimizer_values(self) -> dict[str, dict[str, Any]]:
        """For each key of the optimiser's state, what it holds for each parameter of this worker."""
        found: dict[str, dict[str, Any]] = {}
        if self.optimizer is not None:
            for name, parameter in self._trained().items():
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    found.setdefault(key, {})[name] = value
        return dict(sorted(found.items()))

    def _load_optimizer(self, saved: Checkpoint) -> None:
        assert self.optimizer is not None
        self.optimizer.state.clear()
        for name, parameter in self._trained().items():
            values = saved.optimizer_state(name)
            if values:
                self.optimizer.state[parameter] = {
                    key: self._optimizer_part(name, value, parameter) if isinstance(value, torch.Tensor) else value
                    for key, value in values.items()
                }

    def _optimizer_part(self, name: str, value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """A single number, the count of steps, stays on the CPU unless the optimiser counts on the device."""
        assert self.optimizer is not None
        on_device = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
        part = self._state.part(name, value, parameter)
        return part.to(parameter.device) if value.ndim or on_device else part

    def _trained(self) -> dict[str, nn.Parameter]:
        """This worker's parameters that the optimiser may know, by canonical name."""
        held = self._state.held().items()
        return {name: value for name, value in held if isinstance(value, nn.Parameter) and value.requires_grad}

    def _together(self) -> None:
        if self.plan.mesh.num_workers > 1:
            dist.barrier()


def as_batch(batch: Batch | Sequence[Any]) -> Batch:
    """A batch, or the model's arguments with the target behind them."""
    if isinstance(batch, Batch):
        return batch
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise UsageError(
            "a batch is a stagewright.zoo.Batch, or a tuple of the model's arguments and the target: (x, target)"
        )
    *args, target = batch
    return Batch(args=tuple(args), target=target)


def _inputs(arguments: Sequence[Any]) -> Batch:
    """The model's arguments as a batch without a target."""
    if not isinstance(arguments, (tuple, list)) or not arguments:
        raise UsageError(
            f"to predict, give a stagewright.zoo.Batch or a tuple of the model's arguments, (x,), not "
            f"{type(arguments).__name__}"
        )
    return Batch(args=tuple(arguments), target=None)


def _try_sizes(graph: UnitGraph, model: Model, plan: Plan) -> None:
    """Let a graph find out, while the whole model is here, for which micro-batches its branches are the model's."""
    largest = -(-plan.batch // (plan.mesh.data * plan.microbatches))
    for size in sorted({1, 2, max(1, largest - 1), largest}) if graph.dynamic else ():
        batch = model.example(size)
        with contextlib.suppress(UsageError):  # said again where a batch of this size comes
            graph.flatten(batch.args, batch.kwargs)


def _codec_setting(plan: Plan) -> dict[str, Any]:
    """All that decides what the ends of links remember."""
    cuts = range(plan.num_stages - 1)
    names = [[plan.codec_of(cut, backward=way) for cut in cuts] for way in (False, True)]
    return {"mesh": str(plan.mesh), "cuts": list(plan.cuts), "microbatches": plan.microbatches, "names": names}


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """The options of an optimiser's groups, as far as JSON knows them."""
    if optimizer is None:
        return []
    return [
        {name: list(value) if isinstance(value, tuple) else value for name, value in group.items() if _is_plain(value)}
        for group in optimizer.param_groups
    ]


def _take_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    if len(groups) == len(optimizer.param_groups):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: tuple(one) if isinstance(one, list) else one for name, one in saved.items()})


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return f"{', '.join(listed[:3])}{', …' if len(listed) > 3 else ''}" if listed else "nothing"
