"""The result of a comparison as values: what differs first in each phase of the step, and the likely cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from stagewright.files.json_values import to_json

Phase: TypeAlias = Literal["before the step", "forward", "backward", "optimizer step", "buffers"]
PHASES: tuple[Phase, ...] = ("before the step", "forward", "backward", "optimizer step", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """One tensor of the step compared with the baseline's."""

    phase: Phase
    module: str
    tensor: str
    """Which tensor of the module: ``output``, ``input args[0]``, ``gradient of weight``."""
    error: float
    """Largest difference relative to the largest value; infinite if it can't be compared."""
    tolerance: float
    """What rounding alone explains."""
    ranks: tuple[int, ...]
    """The ranks with the largest error."""
    held: str = ""
    """How it was assembled from its shards."""
    remark: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the error is larger than rounding explains."""
        return not self.error <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A likely cause from the catalogue."""

    name: str
    evidence: str
    """The observation that points to it, with numbers."""
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a distributed step equals the plain model's."""

    same: bool
    first: dict[str, TensorError]
    """First wrong tensor of each phase that has one."""
    cause: Cause | None
    tensors: tuple[TensorError, ...]
    """All comparisons, phase by phase in the order of execution."""
    num_ranks: int
    dtype: str
    """The coarsest floating-point format of the activations."""
    gradient_scale: float
    """Activation gradients relative to the baseline's: the number of replicas or micro-batches that share the loss."""
    problem: str = ""
    """Why tensors could not be compared: another batch, a step that failed."""

    @property
    def module(self) -> str | None:
        """The first wrong module, in the order of phases; None if all are right."""
        error = next((self.first[phase] for phase in PHASES if phase in self.first), None)
        return None if error is None else error.module

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite error is null."""
        content: dict[str, Any] = to_json(self)
        for tensor in (*content["tensors"], *content["first"].values()):
            if tensor["error"] == float("inf"):
                tensor["error"] = None
        return content

    def summary(self) -> list[str]:
        """Return the verdict as sentences."""
        if self.same:
            return [f"The step equals the baseline's: {len(self.tensors)} tensors within rounding ({self.dtype})."]
        lines = [self.problem] if self.problem else []
        for phase in PHASES:
            if phase in self.first:
                lines.append(f"First difference, {phase}: {describe(self.first[phase])}.")
        if self.cause is not None:
            lines += [f"Likely cause: {self.cause.name}. {self.cause.evidence}", f"Fix: {self.cause.fix}"]
        return lines


def describe(error: TensorError) -> str:
    """Return one comparison as a phrase."""
    size = "missing or of another shape" if error.error == float("inf") else f"off by {error.error:.2g}"
    where = f" on rank {', '.join(map(str, error.ranks))}" if error.ranks else ""
    extra = f" ({error.remark})" if error.remark else ""
    known = f"rounding explains {error.tolerance:.1g}"
    return f"{error.module or '(the model)'}, {error.tensor}: {size}, {known}{where}{extra}"
