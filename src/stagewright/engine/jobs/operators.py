"""Record the operators of a run's plan: run it again for three steps, the last one under torch's profiler.

    run folder ─► temporary folder, same plan ─► workers ─► operators.jsonl of each worker ─► back to the run folder

The profiler slows a run down and fills memory, so it is never active while a run is measured. Operator times are
converted to the clock of the recorded actions and clamped to the action that contains them.
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

from stagewright.engine.jobs.train import load_training_model, options_file, read_options
from stagewright.engine.launch.launcher import launch
from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.worker.clock import write_clock
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.recorder import recorder
from stagewright.files.atomic import save_text
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch

JOB = "stagewright.engine.jobs.operators:run_operators"
_MARK = "stagewright mark"
_WARM_UP = 2
_FILE = "operators.jsonl"


def record_operators(folder: RunFolder) -> None:
    """Run the plan of a run again and save the operators of one step to its folder."""
    plan = folder.plan()
    with tempfile.TemporaryDirectory(prefix="stagewright-operators-") as root:
        temporary = RunFolder.create(root, plan, environment=folder.environment())
        options = options_file(folder)
        if options.is_file():
            shutil.copy(options, options_file(temporary))
        launch(plan, temporary, job=JOB)
        for rank in range(plan.mesh.num_workers):
            text = (temporary.worker(rank).path / _FILE).read_text(encoding="utf-8")
            save_text(text, folder.worker(rank).path / _FILE)


def run_operators(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Record the operators on this worker."""
    folder = run_folder.worker(context.rank)
    write_clock(context, folder)
    activity.begin("load model")
    if plan.task is None:
        model = load_model(plan, context, hollow=True)
    else:
        model, _ = load_training_model(plan, context, read_options(run_folder))
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    activity.begin("capture")
    runner = StepRunner(plan, model, context, capture_for(plan, model))
    optimizer = runner.make_optimizer() if plan.training else None

    def step() -> None:
        if not plan.training:
            for _ in runner.stream(batch, 1):
                pass
            return
        runner.part.zero_gradients()
        result = runner.train_step(batch)
        runner.optimizer_step(optimizer)
        runner.total_loss(result)

    for _ in range(_WARM_UP):
        step()
    clock = _ProfiledClock()
    recorder.open(clock=clock.read)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (context.torch_device.type == "cuda")
    with profile(activities=activities) as profiler, recorder.step(0):
        step()
    recorder.close()
    text = "".join(json.dumps(row) + "\n" for row in _rows(profiler.events(), clock, recorder.rows()))
    folder.path.mkdir(parents=True, exist_ok=True)
    save_text(text, folder.path / _FILE)


class _ProfiledClock:
    """A clock whose readings also appear in the profile, which relates recorded actions to profiled operators."""

    def __init__(self) -> None:
        self._numbers = count()
        self._names: dict[float, str] = {}
        self._spans: dict[str, tuple[float, float]] = {}

    def read(self) -> float:
        """Return the current time; every reading is unique."""
        name = f"{_MARK} {next(self._numbers)}"
        with record_function(name):
            moment_s = time.perf_counter()
            self._names[moment_s] = name
        return moment_s

    def find(self, events: Any) -> float:
        """Find the readings among the profiler's events; return the offset from the profiler's clock to ours."""
        self._spans = {event.name: _span(event) for event in events if event.name.startswith(_MARK)}
        matched = [(moment_s, name) for moment_s, name in self._names.items() if name in self._spans]
        return median(moment_s - sum(self._spans[name]) / 2 for moment_s, name in matched)  # without Gloo's threads

    def between(self, action: Mapping[str, Any]) -> tuple[float, float]:
        """Return the span of an action on the profiler's clock: end of its first reading to start of its last."""
        return self._spans[self._names[action["start_s"]]][1], self._spans[self._names[action["end_s"]]][0]


def _rows(events: Any, clock: _ProfiledClock, recorded: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield actions and their operators by start time; an operator lies inside its action and its parent operators."""
    offset_s = clock.find(events)
    actions = [row for row in recorded if row["stream"] == "compute" and row["kind"] != "collective"]
    step, inner = actions[0], [action for action in actions[1:] if action["kind"] != "recompute"]
    spans = [clock.between(action) for action in inner]
    begin_s, end_s = clock.between(step)
    starts = [span[0] for span in spans]
    rows = [_row(_title(row), row["start_s"], row["end_s"], 0, row, is_operator=False) for row in [step, *inner]]
    parents: list[tuple[float, Any]] = []  # operators that enclose the next one: end, action
    operators = [(*_span(event), event.name) for event in events if _is_operator(event)]
    for start_s, stop_s, name in sorted(operators, key=lambda operator: (operator[0], -operator[1])):
        if start_s < begin_s or stop_s > end_s:
            continue
        index = bisect.bisect_right(starts, start_s) - 1
        action = inner[index] if index >= 0 and start_s <= spans[index][1] else None
        low_s, high_s = _gap(inner, index, step) if action is None else (action["start_s"], action["end_s"])
        start_s, stop_s = start_s + offset_s, stop_s + offset_s
        while parents and (parents[-1][0] <= start_s or parents[-1][1] is not action):
            parents.pop()
        if parents:
            high_s = min(high_s, parents[-1][0])
        stop_s = max(low_s, min(stop_s, high_s))
        start_s = min(max(start_s, low_s), stop_s)
        rows.append(_row(name, start_s, stop_s, len(parents), action, is_operator=True))
        parents.append((stop_s, action))
    yield from sorted(rows, key=lambda row: (row["start_s"], -row["end_s"], row["is_operator"], row["depth"]))


def _span(event: Any) -> tuple[float, float]:
    """Return start and end in seconds of the profiler's clock."""
    return event.time_range.start * 1e-6, event.time_range.end * 1e-6


def _gap(inner: list[dict[str, Any]], index: int, step: dict[str, Any]) -> tuple[float, float]:
    """Return the span between an action and the next one."""
    low_s = inner[index]["end_s"] if index >= 0 else step["start_s"]
    high_s = inner[index + 1]["start_s"] if index + 1 < len(inner) else step["end_s"]
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
    kind = "loss" if action["note"] == "loss" else action["kind"]
    return kind if action["microbatch"] is None else f"{kind} {action['microbatch']}"


def _is_operator(event: Any) -> bool:
    """Return whether an event is an operator on the main thread, not an autograd frame, Gloo thread or GPU kernel."""
    on_host = event.device_type == DeviceType.CPU
    return "::" in event.name and on_host and not event.name.startswith(("autograd::", "torch::autograd::"))
