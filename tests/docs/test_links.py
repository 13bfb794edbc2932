"""Links between pages lead somewhere, and the navigation shows every page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = {str(page.relative_to(ROOT)): page for page in [*TOP, *sorted(DOCS.rglob("*.md"))]}
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and most others make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_resolve(name: str) -> None:
    page = PAGES[name]
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name} links to {link}, which has no such heading"


def test_pages_stay_within_docs() -> None:
    """A link out of docs/ works in the repository, but not on the site."""
    for page in DOCS.rglob("*.md"):
        for link in _LINK.findall(prose(page)):
            if not re.match(r"[a-z]+:|#", link):
                target = (page.parent / link.partition("#")[0]).resolve()
                assert target.is_relative_to(DOCS), f"{page.relative_to(ROOT)} links to {link}"


def test_navigation_shows_every_page() -> None:
    """Each page is in the navigation, or is a record that a page of the navigation links to."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    shown = {DOCS / name for name in _pages(site["nav"])}
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in shown for link in _LINK.findall(prose(page))}
    records = [pattern.strip("/") for pattern in site["not_in_nav"].split()]
    for page in DOCS.rglob("*.md"):
        if page not in shown:
            name = page.relative_to(DOCS).as_posix()
            assert any(name.startswith(record.rstrip("*")) for record in records), f"{name} is not in the navigation"
            assert page in linked, f"no page of the navigation links to {name}"


def _pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in _pages(part)]


def test_every_picture_is_shown() -> None:
    linked = {
        (page.parent / link).resolve()
        for page in PAGES.values()
        for link in _LINK.findall(prose(page))
        if not re.match(r"[a-z]+:|#", link)
    }
    for picture in (one for one in (DOCS / "pictures").rglob("*") if one.is_file()):
        assert picture in linked, f"{picture.name} is on no page"


def test_what_was_measured_has_its_command_and_is_linked() -> None:
    pages = sorted((DOCS / "studies" / "measured").glob("*.md"))
    assert pages
    for page in pages:
        study = page.stem.partition("-")[0]
        assert re.search(rf"^`stagewright study {study}\b", page.read_text(), re.MULTILINE), page
        assert f"(measured/{page.name})" in (DOCS / "studies" / f"{study}.md").read_text(), page


def test_tests_that_pages_name_exist() -> None:
    named = {
        path
        for page in PAGES.values()
        for path in re.findall(r"`(tests/[\w/]+\.py)`", page.read_text(encoding="utf-8"))
    }
    assert named
    assert not [path for path in sorted(named) if not (ROOT / path).is_file()]
