"""A share of a GPU's SMs for this process: CUDA MPS, started once for a command and stopped after it.

    this process ── starts ──► nvidia-cuda-mps-control -d        in a folder of its own
        │  environment: pipe folder, percentage                        ▲ quit
        ├─► workers                                                    │
        └── pipe ──► guard (sh) ───────────────────────────────────────┘
            closes when this process ends, even by SIGKILL

MPS reads both variables when a process first uses CUDA, so a process has one share for its whole life. A daemon that
the user runs is used and left alone. Importing this module does not import torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from stagewright.errors import RunError, UsageError

PIPE_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
_LOG_FOLDER = "CUDA_MPS_LOG_DIRECTORY"
_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_CONTROL = "nvidia-cuda-mps-control"
_DEFAULT_PIPES = Path("/tmp/nvidia-mps")
_SHARE = "STAGEWRIGHT_GPU_SHARE"
"""The share of this process's GPU and the SMs of the whole GPU, "8 132", where this module has set it."""
_START_S = 20.0
_COUNT_SMS = """
import ctypes
cuda, value, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), {index}) == 0
assert cuda.cuDeviceGetAttribute(ctypes.byref(value), 16, device) == 0
print(value.value)
"""  # 16: CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

_guard: subprocess.Popen[str] | None = None
"""Holds the pipe whose end stops the daemon."""


def use_share(index: int, share: int) -> None:
    """Limit this process to 1/share of the SMs of a GPU, which it must not have used yet; 1 means the whole GPU."""
    name = f"cuda:{index}/{share}"
    before = os.environ.get(_SHARE, "")
    if share == 1:
        if before:  # inherited from a launcher that uses a share
            for variable in (_PERCENTAGE, PIPE_FOLDER, _SHARE):
                os.environ.pop(variable, None)
        return
    if before.partition(" ")[0] == str(share):
        return
    if is_cuda_used():
        used = f"1/{before.partition(' ')[0]}" if before else "all"
        raise UsageError(
            f"{name}: this process already uses {used} of the GPU's SMs; a process has one share for its whole life: "
            "start another, or name the share before anything runs on the GPU"
        )
    num_sms = before.partition(" ")[2] or str(_count_sms(index))
    start_daemon(name)
    os.environ[_PERCENTAGE] = f"{100 / share:g}"
    os.environ[_SHARE] = f"{share} {num_sms}"


def is_cuda_used() -> bool:
    """Whether this process has used CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def check_share(name: str, num_sms: int) -> None:
    """Raise RunError if this process has more SMs than its share."""
    share, whole = map(int, os.environ.get(_SHARE, "1 0").split())
    most = -(-whole // share) + 1  # MPS rounds
    if share > 1 and num_sms > most:
        raise RunError(
            f"{name}: CUDA MPS gives this process {num_sms} of the GPU's {whole} SMs instead of {whole // share}; stop "
            "other MPS daemons, or use the whole GPU"
        )


def start_daemon(name: str) -> None:
    """Start an MPS daemon that ends with this process, unless one serves this process already."""
    global _guard
    if _guard is not None or PIPE_FOLDER in os.environ or (_DEFAULT_PIPES / "control").exists():
        return
    if "RANK" in os.environ:
        raise UsageError(
            f"{name} needs one MPS daemon for all workers: run `{_CONTROL} -d` before torchrun, or start the workers "
            "with `stagewright run`"
        )
    if shutil.which(_CONTROL) is None:
        raise UsageError(f"{name} needs CUDA MPS, but {_CONTROL} is not installed here; use a whole GPU, like cuda:0")
    folder = tempfile.mkdtemp(prefix="stagewright-mps-")
    environment = {**os.environ, PIPE_FOLDER: folder, _LOG_FOLDER: folder}
    # The guard comes first: whatever happens to this process from here on, it stops the daemon.
    _guard = subprocess.Popen(
        ["sh", "-c", f'read line; echo quit | {_CONTROL} >/dev/null 2>&1; rm -rf "$0"', folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
        start_new_session=True,
    )
    try:
        started = subprocess.run(
            [_CONTROL, "-d"], env=environment, capture_output=True, text=True, timeout=_START_S, check=False
        )
        answer = (started.stderr + started.stdout).strip() or f"exit code {started.returncode}"
        failed = started.returncode != 0
    except subprocess.TimeoutExpired:
        failed, answer = True, f"no answer in {_START_S:g} s"
    if failed:
        stop_daemon()
        raise UsageError(f"{name}: CUDA MPS did not start ({answer}); use the whole GPU, {name.partition('/')[0]}")
    os.environ[PIPE_FOLDER] = folder


def stop_daemon() -> None:
    """Stop the daemon that this process has started; the process must not use CUDA afterwards."""
    global _guard
    if _guard is not None:
        assert _guard.stdin is not None
        _guard.stdin.close()
        _guard.wait()
        _guard = None
        os.environ.pop(PIPE_FOLDER, None)


def _count_sms(index: int) -> int:
    """Count the SMs of a whole GPU, in a process of its own: this one must not use CUDA yet."""
    environment = {name: value for name, value in os.environ.items() if name not in (PIPE_FOLDER, _PERCENTAGE)}
    counted = subprocess.run(
        [sys.executable, "-c", _COUNT_SMS.format(index=index)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if counted.returncode != 0:
        raise UsageError(f"cuda:{index}: there is no such NVIDIA GPU here; use another device, like cpu:0")
    return int(counted.stdout)
