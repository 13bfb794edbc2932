"""Cache of a model's measured overheads, next to its profile, so that two forecasts of one plan agree.

An entry belongs to one model, micro-batch size and device, like a profile, and to one optimizer and loss. It records
whether it includes the factors of a split backward, since only some plans need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stagewright.files.keyed_cache import NAME_KEYS, KeyedCache
from stagewright.simulator.costs.overheads import ModelOverheads

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedOverheads:
    """Overheads, as far as they were measured."""

    overheads: ModelOverheads
    has_split: bool
    """Whether they include the factors of a split backward."""


class OverheadsCache(KeyedCache):
    """Cached overheads in one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(folder, "terms", _FORMAT, (*NAME_KEYS, "optimizer"))

    def load_overheads(self, key: Mapping[str, str]) -> CachedOverheads | None:
        """Return the cached overheads; None if there is no valid entry."""
        entry, _ = self.load(key)
        if entry is None:
            return None
        try:
            overheads = ModelOverheads.from_dict(entry.content["terms"])
            return CachedOverheads(overheads=overheads, has_split=bool(entry.content["halves"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def save_overheads(self, key: Mapping[str, str], cached: CachedOverheads) -> None:
        """Write the overheads."""
        self.save(key, {"terms": cached.overheads.to_dict(), "halves": cached.has_split})
