"""What a unit returns and changes besides tensors, and whether a graph can carry it from unit to unit.

Tensors in any object are carried (see ``structure``). So are numbers that differ from call to call, each as a tensor of
one element. Any other value that differs, an object that can't be taken apart, and an object among the arguments that
the unit changes are rejected: a graph would freeze or lose them.
"""

from __future__ import annotations

from typing import Any

from stagewright import structure
from stagewright.graph.tracing.observation import CallSpec, TensorSpec


def find_varying_numbers(call: CallSpec, repeated: CallSpec | None) -> frozenset[int]:
    """Return the positions of the output leaves that are numbers and differ between two runs; without one, of all.

    A float that is another object in the second run was computed, so it counts even if it is equal: the second batch
    repeats the samples of the first.
    """
    numbers = {index for index, leaf in enumerate(call.out_leaves) if _is_number(leaf)}
    if repeated is None:
        return frozenset(numbers)
    pairs = {index: (call.out_leaves[index], repeated.out_leaves[index]) for index in numbers}
    return frozenset(
        index
        for index, (before, after) in pairs.items()
        if before != after or (isinstance(before, float) and before is not after)
    )


def has_frozen_numbers(call: CallSpec) -> bool:
    """Whether the unit returns numbers that the graph holds as constants."""
    return any(_is_number(leaf) and index not in call.varying for index, leaf in enumerate(call.out_leaves))


def find_uncarried(call: CallSpec, repeated: CallSpec) -> str | None:
    """Describe what the unit returns or changes that can't be carried; ``None`` if there is nothing of the kind."""
    changed = call.replaced or repeated.replaced
    if changed:
        return f"unit {call.name!r} changes {changed}, which can't be sent between stages"
    for index, (before, after) in enumerate(zip(call.out_leaves, repeated.out_leaves, strict=True)):
        field = call.out_spec.paths()[index]
        where = f" in {field!r}" if field else ""
        if isinstance(before, TensorSpec):
            continue
        path = structure.find_tensor(before)
        if path is not None:
            return (
                f"unit {call.name!r} returns a {type(before).__name__}{where} with a tensor in {path!r}, an object "
                "that can't be taken apart"
            )
        if type(before) is not type(after) or (not _is_number(before) and _differ(before, after)):
            return f"unit {call.name!r} returns a value{where} that was {before!r} and then {after!r}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _differ(before: Any, after: Any) -> bool:
    """Whether two values without tensors differ; objects without a comparison of their own count as equal."""
    if not _has_comparison(type(before)):
        return False
    try:
        return bool(before != after)
    except Exception:  # a comparison that returns an array, for example
        return False


def _has_comparison(kind: Any) -> bool:
    return kind.__eq__ is not object.__eq__
