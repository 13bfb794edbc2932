"""Benchmark figures on the pages come from the records in docs/measured; every other figure has a stated source.

docs/measured/NAME.json ──► <!-- measured: … --> a block of a page <!-- end -->     regenerated here
every other number with a unit, outside code: in a block of its page, on a measured page that it links to, or STATED
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))  # as for a script of that folder
SCRIPT = runpy.run_path(str(DOCS / "make_measured_figures.py"))
RECORDS = sorted(SCRIPT["RECORDS"].glob("*.json"))
GENERATED = {"cli.md", "python.md", "schedules.md", "capture-families.md", "engine-families.md", "verify-bugs.md"}

_FIGURE = re.compile(
    r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)[ \u00a0]?"
    r"(×(?! \d)|%|[mµ]?s(?![\w/])|[KMG]i?B(?:/s)?|[TG]B/s|Gb(?:it)?/s|minutes?|seconds?|hours?)(?!\w)"
)
_NOT_PROSE = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)|^ {4}[^\n]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s#]+\.md)")

# Numbers with units that are not measurements, by page.
_LEAGUE = """
    0.28 s,0.56 s,1.3 ms,10 %,12.71 %,11.3 %,7.6 %,100 %,1056 %,12.0 %,12.3 %,12.7 %,31 %,40 %,61 %,83 %,91 %,97 %,
    7.0 %,13.7 %,14.2 %,14.7 %,15.0 %,15.9 %,17 %,17.0 %,17.8 %,2.3 %,2.5 %,2.7 %,2.9 %,25 %,26 %,26.4 %,28.7 %,
    29.6 %,3.2 %,3.6 %,3.9 %,31.2 %,318 %,404 %,5 %,5.5 %,6.0 %,69 %,7.1 %,7.8 %,8.1 %,9.3 %
