"""How long a transfer takes there, from round trips."""

from __future__ import annotations

import pytest

from stagewright.studies.codecs.transfer_job import one_way


def test_the_answer_is_taken_away_from_the_quickest_round_trip() -> None:
    found = one_way({"empty": [0.5, 0.2, 0.3], "none": [1.4, 1.1, 3.0]})
    assert found == {"empty": pytest.approx(0.1), "none": pytest.approx(1.0)}


def test_an_empty_message_that_was_delayed_makes_no_transfer_take_nothing() -> None:
    found = one_way({"empty": [6.0], "block4": [2.0]})
    assert found["block4"] == pytest.approx(1.0)
