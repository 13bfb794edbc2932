"""Hand-made parts of the studies that train and that send: what runs would have said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagewright.studies.codecs.measured import part_name
from stagewright.studies.parts.training_recipe import RECIPES
from stagewright.studies.strategies.measured import LARGE_KINDS, list_experiments

MIB = 2**20
CIFAR = replace(RECIPES["cifar10"], size=32, batch=64, weights="/weights/mobilenetv2")


def trained(accuracy: float, metric: str = "accuracy") -> dict[str, Any]:
    """What a training's part holds, as far as studies read it; the first epoch must not count."""
    return {
        "epochs": [{"epoch": 1, metric: 0.0}, {"epoch": 2, metric: accuracy / 100}],
        "metric": metric,
        "samples_per_s": 100.0,
        "run": "runs/a",
    }


CODECS_OPTIONS: dict[str, Any] = {
    "tasks": ["cifar10"],
    "data": "/data",
    "codecs": ["none", "bf16", "hadamard4/block8", "sort6+2", "sort3+1"],
    "seeds": [0, 1],
    "epochs": 2,
    "microbatches": 4,
    "how": "pipeline",
    "devices": ["cpu:0", "cpu:1"],
    "recipes": {"cifar10": CIFAR},
}

ACCURACIES = {
    "none": (95.8, 96.0),
    "bf16": (95.9, 95.9),
    "hadamard4/block8": (95.6, 95.8),
    "sort6+2": (95.0, 95.4),
    "sort3+1": (30.0, 34.0),
}
_RATIOS = {"none": 1.0, "bf16": 0.5, "hadamard4": 0.14, "block8": 0.27, "sort6+2": 0.25, "sort3+1": 0.125}
_SECONDS = {"none": 0.0, "bf16": 0.001, "hadamard4": 0.004, "block8": 0.002, "sort6+2": 0.5, "sort3+1": 0.5}


def codecs_parts(accuracies: Mapping[str, Sequence[float]] = ACCURACIES) -> dict[str, Any]:
    """Two links of 1 MiB each experiment and micro-batch; 4 micro-batches a step."""
    parts: dict[str, Any] = {
        "data-cifar10": {"kept": True, "train": 320, "judged": 300, "of": [50000, 10000]},
        "crossing-cifar10": {
            "cuts": ["conv_stem", "conv_1x1"],
            "shapes": [[[64, 16, 16, 16]], [[64, 1280, 1, 1]]],
            "message": [16, 16, 16, 16],
            "messages": 4.0,
            "kernels": "numba",
            "rows": [
                {
                    "cut": cut,
                    "direction": direction,
                    "codec": name,
                    "raw_bytes": MIB,
                    "num_bytes": round(ratio * MIB) + (32 if name == "none" else 0),
                    "error": 0.01 if direction == "forward" else 0.02,
                    "encode_s": _SECONDS[name] / 2,
                    "decode_s": _SECONDS[name] / 2,
                }
                for cut in ("conv_stem", "conv_1x1")
                for direction in ("forward", "backward")
                for name, ratio in _RATIOS.items()
            ],
        },
        "transfer-cifar10": {
            "raw_bytes": MIB,
            "codecs": {
                name: {"seconds": 0.001 + seconds, "num_bytes": round(_RATIOS[name] * MIB)}
                for name, seconds in _SECONDS.items()
            },
            "sizes": {"4096": 0.0001, str(16 * MIB): 0.0128},
            "latency_s": 50e-6,
        },
    }
    parts[part_name("cifar10", "hadamard4/block8", None)] = {"equal": True}
    for codec, values in accuracies.items():
        for seed, value in enumerate(values):
            parts[part_name("cifar10", codec, seed)] = trained(value)
    return parts


STRATEGIES_OPTIONS: dict[str, Any] = {
    "tasks": ["cifar10"],
    "data": "/data",
    "workers": [2, 4],
    "microbatches": [2, 4],
    "cuts": ["even", "client"],
    "seeds": [0, 1],
    "epochs": 2,
    "rounds": 1,
    "large_batches": [256, 1024],
    "piece": 32,
    "devices": ["cpu:0", "cpu:1"],
    "recipes": {"cifar10": CIFAR},
}

RATES = {"data-2": 180.0, "pipeline-2-2-even": 120.0, "pipeline-2-4-even": 150.0, "pipeline-2-4-client": 110.0}


