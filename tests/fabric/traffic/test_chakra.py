from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.fabric.traffic.chakra import from_chakra, to_chakra
from stagewright.fabric.traffic.workload import Message, Workload, from_sizes


def test_a_workload_survives_its_traces(tmp_path: Path) -> None:
    messages = (
        Message(name="there", algorithm="pipeline", num_bytes=512, groups=((0, 1),), gap_s=0.002, count=3),
        Message(name="sum", algorithm="ring", num_bytes=8000, groups=((0, 1, 2),), gap_s=0.001),
        Message(name="pair", algorithm="all-gather", num_bytes=64, groups=((1, 2),)),
    )
    workload = Workload(name="step", num_ranks=3, messages=messages, trials=5)
    files = to_chakra(workload, tmp_path / "step")
    assert [path.name for path in files] == ["step.0.et", "step.1.et", "step.2.et"]
    again = from_chakra(tmp_path / "step", trials=5)
    assert again.num_ranks == 3
    found = {(one.algorithm, one.num_bytes, one.groups, one.count) for one in again.messages}
    assert found == {(one.algorithm, one.num_bytes, one.groups, one.count) for one in messages}
    (total,) = [one for one in again.messages if one.name == "sum"]
    # Rank 2 takes no part in what comes before, so its computation adds up until the sum.
    assert total.gap_s == pytest.approx(3 * 0.002 + 0.001)


def test_another_number_of_ranks(tmp_path: Path) -> None:
    to_chakra(from_sizes([2600, 33024], 2, trials=1), tmp_path / "mlp")
    wider = from_chakra(tmp_path / "mlp", num_ranks=8, algorithm="double-tree", trials=3)
    assert [(one.num_bytes, one.groups, one.algorithm) for one in wider.messages] == [
        (2600, (tuple(range(8)),), "double-tree"),
        (33024, (tuple(range(8)),), "double-tree"),
    ]
    message = Message(name="there", algorithm="pipeline", num_bytes=512, groups=((0, 1),))
    to_chakra(Workload(name="p", num_ranks=2, messages=(message,), trials=1), tmp_path / "pipe")
    assert from_chakra(tmp_path / "pipe", num_ranks=2, trials=1).num_ranks == 2


def test_groups_are_not_rescaled(tmp_path: Path) -> None:
    message = Message(name="pair", algorithm="ring", num_bytes=512, groups=((0, 1),))
    to_chakra(Workload(name="p", num_ranks=3, messages=(message,), trials=1), tmp_path / "p")
    with pytest.raises(UsageError, match="cannot be rescaled to 6: 'pair' is between the ranks"):
        from_chakra(tmp_path / "p", num_ranks=6, trials=1)


def test_traces_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no trace"):
        from_chakra(tmp_path / "x", trials=1)
    (tmp_path / "x.0.et").write_bytes(b"\xff\xff\xff\xff\x7f nothing")
    with pytest.raises(UsageError, match="is not a Chakra trace"):
        from_chakra(tmp_path / "x", trials=1)
    to_chakra(from_sizes([8], 3, trials=1), tmp_path / "y")
    (tmp_path / "y.1.et").unlink()
    with pytest.raises(UsageError, match=r"y\.1\.et is missing"):
        from_chakra(tmp_path / "y", trials=1)
