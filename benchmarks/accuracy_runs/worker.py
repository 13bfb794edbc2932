"""One worker of a group: trains the cases that it reads from standard input, with the others, through `sw.parallelize`.

    stdin    {"task": …, "codec": …, "seed": …, "settings": {"devices": […], "steps": …}}      one line for each case
    stdout   RESULT {"score": …}                                                                of worker 0

Process, imports and samples stay for the next case. An error ends the process, and the group with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import stagewright as sw
from accuracy_runs.cases import RECIPES, Case, Recipe
from accuracy_runs.samples import Split, hold_out, load_splits
from stagewright import codecs, zoo
from stagewright.cluster.device import Device
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.loss import logits_of
from stagewright.zoo.tasks.metric import METRICS

RESULT = "RESULT "
_WARMUP = 0.1
_EVALUATED = 256
_splits: dict[str, tuple[Split, Split]] = {}


def make_plan(case: Case, recipe: Recipe, devices: list[str]) -> Plan:
    """Return the plan of a case: two workers as client and server, four in order, or replicas."""
    forward, _, backward = case.codec.partition("/")
    common: dict[str, Any] = {
        "model": ModelSpec(name=recipe.model, seed=case.seed),
        "batch": recipe.batch,
        "devices": tuple(devices),
        "seed": case.seed,
        "optimizer": OptimizerSpec(learning_rate=case.learning_rate or 0.0, weight_decay=recipe.weight_decay),
    }
    if case.strategy == "data":
        return Plan(mesh=Mesh(data=case.workers), **common)
    is_client = case.workers == 2
    return Plan(
        mesh=Mesh(pipeline=case.workers),
        schedule="gpipe" if is_client else "1f1b",
        placement="client-server" if is_client else "in-order",
        cuts=recipe.client_cuts if is_client else recipe.cuts,
        microbatches=2 if is_client else 4,
        codec=forward,
        codec_backward=backward or None,
        **common,
    )


def train(case: Case, settings: dict[str, Any], store: Path) -> dict[str, Any]:
    """Train a case and evaluate it; every worker returns the same result."""
    begun = time.perf_counter()
    recipe = RECIPES[case.task]
    if settings["tiny"]:
        recipe = replace(recipe, batch=8, size=32 if recipe.samples == "cifar10" else 16)
    plan = make_plan(case, recipe, settings["devices"])
    device = Device.parse(plan.devices[int(os.environ["RANK"])]).torch_device()
    if case.task not in _splits:
        _splits[case.task] = load_splits(store, recipe, device)
    training, evaluation = _splits[case.task]
    if case.is_search:
        training, evaluation = hold_out(training)
    is_image = recipe.samples == "cifar10"
    model = zoo.load(
        recipe.model,
        batch=2,
        weights=store / recipe.weights,
        seed=case.seed,
        num_classes=recipe.num_classes,
        **{"image_size" if is_image else "sequence_length": recipe.size},  # type: ignore[arg-type]
    )
    torch.manual_seed(case.seed)
    example = training.batch(torch.arange(min(recipe.batch, len(training)), device=device))
    torch.set_float32_matmul_precision("highest")  # capture compares gradients
    trainer = sw.parallelize(model.module, example, plan=plan, loss=model.loss, hang_s=settings["hang_s"])
    torch.set_float32_matmul_precision("high")
    started = time.perf_counter()
    num_steps = 2 if settings["tiny"] else math.ceil(recipe.epochs * len(training) / recipe.batch)
    loss = _run_steps(trainer, training, case, recipe, num_steps, device)
    trained = time.perf_counter()
    confusion = _evaluate(trainer, evaluation, recipe.num_classes, device)
    _close(trainer)
    return {
        **_scores(confusion, recipe.metric),
        "training_loss": loss,
        "predicted": confusion.sum(axis=0).astype(int).tolist(),
        "num_train": len(training),
        "num_evaluated": len(evaluation),
        "steps": num_steps,
        "batch": recipe.batch,
        "microbatches": plan.microbatches,
        "ratio": None if case.strategy == "data" else _ratio(case.codec, recipe),
        "devices": list(plan.devices),
        "start_s": started - begun,
        "training_s": trained - started,
        "evaluation_s": time.perf_counter() - trained,
    }


def _run_steps(
    trainer: sw.Trainer, samples: Split, case: Case, recipe: Recipe, num_steps: int, device: torch.device
) -> float:
    """Run the steps of a training; return the mean loss of its last tenth."""
    generator = torch.Generator(device).manual_seed(case.seed)
    warmup, rate = max(1, round(_WARMUP * num_steps)), float(case.learning_rate or 0.0)
    order, losses = np.zeros(0, dtype=np.int64), []
    for step in range(num_steps):
        while len(order) < recipe.batch:
            shuffled = np.random.default_rng([case.seed, step, len(order)]).permutation(len(samples))
            order = np.concatenate([order, shuffled])
        indices, order = torch.from_numpy(order[: recipe.batch]).to(device), order[recipe.batch :]
        share = min((step + 1) / warmup, (num_steps - step) / max(1, num_steps - warmup))
        for group in trainer.optimizer.param_groups if trainer.optimizer is not None else ():
            group["lr"] = rate * share
        losses.append(trainer.step(samples.batch(indices, generator)).loss)
    return float(np.mean(losses[-max(1, num_steps // 10) :]))


def _evaluate(trainer: sw.Trainer, samples: Split, num_classes: int, device: torch.device) -> Any:
    """Return how often each class (row) was predicted as each class, over all workers."""
    counts = torch.zeros(num_classes, num_classes, device=device)
    for start in range(0, len(samples), _EVALUATED):
        indices = torch.arange(start, min(start + _EVALUATED, len(samples)), device=device)
        result = trainer.evaluate(samples.batch(indices))
        for output, target in zip(result.outputs, result.targets, strict=True):
            index = target * num_classes + logits_of(output).argmax(-1)
            counts += torch.bincount(index, minlength=num_classes**2).view(num_classes, num_classes)
    dist.all_reduce(counts)
    return counts.cpu().numpy()


def _scores(confusion: Any, metric: str) -> dict[str, Any]:
    """Return accuracy, and Matthews correlation where it is the task's metric, times 100."""
    labels, predictions = (
        np.repeat(np.indices(confusion.shape)[axis].ravel(), confusion.astype(int).ravel()) for axis in (0, 1)
    )
    values = {name: 100 * METRICS[name](predictions, labels) for name in {"accuracy", metric}}
    return {**values, "score": values[metric]}


def _ratio(codec: str, recipe: Recipe) -> float:
    """Return sent bytes relative to float32 bytes, forward and backward, of the larger tensor that crosses."""
    side = recipe.size // 2
    shape = (64, 32, side, side) if recipe.samples == "cifar10" else (recipe.batch // 2, recipe.size, 384)
    raw = 4 * math.prod(shape)
    ways = (codec.partition("/")[0], codec.rpartition("/")[2])
    sent = [raw if name == "none" else codecs.get(name).num_bytes(shape, torch.float32) for name in ways]
    return sum(sent) / (2 * raw)


def _close(trainer: sw.Trainer) -> None:
    """Wait for the others, then close the groups of this case."""
    dist.barrier()
    context = trainer.context
    for group in {id(group): group for group in (*context.link_groups.values(), context.data_group)}.values():
        if group is not None:
            with contextlib.suppress(Exception):  # the next case creates its own
                dist.destroy_process_group(group)
    gc.collect()


def main() -> None:
    store = Path(sys.argv[1])
    for line in sys.stdin:
        content = json.loads(line)
        settings = content.pop("settings")
        result = train(Case(**content), settings, store)
        gc.collect()
        if os.environ["RANK"] == "0":
            print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