def strategies_parts(
    rates: Mapping[str, float] = RATES, accuracy: Mapping[str, Sequence[float]] | None = None, equal: bool = True
) -> dict[str, Any]:
    """Serial 100 samples/s; 4 workers are forecast; batch 1024 is too large for data parallel in one piece."""
    parts: dict[str, Any] = {
        "data-cifar10": {"kept": True, "train": 320, "judged": 300, "of": [50000, 10000]},
        "profile-cifar10": {"cuts": {"pipeline-2-4-client": ["layer.3", "layer.12"]}},
        "forecast-cifar10": {
            experiment.name: {
                "samples_per_s": 300.0 + 10 * experiment.microbatches,
                "speedup": 3.0 + experiment.microbatches / 10,
            }
            for experiment in list_experiments([4], [2, 4], ["even", "client"])
        },
        "speed-cifar10-serial-2-1": {"samples_per_s": 100.0, "equal": True, "peak_memory_bytes": [9 * MIB]},
        "large-limit": {
            "memory_bytes": 100 * MIB,
            "is_chosen": True,
            "needs": {kind: {"256": 60 * MIB, "1024": 200 * MIB} for kind in LARGE_KINDS},
        },
    }
    for name, rate in rates.items():
        parts[f"speed-cifar10-{name}-1"] = {
            "samples_per_s": rate,
            "equal": equal,
            "peak_memory_bytes": [10 * MIB, 30 * MIB] if "client" in name else [20 * MIB, 20 * MIB],
        }
    for experiment in list_experiments([2, 4], [2, 4], ["even", "client"]):
        for seed, value in enumerate((accuracy or {}).get(experiment.name, (95.8, 96.0))):
            parts[f"train-cifar10-{experiment.name}-{seed}"] = trained(value)
    for kind in LARGE_KINDS:
        for batch in (256, 1024):
            about = {"batch": batch, "microbatches": 1 if kind == "data" else batch // 32}
            ran = {"ran": True, "equal": True, "samples_per_s": 90.0, "peak_memory_bytes": [50 * MIB], "run": "runs/l"}
            lost = {"ran": False, "text": "worker 0: out of memory"}
            parts[f"large-{kind}-{batch}"] = about | (lost if (kind, batch) == ("data", 1024) else ran)
    return parts


FABRIC_OPTIONS: dict[str, Any] = {
    "model": "mlp-mnist",
    "bucket_model": "deit-small",
    "where": "lab",
    "hosts": 4,
    "rate": "1gbit",
    "wrong_host": 2,
    "slow_rate": "100mbit",
    "loss": "1%",
    "failing_loss": "8%",
    "part_name": "mlp-mnist",
    "late_s": 0.02,
    "algorithm": "ring",
    "sent": [
        ("mlp-mnist", "mlp-mnist", "clean"),
        ("mlp-mnist", "mlp-mnist", "slow-link"),
        ("deit-small", "deit-small", "clean"),
    ],
}


def sent(made: str, *, times_s: Sequence[float], kind: str = "none", rank: int | None = None) -> dict[str, Any]:
    """What a fabric part holds, as far as the study reads it: two layers, the second ten times as long."""
    middle = sorted(times_s)[len(times_s) // 2]

    def layer(name: str, size: int, factor: float) -> dict[str, Any]:
        return {
            "name": name,
            "bytes": size,
            "samples": len(times_s),
            "p50_s": middle * factor,
            "p95_s": None,
            "p99_s": None,
            "max_s": max(times_s) * factor,
            "ideal_s": middle * factor / 2,
            "share_of_ideal": 0.5,
            "retransmits": 3,
            "modes": [{"kind": "rate", "sentence": f"a plateau of {name}"}],
        }

    return {
        "made": made,
        "trials": len(times_s),
        "layers": [layer("fc4", 2600, 1.0), layer("fc1", 803840, 10.0)],
        "total": {"p50_s": 11 * middle, "max_s": 11 * max(times_s), "mean_s": 11 * middle},
        "verdict": {"kind": kind, "rank": rank, "sentence": f"it is {kind} {rank}", "evidence": []},
        "times_s": [list(times_s), [10 * one for one in times_s]],
        "run": "runs/f",
    }


def fabric_parts() -> dict[str, Any]:
    """A clean network, a slow link that is found, and buckets."""
    return {
        "floor-mlp-mnist": {"activations": [["fc1", 65536], ["fc4", 2560]]},
        "sent-mlp-mnist-clean": sent("clean", times_s=[0.001, 0.001, 0.003]),
        "sent-mlp-mnist-slow-link": sent("slow-link", times_s=[0.01, 0.01, 0.4], kind="slow-link", rank=2),
        "sent-deit-small-clean": sent("clean", times_s=[0.1, 0.1, 0.1]),
    }
