"""Whether a plan can run on this machine: its model, the model's weights, its devices.

    read_plan ─► check_plan: valid anywhere? ─► check_on_this_machine: valid here? ─► run folder, workers

These checks run before a run folder exists. They import torch and user code, so a worker is pinned before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.cluster.device import check_devices
from stagewright.codecs.registry import check_codec
from stagewright.spec.plan import Plan
from stagewright.user_code import is_user_defined
from stagewright.zoo.validation import check_model

if TYPE_CHECKING:
    from stagewright.zoo.blueprint import Blueprint


def check_on_this_machine(plan: Plan) -> Blueprint | None:
    """Raise UsageError if this machine lacks the plan's model, model options, weights or devices.

    Return how the model will be built, or None if only a user's factory knows.
    """
    from stagewright.zoo.blueprint import Options

    check_user_code(plan)
    model = plan.model
    options = Options(
        image_size=model.image_size,
        sequence_length=model.sequence_length,
        num_classes=model.num_classes,
        padded=model.padded,
    )
    check_devices(plan.devices)
    return check_model(model.name, model.weights, options)


def check_user_code(plan: Plan) -> None:
    """Import the policy and the codecs that a plan names; UsageError where that fails."""
    if not plan.cuts and is_user_defined(plan.split):
        from stagewright.partition.registry import find_policy

        find_policy(plan.split)
    for codec in (plan.codec, plan.codec_backward or ()):
        for name in (codec,) if isinstance(codec, str) else codec:
            check_codec(name)
