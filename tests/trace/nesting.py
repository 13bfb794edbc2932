"""What viewers rely on: events of one track are nested or disjoint, to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def crossing(events: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of events of one track of which each begins or ends inside the other."""
    tracks: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for one in events:
        if one["ph"] == "X":
            start = round(one["ts"] * 1000)
            span = (start, start + round(one["dur"] * 1000), one["name"])
            tracks.setdefault((one["pid"], one["tid"]), []).append(span)
    found = []
    for spans in tracks.values():
        around: list[tuple[int, int, str]] = []
        for span in sorted(spans, key=lambda each: (each[0], -each[1])):
            while around and around[-1][1] <= span[0]:
                around.pop()
            if around and span[1] > around[-1][1]:
                found.append((around[-1][2], span[2]))
            around.append(span)
    return found
