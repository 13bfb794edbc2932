"""`constraints.lock` has the hashes of what `constraints.txt` pins."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from lock import hashes_on_page  # noqa: E402


def test_every_pin_has_hashes() -> None:
    pinned = set(re.findall(r"^[^#\s]+==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    entries = (ROOT / "constraints.lock").read_text().replace(" \\\n", " ").splitlines()
    locked = {entry.split()[0]: entry.split()[1:] for entry in entries if not entry.startswith("#")}
    assert {pin for pin in pinned if not pin.startswith("torch==")} == set(locked), "run tools/lock.py"
    for pin, hashes in locked.items():
        assert hashes, pin
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", text) for text in hashes), pin


def test_hashes_of_a_version() -> None:
    digests = [character * 64 for character in "abcdef"]
    files = (
        "some_thing-1.2-py3-none-any.whl",
        "some-thing-1.2.tar.gz",
        "some_thing-1.2-cp310-cp310-win_amd64.whl",
        "some_thing-1.2.1-py3-none-any.whl",
        "some_thing-1.2-cp39-abi3-macosx_11_0_arm64.whl",
        "some_thing_more-1.2-py3-none-any.whl",
    )
    links = [f'<a href="/f/{file}#sha256={digest}">' for file, digest in zip(files, digests, strict=True)]
    assert hashes_on_page("\n".join(links), "Some.Thing", "1.2") == [digests[0], digests[1], digests[4]]
