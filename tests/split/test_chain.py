from __future__ import annotations

import numpy as np
import pytest

from stagewright.split.chain import Chain, best_cuts


def _chain(work: list[int], num_stages: int, **more: object) -> Chain:
    upto = np.concatenate([[0], np.cumsum(np.array(work, dtype=np.int64))])
    compute = np.tile(upto, (num_stages, 1))
    zeros = np.zeros(len(work) + 1, dtype=np.int64)
    return Chain(**{"compute": compute, "link": np.zeros_like(compute), "sends": zeros, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("num_microbatches", [None, 1, 2, 100])
def test_stages_are_never_empty(num_microbatches: int | None) -> None:
    assert best_cuts(_chain([0, 0, 0, 0], 4), num_microbatches) == (1, 2, 3, 4)
    assert best_cuts(_chain([9], 1), num_microbatches) == (1,)
    assert best_cuts(_chain([0, 0, 9], 2), num_microbatches) in {(1, 3), (2, 3)}


def test_pace_adds_the_link_or_overlaps_it() -> None:
    link = np.array([[0, 5, 0, 0], [0, 0, 0, 0]], dtype=np.int64)
    apart = _chain([2, 3, 4], 2, link=link)
    assert apart.pace(0, 0, 1) == 7
    assert _chain([2, 3, 4], 2, link=link, overlap=True).pace(0, 0, 1) == 5
    assert best_cuts(apart, None) == (2, 3)


def test_nothing_allowed_gives_none() -> None:
    def never(stage: int, ends: np.ndarray, width: int) -> np.ndarray:
        return np.zeros((len(ends), width), dtype=np.bool_)

    for num_microbatches in (None, 1, 4):
        assert best_cuts(_chain([1, 2, 3], 2, allowed=never), num_microbatches) is None


def test_known_partition() -> None:
    # The classic: 100 … 900 in three parts, the largest at least 1700.
    assert best_cuts(_chain([100, 200, 300, 400, 500, 600, 700, 800, 900], 3), None) == (5, 7, 9)
