"""Figures that a reader judges by stand on the pages of studies that ran, with the command that made them.

README                  "Results": a line ──► its page in docs/studies/measured/, or docs/benchmarks.md
docs/studies/NAME.md    "Measured": the section ──► the pages that it links to

Figures of benchmarks: test_measured_figures.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ROOT / "docs" / "studies"
MEASURED = STUDIES / "measured"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
MEASURED_STUDIES = sorted({page.stem.partition("-")[0] for page in MEASURED.glob("*.md")})

_FIGURE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)( ?(?:×|%|[mµ]?s|[KMG]iB)(?!\w))?")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def section(page: Path, title: str) -> str:
    _, _, after = page.read_text(encoding="utf-8").partition(f"\n## {title}\n")
    assert after, f"{page} has no section {title!r}"
    return after.partition("\n## ")[0]


def linked(page: Path, text: str) -> list[Path]:
    links = [link for link in _LINK.findall(text) if link.partition("#")[0].endswith(".md")]
    return [(page.parent / link.partition("#")[0]).resolve() for link in links]


def figures(text: str) -> list[tuple[str, str]]:
    """Numbers with their units, "" where they have none; code and links' targets are left out."""
    prose = re.sub(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
    return [(number, unit.strip()) for number, unit in _FIGURE.findall(prose)]


def missing(text: str, pages: list[Path]) -> list[str]:
    """The figures of a text that stand on none of the pages; a unit must stand there too."""
    found = [one for page in pages for one in figures(page.read_text(encoding="utf-8"))]
    known = {*found, *((number, "") for number, _ in found)}
    return [f"{number} {unit}".strip() for number, unit in figures(text) if (number, unit) not in known]


def commands(text: str) -> list[str]:
    """Studies' commands in a text, in a line or in a block, each on one line."""
    written = re.findall(r"`(stagewright study [^`]+)`", text)
    written += re.findall(r"^\$ (stagewright study (?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
    return [" ".join(one.replace("\\\n", " ").split()) for one in written]


def results() -> list[str]:
    return re.findall(r"^- .*(?:\n  .*)*", section(README, "Results"), flags=re.MULTILINE)


def test_readme_has_three_results() -> None:
    assert len(results()) == 3


@pytest.mark.parametrize("result", results())
def test_results_stand_on_their_page(result: str) -> None:
    (page,) = linked(README, result)
    assert len(figures(result)) > 2
    assert missing(result, [page]) == []
    if page != BENCHMARKS:  # its blocks have their commands: test_measured_figures.py
        assert page.parent == MEASURED
        assert len(commands(page.read_text(encoding="utf-8"))) > 0


@pytest.mark.parametrize("study", MEASURED_STUDIES)
def test_measured_sections_stand_on_the_pages_they_link_to(study: str) -> None:
    page = STUDIES / f"{study}.md"
    text = section(page, "Measured")
    pages = linked(page, text)
    assert len(figures(text)) > 5
    assert missing(text, pages) == []
    of_pages = [one for measured in pages if measured.parent == MEASURED for one in commands(measured.read_text())]
    assert sorted(set(commands(text))) == sorted(set(of_pages))


def test_table_of_codecs_is_that_of_its_studies() -> None:
    head, _, *rows = (line for line in section(STUDIES / "codecs.md", "Measured").splitlines() if line.startswith("|"))
    pages = [page.read_text(encoding="utf-8") for page in linked(STUDIES / "codecs.md", head)]
    assert len(pages) == 3
    for row in rows:
        codec, ratio, *accuracies = (cell.strip(" *") for cell in row.strip("|").split("|"))
        for accuracy, page in zip(accuracies, pages, strict=True):
            assert f"| {codec} | {ratio} | {accuracy}" in page if accuracy else f"| {codec} |" not in page, row


def test_table_of_studies_links_to_what_was_measured() -> None:
    rows = [line for line in (STUDIES / "index.md").read_text().splitlines() if line.startswith("| [`study ")]
    assert len(rows) == 5
    for row in rows:
        own, *pages = linked(STUDIES / "index.md", row)
        assert sorted(pages) == sorted(page for page in MEASURED.glob("*.md") if page.stem.startswith(own.stem)), own
        assert row.endswith("| – |") == (not pages)


def test_a_figure_without_a_source_is_found() -> None:
    page = MEASURED / "stages.md"
    assert missing("1.80 × in training (1.80 … 1.81), 164 ms, `9999`, [a link](9999.md)", [page]) == []
    assert missing("1.79 ×, 125 s, 98.7 %", [page]) == ["1.79 ×", "125 s", "98.7 %"]
    assert commands("`stagewright study stages` and\n$ stagewright study memory \\\n    --quick\nmore") == [
        "stagewright study stages",
        "stagewright study memory --quick",
    ]
