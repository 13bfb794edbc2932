"""A real browser for tests: Debian's chromium, driven by Playwright, which must not bring one of its own.

`open_page` opens pages of any width, light or dark; `browser_page` is one of 1280 px. Both record what the console says
and what is asked for; at the end of the test an error on the console, or a request that leaves this machine, fails it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
_HERE = ("127.0.0.1", "localhost", "::1")


@dataclass
class BrowserPage:
    """A page and what happened on it."""

    # Playwright's page.
    page: Any
    # Errors and warnings of the console, and exceptions that nobody caught.
    errors: list[str] = field(default_factory=list)
    # Addresses that were asked for.
    requests: list[str] = field(default_factory=list)
    # What the console may say in this test, as parts of lines.
    allowed: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Nothing went wrong and nothing left this machine."""
        wrong = [line for line in self.errors if not any(part in line for part in self.allowed)]
        assert wrong == [], wrong
        left = [address for address in self.requests if not is_local(address)]
        assert left == [], left


def is_local(address: str) -> bool:
    """Whether a request stays on this machine."""
    parts = urlsplit(address)
    return parts.scheme in ("file", "data", "blob", "about") or parts.hostname in _HERE


def find_browser() -> str | None:
    """The browser's program."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests of a process."""
    program = find_browser()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed (tools/browser.sh installs one as root)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        # Root can't use the browser's sandbox; the pages are our own.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=program, args=[*arguments, "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., BrowserPage]]:
    """Opens pages: `open_page(width=390, height=844, dark=True, touch=True)`."""
    opened: list[tuple[Any, BrowserPage]] = []

    def make(*, width: int = 1280, height: int = 800, dark: bool = False, touch: bool = False) -> BrowserPage:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
            reduced_motion="reduce",
        )
        page = context.new_page()
        page.set_default_timeout(90_000)
        found = BrowserPage(page=page)
        page.on("console", lambda line: _note(found, line))
        page.on("pageerror", lambda error: found.errors.append(f"exception: {error}"))
        page.on("request", lambda request: found.requests.append(request.url))
        opened.append((context, found))
        return found

    yield make
    for context, _ in opened:
        context.close()
    for _, found in opened:
        found.check()


@pytest.fixture
def browser_page(open_page: Callable[..., BrowserPage]) -> BrowserPage:
    """A page of 1280 px, light."""
    return open_page()


def _note(found: BrowserPage, line: Any) -> None:
    if line.type in ("error", "warning"):
        found.errors.append(f"{line.type}: {line.text}")
