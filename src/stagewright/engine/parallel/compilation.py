"""Apply a plan's ``compile`` key to the stages of one worker.

    compile = "units"     every unit's forward is compiled
    compile = "stages"    a stage is one compiled graph; it is compiled unit by unit
                            with replicas: gradients of a unit are all-reduced, or its parameters all-gathered, while
                              other units compute
                            with a tensor axis: units contain collectives
                            if units are recomputed one by one: each is a graph of its own
                            if units draw random numbers: each unit has its own random key

What communicates or keeps Python state inside a unit (tensor-parallel layers, divided experts, deferred batch norms)
stays eager, by graph breaks. A compiled graph computes all its gradients at once, so split backward schedules run the
whole backward of a compiled stage as B, and W has nothing left to do.
"""

from __future__ import annotations

import torch

from stagewright.engine.batch.random_key import random_state
from stagewright.engine.expert.layers import DividedExperts
from stagewright.engine.parallel.model import CAPTURED_SAMPLES, move_batch
from stagewright.engine.tensor.layers import Region
from stagewright.engine.tensor.sequence import DividedBlock
from stagewright.errors import UsageError
from stagewright.graph.compilation import compile_stage, compile_units, keep_eager, keep_saved_tensors
from stagewright.graph.preserve import preserved
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.cpu_offload import offloaded
from stagewright.spec.plan import Compile, Plan
from stagewright.zoo.model import Model


def choose_compile_mode(plan: Plan, model: Model, graph: UnitGraph, device: torch.device) -> tuple[Compile, str]:
    """Return what is compiled, and why that differs from the plan ("" if it does not); the model must be whole."""
    if plan.compile != "stages":
        return plan.compile, ""
    if plan.mesh.data > 1:
        return "units", "replicas communicate while other units compute"
    if plan.mesh.tensor > 1:
        return "units", "units contain tensor-parallel collectives"
    if plan.training and plan.recomputed_units:
        return "units", "units are recomputed one by one"
    if plan.training and _draws_random_numbers(model, graph, device):
        return "units", "each unit draws its own random numbers"
    return "stages", ""


def check_recordable(plan: Plan, model: Model, graph: UnitGraph, device: torch.device) -> None:
    """Raise UsageError if the plan's CUDA graphs would not compute what the model does; the model must be whole."""
    if not plan.cuda_graphs:
        return
    if device.type != "cuda":
        raise UsageError(f"cuda_graphs = true needs a GPU, and this worker runs on {device}: leave it out")
    if plan.training and _draws_random_numbers(model, graph, device):
        raise UsageError(
            "cuda_graphs = true would replay the same random numbers in every micro-batch, and the model draws some "
            "(dropout): set its dropout to 0, or leave cuda_graphs out"
        )
    if plan.compile != "none":
        keep_saved_tensors()


def compile_part(stages: dict[int, Stage], graph: UnitGraph, mode: Compile) -> None:
    """Compile the stages of one worker, in place."""
    if mode == "none":
        return
    for stage in stages.values():
        _keep_regions_eager(stage)
        if mode == "stages":
            compile_stage(stage)
    if mode == "units":
        compile_units(graph.module(call) for stage in stages.values() for call in stage.calls)


def _draws_random_numbers(model: Model, graph: UnitGraph, device: torch.device) -> bool:
    """Run the model once and return whether it draws random numbers."""
    before = random_state(device)
    batch = move_batch(model.example(min(model.batch_size, CAPTURED_SAMPLES)), device)
    with torch.no_grad(), preserved(model.module), offloaded(model.module, device):
        graph.model(*batch.args, **batch.kwargs)
        return random_state(device) != before


def _keep_regions_eager(stage: Stage) -> None:
    """Keep divided experts, and the layers and hooks of tensor-parallel regions, in Python: they communicate."""
    for module in stage.modules():
        if isinstance(getattr(module, "_region", None), Region) or isinstance(module, DividedExperts):
            module.__dict__["forward"] = keep_eager(module.forward)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if isinstance(getattr(hook, "__self__", None), Region | DividedBlock):
                    hooks[key] = keep_eager(hook)
