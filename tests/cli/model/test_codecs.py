from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.cli.model.codecs import _split_names
from stagewright.codecs.cost import CodecCost, cheapest
from stagewright.errors import UsageError


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["codecs", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_list_shows_every_codec() -> None:
    shown = run("list")
    for name in ("block4", "hadamard4", "sort3+1", "delta(block4)"):
        assert name in shown


def test_bench_on_real_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.cli.options.pin_process", lambda device: None)
    figure = tmp_path / "codecs.svg"
    few = (
        "bench",
        "digits-vit",
        "--micro-batch-size",
        "8",
        "--repeats",
        "1",
        "--codecs",
        "none,block4,hadamard4,delta(block8,1MiB)",
    )
    data = json.loads(run(*few, "--links", "1kbit/s,900Tbit/s", "--plot", str(figure), "--json"))
    rows = {(row["codec"], row["direction"]): row for row in data["rows"]}
    assert len(rows) == 8
    block4 = rows["block4", "forward"]
    assert block4["raw_bytes"] == 8 * 17 * 64 * 4
    assert block4["num_bytes"] == 64 + 8 * 17 * 36
    assert 0.02 < block4["error"] < 0.2
    assert block4["pays"] == [True, False]
    assert block4["link_gain"][0] == pytest.approx(1 / block4["ratio"], rel=0.01)
    assert rows["none", "forward"]["pays"] == [False, False]
    assert rows["none", "forward"]["error"] == 0
    assert figure.stat().st_size > 1000
    table = run(*few)
    assert "slower" in table
    assert "activations after" in table
    assert "gradients after" in table


def test_wrong_input_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    for words in (
        ("bench", "digits-vit", "--codecs", "blok4"),
        ("bench", "digits-vit", "--links", "fast"),
        ("bench", "digits-vit", "--plot", str(tmp_path / "a.txt")),
        ("bench", "no-such-model"),
    ):
        with pytest.raises(UsageError):
            CliRunner().invoke(app, ["codecs", *words], catch_exceptions=False)


def test_names_with_commas_inside() -> None:
    assert _split_names("block4,delta(block4,1GiB),bf16") == ["block4", "delta(block4,1GiB)", "bf16"]


def test_break_even() -> None:
    cost = CodecCost(codec="block4", raw_bytes=1000, num_bytes=150, error=0.09, encode_s=0.5, decode_s=0.35)
    assert cost.break_even_rate == pytest.approx(1000)
    assert cost.pays_off(999)
    assert not cost.pays_off(1001)
    slow = CodecCost(codec="slow", raw_bytes=1000, num_bytes=100, error=0.05, encode_s=9.0, decode_s=9.0)
    assert cheapest([cost, slow], 100, 0.1) is cost
    assert cheapest([cost, slow], 10, 0.1) is cost
    assert cheapest([cost, slow], 1, 0.1) is slow
    assert cheapest([cost, slow], 10, 0.06) is slow
    assert cheapest([cost, slow], 990, 0.1) is None  # it pays, but not clearly
    assert cheapest([cost, slow], 1e6, 0.1) is None
    larger = CodecCost(codec="larger", raw_bytes=10, num_bytes=80, error=0.0, encode_s=0.0, decode_s=0.0)
    assert larger.break_even_rate == 0
