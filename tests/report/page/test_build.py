"""From folders to a page, on runs that were made by hand."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from made_pages import make_study
from made_runs import SERIAL_S, make_run, make_training
from stagewright.files.atomic import save_text
from stagewright.report.page import Page, Picture, Section, build_report, page_html, page_markdown
from stagewright.report.page.build import joined_counts
from stagewright.report.page.sections import BarChart, Fold, LineChart, Timeline
from stagewright.report.render.html import script_json
from stagewright.table import Cell, Table


def section(page: Page, name: str) -> Section:
    return next(section for section in page.sections if section.name == name)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    root = tmp_path_factory.mktemp("runs")
    make_run(root, step_s=SERIAL_S, number=0)
    make_run(root, "data=2", number=1)
    make_run(root, "pipeline=2", number=2)
    make_training(root)
    make_training(root, seed=1)
    return build_report([root]).page


def test_every_question_has_its_section(page: Page) -> None:
    assert [section.name for section in page.sections] == [
        "result",
        "compare",
        "speed",
        "speedup-breakdown",
        "timeline",
        "breakdown",
        "memory",
        "traffic",
        "training",
        "forecast",
        "runs",
        "plans",
        "environment",
        "reproduce",
    ]
    assert page.title == "digits-vit, mlp-mnist: serial, data, pipeline"


def test_the_comparison_has_the_figures(page: Page) -> None:
    (table,) = section(page, "compare").items
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["digits-vit, serial", "digits-vit, data=2", "digits-vit, pipeline=2"]
    assert table.rows[0][3] == "1.00 ×"
    assert table.rows[1][3] == f"{SERIAL_S / 0.067:.2f} ×"
    assert table.rows[2][7] == "1.00 MiB"


def test_the_waterfall_goes_from_n_to_what_was_reached(page: Page) -> None:
    charts = [one for one in section(page, "speedup-breakdown").items if isinstance(one, BarChart)]
    assert [one.name for one in charts] == ["speedup-digits-vit-data-2", "speedup-digits-vit-pipeline-2"]
    for chart in charts:
        first, *steps, last = chart.bars
        assert first.parts[0].end == 2.0
        at = 2.0
        for bar in steps:
            (part,) = bar.parts
            down = part.paint == "tone-bad"
            assert (part.end if down else part.start) == pytest.approx(at)
            at = part.start if down else part.end
        assert last.parts[0].end == pytest.approx(at), "the parts end where the run is"


def test_a_stream_of_batches_is_explained_for_one_of_them(tmp_path: Path) -> None:
    make_run(tmp_path, step_s=0.02, training=False, number=0)
    make_run(tmp_path, "pipeline=2", training=False, steps=5, number=1)
    (chart,) = section(build_report([tmp_path]).page, "speedup-breakdown").items
    assert isinstance(chart, BarChart)
    whole = 0.101
    assert chart.bars[-1].parts[0].end == pytest.approx(0.02 / (whole / 5))
    assert "a stream of 5 batches, per batch" in chart.note


def test_shares_add_up_to_the_step(page: Page) -> None:
    for chart in section(page, "breakdown").items:
        assert isinstance(chart, BarChart)
        for bar in chart.bars:
            ends = [part.end for part in bar.parts]
            assert [part.start for part in bar.parts] == pytest.approx([0.0, *ends[:-1]])
    piped = section(page, "breakdown").items[2]
    assert isinstance(piped, BarChart)
    names = [part.name for part in piped.bars[0].parts]
    assert names == ["compute", "transfer", "wait", "bubble", "overhead"]


def test_no_chart_for_one_number(tmp_path: Path) -> None:
    alone = build_report([make_run(tmp_path).path]).page
    assert [one.name for one in alone.sections if one.name in ("speed", "traffic", "speedup-breakdown")] == []
    (memory,) = section(alone, "memory").items
    assert isinstance(memory, LineChart), "the curve, and no bar for one worker"
    assert "worker 0: 16.2 MiB at the peak." in section(alone, "memory").prose


def test_learning_has_curves_and_a_mean_over_seeds(page: Page) -> None:
    loss, accuracy, table = section(page, "training").items
    assert isinstance(loss, LineChart)
    assert loss.lines[0].y[0] == 2.3
    assert [line.dashed for line in loss.lines] == [False, True], "equal curves are both seen"
    assert isinstance(accuracy, LineChart)
    assert accuracy.lines[1].y[-1] == pytest.approx(1 - 0.5 / 3 + 0.01)
    assert isinstance(table, Table)
    assert table.notes == ("accuracy 0.8383 ± 0.0071 over 2 seeds",)


def test_plans_are_lined_up_and_differences_marked(page: Page) -> None:
    table, alike, files = section(page, "plans").items
    assert isinstance(table, Table)
    keys = [str(row[0]) for row in table.rows]
    assert "mesh.pipeline" in keys
    assert "dtype" not in keys
    assert all(isinstance(cell, Cell) and cell.tone == "strong" for row in table.rows for cell in row)
    assert isinstance(alike, Fold)
    assert isinstance(files, Fold)
    assert len(files.items) == 5


def test_what_was_not_recorded_says_why(tmp_path: Path) -> None:
    make_run(tmp_path, events=False)
    make_run(tmp_path, "pipeline=2", events=False, number=1)
    page = build_report([tmp_path]).page
    assert "has no events of worker 0; run its plan again: torchrun" in section(page, "timeline").prose[0]
    assert section(page, "speedup-breakdown").prose[0] == "No run has a breakdown."
    assert "stagewright report" in section(page, "forecast").prose[0]
    assert [one.name for one in page.sections if one.name == "breakdown"] == []


def test_a_failed_run_is_on_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    folder.finish("failed", {"error": "worker 1 was killed"})
    page = build_report([folder.path]).page
    assert section(page, "result").prose == ("serial failed: worker 1 was killed",)
    assert "worker 1 was killed" in page_html(page)


def test_a_refused_run_does_not_look_like_a_failed_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "tensor=2")
    folder.finish("refused", {"error": "worker 1 (cpu:1) refused: no heads; use data instead\n  at: build stages"})
    page = build_report([tmp_path]).page
    assert section(page, "result").prose == ("tensor=2 was refused: no heads; use data instead",)


def test_counts_of_three_kinds_are_a_list() -> None:
    assert joined_counts(["40 runs", "8 fabric runs", "5 studies"]) == "40 runs, 8 fabric runs and 5 studies"
    assert joined_counts(["1 run", "1 study"]) == "1 run and 1 study"
    assert joined_counts(["1 run"]) == "1 run"
    assert joined_counts([]) == ""


def test_sections_of_others_come_first(tmp_path: Path) -> None:
    picture = Picture(caption="a figure", content=b"<svg xmlns='http://www.w3.org/2000/svg'/>", kind="image/svg+xml")
    own = Section(name="mine", title="Mine", prose=("A sentence.",), items=(picture,))
    page = build_report([make_run(tmp_path).path], title="A title", extra=[own]).page
    assert page.sections[0] is own
    assert page.title == "A title"
    assert "data:image/svg+xml;base64," in page_html(page)


def test_runs_of_a_study_are_folded_and_have_their_names(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "2026-11-15-stages-deit")
    run = make_run(folder / "runs", "pipeline=2")
    findings = json.loads((folder / "findings.json").read_text()) | {"runs": {run.path.name: "2 stages by blocks"}}
    (folder / "findings.json").write_text(json.dumps(findings))
    report = build_report([folder, make_run(tmp_path / "runs").path])
    assert [run.label for run in report.runs] == ["2 stages by blocks", "serial"]
    study, runs, *plain = report.page.sections
    assert (study.title, runs.title) == ("Stages of deit", "Runs")
    assert all(isinstance(item, Fold) for item in runs.items)
    folded = {item.title for item in runs.items if isinstance(item, Fold)}
    assert "Timeline" in folded & {section.title for section in plain}, "runs that belong to no study are not folded"
    assert '<dl class="card"' in page_html(report.page)
    assert "**Measured**: 1.6 ×" in page_markdown(report.page)


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&|`$<!--"


class _Parser(HTMLParser):
    """Tags and attributes as a browser sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a<b>&", "pipeline=2", name=f"x:{HOSTILE}", cuts=(HOSTILE,), number=1)
    make_run(tmp_path / "a<b>&", name=f"x:{HOSTILE}")
    for rank in range(2):
        clock = folder.worker(rank).path / "clock.json"
        save_text(json.dumps({"host": HOSTILE, "offset_s": -100.0 * rank, "error_s": 0.0, "wall_s": 0.0}), clock)
    broken = make_run(tmp_path / "a<b>&", "data=2", number=2)
    broken.finish("failed", {"error": HOSTILE})
    page = build_report([tmp_path / "a<b>&"], title=HOSTILE).page
    text = page_html(page)
    parser = _Parser()
    parser.feed(text)
    kinds = [dict(attributes).get("type") for tag, attributes in parser.tags if tag == "script"]
    assert kinds == ["application/json"] * 3 + [None], "the data of three timelines and the page's own script"
    assert [tag for tag, _ in parser.tags if tag == "img"] == []
    assert not [name for _, attributes in parser.tags for name in attributes if name.startswith("on")]
    assert HOSTILE not in text
    for data in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL):
        json.loads(data)
        assert "<" not in data
    fences = re.compile(r"^(`{3,})text\n.*?^\1$", re.DOTALL | re.MULTILINE)
    prose, count = fences.subn("", page_markdown(page))
    assert count == 6, "the plans and commands of three runs"
    assert "<script" not in prose.replace("\\<", "")
    assert "alert(1)" in prose


