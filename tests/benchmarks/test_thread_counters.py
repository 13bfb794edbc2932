from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel has no scheduler statistics"
)


def work(seconds: float) -> None:
    """Compute for that much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def counters_module() -> Any:
    return importlib.import_module("thread_counters")


def test_cpu_time_is_counted_per_thread() -> None:
    worked, done, times_s = threading.Event(), threading.Event(), []

    def work_in_thread() -> None:
        work(0.1)
        times_s.append(time.thread_time())
        worked.set()
        done.wait()

    thread = threading.Thread(target=work_in_thread)
    begun_s, before = time.thread_time(), counters_module().read_counters()
    thread.start()
    work(0.2)
    assert worked.wait(60)
    after, own_s = counters_module().read_counters(), time.thread_time() - begun_s
    done.set()
    thread.join()
    used = counters_module().counters_between(before, after, threading.get_native_id())
    assert used["main_cpu_s"] == pytest.approx(own_s, abs=0.05)
    assert used["others_cpu_s"] == pytest.approx(times_s[0], abs=0.05)
    assert used["gloo_cpu_s"] == 0.0


def make_threads(**threads_by_number: Any) -> Any:
    return {int(number[1:]): counters_module().ThreadCounters(**given) for number, given in threads_by_number.items()}


def test_counters_between_two_readings() -> None:
    """Thread 3 starts in between; thread 2 is Gloo's."""
    first = make_threads(
        n1={"name": "python", "cpu_s": 1.0, "runnable_s": 0.1, "preemptions": 4},
        n2={"name": "gloo_tcp_loop", "cpu_s": 0.5},
    )
    last = make_threads(
        n1={"name": "python", "cpu_s": 3.0, "runnable_s": 0.4, "preemptions": 9},
        n2={"name": "gloo_tcp_loop", "cpu_s": 0.75},
        n3={"name": "python", "cpu_s": 0.125},
    )
    counters = counters_module().Counters
    before, after = counters(threads=first, page_faults=10), counters(threads=last, page_faults=30)
    used = counters_module().counters_between(before, after, 1)
    assert used == pytest.approx(
        {
            "main_cpu_s": 2.0,
            "gloo_cpu_s": 0.25,
            "others_cpu_s": 0.125,
            "main_ready_s": 0.3,
            "main_put_off": 5,
            "page_faults": 20,
        }
    )
    assert counters_module().counter_means([used, dict.fromkeys(used, 0.0)])["main_cpu_s"] == 1.0


def test_without_counters_results_are_empty(tmp_path: Path) -> None:
    counters = counters_module().read_counters(tmp_path / "none")
    assert counters.threads == {}
    assert counters_module().counters_between(counters, counters, 1) == {}
    assert counters_module().counter_means([{}, {}]) == {}
