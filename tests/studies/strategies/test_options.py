"""The options of the study of strategies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stagewright.errors import UsageError
from stagewright.studies.framework.options import quick_values
from stagewright.studies.parts.training import cuts_of_client
from stagewright.studies.strategies.options import Options, parse_client


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"workers": (3,)}, "even numbers"),
        ({"microbatches": ()}, "numbers from 1 up"),
        ({"microbatches": (128,)}, "more than the 64 samples"),
        ({"cuts": ("odd",)}, "split policy .* known: even, client"),
        ({"devices": ("cpu:0",)}, "give two"),
        ({"tasks": ("rte",)}, "needs its data"),
        ({"batch_norm": "defered"}, "did you mean 'deferred'"),
    ],
)
def test_what_can_not_be_studied_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Options(**wrong)


def test_clients_of_any_size() -> None:
    assert parse_client("4,3") == ("f4l3",)
    assert parse_client("f1l1, f2l2") == ("f1l1", "f2l2")
    for wrong in ("4", "0,3", "f1", "4,3,2", ""):
        with pytest.raises(UsageError, match="first and last units"):
            parse_client(wrong)
    options = Options(tasks=("digits",), client=("f1l1", "f2l2"), workers=(2, 4), microbatches=(4,))
    assert [experiment.name for experiment in options.experiments] == [
        "data-2",
        "pipeline-2-4-even",
        "pipeline-2-4-f1l1",
        "pipeline-2-4-f2l2",
        "data-4",
        "pipeline-4-4-even",
    ]
    client = options.experiments[3]
    assert (client.client_units, client.shown) == ((2, 2), "pipeline, client/server, first 2 and last 2")
    assert options.plan("digits", client, 0).placement == "client-server"
    names = [f"u{number}" for number in range(6)]
    assert cuts_of_client(names, 2, 1, "m") == ("u1", "u4")
    with pytest.raises(UsageError, match="first 4 and the last 2 of the 6 units"):
        cuts_of_client(names, 4, 2, "m")


def test_shares_of_a_gpu_are_devices_of_their_own() -> None:
    assert replace(Options(), devices=("cuda:0/8",) * 4).is_run(4)
    assert not replace(Options(), devices=("cpu:0", "cpu:1")).is_run(4)


def test_quick_is_a_size_at_which_steps_are_long_enough_and_digits_are_learned() -> None:
    quick = quick_values(Options)
    assert (quick["batches"], quick["epochs"], len(quick["seeds"])) == ((128,), 4, 3)
    assert min(quick["large_batches"]) > 128
