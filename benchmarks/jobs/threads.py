"""What this process took of its core, thread by thread, as Linux counts it: read before and after what is timed.

    main thread                       computes and waits for messages; CPU autograd works in it, too
    gloo_tcp_loop, pt_gloo_runloop    move what is sent and received, on the same core
    others                            those that watch the worker

    /proc/self/task/ID/schedstat      nanoseconds on a core, nanoseconds ready without one, turns
    /proc/self/task/ID/status         how often it was put off its core while it could have gone on

Where there is no such folder nothing is counted.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Counters", "ThreadCounters", "mean_taken", "read_counters", "taken"]

_TASKS = Path("/proc/self/task")
_PUT_OFF = re.compile(r"^nonvoluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadCounters:
    """One thread since it began."""

    name: str = ""
    """As the system shows it."""
    cpu_s: float = 0.0
    """On a core."""
    ready_s: float = 0.0
    """Ready to go on, but another had the core."""
    put_off: int = 0
    """How often another took the core away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """This process since it began."""

    threads: dict[int, ThreadCounters]
    """By thread; the main thread has the process's own number."""
    page_faults: int
    """Pages that the kernel had to give."""


def read_counters(tasks: Path = _TASKS) -> Counters:
    """All threads as they are now."""
    found = {}
    for folder in tasks.iterdir() if tasks.is_dir() else ():
        try:
            cpu_ns, ready_ns, _ = map(int, (folder / "schedstat").read_text().split())
            put_off = _PUT_OFF.search((folder / "status").read_text())
            name = (folder / "comm").read_text().strip()
        except OSError:
            continue  # it has just ended, or this kernel does not count
        found[int(folder.name)] = ThreadCounters(
            name=name, cpu_s=cpu_ns / 1e9, ready_s=ready_ns / 1e9, put_off=int(put_off[1]) if put_off else 0
        )
    return Counters(threads=found, page_faults=resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


def taken(before: Counters, after: Counters, main: int) -> dict[str, float]:
    """What was taken between two readings; ``main`` is the thread that computes. Empty where nothing is counted."""
    if main not in before.threads or main not in after.threads:
        return {}
    cpu = {"main": 0.0, "gloo": 0.0, "others": 0.0}
    for number, one in after.threads.items():
        kind = "main" if number == main else "gloo" if "gloo" in one.name else "others"
        cpu[kind] += one.cpu_s - before.threads.get(number, ThreadCounters()).cpu_s
    first, last = before.threads[main], after.threads[main]
    return {
        **{f"{kind}_cpu_s": seconds for kind, seconds in cpu.items()},
        "main_ready_s": last.ready_s - first.ready_s,
        "main_put_off": last.put_off - first.put_off,
        "page_faults": after.page_faults - before.page_faults,
    }


def mean_taken(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over rounds of each."""
    return {name: sum(one[name] for one in rounds) / len(rounds) for name in rounds[0]}