"""
_SAILOR = "4.9 %,2.2 %,38 %,5.7 %,2.5 %,4.1 %,2.0 %,17 %,5.0 %,2.7 %,14 %,4.6 %"
STATED: dict[str, dict[str, str]] = {
    "README.md": {
        **dict.fromkeys(("4 %", "6 %", "12 %", "26 %"), "printed by benchmarks/league.py"),
        "5 %": "printed by benchmarks/profiled_plans.py",
    },
    "compare.md": {"57 %": "1 − 0.9⁸", "10 %": "1 − 0.9"},
    "split.md": {"80 %": "a rule of capture", "5 %": "a limit"},
    "plans.md": {"5 %": "a limit"},
    "how-to/slow-job.md": {"3 %": "a limit"},
    "glossary.md": {"2 ×": "a definition"},
    "codecs.md": {"5 %": "a rule of auto"},
    "fabric.md": {
        "1 Gbit/s": "the lab's rate",
        "1 %": "the lab's loss",
        "200 ms": "TCP's minimum retransmission timeout",
        "10 minutes": "a default",
        "2 ×": "a rule of the floor",
        "6 s": "a limit",
        "95 %": "a confidence level",
        "3 MiB": "the lab's queue",
        "20 %": "a limit",
        "1 ms": "a limit",
    },
    "faults.md": {"300 seconds": "a default"},
    "forecast.md": {
        "16 MiB": "a size",
        "8 MiB": "a bucket",
        "450 GB/s": "published",
        "12 µs": "an estimate",
        **dict.fromkeys(("4 %", "6 %", "12 %", "26 %"), "printed by benchmarks/league.py"),
    },
    "json.md": {"3 %": "a share of the ranks", "4 %": "an example", "2 ×": "a rule of the floor", "5 s": "a limit"},
    "how-to/too-large.md": dict.fromkeys(
        ("1153 MiB", "48 MiB", "560 MiB", "74 MiB", "2865 MiB"), "VmHWM of a process, by the steps of test_streamed.py"
    ),
    "studies/stages.md": dict.fromkeys(
        ("140 ms", "160 ms", "175 ms", "246 ms", "1.92 ×", "1.69 ×", "1.54 ×", "1.10 ×"), "printed by the study"
    ),
    "studies/codecs.md": {"87.1 %": "published", "52.2 %": "published"},
    "studies/fabric.md": {
        "25 MiB": "a DDP bucket",
        "20 ms": "published",
        "4 s": "published",
        "12 s": "published",
        "8 %": "loss of the failing link",
    },
    "studies/memory.md": {"1 GiB": "a default on GPUs"},
    "results.md": {"10 s": "length of the strip"},
    "benchmarks.md": {
        "8 MiB": "limit on data in flight",
        **dict.fromkeys(map(str.strip, _LEAGUE.split(",")), "printed by benchmarks/league.py"),
        "4 %": "printed by benchmarks/league.py",
        **dict.fromkeys(map(str.strip, _SAILOR.split(",")), "printed by benchmarks/profiled_plans.py"),
        "1.5 s": "printed by benchmarks/stragglers.py",
        "3 %": "a limit",
        "72 GiB": "a limit",
    },
    "reliability.md": {**dict.fromkeys(("10 s", "200 MiB", "3 s"), "a limit"), "4 s": "length of a stall"},
}


def prose(text: str) -> str:
    return _NOT_PROSE.sub("", text)


def figures(text: str) -> set[str]:
    """Return numbers with their units, like "1.99 ×"."""
    return {f"{number} {unit}" for number, unit in _FIGURE.findall(prose(text))}


def unsourced(page: Path, text: str) -> list[str]:
    """Return a page's figures that are neither in its blocks, nor on a measured page that it links to, nor stated."""
    blocks = " ".join(block for _, _, block in SCRIPT["BLOCK"].findall(text))
    linked = [(page.parent / link).resolve() for link in _LINK.findall(text)]
    sources = [target for target in linked if target.parent.name == "measured"]
    sources += [target for target in linked if target in SCRIPT["pages"]()]
    sourced = figures(blocks).union(*(figures(target.read_text(encoding="utf-8")) for target in sources))
    name = page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name
    return sorted(figures(SCRIPT["BLOCK"].sub("", text)) - sourced - set(STATED.get(name, {})))


def written_pages() -> list[Path]:
    """Return pages that are written by hand and up to date: neither generated nor history."""
    pages = [page for page in DOCS.rglob("*.md") if page.name not in GENERATED]
    return [ROOT / "README.md", *sorted(page for page in pages if page.parent.name not in ("decisions", "measured"))]


@pytest.mark.parametrize("page", SCRIPT["pages"](), ids=lambda page: page.stem)
def test_blocks_match_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert SCRIPT["fill"](text) == text, "run: python docs/make_measured_figures.py"


def test_every_block_is_on_exactly_one_page() -> None:
    names = [name for page in SCRIPT["pages"]() for name, _, _ in SCRIPT["BLOCK"].findall(page.read_text("utf-8"))]
    assert sorted(names) == sorted(SCRIPT["BLOCKS"])


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_name_command_machine_and_time(path: Path) -> None:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    program, script, *_ = record["command"].split()
    assert (program == "python" and (ROOT / script).is_file()) or (program, script) == ("stagewright", "fabric")
    assert re.match(r"\d+ cores of .*; torch \d", record["machine"])
    assert re.match(r"20\d\d-\d\d-\d\dT", record.get("begun") or record["ended"])
    shown = " ".join(page.read_text(encoding="utf-8") for page in SCRIPT["pages"]())
    assert f"(measured/{path.name})" in shown, "no page shows this record"


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: page.stem)
def test_every_figure_has_a_source(page: Path) -> None:
    assert unsourced(page, page.read_text(encoding="utf-8")) == []


def test_stated_figures_are_on_their_page() -> None:
    for name, stated in STATED.items():
        page = ROOT / name if name == "README.md" else DOCS / name
        on_page = figures(SCRIPT["BLOCK"].sub("", page.read_text(encoding="utf-8")))
        assert set(stated) <= on_page, name


