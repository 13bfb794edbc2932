"""The run queue of a thread: competing for a core counts, sleeping does not."""

import os
import subprocess
import sys
import threading
import time

import pytest

from stagewright.attachment.run_queue import RunQueue

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="from Linux's scheduler statistics")


def _compute(seconds: float) -> None:
    begin_s = time.thread_time()
    while time.thread_time() - begin_s < seconds:
        pass


def test_sleeping_is_in_no_run_queue() -> None:
    queue = RunQueue()
    begin_s = queue.waited_s()
    for _ in range(10):
        time.sleep(0.03)
    end_s = queue.waited_s()
    queue.close()

    assert begin_s is not None
    assert end_s is not None
    assert end_s - begin_s < 0.2
    assert queue.waited_s() is None


def test_two_programs_on_one_core_wait_for_it() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); print(1, flush=True)\nwhile True: pass"
    waited_s: list[float] = []

    def run() -> None:
        os.sched_setaffinity(0, {core})  # of this thread alone
        queue = RunQueue()
        begin_s = queue.waited_s()
        _compute(0.2)
        end_s = queue.waited_s()
        queue.close()
        assert begin_s is not None
        assert end_s is not None
        waited_s.append(end_s - begin_s)

    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        other.kill()

    assert waited_s[0] > 0.05
