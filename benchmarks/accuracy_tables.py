"""Accuracy after training with each codec, strategy and number of workers, over seeds, on real data.

    cd benchmarks && python -m accuracy_runs DATA PACKED                 pack data and weights, once, anywhere
    python benchmarks/accuracy_tables.py PACKED --output FILE            one GPU with CUDA MPS; again: continues FILE
    python benchmarks/accuracy_tables.py PACKED --output FILE --tiny     on CPU cores, a few steps: tests the script

MobileNetV2 on CIFAR-10 (96 pixels) and a MiniLM encoder on CoLA and RTE, RTE in batches of 32 and (rte64) of 64, from
pretrained weights, in float32. `rte-long` trains RTE for 30 epochs, on all but held-out samples, and is evaluated on
those. Each worker is a process with a share of the GPU; every activation and gradient between stages goes through the
codec. Several trainings run at once. Each result is written when it is there, and nothing is started that would not end
before `--limit-s`; with a limit of 0, data are only unpacked.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from accuracy_runs.cases import CODECS, RECIPES, SEEDS, TASKS, Case, all_cases, best_rate, key_of
from accuracy_runs.group import Group
from accuracy_runs.store import samples_in, unpack
from accuracy_runs.summary import lines, summarize
from record import machine_text, write_record

_EXPECTED_S = {"cifar10": 80.0, "cola": 60.0, "rte": 60.0}
"""By samples, on two workers, until the first training of a task has ended."""
_START_S = 40.0
"""Of a new group."""
_ATTEMPTS = 2
_FAILURES = 3
"""Before any success, after which shares of the GPU are given up."""
_TIMES_EXPECTED = 4.0
"""A training that takes so much longer than the others of its task is ended."""


class Schedule:
    """Runs cases in groups of workers until all are done or the time is over."""

    def __init__(self, options: argparse.Namespace, store: Path, rows: list[dict[str, Any]]) -> None:
        self.options, self.store, self.rows = options, store, rows
        self.begun_s = time.monotonic()
        self.groups: list[Group] = []
        self.failures: dict[tuple[Any, ...], int] = {}
        self.logs = Path(tempfile.mkdtemp(prefix="accuracy-tables-"))
        self.num_started = 0
        self.share = options.share
        done = {key_of(row) for row in rows if "error" not in row}
        present = samples_in(store)
        self.pending = [
            case
            for case in all_cases(options.tasks.split(","), options.codecs.split(","), options.seeds)
            if RECIPES[case.task].samples in present and case.key not in done
        ]

    @property
    def left_s(self) -> float:
        return float(self.options.limit_s - (time.monotonic() - self.begun_s))

    def run(self) -> None:
        try:
            while self.left_s > 0 and (self.pending or self._busy()):
                while self._start_next():
                    pass
                if not self._busy():
                    break  # nothing that is left would end in time
                time.sleep(0.1)
                for group in self._busy():
                    self._collect(group)
        finally:
            for group in self.groups:
                group.close()

    def _busy(self) -> list[Group]:
        return [group for group in self.groups if group.busy_with is not None]

    def _start_next(self) -> bool:
        """Start the first case that is ready, ends in time and has room; whether there was one."""
        for case in self.pending:
            ready = self._resolve(case)
            if ready is None or self._expected_s(case) + 2 > self.left_s:
                continue
            group = self._group(case.workers)
            if group is None:
                return False  # by priority: do not let smaller ones pass it
            self.pending.remove(case)
            group.start(ready, {"tiny": self.options.tiny, "hang_s": 120.0})
            return True
        return False

    def _resolve(self, case: Case) -> Case | None:
        """Return the case with its learning rate; None: it is not known yet."""
        if case.is_search:
            return case
        searched = [row for row in self.rows if row["is_search"]]
        rate = best_rate(case.task, searched)
        return None if rate is None else replace(case, learning_rate=rate)

    def _expected_s(self, case: Case) -> float:
        """Expect what the slowest training of the task with as many workers has taken, in this run."""
        like = [row for row in self.rows if row["task"] == case.task and row.get("run") == self.options.run]
        known = [
            row["start_s"] + row["training_s"] + row["evaluation_s"]
            for row in like
            if "error" not in row and (row["workers"], row["strategy"]) == (case.workers, case.strategy)
        ]
        unknown = _EXPECTED_S[RECIPES[case.task].samples] * (case.workers / 2) ** 0.5
        return max(known) if known else 150.0 if self.options.tiny else unknown

    def _group(self, size: int) -> Group | None:
        """Return an idle group of this size: one that is there, or a new one where there is room."""
        idle = [group for group in self.groups if group.busy_with is None]
        for group in idle:
            if group.size == size:
                return group
        room = self.options.workers - sum(group.size for group in self.groups)
        while room < size and idle:
            group = idle.pop()
            group.close()
            self.groups.remove(group)
            room += group.size
        if room < size:
            return None
        if self.options.tiny:
            devices = [f"cpu:{rank % os.cpu_count()}" for rank in range(size)]  # type: ignore[operator]
        else:
            devices = [f"cuda:0/{self.share}" if self.share > 1 else "cuda:0"] * size
        self.num_started += 1
        self.groups.append(Group(devices, self.store, self.logs / f"group-{self.num_started:03}"))
        return self.groups[-1]

    def _collect(self, group: Group) -> None:
        """Record the result of a group's case if it is there; end and replace a group that failed."""
        case = group.busy_with
        assert case is not None
        result = group.poll()
        has_ended = any(row.get("run") == self.options.run and "error" not in row for row in self.rows)
        limit = (_TIMES_EXPECTED if has_ended and not self.options.tiny else 1.5) * self._expected_s(case) + _START_S
        if result is None and group.seconds > limit:
            result = {"error": f"not done after {limit:.0f} s", "seconds": group.seconds}
        if result is None:
            return
        row = {**case.to_dict(), "run": self.options.run, **result}
        self._report(row)
        if "error" in result:
            group.close()
            self.groups.remove(group)
            self.failures[case.key] = self.failures.get(case.key, 0) + 1
            if self.share > 1 and not has_ended and sum(self.failures.values()) >= _FAILURES:
                print("trainings on shares of the GPU fail: new groups use the whole GPU", flush=True)
                self.share = 1
            if self.failures[case.key] < _ATTEMPTS:
                self.pending.insert(0, case if case.is_search else replace(case, learning_rate=None))
                return
        self.rows.append({"score": None, **row})
        write_rows(self.options.output, self.rows)

    def _report(self, row: dict[str, Any]) -> None:
        name = f"{row['task']} {row['strategy']}={row['workers']} {row['codec']} seed {row['seed']}"
        rate = f", lr {row['learning_rate']:g}" + (", held out" if row["is_search"] else "")
        text = row["error"] if "error" in row else f"{row['score']:.2f}, loss {row['training_loss']:.3f}"
        times = "" if "error" in row else f" (start {row['start_s']:.1f}, training {row['training_s']:.1f})"
        elapsed = self.options.limit_s - self.left_s
        print(f"{elapsed:6.1f} s  {name}{rate}: {text}; {row['seconds']:.1f} s{times}", flush=True)


