"""The page as a person meets it: opened from the disk, read, clicked through, zoomed, in light, dark and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from made_runs import SERIAL_S, make_run, make_training
from stagewright.report.page import build_report, page_html

HOSTILE = "</script><img src=http://stagewright.invalid/x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    make_run(root / "runs", step_s=SERIAL_S, number=0)
    make_run(root / "runs", "data=2", number=1)
    make_run(root / "runs", "pipeline=2", microbatches=8, number=2)
    make_training(root / "runs")
    path = root / "report.html"
    path.write_text(page_html(build_report([root / "runs"]).page), encoding="utf-8")
    return path


def view(timeline: Any) -> tuple[float, float]:
    """From where to where a timeline shows, in its own units."""
    return float(timeline.get_attribute("data-from")), float(timeline.get_attribute("data-to"))


def test_sections_are_there_to_be_read(browser_page: Any, file: Path) -> None:
    page = browser_page.page
    page.goto(file.as_uri())
    assert page.title() == "digits-vit, mlp-mnist: serial, data, pipeline"
    titles = page.locator("h2").all_inner_texts()
    assert titles[:5] == ["Result", "Comparison", "Throughput and speed-up", "Speed-up breakdown", "Timeline"]
    for title in titles:
        assert page.get_by_role("heading", name=title, exact=True).is_visible()
    row = page.locator("#compare tbody tr", has_text="data=2")
    assert "1.49 ×" in row.inner_text()
    # The bar of the run that is twice as fast as another is twice as long.
    bars = [box.bounding_box()["width"] for box in page.locator('[data-name="throughput-digits-vit"] rect').all()]
    rates = [32 / SERIAL_S, 32 / 0.067, 32 / 0.0905]
    assert [bar / bars[0] for bar in bars] == pytest.approx([rate / rates[0] for rate in rates], rel=0.02)
    browser_page.check()
    assert browser_page.requests == [file.as_uri()], "one file, and nothing else was asked for"


def test_links_folds_and_copying(browser_page: Any, file: Path) -> None:
    page = browser_page.page
    page.goto(file.as_uri())
    page.get_by_role("link", name="Reproduce").click()
    assert page.evaluate("location.hash") == "#reproduce"
    assert page.locator("#reproduce").is_visible()
    fold = page.locator("#plans details").first
    assert not fold.locator("table").is_visible()
    fold.locator("summary").click()
    assert fold.locator("table").is_visible()
    marked = page.locator("#plans tr.marked", has_text="mesh.pipeline")
    assert marked.count() == 1
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#reproduce button.copy").first.click()
    page.get_by_text("copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith(
        "stagewright compare digits-vit --strategy serial"
    )


def test_the_timeline_zooms_and_moves(browser_page: Any, file: Path) -> None:
    page = browser_page.page
    page.goto(file.as_uri())
    first, last = page.locator(".timeline").first, page.locator(".timeline").last
    last.scroll_into_view_if_needed()
    begin, end = view(last)
    assert end - begin == pytest.approx(0.1e6, rel=0.1), "the longest of the three steps"
    last.get_by_role("button", name="Zoom in").click()
    closer = view(last)
    assert closer[1] - closer[0] == pytest.approx((end - begin) / 2)
    assert view(first)[1] - view(first)[0] == pytest.approx((end - begin) / 2), "the others move along"
    page.get_by_label("Link timelines").uncheck()
    last.locator("canvas").scroll_into_view_if_needed()
    box = last.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_function("([e, w]) => e.dataset.to - e.dataset.from < 0.9 * w", arg=[last.element_handle(), 5e4])
    assert view(first)[1] - view(first)[0] == pytest.approx((end - begin) / 2), "alone now"
    before = view(last)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 100, box["y"] + 20, steps=4)
    page.mouse.up()
    assert view(last)[0] == pytest.approx(before[0] + (before[1] - before[0]) * 100 / box["width"])
    last.locator("canvas").focus()
    page.keyboard.press("0")
    assert view(last)[0] == pytest.approx(begin)
    last.get_by_role("button", name="Step ▶").click()
    assert view(last)[0] > begin
    last.get_by_role("button", name="All steps").click()
    assert view(last)[1] - view(last)[0] > 2 * (end - begin)


def test_pointing_at_an_event_says_what_it_is(browser_page: Any, file: Path) -> None:
    page = browser_page.page
    page.goto(file.as_uri())
    canvas = page.locator(".timeline canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + 28)
    tip = page.locator("#tip")
    tip.wait_for(state="visible")
    assert tip.inner_text() == "forward, micro-batch 0, stage 0\nworker 0: 30 ms from 0 µs"
    page.mouse.move(box["x"] + 10, box["y"] - 40)
    tip.wait_for(state="hidden")


def test_light_and_dark(open_page: Callable[..., Any], file: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(dark=False).page, open_page(dark=True).page
    light.goto(file.as_uri())
    dark.goto(file.as_uri())
    assert light.evaluate(paper) == "rgb(255, 255, 255)"
    assert dark.evaluate(paper) == "rgb(20, 24, 29)"
    for _ in range(2):  # auto, light, dark
        light.get_by_role("button", name="Theme").click()
    assert light.evaluate(paper) == "rgb(20, 24, 29)"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(open_page: Callable[..., Any], file: Path, width: int) -> None:
    page = open_page(width=width, touch=width < 500).page
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    sizes = page.locator("p, td, svg text").evaluate_all(
        "all => all.map(one => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 11, "text that can be read"
    value = page.locator('[data-name="speed-up"] .value').first.bounding_box()
    assert value["x"] + value["width"] <= width


def test_hostile_names_do_nothing(browser_page: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "pipeline=2", name=f"x:{HOSTILE}", cuts=(HOSTILE,))
    path = tmp_path / "report.html"
    path.write_text(page_html(build_report([tmp_path / "runs"], title=HOSTILE).page), encoding="utf-8")
    page = browser_page.page
    page.goto(path.as_uri())
    assert page.title() == HOSTILE
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.locator("img").count() == 0
    assert page.locator(".timeline").get_attribute("data-rectangles") != "0"


def test_many_events_are_drawn_as_few_rectangles(browser_page: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "pipeline=2", microbatches=32, steps=80)
    path = tmp_path / "report.html"
    path.write_text(page_html(build_report([tmp_path / "runs"]).page), encoding="utf-8")
    page = browser_page.page
    page.goto(path.as_uri())
    timeline = page.locator(".timeline")
    timeline.get_by_role("button", name="All steps").click()
    page.wait_for_function("e => e.dataset.rectangles > 1000", arg=timeline.element_handle())
    lanes = 2 * 3
    assert int(timeline.get_attribute("data-rectangles")) < lanes * 1280 < 80 * 2 * 32 * 3, "a pixel is drawn once"
