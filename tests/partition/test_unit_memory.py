"""The cut and the treatment of each unit together are the best of all."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from stagewright.partition import unit_memory
from stagewright.partition.unit_memory import MemoryPlan, StageLimit, Treatment, TreatmentCosts, UnitCosts, solve

NUM_CASES = 200


CHOICES: tuple[Treatment, ...] = ("keep", "recompute", "attention", "offload")


def stage_memory(units: list[UnitCosts], stage: StageLimit, chosen: tuple[Treatment, ...]) -> int:
    """The definition: what kept units save and others hold, and one recomputed or fetched unit in backward."""
    held, peaks = 0, [0]
    for unit, treatment in zip(units, chosen, strict=True):
        if treatment == "keep":
            held += unit.saved_bytes
        elif treatment == "recompute":
            held += unit.input_bytes
            peaks.append(unit.saved_bytes - unit.input_bytes)
        elif treatment == "attention":
            assert unit.attention is not None
            held += unit.saved_bytes - unit.attention.gain_bytes
            peaks.append(unit.attention.peak_bytes)
        else:
            peaks.append(2 * unit.saved_bytes)
    return sum(unit.fixed_bytes for unit in units) + stage.in_flight * held + max(peaks)


def stage_seconds(units: list[UnitCosts], stage: StageLimit, chosen: tuple[Treatment, ...]) -> float:
    """The definition: copies overlap with compute, to the host in forward and back in backward."""
    pairs = list(zip(units, chosen, strict=True))
    forward = sum(unit.forward_s for unit in units)
    backward = sum(unit.time_s - unit.forward_s for unit in units)
    backward += sum(unit.forward_s for unit, treatment in pairs if treatment == "recompute")
    backward += sum(unit.attention.recompute_s for unit, name in pairs if name == "attention" and unit.attention)
    copies = sum(unit.saved_bytes for unit, treatment in pairs if treatment == "offload") / stage.host_bytes_per_s
    copies += 2 * max(unit.forward_s for unit in units) / stage.speed if copies else 0
    return max(forward / stage.speed, copies) + max(backward / stage.speed, copies)


def assess(
    units: list[UnitCosts], stages: list[StageLimit], ends: tuple[int, ...], chosen: tuple[Treatment, ...]
) -> tuple[float, float] | None:
    """Return the bottleneck and the sum of the stage times; None if a stage does not fit."""
    seconds = []
    for stage, first, last in zip(stages, (0, *(end + 1 for end in ends)), ends, strict=False):
        inside = slice(first, last + 1)
        if stage_memory(units[inside], stage, chosen[inside]) > stage.memory_bytes:
            return None
        seconds.append(stage_seconds(units[inside], stage, chosen[inside]))
    return max(seconds), sum(seconds)


def brute_force(units: list[UnitCosts], stages: list[StageLimit]) -> tuple[float, float] | None:
    """Try every cut with every treatment of every unit."""
    best: tuple[float, float] | None = None
    possible = [("keep", *unit.treatments()) for unit in units]
    for cuts in itertools.combinations(range(len(units) - 1), len(stages) - 1):
        for chosen in itertools.product(*possible):
            found = assess(units, stages, (*cuts, len(units) - 1), chosen)
            if found is not None and (best is None or found < best):
                best = found
    return best


def random_case(seed: int) -> tuple[list[UnitCosts], list[StageLimit]]:
    """Units of whole seconds, so that sums are exact, and limits around what they need."""
    rng = random.Random(seed)
    units = []
    rate = rng.choice((4.0, 16.0, 64.0))
    for _ in range(rng.randint(2, 5)):
        forward = rng.randint(1, 9)
        saved = rng.randint(0, 40)
        gain = rng.randint(0, saved)
        attention = TreatmentCosts(
            gain_bytes=gain, peak_bytes=rng.randint(0, gain), recompute_s=rng.randint(0, forward)
        )
        units.append(
            UnitCosts(
                time_s=forward * rng.randint(2, 4),
                forward_s=forward,
                saved_bytes=saved,
                input_bytes=rng.randint(0, max(1, saved // 2)),
                fixed_bytes=rng.randint(0, 10),
                attention=rng.choice((attention, None)),
                can_offload=rng.random() < 0.7,
            )
        )
    count = rng.randint(1, min(3, len(units)))
    whole = sum(unit.saved_bytes + unit.fixed_bytes for unit in units)
    stages = [
        StageLimit(
            memory_bytes=max(1, int(whole * rng.uniform(0.2, 1.2) * (count - index) / count)),
            in_flight=count - index,
            speed=rng.choice((1.0, 1.0, 2.0)),
            host_bytes_per_s=rate,
        )
        for index in range(count)
    ]
    return units, stages


def test_equals_brute_force() -> None:
    num_refused, num_chosen = 0, Counter[str]()
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
        assert assess(units, stages, found.ends, found.treatments) == pytest.approx(expected), seed
        assert found.stage_bytes == tuple(
            stage_memory(units[first : last + 1], stage, found.treatments[first : last + 1])
            for stage, first, last in zip(stages, (0, *(end + 1 for end in found.ends)), found.ends, strict=False)
        )
        num_chosen.update(set(found.treatments))
    assert num_refused > NUM_CASES // 20
    assert all(num_chosen[treatment] > NUM_CASES // 10 for treatment in CHOICES), "each is the best in some cases"


def block(**changes: int) -> UnitCosts:
    return UnitCosts(**{"time_s": 3, "forward_s": 1, "saved_bytes": 10, "input_bytes": 1, **changes})  # type: ignore[arg-type]


def test_only_what_memory_requires() -> None:
    """All saved: 80. One recomputed: 71, and 9 more in backward."""
    units = [block()] * 8
    assert solve(units, [StageLimit(memory_bytes=80)]) == MemoryPlan(
        ends=(7,), treatments=("keep",) * 8, stage_s=(24,), stage_bytes=(80,)
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


def test_what_compute_hides_is_offloaded() -> None:
    """Six of eight units hide the copies of two; a third would cost more than its recomputation."""
    units = [block(can_offload=True)] * 8
    found = solve(units, [StageLimit(memory_bytes=79, host_bytes_per_s=20 / 6)])
    assert found is not None
    assert (len(found.units("offload")), len(found.recomputed)) == (2, 1)
    assert found.bottleneck_s == 25, "26 with two recomputed units"


def test_a_thinned_frontier_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_memory, "MAX_FRONTIER", 2)
    for seed in range(20):
        units, stages = random_case(seed)
        found, best = solve(units, stages), brute_force(units, stages)
        if found is not None:
            assert best is not None
            reached = assess(units, stages, found.ends, found.treatments)
            assert reached is not None
            assert reached[0] >= best[0] - 1e-9


def test_more_stages_than_units() -> None:
    assert solve([block()], [StageLimit(memory_bytes=100)] * 2) is None
    assert math.isclose(solve([block()], [StageLimit(memory_bytes=100)]).bottleneck_s, 3)  # type: ignore[union-attr]