def write_rows(output: Path, rows: list[dict[str, Any]]) -> None:
    partial = output.with_suffix(".partial")
    write_record(partial, {"summary": summarize(rows), "rows": rows})
    partial.replace(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path, help="folder of packed data; what is new in it is unpacked")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()) / "stagewright-accuracy")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=16, help="worker processes at a time")
    parser.add_argument("--share", type=int, default=4, help="a worker may use 1/SHARE of the GPU's SMs; 1: no MPS")
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    begun_s = time.monotonic()
    rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"] if options.output.exists() else []
    rows = [row for row in rows if "error" not in row]
    options.run = 1 + max((row["run"] for row in rows), default=0)
    unpack(options.packed, options.store)
    options.share = 1 if options.tiny else options.share
    if options.share > 1:
        from stagewright.errors import StagewrightError
        from stagewright.gpu_sharing.mps import use_share

        try:
            use_share(0, options.share)  # starts the MPS daemon of all groups, which inherit this environment
        except StagewrightError as error:
            print(f"{error}; every worker uses the whole GPU", flush=True)
            options.share = 1
    print(
        f"{time.monotonic() - begun_s:.1f} s to unpack; samples of {', '.join(samples_in(options.store))}", flush=True
    )
    options.limit_s -= time.monotonic() - begun_s
    threading.Thread(target=machine_text, daemon=True).start()  # imports torch: later it would delay the first results
    schedule = Schedule(options, options.store, rows)
    schedule.run()
    print(f"{len(schedule.pending)} trainings are left")
    for line in lines(summarize(schedule.rows)):
        print(line)


if __name__ == "__main__":
    main()
