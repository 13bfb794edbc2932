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
from collections.abc import Iterator, Mapping
from itertools import count
from statistics import median
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from stagewright.engine.jobs.measure import load_model, make_optimizer
from stagewright.engine.jobs.train import load_training_model, options_file
from stagewright.engine.launch.launcher import launch
from stagewright.engine.parallel.replica import Replica, capture_for
from stagewright.engine.worker.clock import write_clock
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.recorder import recorder
from stagewright.files.atomic import save_text
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch

__all__ = ["record_operators", "run_operators"]

JOB = "stagewright.engine.jobs.operators:run_operators"
_MARK = "stagewright mark"
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
        replica.change_parameters(optimizer)
        replica.total_loss(outcome)

    for _ in range(_WARM_UP):
        step()
    marks = _Marks()
    recorder.open(clock=marks.read)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (context.torch_device.type == "cuda")
    with profile(activities=kinds) as profiler, recorder.step(0):
        step()
    recorder.close()
    text = "".join(json.dumps(row) + "\n" for row in _rows(profiler.events(), marks, recorder.rows()))
    folder.path.mkdir(parents=True, exist_ok=True)
    save_text(text, folder.path / _FILE)


class _Marks:
    """A clock each of whose readings the profiler sees too: so that actions are known to the operator."""

    def __init__(self) -> None:
        self._numbers = count()
        self._at: dict[float, str] = {}
        self._spans: dict[str, tuple[float, float]] = {}

    def read(self) -> float:
        """This moment; different from all others."""
        name = f"{_MARK} {next(self._numbers)}"
        with record_function(name):
            moment_s = time.perf_counter()
            self._at[moment_s] = name
        return moment_s

    def find(self, events: Any) -> float:
        """Look the readings up among a profiler's events; what to add to its times to have ours."""
        self._spans = {one.name: _span(one) for one in events if one.name.startswith(_MARK)}
        seen = [(moment_s, name) for moment_s, name in self._at.items() if name in self._spans]
        return median(moment_s - sum(self._spans[name]) / 2 for moment_s, name in seen)  # not those of Gloo's threads

    def between(self, action: Mapping[str, Any]) -> tuple[float, float]:
        """From the end of an action's first reading to the begin of its last, as the profiler times them."""
        return self._spans[self._at[action["start_s"]]][1], self._spans[self._at[action["end_s"]]][0]


def _rows(events: Any, marks: _Marks, recorded: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Actions and the operators in them, by begin; an operator lies inside its action and those around it."""
    shift_s = marks.find(events)
    actions = [one for one in recorded if one["stream"] == "compute" and one["kind"] != "collective"]
    whole, inner = actions[0], [one for one in actions[1:] if one["kind"] != "recompute"]
    spans = [marks.between(one) for one in inner]
    begin_s, end_s = marks.between(whole)
    starts = [span[0] for span in spans]
    rows = [_row(_title(one), one["start_s"], one["end_s"], 0, one, is_operator=False) for one in [whole, *inner]]
    around: list[tuple[float, Any]] = []  # operators that enclose the next one: end, action
    named = [(*_span(one), one.name) for one in events if _is_operator(one)]
    for start_s, stop_s, name in sorted(named, key=lambda each: (each[0], -each[1])):
        if start_s < begin_s or stop_s > end_s:
            continue
        at = bisect.bisect_right(starts, start_s) - 1
        home = inner[at] if at >= 0 and start_s <= spans[at][1] else None
        low_s, high_s = _gap(inner, at, whole) if home is None else (home["start_s"], home["end_s"])
        start_s, stop_s = start_s + shift_s, stop_s + shift_s
        while around and (around[-1][0] <= start_s or around[-1][1] is not home):
            around.pop()
        if around:
            high_s = min(high_s, around[-1][0])
        stop_s = max(low_s, min(stop_s, high_s))
        start_s = min(max(start_s, low_s), stop_s)
        rows.append(_row(name, start_s, stop_s, len(around), home, is_operator=True))
        around.append((stop_s, home))
    yield from sorted(rows, key=lambda row: (row["start_s"], -row["end_s"], row["is_operator"], row["depth"]))


def _span(event: Any) -> tuple[float, float]:
    """Begin and end in the profiler's own seconds."""
    return event.time_range.start * 1e-6, event.time_range.end * 1e-6


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
    return "::" in event.name and on_host and not event.name.startswith(("autograd::", "torch::autograd::"))
