"""The live page as a person sees it: during a real run, of a broken one, replayed, and when its server has gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster.device import usable_cores
from stagewright.engine.worker.faults import Activity, Doing, Fault
from stagewright.report.live.access import choose_access
from stagewright.report.live.server import LiveServer, Watcher
from stagewright.report.live.tail import RunTail
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan

CORES = sorted(usable_cores())
PROGRAM = Path(sys.executable).with_name("stagewright")
# Remembers every word that the status and the boxes have shown.
REMEMBER = """() => {
  window.seen = {statuses: [], kinds: {}};
  const look = () => {
    const status = document.getElementById("status").textContent, list = window.seen.statuses;
    if (list[list.length - 1] !== status) list.push(status);
    for (const box of document.querySelectorAll(".box"))
      (window.seen.kinds[box.dataset.rank] ||= {})[box.dataset.kind] = box.querySelector(".doing").textContent;
  };
  new MutationObserver(look).observe(document.querySelector("main"),
    {subtree: true, childList: true, characterData: true, attributes: true});
  look();
}"""


@contextmanager
def served(path: Path, token: str | None = None) -> Iterator[LiveServer]:
    with LiveServer(Watcher(RunTail(path)), choose_access("127.0.0.1", token)) as server:
        yield server


def a_run(root: Path, *, mesh: Mesh | None = None, name: str = "digits-vit") -> RunFolder:
    """A run of a few steps, written by hand; it has not ended."""
    mesh = mesh or Mesh(pipeline=2)
    plan = Plan(model=ModelSpec(name=name), batch=16, mesh=mesh, microbatches=8, task="digits", epochs=1)
    folder = RunFolder.create(root, plan, environment={})
    for rank in range(mesh.num_workers):
        record = Activity()
        with folder.worker(rank) as worker:
            record.open(worker.path / "activity.txt")
            record.begin("forward" if rank else "receive gradient", step=8, stage=rank % mesh.pipeline, microbatch=3)
            worker.append_metrics(kind="begin", step=0, total=20, batches=20)
            for step in range(1, 9):
                told = {"loss": 2.0 / step, "samples": 8, "seconds": 0.25, "waited_s": 0.05, "memory_bytes": 3 * 2**20}
                worker.append_metrics(kind="step", step=step, epoch=1, **told)
        record.close()
    return folder


@pytest.mark.long
def test_a_real_run_from_before_its_begin_to_after_its_end(browser_page: Any, tmp_path: Path) -> None:
    page, root = browser_page.page, tmp_path / "runs"
    with served(root) as server:
        page.goto(server.url)
        page.get_by_text("waiting for the run").wait_for()
        page.evaluate(REMEMBER)
        words = ["--strategy", "pipeline=2", "--cut", "vit.layers.1", "--epochs", "2", "--root", root]
        devices = f"cpu:{CORES[0]};cpu:{CORES[-1]}"
        run = subprocess.Popen(
            [PROGRAM, "train", "digits-vit", "digits", "--devices", devices, *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            page.get_by_text("finished").wait_for(timeout=300_000)
        finally:
            run.kill()
        run.wait()
        seen = page.evaluate("window.seen")
        assert seen["statuses"] == ["waiting for the run", "starting", "running", "finished"]
        for rank in ("0", "1"):
            assert {"forward", "backward"} <= set(seen["kinds"][rank])
            assert "micro-batch" in seen["kinds"][rank]["forward"]
        (folder,) = root.iterdir()
        assert page.locator("h1").inner_text() == folder.name
        assert page.locator("#about").inner_text().startswith("digits-vit · on digits · pipeline=2 · 1f1b · batch 64")
        assert page.locator("#step").inner_text() == "46 of 46"
        assert page.locator("#metric-name").inner_text() == "accuracy"
        assert page.locator("#rate").inner_text().endswith("samples/s")
        assert page.locator("#bubble").inner_text().endswith("%")
        assert page.locator("#memory").inner_text().endswith("iB")
        assert page.locator(".box").count() == 2
        assert page.locator("#loss-chart polyline").get_attribute("points").count(",") == 46
        # What the page has pieced together from differences is what the server has.
        assert page.evaluate("fetch('/state').then(answer => answer.json())") == page.evaluate("state")
        # The strip of the last seconds is not empty.
        drawn = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(n => n)"
        assert page.locator(".box canvas").first.evaluate(drawn)

        page.get_by_role("button", name="Replay").click()
        page.locator("#status", has_text="replay").wait_for()
        page.locator("#end").click()
        page.get_by_text("finished").wait_for()


def test_a_broken_run_says_who_and_why_and_takes_no_text_for_code(browser_page: Any, tmp_path: Path) -> None:
    page = browser_page.page
    folder = a_run(tmp_path, name="my<b>model:x")
    with served(folder.path) as server:
        page.goto(server.url)
        page.get_by_text("running").wait_for()
        assert page.locator("#error").is_hidden()
        assert page.locator("#step").inner_text() == "8 of 20"
        assert page.locator("#left").inner_text() == "3.0 s"
        assert page.locator(".box").first.locator(".doing").inner_text().split("\n") == [
            "receive gradient",
            "micro-batch 3",
        ]
        doing = Doing(count=9, step=8, stage=1, microbatch=3, action="forward")
        message = "ValueError: <img src=x onerror=alert(1)>"
        fault = Fault(worker=1, kind="raised", message=message, doing=doing, traceback="line 14, in forward")
        fault.write(folder.path / "workers" / "1" / "error.json")
        page.locator("#status", has_text="failed").wait_for()
        assert page.locator("#error-text").inner_text() == f"worker 1 failed: {message}"
        assert page.locator("#error-at").inner_text() == "at: step 8, stage 1, micro-batch 3, forward"
        assert page.locator(".box[data-condition=broken]").get_attribute("data-rank") == "1"
        page.get_by_text("Traceback", exact=True).click()
        assert page.locator("#error-trace").inner_text() == "line 14, in forward"
        assert page.locator("img").count() == 0
        assert page.locator("#about b").count() == 0
        folder.finish("failed", {"error": "worker 1 failed"})
        page.get_by_role("button", name="Replay").wait_for()


def test_a_finished_run_is_replayed_paused_and_sought(browser_page: Any, tmp_path: Path) -> None:
    page = browser_page.page
    folder = a_run(tmp_path)
    folder.finish("done")
    with served(folder.path) as server:
        page.goto(server.url)
        page.get_by_text("finished").wait_for()
        assert page.locator("#step").inner_text() == "8 of 20"
        page.select_option("#speed", "0.1")
        page.get_by_role("button", name="Replay").click()
        page.locator("#status", has_text="replay").wait_for()
        page.get_by_role("button", name="Pause").click()
        paused_s = page.evaluate("state.replay.at_s")
        page.wait_for_timeout(600)
        assert page.evaluate("state.replay.at_s") == paused_s < 2.0
        assert page.evaluate("state.step") in (None, *range(1, 8))
        page.select_option("#speed", "10")
        page.get_by_role("button", name="Resume").click()
        page.locator("#status", has_text="finished").wait_for()
        assert page.evaluate("state.replay") == {"at_s": 2.0, "length_s": 2.0}
        page.select_option("#speed", "0.1")  # at 10 × it would be over before it is seen
        page.locator("#seek").fill("1")
        page.locator("#status", has_text="replay").wait_for()
        page.select_option("#speed", "10")
        page.locator("#status", has_text="finished").wait_for()


def test_a_token_is_taken_out_of_the_address(browser_page: Any, tmp_path: Path) -> None:
    page = browser_page.page
    with served(a_run(tmp_path).path, "auto") as server:
        page.goto(server.url)
        page.get_by_text("running").wait_for()
        assert "token" not in page.url
        assert page.evaluate("document.cookie") == ""


def test_a_server_that_has_gone_is_told_apart_from_the_run(browser_page: Any, tmp_path: Path) -> None:
    page = browser_page.page
    browser_page.allowed += ["ERR_"]  # the browser itself reports the lost connection
    with served(a_run(tmp_path).path) as server:
        page.goto(server.url)
        page.get_by_text("running").wait_for()
    page.get_by_text("Connection to the server lost.").wait_for()
    assert page.locator("#step").inner_text() == "8 of 20", "what was known stays"


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False)])
def test_it_fits(open_page: Callable[..., Any], tmp_path: Path, width: int, dark: bool) -> None:
    """Sixteen workers on a wide and on a narrow screen; text stands out from what is behind it."""
    page = open_page(width=width, dark=dark).page
    with served(a_run(tmp_path, mesh=Mesh(data=2, pipeline=8)).path) as server:
        page.goto(server.url)
        page.locator(".box").nth(15).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator(".name").all_inner_texts() == ["replica 0", "replica 1"]
        ink, paper = page.evaluate(
            "[getComputedStyle(document.querySelector('h1')).color, getComputedStyle(document.body).backgroundColor]"
            ".map(text => text.match(/\\d+/g).map(Number).reduce((a, b) => a + b))"
        )
        assert (ink > paper) is dark
        assert abs(ink - paper) > 450
        over = "all => Math.max(...all.map(one => one.scrollWidth - one.clientWidth))"
        assert page.locator(".box > div, .tile > *").evaluate_all(over) <= 1, "words that don't fit their box"
