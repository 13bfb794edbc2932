from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stagewright.errors import CacheError
from stagewright.files.keyed_cache import default_cache_folder
from stagewright.profiler.cache import ProfileCache
from stagewright.profiler.profile import Profile, Time

ZERO = Time(median_s=0.0, spread_s=0.0)
KEY = {
    "model": "deit small/224",
    "structure": "a1",
    "mode": "train",
    "units": "b2",
    "weights": "on the device",
    "inputs": "[]",
    "device": "cpu",
    "threads": "1",
    "hardware": "Some CPU",
    "training": "True",
    "repeats": "5",
    "part": "whole layers",
    "torch version": "2.13.0",
}
PROFILE = Profile(
    model="m",
    device="cpu",
    dtype="float32",
    batch_size=1,
    training=True,
    units=(),
    whole_forward=ZERO,
    whole_backward=ZERO,
    whole_macs=0,
    versions={},
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    assert cache.profile(KEY) == (None, "")
    path = cache.save_profile(KEY, PROFILE)
    found, refusal = cache.profile(KEY)
    assert found == PROFILE
    assert refusal == ""
    assert found is not None
    assert found.source == "cache"
    assert path.name.startswith("deit-small-224-")
    assert os.listdir(cache.folder) == [path.name]  # no temporary file is left


def test_stale_file_is_rejected_with_both_values(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.save_profile(KEY, PROFILE)
    found, refusal = cache.profile({**KEY, "torch version": "2.14.0", "hardware": "Other CPU"})
    assert found is None
    assert "hardware was Some CPU, now Other CPU; torch version was 2.13.0, now 2.14.0" in refusal


def test_more_rounds_than_asked_for_are_as_good(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    path = cache.save_profile(KEY, PROFILE)
    assert cache.profile({**KEY, "repeats": "3"})[0] == PROFILE
    assert "repeats was 5, now 10" in cache.profile({**KEY, "repeats": "10"})[1]
    minute_ago = path.stat().st_mtime - 60
    os.utime(path, (minute_ago, minute_ago))
    found, _ = cache.profile(KEY)
    assert found is not None
    assert 60 <= found.age_s < 600


def test_a_folder_can_be_shared(tmp_path: Path) -> None:
    """Files are as readable as others that a user writes."""
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert ProfileCache(tmp_path).save_profile(KEY, PROFILE).stat().st_mode == ordinary.stat().st_mode


def test_another_request_is_another_file(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.save_profile(KEY, PROFILE)
    assert cache.profile({**KEY, "threads": "2"}) == (None, "")
    assert cache.profile({**KEY, "part": "one of 2 workers"}) == (None, "")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2}', '{"format": 2, "key": 3, "profile": {}}'])
def test_damaged_file_is_rejected(tmp_path: Path, content: str) -> None:
    cache = ProfileCache(tmp_path)
    cache.save_profile(KEY, PROFILE).write_text(content)
    found, refusal = cache.profile(KEY)
    assert found is None
    assert "is damaged" in refusal


def test_other_format_is_rejected(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    path = cache.save_profile(KEY, PROFILE)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 0}))
    assert "has format 0, not 2" in cache.profile(KEY)[1]


def test_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ProfileCache(tmp_path / "file")
    with pytest.raises(CacheError, match=r"can't write profiles to .*file/profiles .*STAGEWRIGHT_CACHE") as caught:
        cache.check_writable()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert cache.profile(KEY) == (None, "")


def test_location(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "own"))
    assert default_cache_folder() == tmp_path / "own"
    monkeypatch.delenv("STAGEWRIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "stagewright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_folder() == tmp_path / "home" / ".cache" / "stagewright"
