"""Prove a plan equal to serial: loss, results, every gradient, every buffer of one step.

Worker 0 runs the step with the plain model, on its own, over the same micro-batches (batch norm and dropout depend on
them; without these the sum over micro-batches is the full batch's gradient). Then every worker runs its part of the
plan and compares what it holds with worker 0's values, which travel one tensor at a time. No speed-up is shown for a
plan that has not passed here.

    relative difference of a tensor = largest |found - expected| / largest |expected|

On a GPU both run with the full precision of float32: torch lets convolutions round to TF32 there, by kernels that it
chooses anew for each memory layout, which alone may differ by a thousandth. And with convolutions that add in the same
order each time: others differ from one run of serial to the next.

Another order of additions moves a value by its rounding, and some models multiply that: a codec rounds it to the next
step, sums in 16 bits lose it, batch norms divide by what is left of a sum. There serial runs once more, with what
enters codecs, or what every unit gives, moved by as much, and a tensor that needs it is allowed what that made of it
(``Reference.sways``), up to SWAY.

For a gradient, the largest |expected| is taken over all parameters of its module: some gradients are zero but for
rounding (the bias of attention's keys, biases before batch norm), and noise has no relative error worth the name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from stagewright.codecs.header import DTYPES
from stagewright.engine.batch.batch_norm import DeferredBatchNorm, tracked_norms
from stagewright.engine.batch.dropout import generators_of, key_stage, random_key
from stagewright.engine.parity.relative_error import SMALLEST, relative, same, scales
from stagewright.engine.pipeline.link_codec import FakeLink
from stagewright.engine.worker.broadcast import broadcast
from stagewright.graph.preserve import preserved
from stagewright.graph.unit_graph import UnitGraph
from stagewright.zoo.loss import loss_source
from stagewright.zoo.model import LossSource

__all__ = [
    "TOLERANCES",
    "Equality",
    "Part",
    "Reference",
    "compare_with",
    "full_precision",
    "make_reference",
    "statistics_of",
    "sways_of",
    "worst_of_all",
]

SWAY = 0.1
"""The most that is allowed a tensor for rounding's sake: more than that proves nothing."""
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3, "float64": 1e-10}
"""Largest relative difference that counts as equal: what another order of additions may cost in that type."""

NAME_BYTES = 256  # of a name that travels


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One micro-batch of one replica."""

    replica: int
    """Which replica has it."""
    args: tuple[Any, ...]
    """Positional arguments of the model."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    target: Any
    """What the loss compares with."""
    size: int
    """Samples."""
    weight: float
    """Share of the whole batch."""
    first_sample: int
    """Its first sample in the whole batch."""


Runner: TypeAlias = Callable[[Part], tuple[Any, Any]]
"""A micro-batch's result and its loss, both with the random numbers of that micro-batch."""


@dataclass(slots=True, kw_only=True)
class Reference:
    """What serial gives."""

    loss: float = 0.0
    """Of the whole batch."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the model's own names."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the step."""
    changed: frozenset[str] = frozenset()
    """Buffers that the step changed: some worker must have these."""
    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    """The tensors of the model's result, one list a micro-batch, replica by replica."""
    loss_source: LossSource = "given"
    """Whose loss it is."""
    loss_size: float = 0.0
    """What the loss is measured by: the micro-batches' losses without their signs, which may add up to nothing."""
    sways: dict[str, float] = field(default_factory=dict)
    """How far each moves where sums are added up in another order and rounded: a value may round to the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """How far a plan is from serial."""

    equal: bool
    """Whether everything is within what is allowed."""
    tolerance: float
    """What was allowed; where sums round, the most that any tensor needed."""
    loss: float
    """Relative difference of the loss."""
    outputs: float
    """Largest relative difference of a result."""
    gradients: float
    """Largest relative difference of a gradient; 0 for inference."""
    buffers: float
    """Largest relative difference of a buffer."""
    worst: str
    """What differs most, on any worker."""
    updates: float = 0.0
    """Largest relative difference of what the optimiser's step changes; 0 for inference."""

    def to_dict(self) -> dict[str, Any]:
        """For a run's files."""
        return asdict(self)


