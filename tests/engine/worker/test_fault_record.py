"""Records of faults and of activity: root causes, kinds of errors, and the files that other processes read."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.engine.worker.fault_record import FaultRecord
from stagewright.engine.worker.faults import Activity, Doing, Fault, activity, read_doing, root_cause
from stagewright.engine.worker.placement import RankPlacement
from stagewright.engine.worker.process import ProcessMark
from stagewright.errors import RunError
from stagewright.runs.run_folder import RunFolder


def test_a_killed_worker_is_named_in_the_result_without_a_launcher(tmp_path: Path) -> None:
    """Under torchrun the others see only a lost connection; the process of worker 1 is gone."""
    with subprocess.Popen(["sleep", "60"]) as gone:
        mark = replace(
            ProcessMark.of_this_process(), pid=gone.pid, started=Path(f"/proc/{gone.pid}/stat").read_text().split()[21]
        )
        gone.kill()
    placement = RankPlacement(rank=0, num_workers=2, store=("127.0.0.1", 1))
    record = FaultRecord(placement)
    try:
        record.open(tmp_path)
        mark.write(tmp_path / "workers" / "1" / "process.json")
        record.write(Fault(worker=0, kind="lost-peer", message="Connection closed by peer"))
    finally:
        activity.close()
    result = RunFolder(tmp_path).result()
    assert result is not None
    assert result.status == "failed"
    assert str(result.error).startswith("worker 1 was killed: its process ended without a message")


def fault(worker: int, kind: Any, message: str = "", time_ns: int = 0) -> Fault:
    return Fault(worker=worker, kind=kind, message=message, time_ns=time_ns)


def test_root_cause_is_not_the_peer_that_lost_its_connection() -> None:
    lost, raised = fault(0, "lost-peer", time_ns=1), fault(1, "raised", time_ns=2)
    late = fault(2, "raised", time_ns=3)
    assert root_cause([lost, late, raised]) is raised
    killed, aborted = fault(3, "killed", "SIGKILL"), fault(4, "killed", "SIGABRT")
    assert root_cause([lost, raised, killed, aborted]) is killed
    assert root_cause([lost, raised, aborted]) is raised
    assert root_cause([lost, aborted]) is aborted
    assert root_cause([lost, fault(5, "exited", time_ns=9)]).worker == 5
    assert root_cause([fault(6, "lost-peer", time_ns=5), lost]) is lost


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"), "lost-peer"),
        (ConnectionResetError("Connection reset by peer"), "lost-peer"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"), "raised"),
        (ValueError("closed by peer"), "raised"),
    ],
)
def test_kinds_of_errors(error: Exception, kind: str) -> None:
    made = Fault.of(error, worker=1, device="cpu:0", doing=Doing(), time_ns=5)
    assert (made.kind, made.exit_code, made.time_ns) == (kind, 1, 5)
    outer = RunError("could not receive")
    outer.__cause__ = error
    assert Fault.of(outer, worker=1, device="", doing=Doing(), time_ns=0).kind == kind


def test_a_fault_survives_its_file(tmp_path: Path) -> None:
    doing = Doing(count=7, step=3, stage=1, microbatch=2, action="forward", shapes="(4, 3) float32")
    one = Fault(worker=1, kind="hung", message="m", device="cpu:0", doing=doing, traceback="t\n", time_ns=5)
    one.write(tmp_path / "deep" / "error.json")
    assert Fault.read(tmp_path / "deep" / "error.json") == one
    (tmp_path / "half.json").write_text('{"worker": 1, "ki')
    assert Fault.read(tmp_path / "half.json") is None
    assert Fault.read(tmp_path / "none.json") is None


def test_activity_is_read_from_its_file_while_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "3" / "activity.txt"
    assert read_doing(path) == Doing()
    one = Activity()
    one.begin("load model")
    one.open(path)
    assert read_doing(path) == Doing(count=1, action="load model")
    one.begin("forward", step=0, stage=12, microbatch=30, shapes="(4, 3) float32")
    assert read_doing(path) == one.now()
    assert str(one.now()) == "step 0, stage 12, micro-batch 30, forward, shapes (4, 3) float32"
    one.begin("F")  # a shorter record leaves nothing of a longer one
    assert read_doing(path) == Doing(count=3, step=0, action="F")
    one.begin("forward", shapes="(4, 3) float32, " * 500)
    assert read_doing(path).count == 4
    one.close()
    one.begin("after")
    assert read_doing(path).count == 4


def test_batch_norm_of_one_sample_is_told_with_what_helps() -> None:
    with pytest.raises(ValueError, match="per channel") as raised:
        torch.nn.BatchNorm1d(2)(torch.randn(1, 2))
    made = Fault.of(raised.value, worker=0, device="cpu:0", doing=Doing(), time_ns=0)
    assert made.message.endswith("use fewer micro-batches, or a larger batch")
