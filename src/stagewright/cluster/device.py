"""A device: what one worker computes on, `cuda:0` or a pinned set of cores such as `cpu:0-1`.

Without pinning, a "one-thread" run may wander over every core and share caches with whatever else runs, so a
CPU device pins all threads of the process and sets torch's number of threads to the number of cores.
Where the system has no affinity (macOS), the number of threads is set and `pinned()` yields False.
Importing this module does not import torch: `pin_process` must run before torch starts its threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stagewright.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["Device", "available_cores", "can_pin", "has_gpu", "keep_freed_memory", "pin_process", "usable_cores"]

# Read by the libraries under torch and numpy once, when they are loaded.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_ARM_PARTS = {
    ("0x41", "0xd03"): "Arm Cortex-A53",
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0b"): "Arm Cortex-A76",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
    ("0xc0", "0xac3"): "Ampere-1",
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_keeps_freed_memory = False  # glibc does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one worker computes on."""

    text: str
    """As it was written: "cpu:0-1", "cuda:0"."""
    kind: Literal["cpu", "cuda"]
    """Kind of device."""
    cores: tuple[int, ...] = ()
    """The cores of a CPU device, rising; empty for CUDA."""
    index: int = 0
    """The number of a CUDA device; 0 for a CPU device."""

    @classmethod
    def parse(cls, text: str) -> Device:
        """Reads `cpu`, `cpu:0`, `cpu:0-1`, `cpu:0,2`, `cuda` or `cuda:0`; `cpu` means all cores available."""
        kind, colon, rest = text.strip().partition(":")
        if kind == "cpu":
            cores = _cores(text, rest) if colon else tuple(sorted(available_cores()))
            return cls(text=text.strip(), kind="cpu", cores=cores)
        if kind == "cuda" and (not colon or re.fullmatch(r"\d+", rest)):
            return cls(text=text.strip(), kind="cuda", index=int(rest or 0))
        raise UsageError(f"{text!r} is not a device; write cpu, cpu:0, cpu:0-1, cpu:0,2, cuda or cuda:0")

    def __str__(self) -> str:
        return self.text

    @property
    def num_threads(self) -> int:
        """Threads that compute: one for each core; 1 for CUDA, where the host only launches."""
        return max(1, len(self.cores))

    def torch_device(self) -> torch.device:
        """The torch device where tensors live; a CUDA device that is not there is an error."""
        import torch

        if self.kind == "cpu":
            return torch.device("cpu")
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.index >= num_devices:
            seen = f"{num_devices} GPU{'s' if num_devices != 1 else ''}" if num_devices else "no GPU"
            raise UsageError(f"{self.text} is asked for, but torch sees {seen} here; use another device, like cpu:0")
        # Autograd's own thread says so once in each process, and then does what is right.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        return torch.device("cuda", self.index)

    def give_back(self) -> None:
        """Lets others have the GPU memory that torch holds for nobody; a CPU's is kept."""
        if self.kind == "cuda":
            import torch

            gc.collect()
            torch.cuda.empty_cache()

    def hardware_name(self) -> str:
        """The processor's or the GPU's name, as its vendor writes it."""
        if self.kind == "cpu":
            return _processor_name()
        import torch

        return torch.cuda.get_device_name(self.torch_device())

    @contextlib.contextmanager
    def pinned(self) -> Iterator[bool]:
        """Makes this process compute as a worker does, until the block ends: pinned, with as many threads as cores.

        Freed memory is kept, too. Yields whether threads are pinned: False for CUDA and where the system can't pin.
        """
        if self.kind != "cpu":
            yield False
            return
        import torch

        num_threads_before = torch.get_num_threads()
        masks_before = _masks()
        kept_before = keep_freed_memory()
        try:
            if masks_before:
                _pin(self)
            _set_num_threads(self.num_threads)
            yield bool(masks_before)
        finally:
            keep_freed_memory(kept_before)
            _set_num_threads(num_threads_before)
            own = masks_before.get(os.getpid())
            for thread in _masks():
                # Threads that were started meanwhile go where the main thread goes.
                _set_mask(thread, masks_before.get(thread, own))


