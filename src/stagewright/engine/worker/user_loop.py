"""Faults in a training loop of one's own: told as ``stagewright worker`` tells them, as far as a script is not ours.

    inside a trainer's call    what is raised is told, with worker, stage, micro-batch and shapes, and the others end
    outside                    the user's own code: its exceptions stay as they are, and it may take its time

An exception keeps its type and gets a note: a script may still catch it. The process is ended only where it can't go
on: another worker has failed, or the run hangs.
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
from stagewright.engine.worker.watchdog import OUTSIDE, StoreWatch, tell_agent
from stagewright.engine.worker.worker import Place, connect, end_process, start_watch
from stagewright.errors import UsageError

__all__ = ["OwnLoop"]

T = TypeVar("T")

_watch: StoreWatch | None = None  # one a process, however many trainers it makes


class OwnLoop:
    """What is told about the calls of a trainer."""

    def __init__(self, rank: int, device: Device, hang_s: float) -> None:
        """Call it when the workers have met; the first trainer's time limit is the process's."""
        self._rank, self._device = rank, device.text
        place = Place.of(os.environ) if dist.is_torchelastic_launched() else Place()
        if _watch is None and place.store is not None and place.launcher is None:
            _begin_to_watch(place, device, hang_s)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around a call; wrong input, which every worker refuses alike, says all in its sentence."""
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
            tell_agent(replace(fault, traceback=f"{fault.traceback}{note}"))
            if _watch is not None:
                _watch.tell(fault)
                _watch.stop()  # what this process does now is its script's
            raise
        finally:
            activity.begin(OUTSIDE)

    def outside(self, values: Iterable[T]) -> Iterator[T]:
        """What the user's own iterable gives, in the middle of a call."""
        activity.begin(OUTSIDE)
        for one in values:
            activity.begin("deal")
            yield one
            activity.begin(OUTSIDE)


def _begin_to_watch(place: Place, device: Device, hang_s: float) -> None:
    global _watch

    def end(fault: Fault) -> None:
        tell_agent(fault)
        end_process(fault.error())

    activity.begin(OUTSIDE)
    _watch = start_watch(connect(place, hang_s), place, device, hang_s, end)
    atexit.register(_watch.stop)
