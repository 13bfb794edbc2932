"""The figure of the study of codecs."""

from __future__ import annotations

from pathlib import Path

from stagewright.report.figures.accuracy import AccuracyPoint, draw_accuracy


def test_each_panel_says_what_it_measures(tmp_path: Path) -> None:
    points = [
        AccuracyPoint(label="none", ratio=1.0, accuracy=27.7, deviation=2.6, is_baseline=True),
        AccuracyPoint(label="bf16", ratio=0.5, accuracy=27.6, deviation=0.0),
    ]
    panels = {"CoLA, bert-minilm": points, "RTE, bert-minilm": points}
    drawn = draw_accuracy(panels, tmp_path / "a.svg", title="Learned", measures={"CoLA, bert-minilm": "Matthews × 100"})
    text = drawn.read_text(encoding="utf-8")
    assert text.count("Matthews × 100") == 1
    assert text.count("accuracy (%)") == 1