@contextmanager
def full_precision() -> Iterator[None]:
    """Without TF32 or less, which torch may use for float32, most of all on a GPU; and the same at each run."""
    cudnn: Any = torch.backends.cudnn
    same = cudnn.deterministic, cudnn.benchmark
    kinds: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    before = [one.fp32_precision for one in kinds]
    older: tuple[str, bool] | None = None
    with suppress(RuntimeError):  # torch has an older way to say it, and refuses to read that where both were used
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        if older is not None:
            torch.set_float32_matmul_precision("highest")
            cudnn.allow_tf32 = False
        else:
            for one in kinds:
                one.fp32_precision = "ieee"
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = same
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        else:
            for one, precision in zip(kinds, before, strict=True):
                one.fp32_precision = precision


def make_reference(
    graph: UnitGraph,
    parts: Sequence[Part],
    loss: Callable[[Any, Any], torch.Tensor],
    *,
    training: bool,
    seed: int,
    device: torch.device,
    deferred: bool,
    cuts: Sequence[int] = (),
    links: Sequence[tuple[str, str]] = (),
    plain_attention: bool = False,
    nudge: float = 0.0,
) -> Reference:
    """Run one step serially with the plain model; the model is left as it was.

    ``links``: for each of the ``cuts``, the codecs of both directions. Where there is one, the model runs through its
    graph with what the codecs make of activations and gradients at the cuts: serial under the same quantisation.
    ``plain_attention``: without fused kernels, which draw their own dropout masks, and no part of another's.
    ``nudge``: by how much of its largest value what crosses the cuts is moved.
    """
    model = graph.model
    found = Reference()
    replicas = sorted({part.replica for part in parts})
    before = _buffers(model)
    buffers: list[tuple[float, dict[str, torch.Tensor]]] = []
    with preserved(model):
        run = _runner(graph, parts[0], loss, seed, device, training=training)
        if nudge or any(codec != "none" for link in links for codec in link):
            run = _coded_runner(graph, cuts, links, loss, seed, device, training=training, nudge=nudge)
    with DeferredBatchNorm(model) if deferred and training else nullcontext() as norms:
        for replica in replicas:
            own = [part for part in parts if part.replica == replica]
            with preserved(model):
                for part in own:
                    with torch.set_grad_enabled(training), _attention(plain_attention):
                        result, value = run(part)
                        found.loss_source = loss_source(loss, result)
                        value = value * part.weight
                    if training and value.requires_grad:
                        value.backward()
                    found.loss += float(value.detach())
                    found.loss_size += abs(float(value.detach()))
                    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                    found.outputs.append([tensor.detach().clone() for tensor in tensors])
                buffers.append((sum(part.weight for part in own), _buffers(model)))
        found.buffers = _merged(buffers, statistics_of(model))
        if norms is not None:  # they have seen all replicas, and move once
            with preserved(model):
                norms.finish_step()
                found.buffers |= {
                    name: value for name, value in _buffers(model).items() if not bool(same(value, before[name]).all())
                }
    found.changed = frozenset(
        name
        for name, one in found.buffers.items()
        if name not in before or one.shape != before[name].shape or not bool(same(one, before[name]).all())
    )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found.gradients[name] = parameter.grad
            parameter.grad = None
    return found


def _runner(
    graph: UnitGraph, first: Part, loss: Callable[..., Any], seed: int, device: torch.device, *, training: bool
) -> Runner:
    """The plain model; one that draws random numbers, or whose loss does, through its graph, where they are keyed."""
    drawn_from = generators_of(device)  # a GPU has one of its own
    before = [one.get_state() for one in drawn_from]
    with torch.no_grad():
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (first.args, first.kwargs))
        loss(graph.model(*args, **kwargs), first.target)
    if not training or all(torch.equal(was, one.get_state()) for was, one in zip(before, drawn_from, strict=True)):

        def run_plain(part: Part) -> tuple[Any, Any]:
            # Nothing is drawn, but batch norms tell the micro-batches apart by it.
            with random_key(seed=seed, step=0, first_sample=part.first_sample, device=device):
                result = graph.model(*_copies(part.args), **_copies(part.kwargs))
                return result, loss(result, part.target)

        return run_plain
    whole = graph.stage(0, len(graph.calls) - 1)
    key_stage(whole)

    def run(part: Part) -> tuple[Any, Any]:
        with random_key(seed=seed, step=0, first_sample=part.first_sample, device=device):
            result = graph.unflatten(whole(*_copies(graph.flatten(part.args, part.kwargs))))
            return result, loss(result, part.target)

    return run


