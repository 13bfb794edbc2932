"""The documentation site: it builds without a warning, and its own search finds the right page first."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What a reader who knows the field types, and the page that answers it.
SEARCHES = {
    "FSDP": "compare",
    "ZeRO": "compare",
    "DDP": "compare",
    "all-reduce": "compare",
    "tensor parallelism": "compare",
    "activation checkpointing": "schedules",
    "1F1B": "schedules",
    "GPipe": "schedules",
    "bubble": "schedules",
    "micro-batch": "schedules",
    "gradient accumulation": "train",
    "DataLoader": "train",
    "wandb": "train",
    "mixed precision": "how-to/mixed-precision",
    "bfloat16": "how-to/mixed-precision",
    "torch.compile": "how-to/mixed-precision",
    "torchrun": "how-to/multi-node",
    "Slurm": "how-to/multi-node",
    "Kubernetes": "how-to/multi-node",
    "OOM": "faq",
    "MFU": "glossary",
    "straggler": "fabric",
    "NCCL": "fabric",
    "checkpoint resume": "train",
    "Hugging Face": "train",
    "CPU offload": "how-to/too-large",
    "DeepSpeed": "comparison",
    "Perfetto": "results",
    "quantization": "codecs",
    "batch norm": "compare",
    "install": "install",
}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("built") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_site_builds(site: Path) -> None:
    assert (site / "index.html").is_file()
    assert len(SEARCHES) >= 25


def test_search_finds_the_right_page_first(address: str, browser_page: Any) -> None:
    page = browser_page.page
    page.goto(address)
    page.locator("[data-md-component=search-query]").click()
    found = {term: _first_result(page, term, SEARCHES[term]) for term in SEARCHES}
    assert found == SEARCHES


def _first_result(page: Any, term: str, expected: str) -> str:
    """Type a term; return the page of the first result, after waiting a while for the expected one."""
    query = page.locator("[data-md-component=search-query]")
    query.fill(term)
    query.press("End")  # the page searches when a key is released
    link = page.locator(".md-search-result__list > li a").first
    first = ""
    for _ in range(50):
        page.wait_for_timeout(100)
        if link.count():
            first = urlsplit(str(link.get_attribute("href"))).path.strip("/")
        if first == expected:
            break
    return first


def test_copy_button_copies_the_command_alone(address: str, open_page: Any) -> None:
    opened = open_page()
    page = opened.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{address}how-to/slow-job/")
    page.locator("div.highlight button.md-code__button, div.highlight button.md-clipboard").first.click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text.length > 0)")
    copied = page.evaluate("navigator.clipboard.readText()").strip()
    assert copied.startswith("stagewright compare mlp-mnist")
    assert "$" not in copied


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_pages_fit_the_screen(address: str, open_page: Any, width: int, dark: bool) -> None:
    page = open_page(width=width, dark=dark).page
    for path in ("", "benchmarks/", "how-to/multi-node/"):
        page.goto(address + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = sum(int(part) for part in background.strip("rgba()").split(",")[:3]) > 384
    assert bright != dark
