"""How a training step is laid out over devices: everything that the analytic forecast needs beside model and cluster.

Wider than a `Plan`, which says what the engine here runs: a layout also states what other training systems do
(sequence, context and expert parallelism, ZeRO-1 and 2, selective recomputation, rank order). Text form:

    tp=8,pp=8,vp=3,mbs=1,m=64,sp,recompute=selective,order=tp-cp-dp-pp,layers=13-12-12-12-12-12-12-11
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

from stagewright.errors import UnknownName, UsageError
from stagewright.schedules.rules import FIXED_SCHEDULES, SCHEDULES, ScheduleName
from stagewright.spec.plan import ContextAttention

LayoutAxis: TypeAlias = Literal["tensor", "context", "expert", "data", "pipeline"]
RecomputeMode: TypeAlias = Literal["none", "selective", "full"]
Precision: TypeAlias = Literal["bfloat16", "float16", "float32"]
StackName: TypeAlias = Literal["stagewright", "megatron", "nanotron", "deepspeed"]

AXIS_ORDER: tuple[LayoutAxis, ...] = ("tensor", "context", "data", "pipeline")
_SHORT = {
    "dp": "data",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "vp": "virtual",
    "mbs": "microbatch",
    "m": "microbatches",
    "sp": "sequence_parallel",
}
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallelism, micro-batches, precision and memory savings of a training step."""

    data: int = 1
    """Data parallel replicas."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    """Context parallel ranks, which divide the sequence: in all operators, or inside blocks (stack "stagewright")."""
    context_attention: ContextAttention | None = None
    """Attention of context parallel ranks: keys and values go around a ring, or all-to-alls divide heads; None: the
    faster one."""
    expert: int = 1
    """Expert parallel ranks; they are taken from the data parallel ones."""
    virtual: int = 1
    """Stages on each pipeline rank (interleaved schedule)."""
    microbatch: int = 1
    """Samples of a micro-batch."""
    microbatches: int = 1
    """Micro-batches per replica and step."""
    sequence_parallel: bool = False
    """Whether tensor ranks divide the sequence in norms and residuals."""
    regather: bool = True
    """Whether backward gathers the divided inputs of sequence parallelism again instead of saving them whole."""
    zero: int = 0
    """ZeRO stage: 1 divides optimizer states over replicas, 2 also gradients, 3 also parameters (FSDP)."""
    shards: int | None = None
    """Replicas among which ZeRO-3 divides parameters (HSDP); None: all."""
    gather_once: bool = False
    """Whether ZeRO-3 gathers parameters once per step and reduces gradients at its end, not in each micro-batch."""
    recompute: RecomputeMode = "none"
    """Activation checkpointing: none, attention only, or whole blocks."""
    recompute_layers: int | tuple[int, ...] | None = None
    """Blocks of each rank that `recompute = "full"` checkpoints, one number for all or for each; None: all."""
    attention: Literal["flash", "unfused"] = "flash"
    precision: Precision = "bfloat16"
    """Data type of activations and of matrix products."""
    master_weights: bool = True
    """Whether the optimizer keeps 32-bit parameters beside 16-bit ones."""
    gradient_bytes: int = 4
    """Bytes per accumulated gradient."""
    optimizer_states: int = 2
    """32-bit states per parameter: 2 for Adam, 0 for SGD without momentum."""
    divided_vocabulary: bool = True
    """Whether tensor ranks divide embedding and head."""
    overlap_gradients: bool = True
    """Whether gradient collectives overlap with the last backward."""
    overlap_tensor: bool = True
    """Whether tensor collectives of backward overlap with gradients of weights, where the stack can."""
    checkpoint_segments: int | None = None
    """Parts of each rank that `recompute = "full"` recomputes one at a time; None: one for each block."""
    schedule: ScheduleName = "1f1b"
    """Order of micro-batches; 1f1b with several stages on each rank is the interleaved schedule."""
    message_share: float = 1.0
    """Bytes of a point-to-point message over those of the activation: below 1 with a codec."""
    order: tuple[LayoutAxis, ...] = AXIS_ORDER
    """Axes from innermost to outermost: neighbors of the first share a host."""
    layers: tuple[int, ...] = ()
    """Blocks of each pipeline rank; (): as equal as possible."""
    message_stall_s: float = 0.0
    """Measured extra time of each point-to-point message between pipeline ranks; 0 on a healthy network."""
    gradient_stall_s: float = 0.0
    """Measured extra time of a step's gradient collectives; 0 on a healthy network."""
    stack: StackName = "megatron"
    """Training system, whose host time and memory habits apply."""

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context", "expert", "virtual", "microbatch", "microbatches"):
            if getattr(self, name) < 1:
                raise UsageError(f"layout: {name} = {getattr(self, name)}, but must be at least 1")
        placement = SCHEDULES[self.schedule].placement
        if placement == "v" and self.virtual != 2:
            raise UsageError(f"layout: schedule = {self.schedule} has two stages on each rank: set virtual = 2 (vp=2)")
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"layout: zero = {self.zero}, but ZeRO has the stages 0, 1, 2 and 3")
        if self.data * self.context % self.expert:
            raise UsageError(
                f"layout: {self.expert} expert parallel ranks do not divide the {self.data * self.context} data "
                "parallel ranks that they are taken from"
            )
        missing = set(AXIS_ORDER) - set(self.order)
        if missing:
            raise UsageError(f"layout: order lacks {', '.join(sorted(missing))}")
        if len(self.order) != len(set(self.order)):
            raise UsageError(f"layout: order = {'-'.join(self.order)} names an axis twice")
        if self.layers and len(self.layers) != self.pipeline:
            raise UsageError(f"layout: layers states {len(self.layers)} ranks, but pipeline = {self.pipeline}")
        if isinstance(self.recompute_layers, tuple) and len(self.recompute_layers) != self.pipeline:
            raise UsageError(
                f"layout: recompute_layers states {len(self.recompute_layers)} ranks, but pipeline = {self.pipeline}"
            )

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def rank_tokens(self, length: int) -> int:
        """Return the tokens of a micro-batch on the context ranks that have the most."""
        return self.microbatch * math.ceil(length / self.context)

    def end_tokens(self, length: int) -> int:
        """Return the tokens of a micro-batch in embedding, head and messages: the engine here joins them there."""
        return self.microbatch * length if self.stack == "stagewright" else self.rank_tokens(length)

    @property
    def head_rank(self) -> int:
        """Pipeline rank with the head; schedules in a V bring it back to the first."""
        return 0 if SCHEDULES[self.schedule].placement == "v" else self.pipeline - 1

    @property
    def batch(self) -> int:
        """Global batch in samples."""
        return self.data * self.microbatch * self.microbatches

    @property
    def item_bytes(self) -> int:
        """Bytes per activation."""
        return 4 if self.precision == "float32" else 2

    def stride(self, axis: LayoutAxis) -> int:
        """Distance in ranks between neighbors along an axis."""
        sizes = {
            "tensor": self.tensor,
            "context": self.context,
            "data": self.data,
            "pipeline": self.pipeline,
            "expert": 1,
        }
        wanted = "data" if axis == "expert" and "expert" not in self.order else axis
        stride = 1
        for other in self.order:
            if other == wanted:
                return stride
            stride *= sizes[other]
        raise UsageError(f"layout: order lacks {axis}")

    def blocks(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of blocks of each pipeline rank."""
        return self.layers or _equal_blocks(num_layers, self.pipeline)

    def checkpointed(self, rank: int, blocks: int) -> int:
        """Return how many of a rank's blocks `recompute = "full"` recomputes."""
        count = self.recompute_layers
        if isinstance(count, tuple):
            count = count[rank]
        return blocks if count is None else min(blocks, count)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse `tp=8,pp=8,vp=3,mbs=1,m=64,sp,recompute=selective`; `order` and `layers` are joined by hyphens."""
        known = cls.__dataclass_fields__
        values: dict[str, Any] = {}
        for part in text.split(","):
            word, equals, value = (piece.strip() for piece in part.partition("="))
            name = _SHORT.get(word, word)
            if name not in known:
                raise UnknownName("option of a layout", word, [*_SHORT, *known])
            if name in values:
                raise UsageError(f"{text!r} states {name} twice")
            if name == "order":
                values[name] = _parse_order(text, value)
            elif name == "layers" or (name == "recompute_layers" and "-" in value):
                values[name] = tuple(_whole(text, word, count) for count in value.split("-"))
            elif known[name].type == "bool":
                if value not in ("", "true", "false"):
                    raise UsageError(f"{text!r}: {word} is true or false, not {value!r}")
                values[name] = value != "false"
            elif known[name].type == "float":
                try:
                    values[name] = float(value)
                except ValueError:
                    raise UsageError(f"{text!r}: {word} needs a number, not {value!r}") from None
            elif known[name].type in ("int", "int | None", "int | tuple[int, ...] | None"):
                values[name] = _whole(text, word, value)
            else:
                if not equals:
                    raise UsageError(f"{text!r}: {word} needs a value")
                values[name] = _PRECISIONS.get(value, value) if name == "precision" else value
        for name, choices in _CHOICES.items():
            if name in values and values[name] not in choices:
                raise UnknownName(name, values[name], choices)
        return cls(**values)


def _whole(text: str, word: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise UsageError(f"{text!r}: {word} needs a whole number, not {value!r}")
    return int(value)


def _parse_order(text: str, value: str) -> tuple[LayoutAxis, ...]:
    """Parse axes from innermost to outermost; context, which few layouts have, may be left out."""
    axes: dict[str, LayoutAxis] = {axis: axis for axis in AXIS_ORDER}
    found: list[LayoutAxis] = []
    for word in value.split("-"):
        name = _SHORT.get(word, word)
        if name not in axes:
            raise UnknownName("axis", word, [*AXIS_ORDER, "tp", "cp", "dp", "pp"], hint=f"in {text!r}")
        found.append(axes[name])
    return (*found, "context") if "context" not in found else tuple(found)


@cache
def _equal_blocks(num_layers: int, ranks: int) -> tuple[int, ...]:
    each, more = divmod(num_layers, ranks)
    # The last rank also holds the head: it gets the smaller share.
    return tuple(each + (1 if rank < more else 0) for rank in range(ranks))


_CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": get_args(RecomputeMode),
    "attention": ("flash", "unfused"),
    "context_attention": get_args(ContextAttention),
    "precision": get_args(Precision),
    "schedule": FIXED_SCHEDULES,
    "stack": get_args(StackName),
}
