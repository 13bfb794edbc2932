"""Build time and size of a report page with many events; the limits are 10 s and 8 MB.

    python benchmarks/report_size.py [--events 100000] [-o report_size.json]

The run folder is synthetic, made by a helper of the tests: four workers, 32 micro-batches, as many steps as needed.
Reading, building and writing are timed separately; writing the folder is not counted. With `--browser` the page is
opened in chromium, and the frame time of moving and zooming the timeline is measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from made_runs import make_run
from record import write_record
from stagewright.report.page import build_report, page_html

LIMIT_S, LIMIT_BYTES = 10.0, 8_000_000
EVENTS_PER_STEP = 648  # of four workers and 32 micro-batches


def measure(events: int, keep: Path | None) -> dict[str, float]:
    """Build the page once and return its times and size."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_run(root, number=0)
        folder = make_run(root, "pipeline=4", microbatches=32, steps=max(1, round(events / EVENTS_PER_STEP)), number=1)
        count = sum(len(folder.worker(rank).events()) for rank in range(4))
        begin = time.perf_counter()
        report = build_report([root])
        built = time.perf_counter()
        assert all(run.trace is not None for run in report.runs), "every event must be drawn"
        content = page_html(report.page)
        written = time.perf_counter()
        if keep is not None:
            keep.write_text(content, encoding="utf-8")
    return {
        "events": count,
        "read_and_build_s": built - begin,
        "write_s": written - built,
        "total_s": written - begin,
        "bytes": len(content.encode("utf-8")),
    }


def frames(page: Path) -> dict[str, float]:
    """Measure frame times in a browser while the timeline is zoomed and the page is scrolled."""
    import shutil

    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("--browser needs chromium: tools/browser.sh")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        begin = time.perf_counter()
        tab.goto(page.as_uri())
        tab.locator(".timeline canvas").last.scroll_into_view_if_needed()
        opened = time.perf_counter() - begin
        tab.locator(".timeline").last.get_by_role("button", name="All steps").click()
        times = tab.evaluate(
            """async () => {
              const canvas = [...document.querySelectorAll('.timeline canvas')].at(-1);
              const gaps = [];
              let before = performance.now();
              for (let at = 0; at < 60; at++) {
                const up = at % 2 ? 120 : -120;
                canvas.dispatchEvent(new WheelEvent('wheel', {deltaY: up, ctrlKey: true, clientX: 600, clientY: 300,
                  bubbles: true, cancelable: true}));
                await new Promise((done) => requestAnimationFrame(done));
                const now = performance.now();
                gaps.push(now - before);
                before = now;
              }
              const scrolled = [];
              before = performance.now();
              for (let at = 0; at < 60; at++) {
                scrollBy(0, at < 30 ? 60 : -60);
                await new Promise((done) => requestAnimationFrame(done));
                const now = performance.now();
                scrolled.push(now - before);
                before = now;
              }
              const middle = (list) => list.sort((a, b) => a - b)[Math.floor(list.length / 2)];
              const worst = (list) => Math.max(...list);
              return {zoom_median_ms: middle(gaps), zoom_worst_ms: worst(gaps), scroll_median_ms: middle(scrolled),
                      scroll_worst_ms: worst(scrolled)};
            }"""
        )
        browser.close()
    return {"open_s": opened, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--browser", action="store_true", help="open the page in chromium and time frames")
    parser.add_argument("-o", "--output", type=Path, default=Path("report_size.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        page = Path(name) / "report.html"
        result = measure(options.events, page)
        if options.browser:
            result |= frames(page)
    shares = {"share_of_time": result["total_s"] / LIMIT_S, "share_of_size": result["bytes"] / LIMIT_BYTES}
    write_record(options.output, {**result, **shares})
    print(
        f"{result['events']} events: {result['total_s']:.2f} s of {LIMIT_S:.0f} ({shares['share_of_time']:.0%}), "
        f"{result['bytes'] / 1e6:.2f} MB of {LIMIT_BYTES / 1e6:.0f} ({shares['share_of_size']:.0%})"
    )
    if options.browser:
        print(
            f"in the browser: {result['open_s']:.2f} s to open; frame time when zooming "
            f"{result['zoom_median_ms']:.1f} ms, when scrolling {result['scroll_median_ms']:.1f} ms (medians of 60)"
        )


if __name__ == "__main__":
    main()
