"""Model factories of all families, for plans: ``families.factory:bert``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from families import FAMILIES

_BY_NAME = {family.name.replace("-", "_"): family for family in FAMILIES}
SAMPLES = 9


def __getattr__(name: str) -> Callable[[], Any]:
    if name not in _BY_NAME:
        raise AttributeError(name)
    family = _BY_NAME[name]

    def make() -> Any:
        return (family.build(), *family.example(SAMPLES))

    return make