def pin_process(device: Device) -> bool:
    """Pins this process to a CPU device for good; to be called before torch is imported.

    Also sets the variables from which the libraries take their number of threads. Returns whether threads are
    pinned: False for CUDA and where the system can't pin.
    """
    if device.kind != "cpu":
        return False
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(device.num_threads)
    if "torch" in sys.modules:
        _set_num_threads(device.num_threads)
    if can_pin():
        _pin(device)
    return can_pin()


def _set_num_threads(count: int) -> None:
    """How many threads torch computes with.

    On Arm processors torch calls a library that goes on with as many as there were cores when it was loaded: on one
    core they would take turns, and wait for each other. OpenMP lets no thread compute beside one.
    """
    import torch

    torch.set_num_threads(count)
    with contextlib.suppress(OSError, AttributeError):  # elsewhere OpenMP has another name, and libraries obey torch
        ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).omp_set_max_active_levels(0 if count == 1 else 1)


def keep_freed_memory(keep: bool = True) -> bool:
    """Lets glibc keep what tensors give back, or return it as it usually does; whether it did so before.

    Else every step asks the kernel for the same pages again, zeroed: up to a third of a small model's time.
    """
    global _keeps_freed_memory
    before, _keeps_freed_memory = _keeps_freed_memory, keep
    if sys.platform == "linux" and keep != before:
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20 if keep else 2**17)  # the most that glibc takes; its default
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1 if keep else 2**17)
            if not keep:
                libc.malloc_trim(0)
    return before


def can_pin() -> bool:
    """Whether this system lets a process choose its cores."""
    return hasattr(os, "sched_setaffinity")


def has_gpu() -> bool:
    """Whether the system shows an NVIDIA GPU; asked without torch, which would start CUDA."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def available_cores() -> frozenset[int]:
    """The cores that this process runs on now."""
    if not can_pin():
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))


def usable_cores() -> frozenset[int]:
    """The cores that this process may move to, whatever it is pinned to now."""
    available = available_cores()
    if not can_pin():
        return available
    found: set[int] = set()

    def probe() -> None:
        # In a thread of its own, which ends with its mask: the system drops cores that are out of reach.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(max(os.cpu_count() or 1, max(available) + 1)))
        found.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return frozenset(found)


def _cores(text: str, ranges: str) -> tuple[int, ...]:
    cores: set[int] = set()
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(f"{text!r}: {part!r} is not a range of cores; write cpu:0, cpu:0-1 or cpu:0,2")
        cores.update(range(first, min(last, 1 << 16) + 1))
    usable = usable_cores()
    if not cores <= usable:
        missing, there = _ranges(cores - usable), _ranges(usable)
        raise UsageError(f"{text!r} asks for core {missing}, but the cores here are {there}; try cpu:{there}")
    return tuple(sorted(cores))


def _ranges(cores: Iterable[int]) -> str:
    """The cores as text: "0-3,8"."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def _masks() -> dict[int, frozenset[int]]:
    """The cores of every thread of this process; empty where the system has no such thing."""
    if not can_pin():
        return {}
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        threads = [os.getpid()]
    masks = {}
    for thread in threads:
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            masks[thread] = frozenset(os.sched_getaffinity(thread))
    return masks


def _set_mask(thread: int, cores: Iterable[int] | None) -> None:
    if cores:
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            os.sched_setaffinity(thread, cores)


def _pin(device: Device) -> None:
    for thread in _masks():
        _set_mask(thread, device.cores)
    reached = available_cores()
    if reached != frozenset(device.cores):
        raise UsageError(
            f"{device.text} asks for cores {_ranges(device.cores)}, but the system gave {_ranges(reached)}; "
            f"try cpu:{_ranges(reached)}"
        )


def _processor_name() -> str:
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, colon, value = line.partition(":")
            if colon:
                found.setdefault(key.strip(), value.strip())
    if "model name" in found:
        return found["model name"]
    general = platform.processor() or platform.machine()
    if "CPU part" not in found:
        return general
    # Arm processors have numbers alone, and are as different as their names.
    maker, part = found.get("CPU implementer", "?"), found["CPU part"]
    return _ARM_PARTS.get((maker, part), f"{general} {maker} {part}")
