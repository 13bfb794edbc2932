"""The cut and the recomputed units together are the best of all."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from stagewright.partition import unit_memory
from stagewright.partition.unit_memory import MemoryPlan, StageLimit, UnitCosts, solve

NUM_CASES = 200


def stage_memory(units: list[UnitCosts], stage: StageLimit, recomputed: set[int], first: int, last: int) -> int:
    """The definition: what kept units save and recomputed ones hold, and one recomputed unit in backward."""
    held = sum(
        units[index].input_bytes if index in recomputed else units[index].saved_bytes
        for index in range(first, last + 1)
    )
    gains = [units[index].gain_bytes for index in range(first, last + 1) if index in recomputed]
    fixed = sum(unit.fixed_bytes for unit in units[first : last + 1])
    return fixed + stage.in_flight * held + max(gains, default=0)


def assess(
    units: list[UnitCosts], stages: list[StageLimit], ends: tuple[int, ...], recomputed: set[int]
) -> tuple[float, float] | None:
    """Return the bottleneck and the sum of the stage times; None if a stage does not fit."""
    seconds = []
    for stage, first, last in zip(stages, (0, *(end + 1 for end in ends)), ends, strict=False):
        if stage_memory(units, stage, recomputed, first, last) > stage.memory_bytes:
            return None
        again = sum(units[index].forward_s for index in recomputed if first <= index <= last)
        seconds.append((sum(unit.time_s for unit in units[first : last + 1]) + again) / stage.speed)
    return max(seconds), sum(seconds)


def brute_force(units: list[UnitCosts], stages: list[StageLimit]) -> tuple[float, float] | None:
    """Try every cut with every set of recomputed units."""
    best: tuple[float, float] | None = None
    indices = range(len(units))
    for cuts in itertools.combinations(indices[:-1], len(stages) - 1):
        for size in range(len(units) + 1):
            for recomputed in itertools.combinations(indices, size):
                found = assess(units, stages, (*cuts, len(units) - 1), set(recomputed))
                if found is not None and (best is None or found < best):
                    best = found
    return best


def random_case(seed: int) -> tuple[list[UnitCosts], list[StageLimit]]:
    """Units of whole seconds, so that sums are exact, and limits around what they need."""
    rng = random.Random(seed)
    units = []
    for _ in range(rng.randint(2, 7)):
        forward = rng.randint(1, 9)
        saved = rng.randint(0, 40)
        units.append(
            UnitCosts(
                time_s=forward * rng.randint(2, 4),
                forward_s=forward,
                saved_bytes=saved,
                input_bytes=rng.randint(0, max(1, saved // 2)),
                fixed_bytes=rng.randint(0, 10),
            )
        )
    count = rng.randint(1, min(3, len(units)))
    whole = sum(unit.saved_bytes + unit.fixed_bytes for unit in units)
    stages = [
        StageLimit(
            memory_bytes=max(1, int(whole * rng.uniform(0.2, 1.2) * (count - index) / count)),
            in_flight=count - index,
            speed=rng.choice((1.0, 1.0, 2.0)),
        )
        for index in range(count)
    ]
    return units, stages


def test_equals_brute_force() -> None:
    num_refused = num_recomputed = 0
    for seed in range(NUM_CASES):
        units, stages = random_case(seed)
        found, expected = solve(units, stages), brute_force(units, stages)
        if expected is None:
            assert found is None, seed
            num_refused += 1
            continue
        assert found is not None, seed
        assert found.is_exact
        assert (found.bottleneck_s, sum(found.stage_s)) == pytest.approx(expected), seed
        assert assess(units, stages, found.ends, set(found.recomputed)) == pytest.approx(expected), seed
        num_recomputed += bool(found.recomputed)
    assert num_refused > NUM_CASES // 10
    assert num_recomputed > NUM_CASES // 4, "most limits make a difference"


def block(**changes: int) -> UnitCosts:
    return UnitCosts(**{"time_s": 3, "forward_s": 1, "saved_bytes": 10, "input_bytes": 1, **changes})  # type: ignore[arg-type]


def test_only_what_memory_requires() -> None:
    """All saved: 80. One recomputed: 71, and 9 more in backward."""
    units = [block()] * 8
    assert solve(units, [StageLimit(memory_bytes=80)]) == MemoryPlan(
        ends=(7,), recomputed=(), stage_s=(24,), stage_bytes=(80,)
    )
    two = solve(units, [StageLimit(memory_bytes=79)])
    assert two is not None
    assert len(two.recomputed) == 2
    assert two.stage_bytes == (80 - 18 + 9,)
    assert two.bottleneck_s == 26


def test_the_cut_moves_with_the_recomputation() -> None:
    """The first stage holds two micro-batches: with four units it recomputes one more than with three."""
    found = solve([block()] * 7, [StageLimit(memory_bytes=55, in_flight=2), StageLimit(memory_bytes=55)])
    assert found is not None
    assert found.ends == (2, 6)
    assert found.bottleneck_s == 12


def test_a_thinned_frontier_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_memory, "MAX_FRONTIER", 2)
    for seed in range(20):
        units, stages = random_case(seed)
        found, best = solve(units, stages), brute_force(units, stages)
        if found is not None:
            assert best is not None
            reached = assess(units, stages, found.ends, set(found.recomputed))
            assert reached is not None
            assert reached[0] >= best[0] - 1e-9


def test_more_stages_than_units() -> None:
    assert solve([block()], [StageLimit(memory_bytes=100)] * 2) is None
    assert math.isclose(solve([block()], [StageLimit(memory_bytes=100)]).bottleneck_s, 3)  # type: ignore[union-attr]
