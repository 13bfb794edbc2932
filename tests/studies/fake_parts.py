"""Hand-made parts of studies: what runs and forecasts would have said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MIB = 2**20


def row(samples_per_s: float, *, run: str = "runs/a", equal: bool = True, sent: int = 0, **more: Any) -> dict[str, Any]:
    """What a run's part holds, as far as studies read it."""
    return {
        "samples_per_s": samples_per_s,
        "equal": equal,
        "link_bytes": {"0": sent} if sent else {},
        "collective_bytes": [{}],
        "run": run,
        **more,
    }


def split(cuts: Sequence[str], bottleneck_s: float, balance: float, policy: str) -> dict[str, Any]:
    """A split, as far as the study reads it."""
    return {
        "policy": policy,
        "cut_names": list(cuts),
        "bottleneck_s": bottleneck_s,
        "balance": balance,
        "sends_bytes": MIB,
        "speedup_bound": 1.9,
    }


def share(worker: int, **parts: float) -> dict[str, Any]:
    """A worker's step of one second, divided."""
    names = ("compute", "transfer", "collective", "wait", "bubble", "overhead")
    return {"worker": worker, "step_s": 1.0, **{f"{name}_s": parts.get(name, 0.0) for name in names}}


STAGES_OPTIONS: dict[str, Any] = {
    "model": "deit-small",
    "stages": [2, 4],
    "policies": ["parameters", "macs", "blocks"],
    "modes": ["inference"],
    "rounds": 2,
    "microbatches": 8,
    "devices": ["cpu:0", "cpu:1"],
    "cluster": None,
}


def stages_parts(
    *, blocks: tuple[float, float] = (32.0, 33.0), macs: tuple[float, float] = (25.0, 26.0), equal: bool = True
) -> dict[str, Any]:
    """Inference in 2 stages (4 are forecast), two rounds, serial 20 and 21 samples/s; parameters cut as MACs do."""
    splits = {
        "parameters": split(["layers.6"], 0.120, 0.80, "parameters"),
        "macs": split(["layers.6"], 0.120, 0.80, "macs"),
        "blocks": split(["layers.5"], 0.100, 0.98, "blocks"),
    }
    four = {name: split([f"{name}.1", f"{name}.2", f"{name}.3"], 0.06, 0.9, name) for name in splits}
    forecast = {
        "2": {
            name: {"samples_per_s": rate, "step_s": 0.1, "speedup": rate / 20, "parts": []}
            for name, rate in zip(splits, (26.5, 26.5, 34.0), strict=True)
        },
        "4": {
            name: {"samples_per_s": 60.0 + at, "step_s": 0.1, "speedup": 3.0 + at / 10, "parts": []}
            for at, name in enumerate(splits)
        },
    }
    parts: dict[str, Any] = {
        "calibration": {},
        "profile-inference": {"splits": {"2": splits, "4": four}},
        "forecast-inference": forecast,
    }
    for turn in (1, 2):
        parts[f"run-inference-serial-{turn}"] = row(19.0 + turn)
        parts[f"run-inference-2-parameters-{turn}"] = row(macs[turn - 1], run=f"runs/p{turn}", sent=MIB, shared=False)
        parts[f"run-inference-2-macs-{turn}"] = {"same_as": "parameters"}
        parts[f"run-inference-2-blocks-{turn}"] = row(
            blocks[turn - 1], run=f"runs/b{turn}", sent=2 * MIB, shared=False, equal=equal
        )
    parts["why-inference"] = {
        "stages": 2,
        "policy": "blocks",
        "run": "runs/b2",
        "num_devices": 2,
        "serial_s": 2.0,
        "ideal_s": 1.0,
        "step_s": 1.25,
        "speedup": 1.6,
        "is_measured": True,
        "parts": [
            {"name": "imbalance", "seconds": 0.15, "lost_speedup": 0.26},
            {"name": "bubble", "seconds": 0.05, "lost_speedup": 0.07},
            {"name": "transfer", "seconds": 0.10, "lost_speedup": 0.14},
            {"name": "unexplained", "seconds": -0.05, "lost_speedup": -0.07},
        ],
        "change": {"what": "16 micro-batches instead of 8", "step_s": 1.2, "gain": 0.04},
        "shares": [share(0, compute=0.8, transfer=0.15, overhead=0.05), share(1, compute=0.7, bubble=0.3)],
        "serial_shares": [share(0, compute=0.99, overhead=0.01)],
    }
    return parts


CONTRAST_OPTIONS: dict[str, Any] = {**STAGES_OPTIONS, "model": "mobilenet-v2", "stages": [2]}


