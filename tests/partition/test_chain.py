from __future__ import annotations

import numpy as np

from stagewright.partition.chain import Chain, best_cuts


def _chain(work: list[int], num_stages: int, **more: object) -> Chain:
    upto = np.concatenate([[0], np.cumsum(np.array(work, dtype=np.int64))])
    compute = np.tile(upto, (num_stages, 1))
    zeros = np.zeros(len(work) + 1, dtype=np.int64)
    return Chain(**{"compute": compute, "link": np.zeros_like(compute), "sends": zeros, **more})  # type: ignore[arg-type]


def test_stages_are_never_empty() -> None:
    assert best_cuts(_chain([0, 0, 0, 0], 4)) == (1, 2, 3, 4)
    assert best_cuts(_chain([9], 1)) == (1,)
    assert best_cuts(_chain([0, 0, 9], 2)) in {(1, 3), (2, 3)}


def test_pace_adds_the_link_or_overlaps_it() -> None:
    link = np.array([[0, 5, 0, 0], [0, 0, 0, 0]], dtype=np.int64)
    apart = _chain([2, 3, 4], 2, link=link)
    assert apart.pace(0, 0, 1) == 7
    assert _chain([2, 3, 4], 2, link=link, overlap=True).pace(0, 0, 1) == 5
    assert best_cuts(apart) == (2, 3)


def test_nothing_allowed_gives_none() -> None:
    def never(stage: int, ends: np.ndarray, width: int) -> np.ndarray:
        return np.zeros((len(ends), width), dtype=np.bool_)

    assert best_cuts(_chain([1, 2, 3], 2, allowed=never)) is None


def test_known_partition() -> None:
    # The classic: 100 … 900 in three parts, the largest at least 1700.
    assert best_cuts(_chain([100, 200, 300, 400, 500, 600, 700, 800, 900], 3)) == (5, 7, 9)
