"""What the kernel knows of a TCP connection: TCP_INFO of Linux, by field.

The structure only ever grows at its end; a kernel that is older than a field gives zero for it.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

__all__ = ["TcpInfo", "retransmits", "tcp_info"]

_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_SIZE = 248
_RETRANSMITS = struct.Struct("=I")
_RETRANSMITS_AT = 100  # tcpi_total_retrans


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpInfo:
    """One end of a connection."""

    retransmits: int
    """Segments sent again, in all."""
    rtt_s: float
    """Smoothed round trip."""
    min_rtt_s: float
    """The least round trip that was seen."""
    rto_s: float
    """The timeout after which a segment is sent again."""
    segment_bytes: int
    """The largest segment."""
    window: int
    """Segments that may be on their way."""
    delivery_bytes_per_s: float
    """The last rate at which data arrived at the other end."""
    segments: int
    """Data segments sent."""
    retransmitted_bytes: int
    """Bytes sent again."""


def tcp_info(connection: socket.socket) -> TcpInfo:
    """The state of a connection as this end sees it."""
    raw = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _SIZE).ljust(_SIZE, b"\0")

    def u32(at: int) -> int:
        return int(struct.unpack_from("=I", raw, at)[0])

    def u64(at: int) -> int:
        return int(struct.unpack_from("=Q", raw, at)[0])

    return TcpInfo(
        retransmits=u32(_RETRANSMITS_AT),
        rtt_s=u32(68) / 1e6,
        min_rtt_s=u32(148) / 1e6,
        rto_s=u32(8) / 1e6,
        segment_bytes=u32(16),
        window=u32(80),
        delivery_bytes_per_s=float(u64(160)),
        segments=u32(156),
        retransmitted_bytes=u64(208),
    )


def retransmits(connection: socket.socket) -> int:
    """Segments sent again so far; cheap enough to ask after every message."""
    raw = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _RETRANSMITS_AT + 4)
    return int(_RETRANSMITS.unpack_from(raw, _RETRANSMITS_AT)[0])
