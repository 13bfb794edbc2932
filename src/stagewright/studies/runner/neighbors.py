"""Other studies that time the same devices at the same moment: each warns the other.

    CACHE/studies/PID.json    {"folder": …, "devices": […]}    written while a study runs, removed when it ends

Two studies on the same cores slow each other down, and neither's times are those of its own work.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from stagewright.cluster.device import Device
from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.files.json_values import read_object_or_empty
from stagewright.files.keyed_cache import default_cache_folder


@contextlib.contextmanager
def announced(folder: Path, devices: Iterable[str], registry: Path | None = None) -> Iterator[None]:
    """Announce for a block that a study in this folder times these devices."""
    path = (registry or _registry()) / f"{os.getpid()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_text(json.dumps({"folder": str(folder.resolve()), "devices": list(devices)}) + "\n", path)
    except OSError:
        pass  # a cache that can't be written must not stop a study
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_neighbors(folder: Path, devices: Iterable[str], registry: Path | None = None) -> list[str]:
    """Return the folders of other running studies that time one of these devices."""
    own = _cores_and_gpus(devices)
    neighbors = []
    for path in sorted((registry or _registry()).glob("*.json")):
        entry = read_object_or_empty(path)
        is_other = entry.get("folder") not in (None, str(folder.resolve()))
        if is_other and _is_running(path.stem) and own & _cores_and_gpus(map(str, entry.get("devices") or ())):
            neighbors.append(str(entry["folder"]))
    return neighbors


def _registry() -> Path:
    return default_cache_folder() / "studies"


def _cores_and_gpus(devices: Iterable[str]) -> set[tuple[str, int]]:
    """Return the cores and GPUs of devices."""
    cores: set[tuple[str, int]] = set()
    for text in devices:
        with contextlib.suppress(UsageError):  # an entry of another program
            device = Device.parse(text)
            cores |= {(device.kind, number) for number in (device.cores if device.kind == "cpu" else (device.index,))}
    return cores


def _is_running(pid: str) -> bool:
    return pid.isdigit() and Path(f"/proc/{pid}").exists()
