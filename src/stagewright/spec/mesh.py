"""The mesh: how many workers a plan has along each axis, which rank each has, and who communicates with whom.

    world rank = (data · T + tensor) · P + pipeline        data=2, pipeline=2:   replica 0: workers 0 1
    (pipeline is innermost: adjacent stages have adjacent ranks)                 replica 1: workers 2 3

    expert parallelism is no axis of its own: it divides the replicas into groups of `expert` neighbors, each of which
    holds all experts once                                                       data=4, expert=2:  0 1 | 2 3

    tensor=2:1,pipeline=2 has a tensor degree for each pipeline worker; ranks that would not exist are skipped:

                     pipeline 0    pipeline 1          activations 0 ─► 1         gradients 1 ─► 0
        tensor 0     worker 0      worker 1            worker 0 ─► worker 1       worker 1 ─┬► worker 0
        tensor 1     worker 2                          worker 2 sends none                  └► worker 2

What crosses a cut is the same on all tensor workers of a stage, so each worker gets its copy from one of them: worker t
of n from worker t mod m of the m that have it. With equal degrees each sends to its own tensor index.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from stagewright.errors import UnknownName, UsageError

Axis: TypeAlias = Literal["data", "tensor", "pipeline"]
AXES: tuple[Axis, ...] = ("data", "tensor", "pipeline")
AXIS_ALIASES = {"dp": "data", "ddp": "data", "tp": "tensor", "pp": "pipeline", "ep": "expert", "cp": "context"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Number of workers along each axis; 1 × 1 × 1 is a single device."""

    data: int = 1
    """Data parallel (DP) replicas, each with a share of the batch."""
    tensor: int = 1
    """Tensor parallel (TP) workers, which split the matrices of each layer; the largest of ``tensor_degrees``."""
    pipeline: int = 1
    """Pipeline parallel (PP) workers, which hold different stages."""
    expert: int = 1
    """Expert parallel (EP) replicas, which divide the experts of each mixture-of-experts layer; divides `data`."""
    context: int = 1
    """Context parallel (CP) workers, which divide the sequence of each block; they take the place of tensor parallel
    ones."""
    tensor_degrees: tuple[int, ...] = ()
    """Tensor parallel workers at each pipeline index, where they differ; (): `tensor` at each."""

    def __post_init__(self) -> None:
        if self.tensor_degrees:
            self._set_degrees()
        for axis in (*AXES, "expert", "context"):
            if getattr(self, axis) < 1:
                raise UsageError(f"mesh: {axis} = {getattr(self, axis)}, but every axis has at least 1 worker")
        if self.data % self.expert:
            raise UsageError(
                f"mesh: expert = {self.expert} does not divide data = {self.data}: experts are divided over groups of "
                f"replicas; use data = {self.expert}, or an expert size that divides {self.data}"
            )

    def _set_degrees(self) -> None:
        """Check the tensor degrees; equal ones are those of a plain mesh."""
        degrees, written = self.tensor_degrees, list(self.tensor_degrees)
        if len(degrees) != self.pipeline:
            raise UsageError(
                f"mesh: tensor = {written} has {len(degrees)} degrees for pipeline = {self.pipeline}: give one degree "
                "for each pipeline worker, first to last, or one number for all"
            )
        if min(degrees) < 1:
            raise UsageError(f"mesh: tensor = {written}, but every stage has at least 1 worker")
        if self.tensor not in (1, max(degrees)):
            raise UsageError(f"mesh: tensor = {self.tensor} is not the largest of the degrees {written}")
        object.__setattr__(self, "tensor", max(degrees))
        if len(set(degrees)) == 1:
            object.__setattr__(self, "tensor_degrees", ())

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse `data=2,pipeline=2`, `dp=2,pp=2` or `serial`; a missing axis has size 1.

        `expert=2` without `data` has two replicas, `tensor=2:1` without `pipeline` two pipeline workers.
        """
        sizes: dict[str, int] = {}
        degrees: tuple[int, ...] = ()
        for part in [] if text.strip() == "serial" else text.split(","):
            name, _, number = (word.strip() for word in part.partition("="))
            axis = AXIS_ALIASES.get(name, name)
            known = (*AXES, "expert", "context")
            if axis not in known:
                raise UnknownName("axis of a mesh", name, known, hint=f"(in {text!r}; write data=2,pipeline=2)")
            numbers = number.split(":") if axis == "tensor" else [number]
            if axis in sizes or not all(word.isascii() and word.isdigit() for word in numbers):
                wrong = f"{axis} is given twice" if axis in sizes else f"{axis} needs a whole number, not {number!r}"
                raise UsageError(f"{text!r} is not a mesh: {wrong}; write data=2,pipeline=2")
            sizes[axis] = int(numbers[0])
            if len(numbers) > 1:
                degrees = tuple(map(int, numbers))
                sizes[axis] = max(degrees)
        if "expert" in sizes:
            sizes.setdefault("data", sizes["expert"])
        if degrees:
            sizes.setdefault("pipeline", len(degrees))
        return cls(**sizes, tensor_degrees=degrees)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in ("data", "expert", "context", "tensor", "pipeline")}
        written = {axis: f"{size}" for axis, size in sizes.items() if size > 1}
        if self.tensor_degrees:
            written["tensor"] = ":".join(map(str, self.tensor_degrees))
        return ",".join(f"{axis}={size}" for axis, size in written.items()) or "serial"

    @property
    def num_workers(self) -> int:
        per_replica = sum(self.tensor_degrees) or self.tensor * self.context * self.pipeline
        return self.data * per_replica

    @property
    def degrees(self) -> tuple[int, ...]:
        """The number of tensor (or context) parallel workers at each pipeline index."""
        return self.tensor_degrees or (self.tensor * self.context,) * self.pipeline

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """The index along tensor and pipeline of each worker of a replica, by rank."""
        return _positions(self.degrees)

    @property
    def strategy(self) -> str:
        """The axes with more than one worker: "serial", "pipeline", "data×pipeline", "expert"."""
        sizes = {
            "data": self.data // self.expert,
            "expert": self.expert,
            "context": self.context,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
        }
        return "×".join(axis for axis, size in sizes.items() if size > 1) or "serial"

    def size(self, axis: Axis) -> int:
        """Return the largest number of workers along an axis; those along tensor may be context parallel."""
        return {"data": self.data, "tensor": self.tensor * self.context, "pipeline": self.pipeline}[axis]

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return a worker's index along data, tensor (or context) and pipeline."""
        if not 0 <= rank < self.num_workers:
            raise UsageError(f"worker {rank} is not on the mesh {self}, which has workers 0 to {self.num_workers - 1}")
        if self.tensor_degrees:
            data, position = divmod(rank, len(self.positions))
            return (data, *self.positions[position])
        rest, pipeline = divmod(rank, self.pipeline)
        return (*divmod(rest, self.size("tensor")), pipeline)

    def rank(self, data: int, tensor: int, pipeline: int) -> int:
        """Return the rank of a worker from its coordinates."""
        if self.tensor_degrees:
            return data * len(self.positions) + self.positions.index((tensor, pipeline))
        return (data * self.size("tensor") + tensor) * self.pipeline + pipeline

    def ranks_along(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks of the process group of `rank` along an axis, including `rank`, in order.

        Along a pipeline with unequal tensor degrees: the worker at each index that sends to this one.
        """
        data, tensor, pipeline = self.coordinates(rank)
        if axis == "pipeline":
            return tuple(self.sender(rank, index) for index in range(self.pipeline))
        if axis == "tensor":
            return tuple(self.rank(data, index, pipeline) for index in range(self.degrees[pipeline]))
        return tuple(self.rank(index, tensor, pipeline) for index in range(self.data))

    def sender(self, rank: int, pipeline: int) -> int:
        """Return the worker at a pipeline index from which this one gets what crosses a cut."""
        data, tensor, own = self.coordinates(rank)
        return rank if own == pipeline else self.rank(data, tensor % self.degrees[pipeline], pipeline)

    def receivers(self, rank: int, pipeline: int) -> tuple[int, ...]:
        """Return the workers at another pipeline index that get what crosses a cut from this one; maybe none."""
        data, tensor, own = self.coordinates(rank)
        indices = range(tensor, self.degrees[pipeline], self.degrees[own])
        return tuple(self.rank(data, index, pipeline) for index in indices)

    def num_copies(self, sender: int, receiver: int) -> int:
        """Return how often the first worker at one pipeline index sends what crosses a cut to another index."""
        return -(-self.degrees[receiver] // self.degrees[sender])

    def linked_ranks(self) -> list[list[int]]:
        """Return the workers among which crossings are sent: those of each pipeline; of each replica, where tensor
        degrees differ."""
        if self.tensor_degrees:
            size = len(self.positions)
            return [list(range(replica * size, (replica + 1) * size)) for replica in range(self.data)]
        firsts = range(0, self.num_workers, self.pipeline)
        return [list(range(first, first + self.pipeline)) for first in firsts]


@lru_cache(maxsize=64)
def _positions(degrees: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (tensor, pipeline)
        for tensor in range(max(degrees))
        for pipeline, degree in enumerate(degrees)
        if tensor < degree
    )
