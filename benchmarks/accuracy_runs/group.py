"""A group of worker processes that train one case after another together, as `torchrun` would start them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from accuracy_runs.cases import Case

_WORKER = Path(__file__).with_name("worker.py")
_RESULT = "RESULT "
_LOG_CHARACTERS = 1500


class Group:
    """Processes of one size, idle or busy with one case."""

    def __init__(self, devices: list[str], store: Path, log: Path) -> None:
        self.devices = devices
        self._case: Case | None = None
        self._started_s = time.monotonic()
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self._processes: list[subprocess.Popen[str]] = []
        for rank in range(len(devices)):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(devices)),
                "LOCAL_WORLD_SIZE": str(len(devices)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            with open(f"{log}-{rank}.log", "w", encoding="utf-8") as errors:
                process = subprocess.Popen(
                    [sys.executable, str(_WORKER), str(store)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,
                )
            self._processes.append(process)
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.devices)

    @property
    def busy_with(self) -> Case | None:
        return self._case

    @property
    def seconds(self) -> float:
        """How long the case has been running."""
        return time.monotonic() - self._started_s

    def start(self, case: Case, settings: dict[str, Any]) -> None:
        """Give all workers their next case."""
        self._case, self._started_s = case, time.monotonic()
        line = json.dumps({**case.to_dict(), "settings": {"devices": self.devices, **settings}}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended, which `poll` reports
                process.stdin.write(line)
                process.stdin.flush()

    def poll(self) -> dict[str, Any] | None:
        """Return the result of the case once it is there, or its error; None: it still runs."""
        with contextlib.suppress(queue.Empty):
            result: dict[str, Any] = json.loads(self._lines.get_nowait())
            self._case = None
            return {**result, "seconds": self.seconds}
        codes = [process.poll() for process in self._processes]
        if any(code is not None for code in codes):
            time.sleep(0.5)  # for the last lines of the others
            return {"error": self._error(codes), "seconds": self.seconds}
        return None

    def close(self) -> None:
        """End all workers."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_RESULT):
                self._lines.put(line.removeprefix(_RESULT))

    def _error(self, codes: list[int | None]) -> str:
        """Quote the end of the log of the workers that have ended."""
        texts = []
        for rank, code in enumerate(codes):
            if code is not None:
                log = Path(f"{self._log}-{rank}.log").read_text(encoding="utf-8", errors="replace").strip()
                texts.append(f"worker {rank} ended with {code}: {log[-_LOG_CHARACTERS:]}")
        return "\n".join(texts)
