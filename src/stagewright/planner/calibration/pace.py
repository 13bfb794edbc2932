"""The pace of this machine: a probe of a tenth of a second that tells whether a calibration still holds.

    calibration of last week    pace 2.1 ms    probe now 2.2 ms   ─► it holds
    calibration under load      pace 3.6 ms    probe now 2.1 ms   ─► measure again

The probe times a fixed computation in short slices on the first device and takes the median, so that it sees both a
slower clock and other programs on the same core.
"""

from __future__ import annotations

import statistics
import time
from datetime import datetime

from stagewright.cluster.device import Device

TOLERANCE = 0.25
"""Relative change of pace beyond which a calibration is repeated."""
_NUM_SLICES = 40


def probe_pace(device: str) -> float:
    """Return the median seconds of one slice of computation on a device."""
    import torch

    chosen = Device.parse(device)
    with chosen.pinned():
        place = chosen.torch_device()
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(128, 512, generator=generator).to(place)
        weights = torch.randn(512, 512, generator=generator).to(place)
        times = []
        for _ in range(_NUM_SLICES + 5):
            start = time.perf_counter()
            for _ in range(2):
                torch.nn.functional.gelu(values @ weights)
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            times.append(time.perf_counter() - start)
    return statistics.median(times[5:])


def has_changed(pace_s: float, now_s: float, *, if_slower: bool) -> bool:
    """Whether the machine is faster than when it was calibrated, or with `if_slower` slower, beyond the tolerance.

    A busy machine is no reason to replace a calibration that was measured on a calm one, unless what is forecast will
    run on the busy one.
    """
    if pace_s <= 0:
        return True
    return now_s < pace_s / (1 + TOLERANCE) or (if_slower and now_s > pace_s * (1 + TOLERANCE))


def age_text(measured_at: str, now: datetime | None = None) -> str:
    """Write the age of a calibration: "3 minutes", "5 hours", "12 days"; empty if it is unknown."""
    try:
        seconds = ((now or datetime.now().astimezone()) - datetime.fromisoformat(measured_at)).total_seconds()
    except (ValueError, TypeError):
        return ""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}s"
    return "a minute" if seconds < 60 else f"{seconds / 60:.0f} minutes"
