"""Settings of a lab's network, and their description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.errors import UsageError
from stagewright.quantity import format_s, parse_rate, parse_s

MAX_DELAY_S = 10.0
MIN_RATE = 1e3  # bytes/s
_PACKET_S = 0.5e-3
_MAX_PACKET = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class LabNetwork:
    """Hosts and their links to a switch."""

    num_hosts: int
    rates: tuple[float | None, ...]
    """Bytes/s of each host's link in both directions; None: unlimited."""
    delay_s: float = 0.0
    """One-way delay between two hosts."""
    losses: tuple[float, ...]
    """Packet loss of each host's incoming packets, as a fraction."""
    losses_out: tuple[float, ...]
    """Packet loss of each host's outgoing packets."""
    congestion: str = "cubic"
    """Congestion control, set on every route."""
    rto_min_s: float | None = None
    """Minimum retransmission timeout (RTO); None: the kernel's 200 ms."""
    mtu: int = 1500

    @classmethod
    def parse(
        cls,
        *,
        hosts: int,
        rate: str | None = None,
        delay: str | None = None,
        loss: str | None = None,
        slow_links: Sequence[str] = (),
        lossy_links: Sequence[str] = (),
        congestion: str = "cubic",
        rto_min: str | None = None,
        mtu: int = 1500,
    ) -> LabNetwork:
        """Parse the options of `stagewright fabric lab`."""
        if not 2 <= hosts <= 64:
            raise UsageError(f"a lab cannot have {hosts} hosts; use 2 to 64")
        rates = [parse_rate(rate) if rate else None] * hosts
        losses = [parse_loss(loss) if loss else 0.0] * hosts
        losses_out = [0.0] * hosts
        for text in slow_links:
            host, value = _parse_host(text, hosts, "--slow-link", "2:100mbit")
            rates[host] = parse_rate(value)
        for text in lossy_links:
            host, value = _parse_host(text, hosts, "--lossy-link", "2:5%")
            losses[host] = losses_out[host] = parse_loss(value)
        for link_rate in rates:
            if link_rate is not None and link_rate < MIN_RATE:
                raise UsageError(f"a link of {link_rate * 8:g} bit/s is too slow; use at least 8kbit")
        delay_s = parse_s(delay) if delay else 0.0
        if delay_s > MAX_DELAY_S:
            raise UsageError(f"a delay of {delay_s:g} s is too long; use at most {MAX_DELAY_S:g} s")
        if not congestion.isalnum():
            raise UsageError(f"{congestion!r} is not a congestion control; use cubic, reno or bbr")
        return cls(
            num_hosts=hosts,
            rates=tuple(rates),
            delay_s=delay_s,
            losses=tuple(losses),
            losses_out=tuple(losses_out),
            congestion=congestion,
            rto_min_s=parse_s(rto_min) if rto_min else None,
            mtu=mtu,
        )

    @property
    def has_loss(self) -> bool:
        """Whether any link loses packets."""
        return any(self.losses) or any(self.losses_out)

    def address(self, host: int) -> str:
        """Return a host's address; 198.18.0.0/15 is reserved for network tests."""
        return f"198.18.0.{host + 1}"

    def mac(self, host: int) -> str:
        return f"02:00:c6:12:00:{host + 1:02x}"

    def max_packet_bytes(self, host: int) -> int:
        """Return the largest packet that a host passes to its device (before segmentation): 0.5 ms at its rate."""
        rate = self.rates[host]
        return _MAX_PACKET if rate is None else min(_MAX_PACKET, max(8 * self.mtu, round(rate * _PACKET_S)))

    def describe(self) -> str:
        """Describe the network in one line."""
        parts = [f"{self.num_hosts} hosts {self.address(0)} … {self.address(self.num_hosts - 1).rpartition('.')[2]}"]
        for rate in dict.fromkeys(self.rates):
            parts.append(("rate unlimited" if rate is None else f"rate {_bits(rate)}") + _hosts_with(rate, self.rates))
        if self.delay_s:
            parts.append(f"delay {format_s(self.delay_s)} one way")
        for loss in filter(None, dict.fromkeys(self.losses)):
            parts.append(f"loss {loss:{'.3g' if loss < 1e-4 else '.3%'}}" + _hosts_with(loss, self.losses))
        return ", ".join(parts)


def parse_loss(text: str) -> float:
    """Parse a packet loss: `1%` or `0.01`."""
    number = text.strip().removesuffix("%")
    try:
        fraction = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{text!r} is not a packet loss; write 1% or 0.01") from None
    if not 0 <= fraction < 1:
        raise UsageError(f"the loss is {fraction:.0%}; use less than 100%")
    return fraction


def _parse_host(text: str, hosts: int, option: str, example: str) -> tuple[int, str]:
    host, colon, value = text.partition(":")
    if not colon or not host.strip().isdigit():
        raise UsageError(f"{option} {text!r} names no host; write {example}")
    if int(host) >= hosts:
        raise UsageError(f"{option} {text!r}: no host {int(host)}; the hosts are 0 to {hosts - 1}")
    return int(host), value


def _hosts_with(value: float | None, values: Sequence[float | None]) -> str:
    """Name the hosts that have a value; empty if all have it."""
    hosts = [str(host) for host, own in enumerate(values) if own == value]
    return "" if len(hosts) == len(values) else f" (host {', '.join(hosts)})"


def _bits(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:g} {unit}"
    return f"{bits:g} bit/s"
