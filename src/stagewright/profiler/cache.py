"""Profiles on disk: one JSON file for each model, input shape, device and measuring method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stagewright.files.keyed_cache import KeyedCache
from stagewright.profiler.profile import Profile

_FORMAT = 2


class ProfileCache(KeyedCache):
    """The cached profiles in one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(folder, "profiles", _FORMAT)

    def profile(self, key: Mapping[str, str]) -> tuple[Profile | None, str]:
        """Return the cached profile, or None and why an existing file was rejected ("" if there is no file)."""
        entry, reason = self.load(key)
        if entry is None:
            return None, reason
        try:
            return replace(Profile.from_dict(entry.content["profile"]), source="cache", age_s=entry.age_s), ""
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
            return None, self.damaged(key, error)

    def save_profile(self, key: Mapping[str, str], profile: Profile) -> Path:
        """Write the profile and return its path."""
        return self.save(key, {"profile": profile.to_dict()})
