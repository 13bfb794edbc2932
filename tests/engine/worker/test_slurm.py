"""Tasks of `srun` become workers."""

from __future__ import annotations

import pytest

from stagewright.engine.worker.placement import RankPlacement
from stagewright.engine.worker.slurm import first_host, slurm_variables

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu3", "gpu3"), ("gpu3,gpu4", "gpu3"), ("gpu[07-09,12],login", "gpu07"), ("a-b[1,3]", "a-b1")],
)
def test_the_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_ranks_and_address() -> None:
    place = RankPlacement.from_environment(slurm_variables(TASK))
    assert (place.rank, place.local_rank, place.num_workers, place.num_machines) == (5, 1, 8, 2)
    assert place.store is not None
    assert place.store[0] == "gpu07"
    assert 20_000 <= place.store[1] < 40_000
    assert slurm_variables({**TASK, "SLURM_PROCID": "0"})["MASTER_PORT"] == slurm_variables(TASK)["MASTER_PORT"]


def test_other_launchers_come_first() -> None:
    assert slurm_variables({**TASK, "RANK": "0"}) == {}
    assert slurm_variables({}) == {}
    assert slurm_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == {}  # the batch script itself
