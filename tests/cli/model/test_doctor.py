from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stagewright.cli.model.doctor import doctor
from stagewright.cluster import read_cluster

app = typer.Typer()
app.command()(doctor)


def test_shows_this_machine() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0, result.output
    for word in ("processor", "cores", "memory", "backends", "gloo", "python 3.", "torch 2."):
        assert word in result.stdout


def test_json() -> None:
    data = json.loads(CliRunner().invoke(app, ["--json"]).stdout)
    assert set(data) == {"machine", "remarks"}
    assert data["machine"]["cores"]


def test_writes_the_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stagewright.machine import probe_links as probe

    real = probe.measure_link
    monkeypatch.setattr(probe, "measure_link", lambda devices: real(devices, budget_s=0.2))
    path = tmp_path / "cluster.toml"
    result = CliRunner().invoke(app, ["-o", str(path), "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    cluster = read_cluster(path)
    assert cluster.num_devices >= 1
    assert cluster.links.intra_host.latency_s == data["link"]["link"]["latency_s"] > 0
    assert cluster.links.intra_host.bandwidth_bytes_per_s == data["link"]["link"]["bandwidth_bytes_per_s"] > 1e6
    assert path.read_text().startswith("# This machine, measured between ")
    assert "measuring the link between" in result.stderr