def _coded_runner(
    graph: UnitGraph,
    cuts: Sequence[int],
    links: Sequence[tuple[str, str]],
    loss: Callable[..., Any],
    seed: int,
    device: torch.device,
    *,
    training: bool,
    nudge: float,
) -> Runner:
    """The model stage by stage, with a link of the same codecs between two stages."""
    stages = graph.stages(cuts)
    coded = [graph.needs_gradient(cut) for cut in cuts]
    if training:
        for stage in stages:
            key_stage(stage)

    def run(part: Part) -> tuple[Any, Any]:
        values: Sequence[Any] = _copies(graph.flatten(part.args, part.kwargs))
        key = {"seed": seed, "step": 0, "first_sample": part.first_sample}
        with random_key(**key, device=device) if training else nullcontext():
            for at, stage in enumerate(stages):
                values = stage(*values)
                if at < len(cuts):
                    values = [
                        FakeLink.apply(value, *links[at], nudge) if wanted and value.dtype in DTYPES else value  # type: ignore[no-untyped-call]
                        for value, wanted in zip(values, coded[at], strict=True)
                    ]
            result = graph.unflatten(values)
            return result, loss(result, part.target)

    return run


def _attention(plain: bool) -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH) if plain else nullcontext()


def _copies(value: Any) -> Any:
    """Inputs that the model may change."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies."""
    return {name: value.detach().clone() for name, value in model.named_buffers()}


def statistics_of(model: nn.Module) -> set[str]:
    """Names of batch norms' running statistics, which replicas average."""
    norms = {id(norm) for norm in tracked_norms(model)}
    names = [name for name, module in model.named_modules() if id(module) in norms]
    return {f"{name}.{kind}".lstrip(".") for name in names for kind in ("running_mean", "running_var")}


def _merged(buffers: list[tuple[float, dict[str, torch.Tensor]]], averaged: set[str]) -> dict[str, torch.Tensor]:
    """Buffers after a step: running statistics averaged over replicas by weight, the others replica 0's."""
    if len(buffers) == 1:
        return buffers[0][1]
    total = sum(weight for weight, _ in buffers)
    return {
        name: sum(weight / total * values[name].double() for weight, values in buffers).to(value.dtype)  # type: ignore[union-attr]
        if name in averaged
        else value
        for name, value in buffers[0][1].items()
    }


def sways_of(moved: Reference, reference: Reference) -> dict[str, float]:
    """How far everything of one is from the other, twice: it is one trial of many."""
    found = {"loss": abs(moved.loss - reference.loss) / max(reference.loss_size, SMALLEST)}
    for kind, mine, other in (
        ("gradients", moved.gradients, reference.gradients),
        ("buffers", moved.buffers, reference.buffers),
        ("outputs", _named(dict(enumerate(moved.outputs))), _named(dict(enumerate(reference.outputs)))),
    ):
        sizes = scales(other, by_module=kind == "gradients")
        found |= {_called(kind, name): relative(mine[name], other[name], sizes[name]) for name in other}
    return {name: 2 * one for name, one in found.items()}


