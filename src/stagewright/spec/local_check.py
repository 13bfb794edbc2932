"""What a plan names that must be on this machine: its model, the model's weights, its devices.

    read_plan ─► check_plan: can it run anywhere? ─► check_here: can it run here? ─► folder, workers

Asked before a run has a folder or a process. `check_named` imports neither torch nor a module of the user's, so that a
worker may ask before it is pinned; `check_here` imports both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.cluster.device import Device, has_gpu
from stagewright.errors import UsageError
from stagewright.spec.plan import ModelSpec, Plan
from stagewright.zoo.check import check_model, check_name

if TYPE_CHECKING:
    from stagewright.zoo.blueprint import Blueprint

__all__ = ["check_devices", "check_here", "check_named"]


def check_named(model: ModelSpec, device: str | None = None) -> None:
    """UsageError where there is no such model, no such folder of weights, or no GPU at all for the device."""
    check_name(model.name, model.weights)
    if device is not None and Device.parse(device).kind == "cuda" and not has_gpu():
        raise UsageError(f"{device} is asked for, but this machine shows no GPU; use another device, like cpu:0")


def check_here(plan: Plan) -> Blueprint | None:
    """UsageError where the plan's model, its options, its weights or a device is not to be had on this machine.

    Returns how the model will be built; None where only a user's factory knows.
    """
    from stagewright.zoo.blueprint import Options

    model = plan.model
    options = Options(
        image_size=model.image_size,
        sequence_length=model.sequence_length,
        num_classes=model.num_classes,
        padded=model.padded,
    )
    check_devices(plan.devices)
    return check_model(model.name, model.weights, options)


def check_devices(devices: tuple[str, ...]) -> None:
    """UsageError where one of them is not on this machine: a core, a GPU."""
    for device in dict.fromkeys(devices):
        Device.parse(device).torch_device()
