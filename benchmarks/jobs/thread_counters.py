"""CPU time of this process by thread, from Linux counters: read before and after a measurement.

    main thread                       computes and waits for receives; CPU autograd runs in it too
    gloo_tcp_loop, pt_gloo_runloop    send and receive, on the same core
    others                            monitor the worker

    /proc/self/task/ID/schedstat      nanoseconds on a core, nanoseconds runnable without one, time slices
    /proc/self/task/ID/status         involuntary context switches

Without that folder nothing is counted.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Counters", "ThreadCounters", "counter_means", "counters_between", "read_counters"]

_TASKS = Path("/proc/self/task")
_PREEMPTIONS = re.compile(r"^nonvoluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadCounters:
    """Counters of one thread since its start."""

    name: str = ""
    cpu_s: float = 0.0
    runnable_s: float = 0.0
    """Time runnable, but without a core."""
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counters of this process since its start."""

    threads: dict[int, ThreadCounters]
    """By thread id; the main thread's is the process id."""
    page_faults: int


def read_counters(tasks: Path = _TASKS) -> Counters:
    """Read the current counters of all threads."""
    threads = {}
    for folder in tasks.iterdir() if tasks.is_dir() else ():
        try:
            cpu_ns, runnable_ns, _ = map(int, (folder / "schedstat").read_text().split())
            preemptions = _PREEMPTIONS.search((folder / "status").read_text())
            name = (folder / "comm").read_text().strip()
        except OSError:
            continue  # the thread has just ended, or this kernel has no such counters
        threads[int(folder.name)] = ThreadCounters(
            name=name,
            cpu_s=cpu_ns / 1e9,
            runnable_s=runnable_ns / 1e9,
            preemptions=int(preemptions[1]) if preemptions else 0,
        )
    return Counters(threads=threads, page_faults=resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


def counters_between(before: Counters, after: Counters, main: int) -> dict[str, float]:
    """Return the difference of two readings; ``main`` is the computing thread. Empty without counters."""
    if main not in before.threads or main not in after.threads:
        return {}
    cpu = {"main": 0.0, "gloo": 0.0, "others": 0.0}
    for thread_id, thread in after.threads.items():
        kind = "main" if thread_id == main else "gloo" if "gloo" in thread.name else "others"
        cpu[kind] += thread.cpu_s - before.threads.get(thread_id, ThreadCounters()).cpu_s
    first, last = before.threads[main], after.threads[main]
    return {
        **{f"{kind}_cpu_s": seconds for kind, seconds in cpu.items()},
        "main_ready_s": last.runnable_s - first.runnable_s,
        "main_put_off": last.preemptions - first.preemptions,
        "page_faults": after.page_faults - before.page_faults,
    }


def counter_means(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each counter over rounds."""
    return {name: sum(counters[name] for counters in rounds) / len(rounds) for name in rounds[0]}
