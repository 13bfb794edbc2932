from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(),
    reason="this kernel does not count turns on a core",
)


def work(seconds: float) -> None:
    """On the core for that long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def threads() -> Any:
    return importlib.import_module("threads")


def test_each_thread_has_its_own_time() -> None:
    worked, done, times_s = threading.Event(), threading.Event(), []

    def beside() -> None:
        work(0.1)
        times_s.append(time.thread_time())
        worked.set()
        done.wait()

    other = threading.Thread(target=beside)
    begun_s, before = time.thread_time(), threads().read_counters()
    other.start()
    work(0.2)
    assert worked.wait(60)
    after, own_s = threads().read_counters(), time.thread_time() - begun_s
    done.set()
    other.join()
    found = threads().taken(before, after, threading.get_native_id())
    assert found["main_cpu_s"] == pytest.approx(own_s, abs=0.05)
    assert found["others_cpu_s"] == pytest.approx(times_s[0], abs=0.05)
    assert found["gloo_cpu_s"] == 0.0


def made(**threads_by_number: Any) -> Any:
    return {int(number[1:]): threads().ThreadCounters(**given) for number, given in threads_by_number.items()}


def test_what_was_taken_between_two_readings() -> None:
    """Thread 3 begins in between; thread 2 moves messages."""
    first = made(
        n1={"name": "python", "cpu_s": 1.0, "ready_s": 0.1, "put_off": 4},
        n2={"name": "gloo_tcp_loop", "cpu_s": 0.5},
    )
    last = made(
        n1={"name": "python", "cpu_s": 3.0, "ready_s": 0.4, "put_off": 9},
        n2={"name": "gloo_tcp_loop", "cpu_s": 0.75},
        n3={"name": "python", "cpu_s": 0.125},
    )
    counters = threads().Counters
    before, after = counters(threads=first, page_faults=10), counters(threads=last, page_faults=30)
    found = threads().taken(before, after, 1)
    assert found == pytest.approx(
        {
            "main_cpu_s": 2.0,
            "gloo_cpu_s": 0.25,
            "others_cpu_s": 0.125,
            "main_ready_s": 0.3,
            "main_put_off": 5,
            "page_faults": 20,
        }
    )
    assert threads().mean_taken([found, dict.fromkeys(found, 0.0)])["main_cpu_s"] == 1.0


def test_where_nothing_is_counted_nothing_is_told(tmp_path: Path) -> None:
    read = threads().read_counters(tmp_path / "none")
    assert read.threads == {}
    assert threads().taken(read, read, 1) == {}
    assert threads().mean_taken([{}, {}]) == {}
