"""The operators that each worker executed in one step, and the difference between two workers.

    workers/N/operators.jsonl: a line for each operator and each action, {"name", "start_s", "end_s", "depth", …}

Every micro-batch of a stage runs the same operators, so sequences are compared by kind of action: forward with forward,
backward, optimizer, and the rest. This also keeps the comparison short.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stagewright.errors import UsageError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.trace.read import read_clock

_MOST = 2000  # maximum number of operators of one part that are aligned
_COLLECTIVES = ("allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "broadcast", "barrier")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One call of an operator, or an action that contains operators."""

    name: str
    """aten::linear, or the label of an action: forward 0."""
    start_s: float
    """On worker 0's clock."""
    end_s: float
    depth: int
    """Number of enclosing operators; 0: called by the model, the engine or autograd."""
    is_operator: bool
    """Whether it is an operator, not an action."""
    action: str
    """The enclosing action: forward, backward, …; "between" outside of all."""
    stage: int | None
    microbatch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOperators:
    """The operators of one worker."""

    rank: int
    operators: tuple[Operator, ...]
    """By start time."""

    def sequence(self) -> dict[str, list[tuple[str, ...]]]:
        """Return for each kind of action the outermost operators of each micro-batch."""
        names: dict[str, dict[tuple[int | None, int | None], list[str]]] = {}
        for call in self.operators:
            if call.is_operator and call.depth == 0:
                names.setdefault(call.action, {}).setdefault((call.stage, call.microbatch), []).append(call.name)
        return {action: [tuple(chunk) for chunk in chunks.values()] for action, chunks in names.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartComparison:
    """The comparison of one kind of action."""

    action: str
    """forward, backward, optimizer, between, …"""
    num_first: int
    """Operators over all micro-batches."""
    num_second: int
    num_same: int
    """Operators of one micro-batch that both have in the same order."""
    lines: tuple[str, ...]
    """Aligned difference of one micro-batch: "  " both, "- " first only, "+ " second only."""
    only_first: tuple[tuple[str, int], ...]
    """Operators that one calls more often in one micro-batch, with the difference."""
    only_second: tuple[tuple[str, int], ...]

    @property
    def is_same(self) -> bool:
        """Whether both executed the same, equally often."""
        return self.num_first == self.num_second and all(line.startswith("  ") for line in self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of two workers."""

    first: int
    second: int
    parts: tuple[PartComparison, ...]
    sentence: str
    """The cause of the difference."""

    @property
    def is_same(self) -> bool:
        """Whether both executed the same sequence."""
        return all(part.is_same for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        parts = [
            {
                **asdict(part),
                "lines": list(part.lines),
                "only_first": dict(part.only_first),
                "only_second": dict(part.only_second),
                "is_same": part.is_same,
            }
            for part in self.parts
        ]
        return {**asdict(self), "parts": parts, "is_same": self.is_same}


def read_operators(folder: RunFolder) -> tuple[WorkerOperators, ...]:
    """Read the operators of every worker; UsageError where they were not recorded."""
    workers = []
    for rank in range(folder.plan().mesh.num_workers):
        worker = folder.worker(rank)
        path = worker.path / "operators.jsonl"
        if not path.is_file():
            raise UsageError(
                f"{folder.path} has no operators of worker {rank}; record them with "
                f"stagewright trace {folder.path} --operators"
            )
        offset_s = read_clock(worker).offset_s
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            operators = tuple(
                Operator(**{**row, "start_s": row["start_s"] + offset_s, "end_s": row["end_s"] + offset_s})
                for row in rows
            )
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UsageError(f"can't read {path}: {error}; record operators again with --operators") from None
        workers.append(WorkerOperators(rank=rank, operators=operators))
    return tuple(workers)


def compare_workers(workers: Sequence[WorkerOperators], first: int, second: int, plan: Plan) -> Comparison:
    """Align the operators of two workers and explain the difference."""
    by_rank = {worker.rank: worker for worker in workers}
    for rank in (first, second):
        if rank not in by_rank:
            raise UsageError(f"there is no worker {rank}; the run has workers 0 to {len(workers) - 1}")
    if first == second:
        raise UsageError(f"worker {first} can't be compared with itself; name two, like --compare-workers 0 1")
    left, right = by_rank[first].sequence(), by_rank[second].sequence()
    parts = tuple(
        _compare_part(action, left.get(action, []), right.get(action, [])) for action in dict.fromkeys((*left, *right))
    )
    num_collectives = sum(_is_collective(name) for chunks in left.values() for chunk in chunks for name in chunk)
    return Comparison(
        first=first, second=second, parts=parts, sentence=_sentence(parts, first, second, plan, num_collectives)
    )


def _compare_part(action: str, first: Sequence[tuple[str, ...]], second: Sequence[tuple[str, ...]]) -> PartComparison:
    left, right = _typical(first), _typical(second)
    if left != right:
        left, right = left[:_MOST], right[:_MOST]
    lines: list[str] = []
    num_same = 0
    if left == right:
        lines, num_same = [f"  {name}" for name in left], len(left)
    else:
        for tag, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
            if tag == "equal":
                lines += [f"  {name}" for name in left[a:b]]
                num_same += b - a
            else:
                lines += [f"- {name}" for name in left[a:b]]
                lines += [f"+ {name}" for name in right[c:d]]
    left_counts, right_counts = Counter(left), Counter(right)
    return PartComparison(
        action=action,
        num_first=sum(map(len, first)),
        num_second=sum(map(len, second)),
        num_same=num_same,
        lines=tuple(lines),
        only_first=tuple((left_counts - right_counts).most_common()),
        only_second=tuple((right_counts - left_counts).most_common()),
    )


def _typical(chunks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the most common sequence of the micro-batches."""
    return Counter(chunks).most_common(1)[0][0] if chunks else ()


def _sentence(parts: Sequence[PartComparison], first: int, second: int, plan: Plan, num_collectives: int) -> str:
    mesh = plan.mesh
    coordinates = [mesh.coordinates(rank) for rank in (first, second)]
    differ = [
        axis for axis, *pair in zip(("data", "tensor", "pipeline"), *coordinates, strict=True) if pair[0] != pair[1]
    ]
    total = sum(part.num_first for part in parts)
    who = f"workers {first} and {second}"
    if "pipeline" in differ:
        about = " and ".join(
            f"worker {rank} has {_stages_text(plan, coordinate[2])}"
            for rank, coordinate in zip((first, second), coordinates, strict=True)
        )
        return f"{who} executed different operators because they hold different stages: {about}{_alone(parts)}"
    kind = "data-parallel replicas of the same stages, whose gradients are all-reduced" if differ == ["data"] else ""
    if differ == ["tensor"]:
        kind = "tensor-parallel shards of the same layers, whose results are all-reduced"
    kind = kind or "at different coordinates of the data and tensor axes, with the same stages"
    collectives = f", including {_many(num_collectives, 'collective')}" if num_collectives else ""
    if all(part.is_same for part in parts):
        return f"{who} executed the same {total} operators in the same order{collectives}: they are {kind}"
    wrong = [line[2:] for part in parts for line in part.lines if not line.startswith("  ")]
    if wrong and all(map(_is_collective, wrong)):
        return f"{who} executed the same operators except {_many(len(wrong), 'collective')}: they are {kind}"
    if not wrong:
        return f"{who} executed the same operators a different number of times ({_counts(parts)}): they are {kind}"
    names = ", ".join(f"{name} × {count}" for name, count in Counter(wrong).most_common(3))
    return f"{who} are {kind}, yet they differ in {_many(len(wrong), 'operator')} of one micro-batch: {names}"


def _is_collective(name: str) -> bool:
    return any(word in name for word in _COLLECTIVES)


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _counts(parts: Sequence[PartComparison]) -> str:
    return ", ".join(f"{part.action} {part.num_first} and {part.num_second}" for part in parts if not part.is_same)


def _stages_text(plan: Plan, worker: int) -> str:
    """Describe the stages of a pipeline rank by the units at their ends."""
    texts = []
    for stage, holder in enumerate(plan.stage_workers):
        if holder == worker:
            begin = f"after {plan.cuts[stage - 1]}" if stage and plan.cuts else "from the inputs"
            end = f"up to {plan.cuts[stage]}" if stage < len(plan.cuts) else "to the loss" * plan.training
            texts.append(f"stage {stage} ({begin} {end or 'to the results'})")
    return " and ".join(texts)


def _alone(parts: Sequence[PartComparison]) -> str:
    """List the operators that only one of them has."""
    inside = sorted((part for part in parts if part.action != "between"), key=lambda part: part.action != "forward")
    by_worker = [
        Counter(line[2:] for part in inside for line in part.lines if line[0] in (" ", sign)) for sign in ("-", "+")
    ]
    differences = []
    for counts, others, word in ((by_worker[0], by_worker[1], "first"), (by_worker[1], by_worker[0], "second")):
        names = [name for name in counts if name not in others]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            differences.append(f"only the {word} has {', '.join(names[:4])}{more}")
    return f"; {', '.join(differences)}" if differences else "; both use the same kinds of operators"
