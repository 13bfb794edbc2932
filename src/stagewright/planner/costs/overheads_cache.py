"""What was measured of a model beside its units, kept beside its profile: two forecasts of one plan then agree.

A record is of one model, size of micro-batch and device, as a profile is, and of one optimiser and loss. Whether it has
the factors of a backward in two halves is written down, for only some plans need these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stagewright.files.keyed_cache import ASKED, KeyedFiles
from stagewright.simulator.costs.overheads import ModelOverheads

__all__ = ["CachedOverheads", "OverheadsCache"]

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedOverheads:
    """Terms, as far as they were measured."""

    terms: ModelOverheads
    """The terms."""
    halves: bool
    """Whether the factors of a backward in two halves are among them."""


class OverheadsCache(KeyedFiles):
    """The kept terms in one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(folder, "terms", _FORMAT, (*ASKED, "optimizer"))

    def terms(self, key: Mapping[str, str]) -> CachedOverheads | None:
        """What is kept; None where there is nothing that holds."""
        kept, _ = self.load(key)
        if kept is None:
            return None
        try:
            return CachedOverheads(terms=ModelOverheads.from_dict(kept.content["terms"]), halves=bool(kept.content["halves"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def save_terms(self, key: Mapping[str, str], kept: CachedOverheads) -> None:
        """Writes them."""
        self.save(key, {"terms": kept.terms.to_dict(), "halves": kept.halves})
