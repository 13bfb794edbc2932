"""The devices that a study uses where none are named."""

from __future__ import annotations

from typing import Any

from stagewright.studies.framework.options import option


def devices_option(gpus: str) -> Any:
    """Declare --devices."""
    default = f"{gpus} if there are two or more, else CPU cores"
    return option(
        ("cpu:0", "cpu:1"), "How many devices; or names: cpu:0,cpu:1.", panel="Execution", default_text=default
    )


def choose_devices(most: int) -> tuple[str, ...]:
    """Choose at most `most` devices: GPUs where there are two or more, else CPU cores."""
    import torch

    from stagewright.machine.machine import separate_cores

    if torch.cuda.device_count() >= 2:
        return tuple(f"cuda:{index}" for index in range(min(most, torch.cuda.device_count())))
    return tuple(f"cpu:{core}" for core in separate_cores()[:most])
