"""A fabric run's section, on trials whose times are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stagewright.fabric.ranks.coordinator import Measurements
from stagewright.fabric.results.result import summarize
from stagewright.fabric.results.run_folder import FabricFolder
from stagewright.fabric.traffic.workload import Message, Workload
from stagewright.fabric.trials import TrialTable, row_type
from stagewright.report.page import build_report, page_html
from stagewright.report.page.sections import LineChart
from stagewright.table import Table

SLOW = 700


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    message = Message(name="fc1", num_bytes=4096, algorithm="ring", groups=((0, 1),))
    workload = Workload(name="mlp<b>", num_ranks=2, messages=(message,), trials=1000)
    rows = np.zeros((1000, 1, 2), dtype=row_type(2))
    rows["took_part"] = 1
    rows["duration_s"] = 0.001
    rows["duration_s"][SLOW] = 0.2
    measured = Measurements(
        trials=TrialTable(rows, np.zeros(1000, dtype=np.bool_)), steps=[], pairs=[], links=[], hosts=[]
    )
    made = FabricFolder.create(tmp_path / "runs", workload, {"engine": "sockets"})
    made.write(workload, measured, summarize(workload, "sockets", measured, same_host=True).to_dict())
    return made.path


def test_layers_the_spread_and_the_slow_trial(folder: Path) -> None:
    (section,) = build_report([folder]).page.sections
    assert section.prose[0].startswith("mlp<b>: 2 ranks, 1000 trials, engine sockets; started 20")
    assert any(line.startswith("verdict: ") for line in section.prose)
    table, spread, over = section.items
    assert isinstance(table, Table)
    assert table.rows[0][:4] == ("fc1", "4096", "1000", "1.00 ms")
    assert isinstance(spread, LineChart)
    assert spread.lines[0].x[-1] == 0.2
    assert spread.lines[0].y[-1] == 1.0
    assert isinstance(over, LineChart)
    assert len(over.lines[0].x) < 700, "not every trial is drawn"
    assert (float(SLOW), 0.2) in zip(over.lines[0].x, over.lines[0].y, strict=True), "but the slowest is"
    assert "mlp&lt;b&gt;" in page_html(build_report([folder]).page)


def test_a_run_that_goes_on_says_so(folder: Path) -> None:
    (folder / "result.json").unlink()
    (section,) = build_report([folder.parent]).page.sections
    assert "has no result.json: the run is in progress or was killed" in section.prose[0]
    assert section.items == ()