def contrast_parts(**rates: float) -> dict[str, Any]:
    """The second model: each policy cuts it elsewhere; serial 20 samples/s in both rounds."""
    shares = {"parameters": (0.5, 0.6, 0.9), "macs": (0.1, 0.5, 0.7), "blocks": (0.05, 0.4, 0.6)}
    splits = {}
    for policy, (parameters, macs, seconds) in shares.items():
        stages = [
            {"parameters": 1000 * a, "macs": 1000 * b, "units": ["u"] * 4, "time_s": c}
            for a, b, c in ((parameters, macs, seconds), (1 - parameters, 1 - macs, 1 - seconds))
        ]
        splits[policy] = split([f"{policy}.cut"], seconds, 0.5 / seconds, policy) | {"stages": stages}
    parts: dict[str, Any] = {"contrast-profile-inference": {"splits": {"2": splits}}}
    for turn in (1, 2):
        parts[f"contrast-run-inference-serial-{turn}"] = row(20.0)
        for policy, rate in ({"parameters": 22.0, "macs": 28.0, "blocks": 32.0} | rates).items():
            part = row(rate + 0.1 * turn, run=f"runs/c-{policy}{turn}", sent=MIB, shared=False)
            parts[f"contrast-run-inference-2-{policy}-{turn}"] = part
    return parts


MEMORY_OPTIONS: dict[str, Any] = {
    "model": "gpt-layers:4",
    "strategies": ["data", "tensor", "pipeline"],
    "batch": 8,
    "sequence_length": 64,
    "optimizer": "adamw",
    "rounds": 1,
    "memory_bytes": 384 * MIB,
    "fits": ["data", "tensor+recompute"],
}

SPEEDS = {"serial": 10.0, "data": 17.0, "tensor": 14.0, "pipeline": 8.0}
PEAKS = {"serial": 400, "data": 360, "tensor": 220, "pipeline": 250}


def memory_parts(
    speeds: Mapping[str, float] = SPEEDS, peaks: Mapping[str, int] = PEAKS, saves: float = 0.25, largest: int = 8
) -> dict[str, Any]:
    """One round of everything; recomputation takes a quarter more time and saves a share of the memory."""
    parts: dict[str, Any] = {"calibration": {}}
    fits = {}
    for strategy, speed in speeds.items():
        workers = 1 if strategy == "serial" else 2
        executed, forecasts = {}, {}
        for way, slower, less in ((strategy, 1.0, 0.0), (f"{strategy}+recompute", 1.25, saves)):
            peak = round(peaks[strategy] * (1 - less)) * MIB
            parts[f"run-{way}-1"] = row(
                speed / slower,
                peak_memory_bytes=[peak] * workers,
                memory=[{"parameters": peak // 2, "activations": peak // 2, "gradients": 0}] * workers,
            )
            kinds = {"forward": {"count": 4, "seconds": 1.0, "bytes": 0}}
            executed[way] = [
                {"worker": at, "stages": [at] if strategy == "pipeline" else [0], "kinds": kinds}
                for at in range(workers)
            ]
            forecasts[way] = {
                "speedup": speed / 10 + 0.1,
                "free_speedup": 2.0,
                "step_s": 1.0,
                "parts": [{"name": "collectives", "seconds": 0.2}, {"name": "bubble", "seconds": 0.1}],
            }
            fits[way] = {"largest": 3, "refused": ""}
        parts[f"executed-{strategy}"] = executed
        if strategy != "serial":
            parts[f"ideal-{strategy}"] = [
                {
                    "round": 1,
                    "step_s": 1.0,
                    "free_s": 0.85,
                    "balanced_s": 0.8,
                    "endless_s": 0.2 * (strategy != "tensor"),
                }
            ]
            parts[f"operators-{strategy}"] = {
                "is_same": strategy != "pipeline",
                "sentence": f"workers of {strategy}",
                "parts": {"forward": [30, 40 if strategy == "pipeline" else 30], "backward": [60, 60]},
            }
        parts[f"forecast-{strategy}"] = forecasts
    parts["fit-forecast"] = fits
    parts["fit-data"] = {
        "largest": 3,
        "is_exact": True,
        "forecast": 3,
        "attempts": [
            {"layers": 3, "ran": True, "peak_memory_bytes": [300 * MIB] * 2, "run": "runs/x", "text": ""},
            {"layers": 4, "ran": False, "text": "worker 0 is out of memory"},
        ],
    }
    parts["fit-tensor+recompute"] = {
        "largest": largest,
        "is_exact": False,
        "forecast": 7,
        "attempts": [{"layers": largest, "ran": True, "peak_memory_bytes": [380 * MIB] * 2, "run": "", "text": ""}],
    }
    return parts
