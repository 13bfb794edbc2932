"""The kernel's state of a TCP connection: TCP_INFO of Linux.

The structure only grows at its end; fields that an older kernel does not have are zero.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_SIZE = 248
_RETRANSMITS = struct.Struct("=I")
_RETRANSMITS_OFFSET = 100  # tcpi_total_retrans


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpInfo:
    """State of one end of a connection."""

    retransmits: int
    rtt_s: float
    min_rtt_s: float
    rto_s: float
    """Retransmission timeout (RTO)."""
    segments: int
    """Data segments sent."""


def tcp_info(connection: socket.socket) -> TcpInfo:
    """Read the state of a connection at this end."""
    raw = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _SIZE).ljust(_SIZE, b"\0")

    def u32(offset: int) -> int:
        return int(struct.unpack_from("=I", raw, offset)[0])

    return TcpInfo(
        retransmits=u32(_RETRANSMITS_OFFSET),
        rtt_s=u32(68) / 1e6,
        min_rtt_s=u32(148) / 1e6,
        rto_s=u32(8) / 1e6,
        segments=u32(156),
    )


def retransmits(connection: socket.socket) -> int:
    """Return the segments retransmitted so far; cheap enough to call after every message."""
    raw = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _RETRANSMITS_OFFSET + 4)
    return int(_RETRANSMITS.unpack_from(raw, _RETRANSMITS_OFFSET)[0])
