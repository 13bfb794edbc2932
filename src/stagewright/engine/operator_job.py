"""Which operators a run's plan executes: the plan once more, for three steps, the last with torch's profiler.

    run folder ─► a folder of its own, the same plan ─► workers ─► operators.jsonl of each ─► back into the run folder

A profiler slows a run down and fills memory, so it is never on while a run is measured. Operators' times are put on the
clock of the actions that were recorded around them, whose begin and end they are held to.
"""

from __future__ import annotations

import bisect
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from stagewright.cluster.atomic_file import save_text
from stagewright.engine.clock import write_clock
from stagewright.engine.context import WorkerContext
from stagewright.engine.fault import activity
from stagewright.engine.job import load_model, make_optimizer
from stagewright.engine.launch import launch
from stagewright.engine.recorder import recorder
from stagewright.engine.replica import Replica, capture_for
from stagewright.engine.training_job import load_training_model, options_file
from stagewright.plan.value import Plan
from stagewright.store.run import RunFolder
from stagewright.zoo.model import Batch

__all__ = ["record_operators", "run_operators"]

JOB = "stagewright.engine.operator_job:run_operators"
_ANCHOR = "stagewright anchor"
_WARM_UP = 2
_FILE = "operators.jsonl"


def record_operators(folder: RunFolder) -> None:
    """Run a run's plan again and add the operators of one step to its folder."""
    plan = folder.plan()
    with tempfile.TemporaryDirectory(prefix="stagewright-operators-") as root:
        other = RunFolder.create(root, plan, environment=folder.environment())
        options = options_file(folder)
        if options.is_file():
            shutil.copy(options, options_file(other))
        launch(plan, other, job=JOB)
        for rank in range(plan.mesh.num_workers):
            text = (other.worker(rank).path / _FILE).read_text(encoding="utf-8")
            save_text(text, folder.worker(rank).path / _FILE)


def run_operators(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """This worker's part."""
    folder = run_folder.worker(context.rank)
    write_clock(context, folder)
    activity.begin("load model")
    model = load_model(plan, context) if plan.task is None else load_training_model(plan, context, run_folder)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    activity.begin("capture")
    replica = Replica(plan, model, context, capture_for(plan, model))
    parameters = [one for one in replica.module.parameters() if one.requires_grad]
    optimizer = make_optimizer(plan.optimizer, parameters) if parameters and plan.training else None

    def step() -> None:
        if not plan.training:
            for _ in replica.stream(batch, 1):
                pass
            return
        replica.zero_gradients()
        outcome = replica.train_step(batch)
        if optimizer is not None:
            begun = recorder.now()
            optimizer.step()
            recorder.add("optimizer", begun)
        replica.total_loss(outcome)

    for _ in range(_WARM_UP):
        step()
    recorder.open(context.torch_device)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (context.torch_device.type == "cuda")
    with profile(activities=kinds) as profiler:
        before_s = time.perf_counter()
        with record_function(_ANCHOR):
            after_s = time.perf_counter()
        with recorder.step(0):
            step()
    recorder.close()
    rows = _rows(profiler.events(), (before_s + after_s) / 2, recorder.rows())
    text = "".join(json.dumps(row) + "\n" for row in rows)
    folder.path.mkdir(parents=True, exist_ok=True)
    save_text(text, folder.path / _FILE)


def _rows(events: Any, anchor_s: float, recorded: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Actions and the operators in them, by begin; an operator lies inside its action and those around it."""
    anchor = next(one for one in events if one.name == _ANCHOR)
    shift_s = anchor_s - anchor.time_range.start * 1e-6
    actions = [one for one in recorded if one["stream"] == "compute" and one["kind"] != "collective"]
    whole, inner = actions[0], [one for one in actions[1:] if one["kind"] != "recompute"]
    starts = [one["start_s"] for one in inner]
    rows = [_row(_title(one), one["start_s"], one["end_s"], 0, one, is_operator=False) for one in [whole, *inner]]
    around: list[tuple[float, Any]] = []  # operators that enclose the next one: end, action
    named = [one for one in events if _is_operator(one)]
    for one in sorted(named, key=lambda each: (each.time_range.start, -each.time_range.end)):
        start_s, end_s = (moment * 1e-6 + shift_s for moment in (one.time_range.start, one.time_range.end))
        middle_s = (start_s + end_s) / 2
        if not whole["start_s"] <= middle_s <= whole["end_s"]:
            continue
        at = bisect.bisect_right(starts, middle_s) - 1
        home = inner[at] if at >= 0 and middle_s <= inner[at]["end_s"] else None
        low_s, high_s = _gap(inner, at, whole) if home is None else (home["start_s"], home["end_s"])
        while around and (around[-1][0] <= start_s or around[-1][1] is not home):
            around.pop()
        if around:
            high_s = min(high_s, around[-1][0])
        start_s, end_s = max(start_s, low_s), min(end_s, high_s)
        start_s = min(start_s, end_s)
        rows.append(_row(one.name, start_s, end_s, len(around), home, is_operator=True))
        around.append((end_s, home))
    yield from sorted(rows, key=lambda row: (row["start_s"], -row["end_s"], row["is_operator"], row["depth"]))


def _gap(inner: list[dict[str, Any]], at: int, whole: dict[str, Any]) -> tuple[float, float]:
    """The time between two actions."""
    low_s = inner[at]["end_s"] if at >= 0 else whole["start_s"]
    high_s = inner[at + 1]["start_s"] if at + 1 < len(inner) else whole["end_s"]
    return low_s, high_s


def _row(
    name: str, start_s: float, end_s: float, depth: int, action: dict[str, Any] | None, *, is_operator: bool
) -> dict[str, Any]:
    return {
        "name": name,
        "start_s": start_s,
        "end_s": end_s,
        "depth": depth,
        "is_operator": is_operator,
        "action": "between" if action is None else action["kind"],
        "stage": None if action is None else action["stage"],
        "microbatch": None if action is None else action["microbatch"],
    }


def _title(action: dict[str, Any]) -> str:
    what = "loss" if action["note"] == "loss" else action["kind"]
    return what if action["microbatch"] is None else f"{what} {action['microbatch']}"


def _is_operator(event: Any) -> bool:
    """An operator of any library, not autograd's own frames nor what runs in Gloo's threads or on the GPU."""
    on_host = event.device_type == DeviceType.CPU
    return "::" in event.name and on_host and not event.name.startswith(("autograd::", "Optimizer."))
