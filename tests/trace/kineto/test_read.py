"""Traces of the PyTorch profiler become a Trace whose breakdown adds up."""

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kineto_files import event, gpu_rank, pipeline_rank, write

from stagewright.errors import UsageError
from stagewright.trace.breakdown import breakdown
from stagewright.trace.kineto.read import read_profiles
from stagewright.trace.waterfall import explain_trace

US = 1e-6


def test_every_instant_of_a_gpu_step_has_one_class(tmp_path: Path) -> None:
    trace = read_profiles([write(tmp_path / "a.json", 0, gpu_rank())])

    (share,) = breakdown(trace, 7)

    assert share.step_s == pytest.approx(1000 * US)
    assert share.compute_s == pytest.approx((150 + 100 + 100 + 200 + 200) * US)
    assert share.optimizer_s == pytest.approx(200 * US)
    details = {(part, name): seconds / US for part, name, seconds in share.details}
    assert details["collective", "all-reduce, data"] == pytest.approx(100)
    assert details["overhead", "data-loading"] == pytest.approx(100)
    assert details["overhead", "launch"] == pytest.approx(20 + 5)
    assert details["overhead", "idle"] == pytest.approx(25)
    assert sum(share.parts().values()) == pytest.approx(share.step_s, rel=1e-9)
    assert sum(details.values()) == pytest.approx((share.collective_s + share.overhead_s) / US)


def test_backward_is_told_from_forward_by_the_thread_that_launched_it(tmp_path: Path) -> None:
    trace = read_profiles([write(tmp_path / "a.json", 0, gpu_rank())])

    kinds = [(e.kind, round(e.start_s / US), round(e.end_s / US)) for e in trace.workers[0].events]

    assert ("forward", 100, 500) in kinds
    assert ("backward", 500, 700) in kinds
    assert ("optimizer", 800, 1000) in kinds
    assert [e.bytes for e in trace.workers[0].events if e.stream == "collective"] == [2000]


def test_waiting_for_a_late_rank_is_no_communication(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{rank}.json", rank, gpu_rank(late_us=80.0 * rank)) for rank in (0, 1)]

    first, second = breakdown(read_profiles(paths), 7)

    # Rank 0 joins the all-reduce 80 µs before rank 1; 100 µs of its 200 are overlapped with backward.
    assert first.wait_s == pytest.approx(0.0)
    assert first.collective_s == pytest.approx(100 * US)
    assert second.wait_s == pytest.approx(0.0)
    late = read_profiles([*paths[:1], write(tmp_path / "2.json", 1, gpu_rank(late_us=150.0))])
    assert breakdown(late, 7)[0].wait_s == pytest.approx(50 * US)
    assert breakdown(late, 7)[0].collective_s == pytest.approx(50 * US)
    explained = explain_trace(late)
    assert explained.slowest == 1
    assert explained.slowest_s == pytest.approx(75 * US)


def test_clocks_of_two_hosts_are_aligned_at_their_collectives(tmp_path: Path) -> None:
    apart = [{**found, "ts": found["ts"] + 5e6} for found in gpu_rank()]
    paths = [write(tmp_path / "0.json", 0, gpu_rank()), write(tmp_path / "1.json", 1, apart, host_name="b")]

    shares = breakdown(read_profiles(paths), 7)

    assert [share.wait_s for share in shares] == [pytest.approx(0.0, abs=1e-9)] * 2


def test_stages_and_bubbles_follow_from_messages(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{rank}.json", rank, pipeline_rank(rank)) for rank in (0, 1)]

    trace = read_profiles(paths)

    assert str(trace.mesh) == "pipeline=2"
    assert [worker.stages for worker in trace.workers] == [(0,), (1,)]
    numbered = [(e.kind, e.microbatch) for e in trace.workers[1].events if e.kind in ("forward", "backward")]
    assert numbered == [(kind, number) for kind in ("forward", "backward") for number in range(3)]
    first, second = breakdown(trace, 2)
    assert [first.compute_s, second.compute_s] == [pytest.approx(900 * US)] * 2
    # With free links, GPipe with 2 stages and 3 micro-batches idles for one forward and one backward.
    assert first.bubble_s == pytest.approx(300 * US, rel=0.02)
    assert sum(first.parts().values()) == pytest.approx(1560 * US)


def test_a_trace_without_steps_is_one_step(tmp_path: Path) -> None:
    events = [found for found in gpu_rank() if not found["name"].startswith("ProfilerStep")]

    trace = read_profiles([write(tmp_path / "a.json", 0, events)])

    assert trace.steps == (0,)
    assert breakdown(trace, 0)[0].step_s == pytest.approx(900 * US)


def test_a_packed_file_is_read_like_a_plain_one(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.json", 0, gpu_rank())
    packed = tmp_path / "b.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))

    assert read_profiles([packed]).workers == read_profiles([plain]).workers


def test_what_was_communicated_and_by_whom_names_the_axis(tmp_path: Path) -> None:
    events = [
        event("aten::mm", 0, 100),
        event("c10d::allreduce_", 100, 1),
        event("gloo:all_reduce", 101, 50, "user_annotation", tid=5),
    ]

    trace = read_profiles([write(tmp_path / f"{rank}.json", rank, events) for rank in (0, 1)])

    assert str(trace.mesh) == "tensor=2"  # in forward
    assert ("collective", "all-reduce, tensor") in {detail[:2] for detail in breakdown(trace, 0)[0].details}


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("[1", "not JSON"),
        ('{"a": 1}', "traceEvents"),
        ('{"traceEvents": []}', "no events with a duration"),
        (json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": "x", "dur": 1}]}), "from 'x'"),
        (json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": -1}]}), "duration -1"),
    ],
)
def test_a_damaged_file_is_refused_with_one_sentence(tmp_path: Path, content: str, wrong: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)

    with pytest.raises(UsageError, match=wrong):
        read_profiles([path])


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, 1, gpu_rank()) for name in ("a.json", "b.json")]

    with pytest.raises(UsageError, match="both of rank 1"):
        read_profiles(paths)


def test_peers_and_collectives_of_gloo_belong_to_the_groups_of_the_rank(tmp_path: Path) -> None:
    """Gloo records a peer's rank in the pipeline's group, and no group of an all-reduce."""
    paths = []
    for rank in range(4):
        stage, replica = rank % 2, rank // 2
        groups = [
            {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1, 2, 3]},
            {"pg_name": "1", "pg_desc": "mesh_dp", "ranks": [stage, stage + 2]},
            {"pg_name": "2", "pg_desc": "mesh_pp", "ranks": [2 * replica, 2 * replica + 1]},
        ]
        reduce = [event("c10d::allreduce_", 1510, 1), event("gloo:all_reduce", 1511, 20, "user_annotation", tid=9)]
        about = {"distributedInfo": {"rank": rank, "world_size": 4, "pg_config": groups}}
        paths.append(write(tmp_path / f"{rank}.json", rank, [*pipeline_rank(stage), *reduce], **about))

    trace = read_profiles(paths)

    assert str(trace.mesh) == "data=2,pipeline=2"
    events = {worker.rank: worker.of_step(2) for worker in trace.workers}
    assert {rank: {e.peer for e in found if e.peer is not None} for rank, found in events.items()} == {
        0: {1},
        1: {0},
        2: {3},
        3: {2},
    }
    calls = {rank: {e.call for e in found if e.call is not None} for rank, found in events.items()}
    assert calls[0] == calls[2] != calls[1] == calls[3]
    assert {e.note for found in events.values() for e in found if e.kind == "collective"} == {"all-reduce, data"}
