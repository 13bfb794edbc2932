"""``sw.attach()``: one line in a training script, and its steps are measured.

    optimizer.step() ends ──► a line of metrics: step time, data loading, garbage collection, memory
                          └─► steps 5 to 7, 50 to 52, 500 to 502, … run under torch's profiler, whose files are kept

All ranks profile the same steps, so that they can be compared. What recording itself costs is measured and written with
each step. Errors of recording never end the user's run.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from stagewright.attachment import hooks
from stagewright.attachment.folder import create_folder, finish_folder
from stagewright.attachment.open_spans import OpenSpans
from stagewright.attachment.run_queue import RunQueue
from stagewright.errors import StagewrightError
from stagewright.runs.run_folder import RunFolder
from stagewright.runs.worker_folder import WorkerFolder
from stagewright.trace.attached import profile_path

FOLDER_VARIABLE = "STAGEWRIGHT_ATTACH"
STEPS_VARIABLE = "STAGEWRIGHT_ATTACH_STEPS"
PROFILED_STEPS = (5, 50, 500, 5_000, 50_000)
"""First steps of what is profiled: ever rarer, so that it costs less than 1 % of a long run."""
WINDOW = 3
"""Steps that are profiled at a time."""

_WRITE_EVERY_S = 0.2  # metrics of short steps are written together
_current: Attached | None = None


def attach(
    root: str | Path = "runs", *, name: str | None = None, profile_steps: Sequence[int] | None = None
) -> Attached:
    """Measure the training loop of this process; call it once, on every rank, before the first step.

    Nothing else changes in the script: a step ends when the first optimizer has stepped. The result is also a callback
    for trainers: ``Trainer(…, callbacks=[sw.attach()])`` adds the loss and ends the recording with the training.

    Args:
        root: Where the run folder is created.
        name: Name of the job; by default that of the script.
        profile_steps: From which steps on, counted from 1, three run under torch's profiler; by default 5, 50, 500, …

    Example:
        run = sw.attach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            model(x).square().mean().backward()
            optimizer.step()
        run.stop()
        print(run.path)
    """
    global _current
    if _current is None:
        text = os.environ.get(STEPS_VARIABLE)
        steps = profile_steps or ([int(word) for word in text.split(",")] if text else PROFILED_STEPS)
        _current = Attached(Path(root), name, frozenset(steps))
    return _current


class Attached:
    """The recording of a training loop."""

    def __init__(self, root: Path, name: str | None, profile_steps: frozenset[int]) -> None:
        self._root = root
        self._name = name or Path(sys.argv[0] or "python").name
        self._profile_steps = profile_steps
        self._folder: RunFolder | None = None
        self._worker: WorkerFolder | None = None
        self._main: weakref.ref[Optimizer] | None = None
        self._owns_folder = False
        self._step = 0
        self._begin_s = 0.0
        self._profiler: torch.profiler.profile | None = None
        self._span: Any = None
        self._profile_begin = 0
        self._spent_s = 0.0
        self._run_queue: RunQueue | None = None
        self._begin_cpu_s = 0.0
        self._begin_queue_s: float | None = None
        self._loading_queue_s: float | None = None
        self._loss: float | None = None
        self._rank, self._size = 0, 1
        self._pending: list[dict[str, Any]] = []
        self._written_s = 0.0
        self._is_stopped = False
        self._clear()
        self._hooks: ExitStack = hooks.install(self)
        self._spans = OpenSpans(self._hooks)
        atexit.register(self.stop)

    @property
    def path(self) -> Path | None:
        """The run folder; None before the first step."""
        return None if self._folder is None else self._folder.path

    def stop(self) -> None:
        """End the recording; also at the end of the program."""
        global _current
        if self._is_stopped:
            return
        self._is_stopped = True
        atexit.unregister(self.stop)
        if _current is self:
            _current = None
        try:
            if self._profiler is not None:
                self._end_span()
                profiler = self._profiler
                self._spans.call_when_ended(lambda: self._try(profiler.stop))
            self._hooks.close()
            if self._run_queue is not None:
                self._run_queue.close()
            if self._worker is not None:
                self._flush()
                self._worker.close()
            if self._folder is not None and self._owns_folder:
                finish_folder(self._folder, failed=getattr(sys, "last_value", None) is not None)
        except (StagewrightError, OSError, RuntimeError) as error:
            _warn(error)

    # What the hooks report.

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        main = self._main() if self._main is not None else None
        if main is None:
            self._main = weakref.ref(optimizer)
        elif main is not optimizer:
            return  # a step ends with the first of several optimizers
        self._try(self._end_step)

    def batch_loading(self) -> None:
        self._loading_queue_s = self._queue_s()

    def batch_loaded(self, seconds: float, batch: Any) -> None:
        self._loading_s += seconds
        end_s = self._queue_s()
        if self._loading_queue_s is not None and end_s is not None:
            self._loading_runqueue_s += end_s - self._loading_queue_s
        samples, tokens = hooks.batch_size(batch)
        self._samples += samples
        self._tokens += tokens

    def checkpoint_saved(self, seconds: float) -> None:
        self._checkpoint_s += seconds

    def garbage_collected(self, seconds: float) -> None:
        self._collection_s += seconds

    # A callback of Hugging Face's Trainer, and by its protocol of Lightning.

    def on_log(self, *args: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        loss = (logs or {}).get("loss")
        if isinstance(loss, int | float):
            self._loss = float(loss)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.stop()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict"):
            return lambda *args, **kwargs: None
        if name == "state_dict":
            return lambda: {}  # noqa: PIE807  # Lightning looks at the code of its callbacks' methods
        if name == "state_key":
            return "stagewright.attach"
        raise AttributeError(name)

    def _try(self, function: Callable[[], None]) -> None:
        """Call a function; its error ends the recording, not the user's run."""
        try:
            function()
        except (StagewrightError, OSError, RuntimeError) as error:
            _warn(error)
            self.stop()

    def _end_step(self) -> None:
        now_s = time.perf_counter()
        self._step += 1
        if self._worker is None:
            self._open()
        else:
            self._write(now_s - self._begin_s, profiled=self._profiler is not None)
        is_last = self._profiler is not None and self._step - self._profile_begin + 1 >= WINDOW
        if self._profiler is not None:
            self._end_span()
            if not is_last:
                self._begin_span()
        self._clear()
        self._begin_scheduling()
        self._begin_s = time.perf_counter()
        self._spent_s = self._begin_s - now_s
        if is_last or (self._profiler is None and self._step + 1 in self._profile_steps):
            self._spans.call_when_ended(lambda: self._try(self._change_profile))

    def _change_profile(self) -> None:
        """End a profile that has all of its steps, and begin one where the next step is profiled."""
        begin_s = time.perf_counter()
        if self._profiler is not None and self._step - self._profile_begin + 1 >= WINDOW:
            self._end_profile()
        if self._step + 1 in self._profile_steps and self._profiler is None:
            self._begin_profile()
        self._begin_scheduling()
        spent_s = time.perf_counter() - begin_s
        self._begin_s += spent_s
        self._spent_s += spent_s

    def _write(self, step_s: float, *, profiled: bool) -> None:
        loss = {} if self._loss is None else {"loss": self._loss}
        values = {
            "kind": "step",
            "step": self._step,
            "total": 0,
            "seconds": step_s,
            "samples": self._samples * self._size,
            "tokens": self._tokens * self._size,
            "loading_s": self._loading_s,
            "checkpoint_s": self._checkpoint_s,
            "garbage_collection_s": self._collection_s,
            "profiled": profiled,
            "recording_s": self._spent_s,
            **self._scheduling(),
            **loss,
        }
        self._pending.append(values)
        if time.perf_counter() - self._written_s > _WRITE_EVERY_S:
            self._flush()

    def _queue_s(self) -> float | None:
        """Return the time of this thread in the run queue; None outside of profiled steps, which need no cause."""
        return None if self._profiler is None or self._run_queue is None else self._run_queue.waited_s()

    def _begin_scheduling(self) -> None:
        self._begin_queue_s, self._loading_queue_s = self._queue_s(), None
        self._begin_cpu_s = time.thread_time()

    def _scheduling(self) -> dict[str, float]:
        """Return how long the training thread was on a core in this step, and how long it waited for one."""
        end_s = self._queue_s()
        if self._begin_queue_s is None or end_s is None:
            return {}
        return {
            "cpu_s": time.thread_time() - self._begin_cpu_s,
            "runqueue_s": end_s - self._begin_queue_s,
            "loading_runqueue_s": self._loading_runqueue_s,
        }

    def _flush(self) -> None:
        """Write the steps since the last time, with the memory of now."""
        assert self._worker is not None
        memory_bytes = _memory_bytes()
        for values in self._pending:
            self._worker.append_metrics(**values, memory_bytes=memory_bytes)
        self._pending.clear()
        self._written_s = time.perf_counter()

    def _clear(self) -> None:
        self._loading_s = self._checkpoint_s = self._collection_s = self._loading_runqueue_s = 0.0
        self._samples = self._tokens = 0

    def _open(self) -> None:
        """Create the run folder, or join that of rank 0; the first step, with its set-up, is not measured."""
        is_distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if is_distributed else 0
        size = self._size = dist.get_world_size() if is_distributed else 1
        given = os.environ.get(FOLDER_VARIABLE)
        path: list[Any] = [None]
        if self._rank == 0:
            batch = max(1, self._samples) * size
            self._folder = create_folder(self._root, self._name, size, batch, path=given)
            path = [str(self._folder.path.absolute())]
            self._owns_folder = given is None
        if is_distributed and size > 1:
            dist.broadcast_object_list(path, src=0)
        self._folder = self._folder or RunFolder(Path(path[0]))
        self._worker = self._folder.worker(self._rank)
        self._run_queue = RunQueue()

    def _begin_profile(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=False)
        try:
            profiler.start()
        except RuntimeError:
            return  # the script itself is profiling
        self._profiler = profiler
        self._profile_begin = self._step + 1
        self._spans.watch()
        self._begin_span()

    def _begin_span(self) -> None:
        self._span = self._spans.begin(f"ProfilerStep#{self._step + 1}")

    def _end_span(self) -> None:
        if self._span is not None:
            self._spans.end(self._span)
            self._span = None

    def _end_profile(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        if self._folder is not None:
            path = profile_path(self._folder, self._rank, self._profile_begin)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}")
            profiler.export_chrome_trace(str(temporary))
            temporary.replace(path)


def _memory_bytes() -> int | None:
    """Return the memory that this rank uses: allocated on its GPU, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _warn(error: BaseException) -> None:
    sys.stderr.write(f"stagewright: attach stopped recording: {error}\n")