def _named(outputs: Mapping[int, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{at}.{index}": tensor for at, row in outputs.items() for index, tensor in enumerate(row)}


def _called(kind: str, name: str) -> str:
    at, _, index = name.partition(".")
    return f"result {index} of micro-batch {at}" if kind == "outputs" else f"{kind[:-1]} of {name}"


def compare_with(
    reference: Reference | None,
    *,
    loss: float,
    gradients: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    outputs: Mapping[int, Sequence[torch.Tensor]],
    tolerance: float,
    device: torch.device,
    trained: Collection[str] = (),
) -> Equality:
    """Compare what this worker holds with worker 0's reference; every worker must call this, and all get one verdict.

    ``outputs`` are the results of this worker's micro-batches, by their place among all; only worker 0 gives a
    ``reference``. What no worker has, and what serial has not, is infinitely far: a result, a gradient, a buffer that
    the step changed. So is the gradient of a parameter that this worker trains (``trained``) and serial has one for:
    another replica may have it, and go on without this one.
    """
    worst, failed, used = ("nothing", 0.0, tolerance), False, tolerance
    differences = {"outputs": 0.0, "gradients": 0.0, "buffers": 0.0}
    results = _named(outputs)
    sways = reference.sways if reference else {}
    kinds: list[tuple[str, Mapping[str, torch.Tensor], dict[str, torch.Tensor] | None, frozenset[str] | None]] = [
        ("gradients", gradients, reference.gradients if reference else None, None),
        ("buffers", buffers, *((reference.buffers, reference.changed) if reference else (None, None))),
        ("outputs", results, _named(dict(enumerate(reference.outputs))) if reference else None, None),
    ]

    def note(name: str, difference: float, sway: float = 0.0) -> None:
        nonlocal worst, failed, used
        allowed = tolerance if difference <= tolerance else max(tolerance, sway)  # no more than is needed
        worst = max(worst, (name, difference, allowed), key=lambda one: one[1] / one[2])
        failed |= not difference <= allowed
        used = max(used, allowed)

    for kind, held, expected, needed in kinds:
        names: list[str] = []
        for name, value, scale, sway in _shared(expected, device, kind, sways):
            names.append(name)
            if name in held:
                difference = relative(held[name], value, scale)
                differences[kind] = max(differences[kind], difference)
                note(_called(kind, name), difference, sway)
            elif kind == "gradients" and name in trained:
                differences[kind] = float("inf")
                note(f"{_called(kind, name)} (a worker has none)", float("inf"))
        absent = _absent(names, held, needed, device)
        unknown = [] if kind == "buffers" else [name for name in held if name not in set(names)]
        for remark, odd in (("no worker has one", absent), ("serial has none", unknown)):
            if odd:
                differences[kind] = float("inf")
                note(f"{_called(kind, odd[0])} ({remark})", float("inf"))
    own = [reference.loss, reference.loss_size, _sway(sways, "loss")] if reference else [0.0, 0.0, 0.0]
    expected_loss, size, sway = next(broadcast([torch.tensor(own, dtype=torch.float64)], device)).tolist()
    loss_difference = abs(loss - expected_loss) / max(size, SMALLEST)
    note("the loss", loss_difference, sway)
    every = [loss_difference, *differences.values(), float(failed), used]
    numbers = torch.tensor(every, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    loss_difference, *by_kind, any_failed, allowed = numbers.tolist()
    return Equality(
        equal=not any_failed,
        tolerance=allowed,
        loss=loss_difference,
        outputs=by_kind[0],
        gradients=by_kind[1],
        buffers=by_kind[2],
        worst=worst_of_all(worst[0], worst[1] / worst[2], device),
    )


def worst_of_all(name: str, difference: float, device: torch.device) -> str:
    """The name that comes with the largest difference of any worker; every worker must call this."""
    if dist.get_world_size() == 1:
        return name
    text = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    size = torch.tensor([difference], dtype=torch.float64, device=device)
    names = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    sizes = [torch.empty_like(size) for _ in names]
    dist.all_gather(names, own)
    dist.all_gather(sizes, size)
    worst = max(range(len(names)), key=lambda rank: float(sizes[rank]))
    return bytes(names[worst].cpu().tolist()).rstrip(b"\0").decode(errors="replace")


def _absent(
    names: Sequence[str], held: Mapping[str, Any], needed: frozenset[str] | None, device: torch.device
) -> list[str]:
    """Names that no worker holds, by worker 0's list; where it says which are ``needed``, of these."""
    if not names:
        return []
    found = torch.tensor([float(name in held) for name in names], device=device)
    if needed is not None:
        found = torch.maximum(found, torch.tensor([float(name not in needed) for name in names], device=device))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [name for name, one in zip(names, found.tolist(), strict=True) if one == 0]


def _sway(sways: Mapping[str, float], name: str) -> float:
    return min(sways.get(name, 0.0), SWAY)


def _shared(
    tensors: Mapping[str, torch.Tensor] | None, device: torch.device, kind: str, sways: Mapping[str, float]
) -> Iterator[tuple[str, torch.Tensor, float, float]]:
    """Worker 0's tensors, one after the other, on every worker, each with its scale and its sway.

    Names and shapes travel as JSON.
    """
    sizes = scales(tensors or {}, by_module=kind == "gradients")
    about = {
        name: [
            list(one.shape),
            str(one.dtype).removeprefix("torch."),
            sizes[name],
            _sway(sways, _called(kind, name)),
        ]
        for name, one in (tensors or {}).items()
    }
    text = json.dumps(about).encode() if tensors is not None else b""
    size = next(broadcast([torch.tensor([len(text)])], device))
    data = torch.zeros(int(size), dtype=torch.uint8)
    if tensors is not None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    about = json.loads(bytes(next(broadcast([data], device)).cpu().tolist()))
    values = (
        tensors[name] if tensors is not None else torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype, _, _) in about.items()
    )
    for (name, (_, _, scale, sway)), value in zip(about.items(), broadcast(values, device), strict=True):
        yield name, value, scale, sway
