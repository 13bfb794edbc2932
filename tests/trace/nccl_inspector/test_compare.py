"""Logs of NCCL Inspector: bandwidth, waiting, the late rank and the slow link; damaged logs are refused."""

import gzip
import json
import random
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
import inspector_logs as logs

from stagewright.cli.app import app
from stagewright.cli.planning.recorded import explain_recorded
from stagewright.errors import UsageError
from stagewright.trace.nccl_inspector.compare import compare_logs
from stagewright.trace.nccl_inspector.log_file import inspector_logs, is_inspector_log, read_log


def test_every_field_of_a_record_is_read(tmp_path: Path) -> None:
    path = logs.write_log(tmp_path, 2, [logs.line(2, "ReduceScatter", 1231, 2**31, 41057, name="tp/dp")])

    (operation,) = read_log(path)

    assert (operation.communicator, operation.name, operation.kind) == ("0x7f8c496ae9f661", "tp/dp", "ReduceScatter")
    assert (operation.rank, operation.num_ranks, operation.num_nodes, operation.number) == (2, 4, 2, 1231)
    assert (operation.host, operation.pid, operation.bytes, operation.peer) == ("node1", 438772, 2**31, None)
    assert operation.seconds == pytest.approx(0.041057)
    assert operation.bus_bandwidth == pytest.approx(2**31 * 3 / 0.041057, rel=1e-6)


def test_a_record_of_nccl_2_28_without_a_name(tmp_path: Path) -> None:
    path = logs.write_log(
        tmp_path, 0, [logs.line(0, "AllReduce", 1, 8192, 10).replace('"comm_name":"DP Group 0",', "")]
    )

    assert read_log(path)[0].name == ""


def test_the_rank_with_the_shortest_kernels_is_late(tmp_path: Path) -> None:
    report = compare_logs(logs.late_rank(tmp_path, late=2))

    (found,) = report.collectives
    (finding,) = report.findings
    assert (finding.kind, finding.ranks) == ("late", (2,))
    assert (
        "Rank 2 of DP Group 0 (0x7f8c496ae9f661), on node1 with pid 438772, joins last in 10 of 10" in finding.sentence
    )
    assert "500 µs" in finding.sentence
    assert found.transfer_s == pytest.approx(1.001e-3)
    assert found.bus_bandwidth == pytest.approx(2**20 * 1.5 / 1.001e-3, rel=1e-3)
    assert found.wait == pytest.approx(3 * 500 / (3 * 1501 + 1001), rel=0.01)
    assert [rank.wait_s > 4e-4 for rank in found.ranks] == [True, True, False, True]


def test_ranks_that_take_turns_are_not_late(tmp_path: Path) -> None:
    paths = [
        logs.write_log(tmp_path, r, [logs.line(r, "AllReduce", n, 2**20, 1000 + 100 * (n % 4 == r)) for n in range(40)])
        for r in range(4)
    ]

    assert compare_logs(paths).findings == ()


def test_launch_times_blame_nobody(tmp_path: Path) -> None:
    """Without a kernel's times, only that of its launch is known, which says nothing about waiting."""
    for path in logs.late_rank(tmp_path, late=2):
        path.write_text(path.read_text().replace("kernel_gpu", "collective_cpu"))

    assert compare_logs(inspector_logs(tmp_path)).findings == ()


def test_the_slow_link_is_named(tmp_path: Path) -> None:
    """A pipeline of 4 ranks: receives wait for the sender, and sends from 1 to 2 take three times as long."""
    paths = []
    for rank in range(4):
        lines = []
        for n in range(8):
            if rank < 3:
                lines.append(logs.line(rank, "Send", 2 * n, 2**20, 300 if rank == 1 else 100, peer=rank + 1))
            if rank > 0:
                lines.append(logs.line(rank, "Recv", 2 * n + 1, 2**20, 5000, peer=rank - 1))
        paths.append(logs.write_log(tmp_path, rank, lines))

    report = compare_logs(paths)

    assert [(f.kind, f.ranks) for f in report.findings] == [("link", (1, 2))]
    assert {(link.source, link.target): round(link.median_s * 1e6) for link in report.links} == {
        (0, 1): 100,
        (1, 2): 300,
        (2, 3): 100,
    }


def test_explain_reads_the_folder(tmp_path: Path) -> None:
    logs.late_rank(tmp_path, late=1)

    text = CliRunner().invoke(app, ["explain", str(tmp_path)], env={"COLUMNS": "160"}).output
    data = json.loads(CliRunner().invoke(app, ["explain", str(tmp_path), "--json"]).stdout)

    assert "AllReduce" in text
    assert "Rank 1 of DP Group 0" in text
    assert data["findings"][0]["ranks"] == [1]
    assert data["collectives"][0]["ranks"][1]["host"] == "node0"


def test_the_last_line_of_a_killed_job_is_left_out(tmp_path: Path) -> None:
    path = logs.late_rank(tmp_path, late=1)[0]
    path.write_text(path.read_text()[:-40])
    packed = tmp_path / "other.log.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))

    assert len(read_log(path)) == 9
    assert read_log(packed) == read_log(path)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"rank":0', '"rank":-1', "rank is -1"),
        ('"rank":0', '"rank":9', "rank 9, peer None of 4 ranks"),
        ('"coll_perf"', '"other"', "it has no coll_perf"),
        ('"coll_exec_time_us":', '"coll_exec_time_us":1e400,"x":', "coll_exec_time_us is inf"),
        ('"hostname":"node0"', '"hostname":7', "hostname is 7"),
        ('{"header":', '{"header":]', "line 1 of"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, before: str, after: str, words: str) -> None:
    path = logs.late_rank(tmp_path, late=1)[0]
    path.write_text(path.read_text().replace(before, after))

    assert is_inspector_log(path)
    with pytest.raises(UsageError, match=r"line 1 of .*pid438770\.log is no record of NCCL Inspector") as error:
        read_log(path)
    assert words in str(error.value)


def test_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    path, *others = logs.late_rank(tmp_path, late=1)
    valid = path.read_bytes()
    chance = random.Random(1)
    refused = 0
    for _ in range(400):
        content = bytearray(valid)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.choice(b'0-9{}[]",:eE.x\\\x00\xff')
        path.write_bytes(content)
        try:
            compare_logs([path, *others])
        except UsageError:
            refused += 1

    assert 100 < refused < 400


def test_logs_beside_other_files_are_refused(tmp_path: Path) -> None:
    path = logs.late_rank(tmp_path, late=1)[0]
    (tmp_path / "trace.json").write_text("{}")

    with pytest.raises(UsageError, match=r"trace\.json is no log of NCCL Inspector"):
        explain_recorded([str(path), str(tmp_path / "trace.json")], None, True)
