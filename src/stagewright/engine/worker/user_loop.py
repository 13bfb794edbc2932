"""Fault reporting for a user's training loop around a trainer, like that of ``stagewright worker``.

    inside a trainer's call    an exception is reported with worker, stage, micro-batch and shapes; the others end
    outside                    user code: its exceptions stay as they are, and it has no time limit

An exception keeps its type and gets a note, so a script may still catch it. The process is ended only where it can't
continue: another worker has failed, or the run hangs.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from stagewright.cluster.device import Device
from stagewright.engine.worker.faults import Fault, activity
from stagewright.engine.worker.placement import RankPlacement
from stagewright.engine.worker.store import connect_store
from stagewright.engine.worker.watchdog import OUTSIDE, StoreWatchdog, report_to_agent
from stagewright.engine.worker.worker import end_process
from stagewright.errors import UsageError

T = TypeVar("T")

_watchdog: StoreWatchdog | None = None  # one per process, shared by all trainers


class UserLoop:
    """Reports faults in the calls of a trainer."""

    def __init__(self, rank: int, device: Device, hang_s: float) -> None:
        """Start the watchdog once per process, with the first trainer's time limit; the group must be initialized."""
        global _watchdog
        self._rank, self._device = rank, device.text
        launched = dist.is_torchelastic_launched()
        placement = RankPlacement.from_environment(os.environ) if launched else RankPlacement()
        if _watchdog is None and placement.store is not None and placement.launcher is None:
            activity.begin(OUTSIDE)
            store = connect_store(placement, hang_s)
            _watchdog = StoreWatchdog(
                store,
                worker=placement.rank,
                device=device.text,
                hang_s=hang_s,
                end=_report_and_end,
                num_workers=placement.num_workers,
                address=f"{placement.store[0]}:{placement.store[1]}",
            ).start()
            atexit.register(_watchdog.stop)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Wrap a call; a UsageError, which every worker raises alike, is complete without a report."""
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            fault = Fault.of(
                error, worker=self._rank, device=self._device, doing=activity.now(), time_ns=time.time_ns()
            )
            note = f"stagewright: {replace(fault, traceback='').text()}"
            error.add_note(note)
            report_to_agent(replace(fault, traceback=f"{fault.traceback}{note}"))
            if _watchdog is not None:
                _watchdog.report(fault)
                _watchdog.stop()  # from here on the script decides
            raise
        finally:
            activity.begin(OUTSIDE)

    def outside(self, values: Iterable[T]) -> Iterator[T]:
        """Iterate over a user's iterable inside a call; its own time counts as user code."""
        activity.begin(OUTSIDE)
        for value in values:
            activity.begin("split batch")
            yield value
            activity.begin(OUTSIDE)


def _report_and_end(fault: Fault) -> None:
    report_to_agent(fault)
    end_process(fault.error())