def test_figures_without_a_source_are_reported() -> None:
    page = DOCS / "benchmarks.md"
    text = page.read_text(encoding="utf-8")
    sourced = next(iter(re.findall(r"\d\.\d\d × \(", text)))
    assert unsourced(page, f"{text}\nBlocks give {sourced[:-2]} on a good day, `7.77 ×` in code.") == []
    assert unsourced(page, f"{text}\nBlocks give 7.77 × in 12 ms.") == ["12 ms", "7.77 ×"]
    assert SCRIPT["fill"](text.replace(sourced, "9.99 × (")) == text


def example_row() -> dict[str, Any]:
    """Return two stages whose steps take 10 s, where serial takes 16 s for the same 8 samples."""
    zeros = dict.fromkeys(("weights_s", "recompute_s", "codec_s", "sums_s", "until_sent_s", "schedule_idle_s"), 0.0)
    first = {**zeros, "forward_s": 3.0, "backward_s": 5.5, "optimizer_s": 0.5, "receive_s": 0.5, "at_the_end_s": 0.0}
    second = {**zeros, "forward_s": 2.0, "backward_s": 5.5, "optimizer_s": 0.5, "receive_s": 1.0, "at_the_end_s": 0.5}
    rest = {"send_s": 0.2, "between_s": 0.3, "step_s": 10.0}
    threads = {"main_cpu_s": 9.0, "gloo_cpu_s": 0.1, "others_cpu_s": 0.0, "main_ready_s": 0.4, "main_put_off": 7.4}
    return {
        "stages": 2,
        "samples": 8,
        "rounds": [{"serial": 1.5}, {"serial": 2.5}],
        "parts": [first | rest, second | rest | {"schedule_idle_s": 1.0}],
        "threads": [{**threads, "page_faults": 3.0}, {}],
    }


def test_core_table_shows_shares_of_each_workers_step() -> None:
    head, lines = SCRIPT["pipeline"].core_table({"DeiT-S, training": example_row()})
    assert head == ["", "DeiT-S, training, stage 0", "DeiT-S, training, stage 1"]
    cells = {name: (first, second) for name, first, second in lines}
    assert cells["step time"] == ("10000 ms", "10000 ms")
    assert cells["compute"] == ("90.0 %", "80.0 %")
    assert cells["waiting for receives"] == ("5.0 %", "10.0 %")
    assert cells["Python between actions"] == ("3.0 %", "3.0 %")
    assert cells["*counters:* Gloo's threads"] == ("1.0 %", "")  # a machine without counters
    assert cells["preemptions"] == ("7", "")


def test_excess_over_the_ideal_step_adds_up() -> None:
    """The ideal is 8 s; compute takes 8.5 s on average, waiting 1 s; the schedule causes 1 s of the second's 1.5 s."""
    head, ((title, total, *parts),) = SCRIPT["pipeline"].excess_table({"DeiT-S, training": example_row()})
    assert (title, total) == ("DeiT-S, training", "+25.0 %")
    assert dict(zip(head[2:], parts, strict=True)) == {
        "slower compute": "+6.2 %",
        "bubble": "+6.2 %",
        "other waiting": "+6.2 %",
        "send calls": "+2.5 %",
        "Python": "+3.8 %",
    }


def test_a_lab_page_lists_each_of_its_commands_with_or_without_a_time() -> None:
    text = SCRIPT["block"]("lab_times_memory")
    page = (DOCS / "studies" / "memory.md").read_text(encoding="utf-8")
    record = json.loads((DOCS / "measured" / "lab_times.json").read_text(encoding="utf-8"))
    commands = re.findall(r"^\|[^|]*\| `(study [^`]*)`", page, re.MULTILINE)
    timed = {row["command"] for row in record["rows"] if row["seconds"] is not None}
    assert commands
    for command in commands:
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{command} --quick"))
        assert line.endswith("| – |") == (command not in timed)