def test_json_for_a_script_can_be_read_back() -> None:
    data = {"a": "</script>", "b": ["<!--", "&amp;", "\u2028"]}
    text = script_json(data)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == data


def test_the_page_asks_for_nothing(page: Page) -> None:
    text = page_html(page)
    parser = _Parser()
    parser.feed(text)
    sources = [value for _, attributes in parser.tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(value is not None and value.startswith(("#", "data:")) for value in sources)
    assert "@import" not in text
    assert "url(" not in text


def test_markdown_tables_are_whole(page: Page) -> None:
    width: int | None = None
    for line in page_markdown(page).splitlines():
        if line.startswith("|"):
            count = len(re.findall(r"(?<!\\)\|", line))
            assert width in (None, count), line
            width = count
        else:
            width = None
    assert "| digits-vit, serial |" in page_markdown(page)


def test_timelines_share_the_room_for_events(page: Page) -> None:
    items = section(page, "timeline").items
    assert [one.title for one in items if isinstance(one, Timeline)] == [
        "digits-vit, serial",
        "digits-vit, data=2",
        "digits-vit, pipeline=2",
    ]


def test_rates_of_other_batches_are_other_charts(tmp_path: Path) -> None:
    for number, (mesh, precision) in enumerate(
        [("serial", "float32"), ("data=2", "float32"), ("serial", "bf16"), ("data=2", "bf16")]
    ):
        make_run(tmp_path, mesh, precision=precision, number=number)
    page = build_report([tmp_path]).page
    charts = [one for one in section(page, "speed").items if isinstance(one, BarChart)]
    assert [one.title for one in charts] == [
        "digits-vit, float32: throughput (samples/s)",
        "digits-vit, bf16: throughput (samples/s)",
        "Speed-up over the single-device baseline",
    ]
    assert [len(one.bars) for one in charts] == [2, 2, 4]
    (table,) = section(page, "compare").items
    assert isinstance(table, Table)
    assert table.columns[4].name == "baseline"
    assert [row[4] for row in table.rows] == [table.rows[index][0] for index in (0, 0, 2, 2)]


def test_one_baseline_for_all_rows(tmp_path: Path) -> None:
    """The slower, recomputed single-device run comes last before data parallel, as in the study of memory."""
    make_run(tmp_path, step_s=0.1, number=0)
    make_run(tmp_path, step_s=0.13, recompute="always", number=1)
    make_run(tmp_path, "data=2", step_s=0.08, number=2)
    make_run(tmp_path, "data=2", step_s=0.4, number=3, steps=1, warmup=0)
    (table,) = section(build_report([tmp_path]).page, "compare").items
    assert isinstance(table, Table)
    assert [row[3] for row in table.rows] == ["1.00 ×", "0.77 ×", "1.25 ×", "–"]
    assert f"of the same batch, {table.rows[0][0]} (" in table.notes[0]


def test_a_page_of_the_newest_says_so(tmp_path: Path) -> None:
    for number in range(3):
        make_run(tmp_path, events=False, number=number)
    report = build_report([tmp_path], newest=2)
    assert len(report.runs) == 2
    assert report.page.subtitle.endswith(f"({report.folders.left_out})")


def test_a_fold_of_curves_alone_is_not_in_markdown() -> None:
    chart = LineChart(name="x", title="X", x_title="x", y_title="y", lines=())
    whole = Section(name="a", title="Curves", items=(chart, Fold(title="3 more curves", items=(chart,))))
    other = Section(name="b", title="Words", prose=("One.",), items=(Fold(title="More", items=(chart,)),))
    text = page_markdown(Page(title="T", subtitle="S", sections=(whole, other)))
    assert "Curves" not in text
    assert "<details>" not in text
    assert "One." in text


def test_many_plans_have_a_row_each(tmp_path: Path) -> None:
    for number in range(7):
        make_run(tmp_path, "pipeline=2" if number else "serial", number=number)
    table = section(build_report([tmp_path]).page, "plans").items[0]
    assert isinstance(table, Table)
    assert len(table.rows) == 7, "seven columns would be too wide for a page"
    assert "mesh.pipeline" in [column.name for column in table.columns]
