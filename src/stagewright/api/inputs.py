"""Arguments that several verbs share: devices, strategies, and the options of a model and a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from stagewright.analytic.hardware.named_cluster import is_cluster_name, named_cluster
from stagewright.api.progress import SILENT, Progress
from stagewright.cluster.cluster import Cluster
from stagewright.cluster.device import Device
from stagewright.cluster.file import read_cluster
from stagewright.errors import UsageError
from stagewright.spec.plan import ModelSpec, Plan
from stagewright.spec.plan_file import read_plan
from stagewright.spec.plan_rules import check_choice
from stagewright.spec.strategy import STRATEGIES, strategy_name

Options = TypeVar("Options")

_MODEL_FIELDS = tuple(field.name for field in fields(ModelSpec) if field.name != "name")


def parse_devices(devices: int | str | Sequence[str], progress: Progress = SILENT) -> tuple[str, ...]:
    """Return device names: for a number, that many GPUs or cores; ``"cpu:0,cpu:1"`` names them.

    Workers that share a GPU and a fall-back to the CPU are announced.
    """
    text = str(devices) if isinstance(devices, int | str) else ",".join(devices)
    if re.fullmatch(r"\s*-?\d+\s*", text):
        if int(text) < 1:
            raise UsageError(f"--devices {text}: must be at least 1")
        from stagewright.machine.machine import default_devices, describe_choice

        chosen = default_devices(int(text))
        if (remark := describe_choice(chosen)) is not None:
            progress.note(remark)
        return chosen
    names = tuple(name.strip() for name in re.split(r"[;,]\s*(?=cpu|cuda)", text))
    for name in names:
        if not name.startswith(("cpu", "cuda")):
            raise UsageError(
                f"--devices {text!r}: {name!r} is neither a number of devices nor a device; write 2, or cpu:0,cpu:1"
            )
        Device.parse(name)
    return names


def parse_strategies(strategies: str | Iterable[str]) -> tuple[str, ...]:
    """Return strategy names and meshes, from ``"serial,data data=2,pipeline=2"`` or a list of them."""
    words = strategies.split() if isinstance(strategies, str) else strategies
    names = [name for word in words for name in ([word] if "=" in word else re.split("[,;]", word))]
    chosen = tuple(strategy_name(name) for name in names if name)
    if not chosen:
        raise UsageError(f"--strategy {strategies!r} names none; write for example --strategy serial,pipeline")
    check_names("strategy", [name for name in chosen if "=" not in name], STRATEGIES)
    return chosen


def check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a name that is not known; the error offers the nearest one."""
    known = list(known)
    for name in names:
        check_choice(kind, name, known)


def pop_fields(cls: type[Options], options: dict[str, Any]) -> Options:
    """Build a dataclass from the options that are its fields, and remove them."""
    names = [field.name for field in fields(cls) if field.name in options]  # type: ignore[arg-type]
    return cls(**{name: options.pop(name) for name in names})


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the model (``image_size``, …) and those of the plan (``schedule``, …)."""
    known = {field.name for field in fields(Plan)}
    check_names("option", options, sorted(known | set(_MODEL_FIELDS)))
    model = {name: value for name, value in options.items() if name in _MODEL_FIELDS}
    return model, {name: value for name, value in options.items() if name in known}


def load_plan(plan: Plan | str | Path) -> Plan:
    """Return a plan, read from its file where it is given as a path."""
    return plan if isinstance(plan, Plan) else read_plan(plan)


def load_cluster(cluster: Cluster | str | Path | None) -> Cluster | None:
    """Return a cluster; a text is the path of its file, or a name such as ``8xh100`` or ``32x8xa100``."""
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    if is_cluster_name(str(cluster)) and not Path(cluster).exists():
        return named_cluster(str(cluster))
    return read_cluster(cluster)
