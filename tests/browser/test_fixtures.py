"""The fixtures themselves can fail: what they are to catch is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_errors_and_requests_are_caught(browser_page: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(
        "<!doctype html><link rel=icon href='data:,'><h1>here</h1><script>console.error('broken')</script>"
        "<img src='http://stagewright.invalid/x.png'>"
    )
    browser_page.page.goto(file.as_uri())
    browser_page.page.get_by_text("here").wait_for()
    with pytest.raises(AssertionError, match="broken"):
        browser_page.check()
    browser_page.allowed += ["broken", "ERR_"]
    with pytest.raises(AssertionError, match=r"stagewright\.invalid"):
        browser_page.check()
    browser_page.requests.remove("http://stagewright.invalid/x.png")
