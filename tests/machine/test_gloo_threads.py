"""Threads that take no core from who computes."""

from __future__ import annotations

import os
import threading

import pytest

from stagewright.machine.gloo_threads import sched_batch_threads

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")


def policy_of_a_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_that_are_started_in_it_are_patient_and_no_others() -> None:
    with sched_batch_threads():
        assert policy_of_a_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_a_thread() == os.SCHED_OTHER


def test_it_ends_with_an_error_too() -> None:
    with pytest.raises(ValueError, match="no group"), sched_batch_threads():
        raise ValueError("no group")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_priority_that_was_chosen_stays() -> None:
    def chosen() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with sched_batch_threads():
            pass
        found.append(os.sched_getscheduler(0))

    found: list[int] = []
    thread = threading.Thread(target=chosen)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH]
