"""The slow-down of stragglers on a job whose times are easy to add up."""

import numpy as np
import pytest

from stagewright.errors import UsageError
from stagewright.trace.stragglers.analysis import analyze
from stagewright.trace.stragglers.job import Job, Op, Simulator
from stagewright.trace.stragglers.operation_table import job_of_columns


def table(
    num_replicas: int = 4, num_steps: int = 2, slow: dict[tuple[int, int], float] | None = None
) -> dict[str, list]:
    """Two stages, two micro-batches: forward 1 s, backward 2 s, messages 0 s; `slow` is a factor of compute."""
    rows = []
    for replica in range(num_replicas):
        for stage in (0, 1):
            factor = (slow or {}).get((replica, stage), 1.0)
            for step in range(num_steps):
                for number in (0, 1):
                    rows.append((replica, stage, step, "forward-compute", number + stage, factor, number))
                    rows.append((replica, stage, step, "backward-compute", 4 + 2 * number - stage, 2 * factor, number))
                    forward, backward = ("send", "recv") if stage == 0 else ("recv", "send")
                    rows.append((replica, stage, step, f"forward-{forward}", 1 + number, 0.0, number))
                    rows.append((replica, stage, step, f"backward-{backward}", 6 + 2 * number, 0.0, number))
                rows.append((replica, stage, step, "grads-reduce-scatter", 20.0, 0.5, 0))
                rows.append((replica, stage, step, "optimizer", 20.5, 0.25, 0))
    names = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id")
    columns = {name: [row[index] for row in rows] for index, name in enumerate(names)}
    return {**columns, "rank": [row[0] * 2 + row[1] for row in rows]}


def test_a_job_without_stragglers_has_no_slow_down() -> None:
    analysis = analyze(job_of_columns(table(), "job"))

    # F F on both stages, one after the other (3 s), then B B likewise (6 s), reduction and optimizer.
    assert analysis.ideal_s == pytest.approx(3 + 6 + 0.75)
    assert analysis.slowdown == pytest.approx(1.0)
    assert analysis.cause == "none"


def test_one_slow_rank_is_named_with_its_share() -> None:
    analysis = analyze(job_of_columns(table(slow={(2, 0): 2.0}), "job"))

    # Rank 4 takes 2 + 2 s forward and 4 + 4 s backward; its stage 1 takes 1 s and 2 s in between.
    assert analysis.step_s == pytest.approx(2 + 2 + 1 + 2 + 4 + 4 + 0.75)
    assert analysis.slowest_rank == 4
    assert analysis.cause == "worker"
    assert analysis.worker_share > 0.9
    assert "rank 4" in analysis.verdict


def test_a_long_last_stage_is_not_a_slow_rank() -> None:
    slow = {(replica, 1): 1.5 for replica in range(4)}

    analysis = analyze(job_of_columns(table(slow=slow), "job"))

    assert analysis.cause == "last stage"
    assert analysis.by_stage[1] > analysis.by_stage[0]


def test_communication_ends_after_its_last_participant() -> None:
    first, second, after = Op(0, "send", 0), Op(1, "recv", 0), Op(1, "forward", 0)
    begin = Op(0, "forward", 0)
    job = Job(
        durations={
            begin: np.array([[3.0]]),
            first: np.array([[0.5]]),
            second: np.array([[0.25]]),
            after: np.array([[1.0]]),
        },
        depends={first: [begin], after: [second]},
        groups=[(first, second)],
        synced=frozenset(),
        communication=frozenset({"send", "recv"}),
        ranks={(0, 0): 0, (0, 1): 1},
    )

    assert Simulator.of(job).step_times(job.durations).tolist() == [4.25]


def test_operations_that_wait_for_each_other_are_refused() -> None:
    a, b = Op(0, "forward", 0), Op(0, "forward", 1)
    durations = {a: np.ones((1, 1)), b: np.ones((1, 1))}
    job = Job(
        durations=durations,
        depends={a: [b], b: [a]},
        groups=[],
        synced=frozenset(),
        communication=frozenset(),
        ranks={(0, 0): 0},
    )

    with pytest.raises(UsageError, match="2 operations"):
        Simulator.of(job)


def test_a_step_with_missing_operations_is_refused() -> None:
    columns = {name: values[:-1] for name, values in table().items()}

    with pytest.raises(UsageError, match="optimizer 0 of stage 1 is missing"):
        job_of_columns(columns, "job")
