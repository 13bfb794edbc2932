"""What workers exchange through the agent's store: the run folder's name, and their files when the run ends."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.engine.worker.faults import worker_folder
from stagewright.engine.worker.placement import RankPlacement
from stagewright.engine.worker.watchdog import START_S
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_GATHERED_FILES = (
    *("result.json", "metrics.jsonl", "clock.json"),
    *("events.parquet", "events.jsonl", "memory.parquet", "memory.jsonl"),
)


def connect_store(placement: RankPlacement, hang_s: float) -> Store:
    """Open a separate connection to the agent's store: the process group's connection blocks while it waits."""
    from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

    if placement.store is None:
        return HashStore()
    host, port = placement.store
    timeout = datetime.timedelta(seconds=max(hang_s, START_S))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store still has the failure before a restart
    return PrefixStore(f"stagewright {attempt}", TCPStore(host, port, is_master=False, timeout=timeout))


def agree_on_folder(store: Store, placement: RankPlacement, plan: Plan) -> Path:
    """Let worker 0 create the run folder; other machines use the same path below their working directory."""
    if placement.rank == 0:
        store.set("run folder", str(RunFolder.create("runs", plan).path))
    return Path(store.get("run folder").decode())


def gather_files(store: Store, placement: RankPlacement, folder: RunFolder) -> None:
    """Copy the files of workers on other machines into worker 0's run folder; every worker must call this."""
    for name in _GATHERED_FILES:
        if placement.rank != 0:
            path = worker_folder(folder.path, placement.rank) / name
            content = path.read_bytes() if path.is_file() else b""
            store.set(f"{name} {placement.rank}", content)  # type: ignore[arg-type]
            continue
        for rank in range(1, placement.num_workers):
            content = store.get(f"{name} {rank}")
            path = worker_folder(folder.path, rank) / name
            if content and not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
