"""A switch in user space that delays every frame, for kernels without netem; it writes down when it was late itself.

    python -m stagewright.fabric.lab.switch DELAY_S TOLERANCE_S FILE PORT=LOSS…       in the switch's namespace

    host 0 ── p0 ─┐  packet sockets   ┌─ p2 ── host 2         frames leave `delay` after they came, in order;
    host 1 ── p1 ─┘  + one queue      └─ p3 ── host 3         FILE: pairs of doubles (when, how late)

Frames keep their offload headers, so up to 64 KiB pass in one piece where packets are not dropped on the way.
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

__all__ = ["main"]

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_ETH_P_ALL = 0x0003
_SO_RCVBUFFORCE = 33
_HEADER_BYTES = 10  # virtio's, before each frame
_FRAME_BYTES = 70_000
_BUFFER_BYTES = 32 * 2**20
_AT_ONCE = 64
_MOST_WAITING = 64 * 2**20  # bytes in the queue; more are dropped, as a switch does
_LATE = struct.Struct("<dd")


def main(delay_s: float, tolerance_s: float, path: str, ports: list[tuple[str, float]]) -> None:
    """Forward until killed; a port loses that share of what comes from its host."""
    die_with_parent()
    stop = False

    def end(number: int, frame: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, end)
    sockets = [_port(name) for name, _ in ports]
    losses = [loss for _, loss in ports]
    draw = random.Random(os.getpid()).random
    # Addresses are fixed: the last byte is the host's number, from 1.
    waiting: deque[tuple[float, int, bytes]] = deque()
    waiting_bytes = 0
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    clock = time.perf_counter
    with contextlib.suppress(OSError):
        # Late frames spoil trials: go before whatever else wants a core.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    buffer = memoryview(bytearray(_FRAME_BYTES))
    while not stop:
        timeout = max(0.0, waiting[0][0] - clock()) if waiting else 0.5
        try:
            readable = select.select(sockets, (), (), timeout)[0]
        except InterruptedError:
            continue
        for source in readable:
            number = sockets.index(source)
            for _ in range(_AT_ONCE):
                try:
                    size = source.recv_into(buffer, 0, socket.MSG_DONTWAIT)
                except OSError:
                    break
                if losses[number] and draw() < losses[number]:
                    continue
                if waiting_bytes < _MOST_WAITING:
                    waiting.append((clock() + delay_s, number, bytes(buffer[:size])))
                    waiting_bytes += size
        now = clock()
        while waiting and waiting[0][0] <= now:
            due, number, frame = waiting.popleft()
            waiting_bytes -= len(frame)
            for target in _targets(frame, number, len(sockets)):
                try:
                    sockets[target].send(frame)
                except OSError as error:
                    if error.errno not in (errno.ENOBUFS, errno.EAGAIN, errno.ENETDOWN, errno.EMSGSIZE):
                        raise
            now = clock()
            if now - due > tolerance_s:
                os.write(log, _LATE.pack(now, now - due))


def _port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # type: ignore[attr-defined,unused-ignore]
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    port.bind((name, _ETH_P_ALL))
    return port


def _targets(frame: bytes, source: int, num_ports: int) -> list[int] | range:
    """Where a frame goes: to the host whose address it carries, or to all others."""
    target = frame[_HEADER_BYTES + 5] - 1
    if not frame[_HEADER_BYTES] & 1 and 0 <= target < num_ports:
        return [target] if target != source else []
    return [port for port in range(num_ports) if port != source]


if __name__ == "__main__":
    wanted = [word.partition("=") for word in sys.argv[4:]]
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3], [(name, float(loss)) for name, _, loss in wanted])
