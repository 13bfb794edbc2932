"""A device of one worker: `cuda:0`, a share of its SMs such as `cuda:0/8`, or a pinned set of cores such as `cpu:0-1`.

Without pinning, a single-threaded run moves between cores and shares caches with other processes, so a CPU device pins
all threads of the process and sets torch's number of threads to the number of cores. Where the system has no affinity
(macOS), only the number of threads is set and `pinned()` yields False.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stagewright.errors import UsageError
from stagewright.gpu_sharing.mps import check_share, is_cuda_used, start_daemon, use_share

if TYPE_CHECKING:
    import torch

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
MAX_SHARE = 64
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_keeps_freed_memory = False  # glibc has no query for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one worker."""

    text: str
    """As in the plan: "cpu:0-1", "cuda:0"."""
    kind: Literal["cpu", "cuda"]
    cores: tuple[int, ...] = ()
    """Cores of a CPU device, ascending; empty for CUDA."""
    index: int = 0
    """Index of a CUDA device; 0 for a CPU device."""
    share: int = 1
    """The worker has 1/share of the SMs of its CUDA device."""

    @classmethod
    def parse(cls, text: str) -> Device:
        """Parse `cpu` (all cores available), `cpu:0`, `cpu:0-1`, `cpu:0,2`, `cuda`, `cuda:0` or `cuda:0/8`."""
        kind, colon, rest = text.strip().partition(":")
        if kind == "cpu":
            cores = _cores(text, rest) if colon else tuple(sorted(available_cores()))
            return cls(text=text.strip(), kind="cpu", cores=cores)
        if kind == "cuda" and not colon:
            return cls(text=text.strip(), kind="cuda")
        if kind == "cuda" and (match := re.fullmatch(r"(\d{1,9})(?:/(\d{1,9}))?", rest)):
            share = int(match[2] or 1)
            if not 1 <= share <= MAX_SHARE:
                raise UsageError(
                    f"{text!r}: a GPU has at most {MAX_SHARE} shares, not {share}; write for example cuda:{match[1]}/8"
                )
            return cls(text=text.strip(), kind="cuda", index=int(match[1]), share=share)
        raise UsageError(f"{text!r} is not a device; write cpu, cpu:0, cpu:0-1, cpu:0,2, cuda, cuda:0 or cuda:0/8")

    def __str__(self) -> str:
        return self.text

    @property
    def num_threads(self) -> int:
        """Compute threads: one for each core; 1 for CUDA, where the host only launches kernels."""
        return max(1, len(self.cores))

    def torch_device(self) -> torch.device:
        """Return the torch device; a missing CUDA device is an error."""
        import torch

        if self.kind == "cpu":
            return torch.device("cpu")
        self._check_present()
        use_share(self.index, self.share)
        if self.share > 1:
            check_share(self.text, torch.cuda.get_device_properties(self.index).multi_processor_count)
        # Autograd's thread warns once in each process and then creates the context.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        return torch.device("cuda", self.index)

    def _check_present(self) -> None:
        import torch

        # NVML counts without using CUDA: a process must name its share of a GPU before that.
        num_devices = torch.cuda.device_count()
        if self.index >= num_devices:
            seen = f"{num_devices} GPU{'s' if num_devices != 1 else ''}" if num_devices else "no GPU"
            raise UsageError(f"the plan uses {self.text}, but torch sees {seen} here; use another device, like cpu:0")

    def release_memory(self) -> None:
        """Release unused GPU memory of torch's allocator; does nothing for a CPU."""
        if self.kind == "cuda":
            import torch

            gc.collect()
            torch.cuda.empty_cache()

    def hardware_name(self) -> str:
        """Return the vendor's name of the processor or GPU, and the share of its SMs."""
        if self.kind == "cpu":
            return _processor_name()
        import torch

        name = torch.cuda.get_device_name(self.torch_device())
        return name if self.share == 1 else f"{name}, 1/{self.share} of its SMs"

    @contextlib.contextmanager
    def pinned(self) -> Iterator[bool]:
        """Compute as a worker does inside the block: pinned, one thread for each core, freed memory kept.

        Yields whether threads are pinned: False for CUDA and where the system can't pin.
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
            main_mask = masks_before.get(os.getpid())
            for thread in _masks():
                # Threads that were started meanwhile get the main thread's cores.
                _set_mask(thread, masks_before.get(thread, main_mask))


def are_separate(devices: Sequence[str]) -> bool:
    """Whether no two workers compute on the same core or the same SMs."""
    return num_separate(devices) == len(devices)


def num_separate(devices: Sequence[str]) -> int:
    """Count the devices that compute at the same time: every share of a GPU, but a core or whole GPU once.

    >>> num_separate(["cuda:0/8", "cuda:0/8", "cpu:0", "cpu:0"])
    3
    """
    whole = [device for device in devices if Device.parse(device).share == 1]
    return len(devices) - len(whole) + len(set(whole))


def check_devices(devices: Iterable[str]) -> None:
    """Raise UsageError if a core or GPU does not exist here, or a GPU has more shares than it can give.

    If a worker has a share of a GPU, the MPS daemon of this process is started, for the workers that it starts, and the
    process itself is limited to the first worker's share.
    """
    parsed = [Device.parse(device) for device in devices]
    for device in parsed:
        if device.kind == "cuda":
            device._check_present()
    for device in parsed:
        if device.share > 1:
            taken = [other for other in parsed if other.kind == "cuda" and other.index == device.index]
            if sum(1 / other.share for other in taken) > 1 + 1e-9:
                names = ", ".join(other.text for other in taken)
                raise UsageError(
                    f"the plan uses {names}, which is more than all of cuda:{device.index}; use smaller shares, like "
                    f"cuda:{device.index}/{len(taken)}"
                )
            start_daemon(device.text)
    first = next((device for device in parsed if device.share > 1), None)
    if first is not None and not is_cuda_used():
        use_share(first.index, first.share)


def pin_process(device: Device) -> bool:
    """Pin this process to a CPU device, or to its share of a GPU, permanently; call it before torch is imported.

    Also sets the environment variables for the libraries' number of threads. Returns whether threads are pinned: False
    for CUDA and where the system can't pin.
    """
    if device.kind != "cpu":
        use_share(device.index, device.share)
        return False
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(device.num_threads)
    if "torch" in sys.modules:
        _set_num_threads(device.num_threads)
    if can_pin():
        _pin(device)
    return can_pin()


def _set_num_threads(count: int) -> None:
    """Set torch's number of threads.

    On Arm processors torch calls a library that keeps one thread for each core it saw when it was loaded: on one core
    they would wait for each other. An OpenMP limit of nested parallel regions prevents that.
    """
    import torch

    torch.set_num_threads(count)
    with contextlib.suppress(OSError, AttributeError):  # another OpenMP runtime: its libraries follow torch
        ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).omp_set_max_active_levels(0 if count == 1 else 1)


def keep_freed_memory(keep: bool = True) -> bool:
    """Make glibc keep freed memory, or return it to the system (its default); return the previous setting.

    By default every step requests the same pages, zeroed, from the kernel: up to a third of a small model's time.
    """
    global _keeps_freed_memory
    before, _keeps_freed_memory = _keeps_freed_memory, keep
    if sys.platform == "linux" and keep != before:
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20 if keep else 2**17)  # glibc's maximum; its default
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1 if keep else 2**17)
            if not keep:
                libc.malloc_trim(0)
    return before


def can_pin() -> bool:
    """Whether this system supports CPU affinity."""
    return hasattr(os, "sched_setaffinity")


def has_gpu() -> bool:
    """Whether there is a GPU of NVIDIA, under WSL too, or of AMD; without torch, which would initialize CUDA."""
    return any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "dxg", "kfd"))


def available_cores() -> frozenset[int]:
    """Return the cores that this process runs on now."""
    if not can_pin():
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may use, whatever it is pinned to now."""
    available = available_cores()
    if not can_pin():
        return available
    cores: set[int] = set()

    def probe() -> None:
        # In a separate thread, whose mask is discarded: the system drops cores that are not allowed.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(max(os.cpu_count() or 1, max(available) + 1)))
        cores.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return frozenset(cores)


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
        missing, present = _ranges(cores - usable), _ranges(usable)
        raise UsageError(f"{text!r} asks for core {missing}, but the cores here are {present}; try cpu:{present}")
    return tuple(sorted(cores))


def _ranges(cores: Iterable[int]) -> str:
    """Format cores: "0-3,8"."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def _masks() -> dict[int, frozenset[int]]:
    """Return the cores of every thread of this process; empty without CPU affinity."""
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
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, colon, value = line.partition(":")
            if colon:
                fields.setdefault(key.strip(), value.strip())
    if "model name" in fields:
        return fields["model name"]
    general = platform.processor() or platform.machine()
    if "CPU part" not in fields:
        return general
    # Arm processors report numbers only.
    maker, part = fields.get("CPU implementer", "?"), fields["CPU part"]
    return _ARM_PARTS.get((maker, part), f"{general} {maker} {part}")
