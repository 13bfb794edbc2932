"""The operators that each worker executed in one step, and what makes two workers' sequences differ.

    workers/N/operators.jsonl: a line an operator and a line an action, {"name", "start_s", "end_s", "depth", …}

Every micro-batch of a stage runs the same operators, so sequences are compared kind by kind: all of one worker's
forward against the other's, its backward, its optimiser, what lies between. That is also what keeps comparing short.
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

__all__ = [
    "Comparison",
    "Operator",
    "PartComparison",
    "WorkerOperators",
    "compare_workers",
    "read_operators",
]

_MOST = 2000  # operators of one part that are aligned one by one; of longer ones only the beginning is
_COLLECTIVES = ("allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "broadcast", "barrier")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One call of an operator, or the action that it is part of."""

    name: str
    """As torch names it: aten::linear; an action as the trace names it: forward 0."""
    start_s: float
    """When, on worker 0's clock."""
    end_s: float
    depth: int
    """Operators around it; 0: called by the model, the engine or autograd."""
    is_operator: bool
    """Whether it is an operator, not an action."""
    action: str
    """The action that it is part of: forward, backward, …; "between" outside of all."""
    stage: int | None
    """Of the action."""
    microbatch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOperators:
    """What one worker executed."""

    rank: int
    """Its world rank."""
    operators: tuple[Operator, ...]
    """In the order of their begin."""

    def sequence(self) -> dict[str, list[tuple[str, ...]]]:
        """For each kind of action, the names of the outermost operators of each of its micro-batches."""
        found: dict[str, dict[tuple[int | None, int | None], list[str]]] = {}
        for one in self.operators:
            if one.is_operator and one.depth == 0:
                found.setdefault(one.action, {}).setdefault((one.stage, one.microbatch), []).append(one.name)
        return {action: [tuple(each) for each in chunks.values()] for action, chunks in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartComparison:
    """One kind of action of two workers."""

    action: str
    """forward, backward, optimizer, between, …"""
    num_first: int
    """Operators of each, over all micro-batches."""
    num_second: int
    num_same: int
    """Of one micro-batch each: operators that both have in the same order."""
    lines: tuple[str, ...]
    """… and the lines of their aligned difference: "  " both, "- " the first alone, "+ " the second alone."""
    only_first: tuple[tuple[str, int], ...]
    """Names that one has more often than the other, in one micro-batch, with how much more often."""
    only_second: tuple[tuple[str, int], ...]

    @property
    def is_same(self) -> bool:
        """Whether both did the same, as often."""
        return self.num_first == self.num_second and all(line.startswith("  ") for line in self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two workers executed, side by side."""

    first: int
    second: int
    parts: tuple[PartComparison, ...]
    sentence: str
    """What makes the difference."""

    @property
    def is_same(self) -> bool:
        """Whether both executed the same sequence."""
        return all(part.is_same for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
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
    """The operators of every worker; one error where they were not recorded."""
    found = []
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
            every = tuple(
                Operator(**{**row, "start_s": row["start_s"] + offset_s, "end_s": row["end_s"] + offset_s})
                for row in rows
            )
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"can't read {path}: {error}; record operators again with --operators") from None
        found.append(WorkerOperators(rank=rank, operators=every))
    return tuple(found)


def compare_workers(workers: Sequence[WorkerOperators], first: int, second: int, plan: Plan) -> Comparison:
    """Align what two workers executed, and say what makes the difference."""
    known = {worker.rank: worker for worker in workers}
    for rank in (first, second):
        if rank not in known:
            raise UsageError(f"there is no worker {rank}; the run has workers 0 to {len(workers) - 1}")
    if first == second:
        raise UsageError(f"worker {first} can't be compared with itself; name two, like --compare-workers 0 1")
    one, other = known[first].sequence(), known[second].sequence()
    parts = tuple(
        _compare_part(action, one.get(action, []), other.get(action, [])) for action in dict.fromkeys((*one, *other))
    )
    sums = sum(_is_collective(name) for chunks in one.values() for chunk in chunks for name in chunk)
    return Comparison(first=first, second=second, parts=parts, sentence=_sentence(parts, first, second, plan, sums))


def _compare_part(action: str, one: Sequence[tuple[str, ...]], other: Sequence[tuple[str, ...]]) -> PartComparison:
    mine, theirs = _typical(one), _typical(other)
    if mine != theirs:
        mine, theirs = mine[:_MOST], theirs[:_MOST]
    lines: list[str] = []
    same = 0
    if mine == theirs:
        lines, same = [f"  {name}" for name in mine], len(mine)
    else:
        for tag, a, b, c, d in difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
            if tag == "equal":
                lines += [f"  {name}" for name in mine[a:b]]
                same += b - a
            else:
                lines += [f"- {name}" for name in mine[a:b]]
                lines += [f"+ {name}" for name in theirs[c:d]]
    counts, others = Counter(mine), Counter(theirs)
    return PartComparison(
        action=action,
        num_first=sum(map(len, one)),
        num_second=sum(map(len, other)),
        num_same=same,
        lines=tuple(lines),
        only_first=tuple((counts - others).most_common()),
        only_second=tuple((others - counts).most_common()),
    )


def _typical(chunks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The sequence that most micro-batches have; of several, the first."""
    return Counter(chunks).most_common(1)[0][0] if chunks else ()


def _sentence(parts: Sequence[PartComparison], first: int, second: int, plan: Plan, sums: int) -> str:
    mesh = plan.mesh
    places = [mesh.coordinates(rank) for rank in (first, second)]
    differ = [axis for axis, one, other in zip(("data", "tensor", "pipeline"), *places, strict=True) if one != other]
    total = sum(part.num_first for part in parts)
    who = f"workers {first} and {second}"
    if "pipeline" in differ:
        about = " and ".join(
            f"worker {rank} has {_stages_text(plan, place[2])}"
            for rank, place in zip((first, second), places, strict=True)
        )
        return f"{who} executed different operators because they hold different stages: {about}{_alone(parts)}"
    kind = (
        "replicas of the same stages, with their own samples, whose gradients are summed" if differ == ["data"] else ""
    )
    if differ == ["tensor"]:
        kind = "holders of one part each of the same layers, whose results are summed"
    kind = kind or "on different places of the data and tensor axes, with the same stages"
    with_sums = f", {_many(sums, 'collective')} among them" if sums else ""
    if all(part.is_same for part in parts):
        return f"{who} executed the same {total} operators in the same order{with_sums}: they are {kind}"
    wrong = [line[2:] for part in parts for line in part.lines if not line.startswith("  ")]
    if wrong and all(map(_is_collective, wrong)):
        return f"{who} executed the same operators but for {_many(len(wrong), 'collective')}: they are {kind}"
    if not wrong:
        return f"{who} executed the same operators, but not as often ({_counts(parts)}): they are {kind}"
    names = ", ".join(f"{name} × {count}" for name, count in Counter(wrong).most_common(3))
    return f"{who} are {kind}, yet they differ in {_many(len(wrong), 'operator')} of one micro-batch: {names}"


def _is_collective(name: str) -> bool:
    return any(word in name for word in _COLLECTIVES)


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _counts(parts: Sequence[PartComparison]) -> str:
    return ", ".join(f"{part.action} {part.num_first} and {part.num_second}" for part in parts if not part.is_same)


def _stages_text(plan: Plan, worker: int) -> str:
    """The stages of one place along the pipeline, by the units at their ends."""
    texts = []
    for stage, holder in enumerate(plan.stage_workers):
        if holder == worker:
            begin = f"after {plan.cuts[stage - 1]}" if stage and plan.cuts else "from the inputs"
            end = f"up to {plan.cuts[stage]}" if stage < len(plan.cuts) else "to the loss" * plan.training
            texts.append(f"stage {stage} ({begin} {end or 'to the results'})")
    return " and ".join(texts)


def _alone(parts: Sequence[PartComparison]) -> str:
    """Operators that one of them has and the other has not at all."""
    inside = sorted((part for part in parts if part.action != "between"), key=lambda part: part.action != "forward")
    counts = [
        Counter(line[2:] for part in inside for line in part.lines if line[0] in (" ", sign)) for sign in ("-", "+")
    ]
    found = []
    for own, other, word in ((counts[0], counts[1], "first"), (counts[1], counts[0], "second")):
        names = [name for name in own if name not in other]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            found.append(f"only the {word} has {', '.join(names[:4])}{more}")
    return f"; {', '.join(found)}" if found else "; of the operators themselves both have the same kinds"
