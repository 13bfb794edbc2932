from __future__ import annotations

import numpy as np

from stagewright.partition.chain import Chain, best_cuts


def _chain(work: list[int], num_stages: int, **options: object) -> Chain:
    cumulative = np.concatenate([[0], np.cumsum(np.array(work, dtype=np.int64))])
    compute = np.tile(cumulative, (num_stages, 1))
    zeros = np.zeros(len(work) + 1, dtype=np.int64)
    return Chain(**{"compute": compute, "link": np.zeros_like(compute), "sends": zeros, **options})  # type: ignore[arg-type]


def test_stages_are_never_empty() -> None:
    assert best_cuts(_chain([0, 0, 0, 0], 4)) == (1, 2, 3, 4)
    assert best_cuts(_chain([9], 1)) == (1,)
    assert best_cuts(_chain([0, 0, 9], 2)) in {(1, 3), (2, 3)}


def test_links_add_to_compute_or_overlap_with_it() -> None:
    # Cut after unit 0: stages 2 | 5, and a link of 5 behind the first; after unit 1: stages 5 | 2 and a link of 1.
    link = np.array([[0, 5, 1, 0], [0, 0, 0, 0]], dtype=np.int64)
    assert best_cuts(_chain([2, 3, 2], 2, link=link)) == (2, 3), "7 against 6"
    assert best_cuts(_chain([2, 1, 4], 2, link=link)) == (2, 3), "7 against 4"
    assert best_cuts(_chain([2, 4, 1], 2, link=link, overlap=True)) == (1, 3), "5 against 6"


def test_nothing_allowed_gives_none() -> None:
    def reject_all(stage: int, ends: np.ndarray, width: int) -> np.ndarray:
        return np.zeros((len(ends), width), dtype=np.bool_)

    assert best_cuts(_chain([1, 2, 3], 2, allowed=reject_all)) is None


def test_known_partition() -> None:
    # The classic: 100 … 900 in three parts, the largest at least 1700.
    assert best_cuts(_chain([100, 200, 300, 400, 500, 600, 700, 800, 900], 3)) == (5, 7, 9)
