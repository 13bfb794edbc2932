"""A user-space switch that delays every frame, for kernels without netem; it logs its own lateness.

    python -m stagewright.fabric.lab.switch DELAY_S TOLERANCE_S FILE PORT=LOSS…       in the switch's namespace

    host 0 ── p0 ─┐  packet sockets   ┌─ p2 ── host 2         frames leave `delay` after arrival, in order;
    host 1 ── p1 ─┘  + one queue      └─ p3 ── host 3         FILE: pairs of doubles (time, lateness)

Frames keep their offload headers, so up to 64 KiB pass in one piece unless packets are dropped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections import deque

from stagewright.fabric.lab.kernel import die_with_parent

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_ETH_P_ALL = 0x0003
_SO_RCVBUFFORCE = 33
_HEADER_BYTES = 10  # of virtio, before each frame
_FRAME_BYTES = 70_000
_BUFFER_BYTES = 32 * 2**20
_BATCH_FRAMES = 64
_MAX_QUEUE_BYTES = 64 * 2**20  # frames beyond it are dropped, as in a real switch
_RECORD = struct.Struct("<dd")


def main(delay_s: float, tolerance_s: float, path: str, ports: list[tuple[str, float]]) -> None:
    """Forward frames until killed; each port drops a fraction of its host's frames."""
    die_with_parent()
    stop = False

    def end(number: int, frame: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, end)
    sockets = [_port(name) for name, _ in ports]
    losses = [loss for _, loss in ports]
    draw = random.Random(os.getpid()).random
    # The last byte of a MAC address is the host's number plus 1.
    queue: deque[tuple[float, int, bytes]] = deque()
    queued_bytes = 0
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    clock = time.perf_counter
    with contextlib.suppress(OSError):
        # Late frames void trials: use real-time priority.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    buffer = memoryview(bytearray(_FRAME_BYTES))
    while not stop:
        timeout = max(0.0, queue[0][0] - clock()) if queue else 0.5
        try:
            readable = select.select(sockets, (), (), timeout)[0]
        except InterruptedError:
            continue
        for source in readable:
            number = sockets.index(source)
            for _ in range(_BATCH_FRAMES):
                try:
                    size = source.recv_into(buffer, 0, socket.MSG_DONTWAIT)
                except OSError:
                    break
                if losses[number] and draw() < losses[number]:
                    continue
                if queued_bytes < _MAX_QUEUE_BYTES:
                    queue.append((clock() + delay_s, number, bytes(buffer[:size])))
                    queued_bytes += size
        now = clock()
        while queue and queue[0][0] <= now:
            due, number, frame = queue.popleft()
            queued_bytes -= len(frame)
            for target in _targets(frame, number, len(sockets)):
                try:
                    sockets[target].send(frame)
                except OSError as error:
                    if error.errno not in (errno.ENOBUFS, errno.EAGAIN, errno.ENETDOWN, errno.EMSGSIZE):
                        raise
            now = clock()
            if now - due > tolerance_s:
                os.write(log, _RECORD.pack(now, now - due))


def _port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # type: ignore[attr-defined,unused-ignore]
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    port.bind((name, _ETH_P_ALL))
    return port


def _targets(frame: bytes, source: int, num_ports: int) -> list[int] | range:
    """Return a frame's ports: that of its destination address, or all others for a broadcast."""
    target = frame[_HEADER_BYTES + 5] - 1
    if not frame[_HEADER_BYTES] & 1 and 0 <= target < num_ports:
        return [target] if target != source else []
    return [port for port in range(num_ports) if port != source]


if __name__ == "__main__":
    ports = [word.partition("=") for word in sys.argv[4:]]
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3], [(name, float(loss)) for name, _, loss in ports])
