"""Sockets of an exchange: only processes of the same user are heard."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.shared_memory.exchange import SharedMemoryExchange, _address
from stagewright.shared_memory.host import HostMemory

INTRUDER = """
import os, socket, sys
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(chr(0) + sys.argv[1])
connection.send(b'{"rank": 1}')
"""


class Store(dict[str, bytes]):
    """The part of a store that an exchange uses."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


def connect(name: str, message: dict[str, Any]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(_address(name))
    connection.send(json.dumps(message).encode())
    return connection


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_is_turned_away() -> None:
    store = Store()
    exchange = SharedMemoryExchange(store, 0, 2, timedelta(seconds=20), HostMemory())
    name = store["address-0"].decode()
    subprocess.run([sys.executable, "-c", INTRUDER, name], check=True)
    worker = connect(name, {"rank": 1})
    memory = HostMemory()
    buffer = memory.allocate(16)
    buffer.fill_(9)
    slot = {"slot": 0, "bytes": 8, "buffer": memory.export(buffer), "event": ""}
    worker.send(json.dumps(slot).encode())
    with exchange.reading(1, torch.empty(8, dtype=torch.uint8)) as value:
        assert value.tolist() == [9] * 8, "of the worker, not of the intruder"
    worker.close()
    exchange.close()
    memory.close()


LAST_WORDS = """
import json, sys
from datetime import timedelta
import torch
from torch.distributed import FileStore
from stagewright.shared_memory.exchange import SharedMemoryExchange
from stagewright.shared_memory.host import HostMemory
store = FileStore(sys.argv[1], 2)
exchange = SharedMemoryExchange(store, 1, 2, timedelta(seconds=20), HostMemory())
for number in range(3):
    exchange.write(torch.full((8,), number), [0])
exchange.finish()
"""


def test_what_a_worker_has_written_outlives_its_end(tmp_path: Path) -> None:
    """It waits until the others have read; the last of them needs nobody who hears that."""
    with subprocess.Popen([sys.executable, "-c", LAST_WORDS, str(tmp_path / "store")]) as other:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        exchange = SharedMemoryExchange(store, 0, 2, timedelta(seconds=20), HostMemory())
        for number in range(3):
            time.sleep(0.3)  # the other has nothing left to do
            with exchange.reading(1, torch.empty(8, dtype=torch.int64)) as value:
                assert value.tolist() == [number] * 8
                assert other.poll() is None
        assert other.wait(20) == 0
    exchange.close()


def test_nobody_waits_for_a_worker_that_has_ended() -> None:
    store = Store()
    first, second = (SharedMemoryExchange(store, rank, 2, timedelta(seconds=20), HostMemory()) for rank in range(2))
    first.write(torch.ones(4), [1])
    second.write(torch.ones(4), [0])
    with second.reading(0, torch.ones(4)) as value:
        first.close()
        assert value.tolist() == [1.0] * 4
    begun_s = time.monotonic()
    second.finish()
    assert time.monotonic() - begun_s < 5
