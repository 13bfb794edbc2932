"""Profiles on disk: one JSON file for each model, input shape, device and way of measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stagewright.files.keyed_cache import KeyedFiles, default_cache_folder
from stagewright.profiler.profile import Profile

__all__ = ["ProfileCache", "default_cache_folder"]

_FORMAT = 2


class ProfileCache(KeyedFiles):
    """The cached profiles in one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(folder, "profiles", _FORMAT)

    def profile(self, key: Mapping[str, str]) -> tuple[Profile | None, str]:
        """The cached profile, or None and why the file that is there was refused ("" where there is none)."""
        kept, refusal = self.load(key)
        if kept is None:
            return None, refusal
        try:
            return replace(Profile.from_dict(kept.content["profile"]), source="cache", age_s=kept.age_s), ""
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return None, self.damaged(key, error)

    def save_profile(self, key: Mapping[str, str], profile: Profile) -> Path:
        """Writes the profile."""
        return self.save(key, {"profile": profile.to_dict()})
