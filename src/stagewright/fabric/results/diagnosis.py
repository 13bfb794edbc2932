"""Diagnosis of stragglers and slow or lossy links, from ranks' waits, pair probes and TCP retransmissions.

    late host     a straggler: its busy time (duration − waits) exceeds that of the others
    lossy link    many more retransmissions to or from a rank than elsewhere (or everywhere: the network)
    slow link     a pair's probe is slower than those of others; if most pairs of a host are, it is that host's link

Mean times per rank are misleading, since all ranks wait for the slow one, its neighbor the longest. Symptoms describe
the times of a layer: retransmission timeouts, bandwidth-bound, latency-bound, host-bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from stagewright.fabric.ranks.probe import PairProbe
from stagewright.fabric.trials import TrialTable
from stagewright.quantity import format_s

_LATE_S = 2e-3  # minimum excess of busy time over the others'
_LATE_SHARE = 0.25  # minimum excess, as a fraction of a trial
_MAX_IMBALANCE = 1.05  # ranks' bytes must be this equal to compare busy times
_LOSS_SHARE = 2e-3  # retransmissions over all segments
_LOSS_FACTOR = 4.0
_MIN_RETRANSMISSIONS = 6
_BUSY_SEGMENTS = 500  # fewer segments are not informative
_SLOW_FACTOR = 2.0
_FAR_S = 0.5e-3
_RTO_S = 0.18  # Linux' minimum RTO is 200 ms
_PLATEAU_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The cause of slowness that stands out."""

    kind: Literal["none", "late-host", "lossy-link", "lossy-network", "slow-link", "far-link"]
    rank: int | None = None
    """The rank whose host or link it is; None for a pair or no cause."""
    pair: tuple[int, int] | None = None
    """The two ranks, if the link between them is the cause."""
    sentence: str
    evidence: tuple[str, ...] = ()
    """One line per observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A characteristic of a layer's times."""

    kind: str
    """retransmission-timeout, rate, latency, straggler or host."""
    sentence: str
    """Explanation, with a fix if there is one."""


def diagnose(
    trials: TrialTable,
    pairs: Sequence[PairProbe],
    links: Sequence[Mapping[str, Any]],
    *,
    same_host: bool,
    work: Sequence[int] | None = None,
) -> Diagnosis:
    """Find the most prominent cause; links within one host are memory and are not diagnosed.

    `work` is what each rank sends and receives in a trial. If it is unequal (trees, broadcast), busy times are not
    comparable, and only reported delays are compared.
    """
    late = _late_host(trials, work)
    if late is not None:
        return late
    if not same_host:
        for cause in (_lossy_link(trials.num_ranks, pairs, links), _slow_link(trials, pairs)):
            if cause is not None:
                return cause
    return Diagnosis(kind="none", sentence="no host and no link stands out")


def busy_times(trials: TrialTable) -> npt.NDArray[np.float64]:
    """Return each rank's median busy time: its duration without waits, summed over the messages."""
    rows = trials.rows[~trials.void]
    waits = rows["receive_wait_s"].max(axis=-1) + rows["send_wait_s"].max(axis=-1)
    if not waits.any():  # the engine does not report waits
        return reported_delays(trials)
    busy = np.where(rows["took_part"] > 0, np.maximum(rows["duration_s"] - waits, 0.0), 0.0)
    medians: npt.NDArray[np.float64] = np.median(busy.sum(axis=1), axis=0)
    return medians


def reported_delays(trials: TrialTable) -> npt.NDArray[np.float64]:
    """Return each rank's median delay as it reported it."""
    medians: npt.NDArray[np.float64] = np.median(trials.rows[~trials.void]["late_s"].sum(axis=1), axis=0)
    return medians


def _late_host(trials: TrialTable, work: Sequence[int] | None) -> Diagnosis | None:
    if trials.num_ranks < 2 or not np.any(~trials.void):
        return None
    is_balanced = work is None or max(work) <= _MAX_IMBALANCE * min(work)
    busy = busy_times(trials) if is_balanced else reported_delays(trials)
    rank = int(np.argmax(busy))
    others = float(np.median(np.delete(busy, rank)))
    excess = float(busy[rank]) - others
    typical = float(np.median(trials.totals()))
    if excess < _LATE_S or excess < _LATE_SHARE * typical:
        return None
    return Diagnosis(
        kind="late-host",
        rank=rank,
        sentence=f"rank {rank} is a straggler: the others wait for its host, not for the network",
        evidence=(
            f"it is busy for {format_s(float(busy[rank]))} per trial, the others for {format_s(others)}",
            f"a trial takes {format_s(typical)} (median)",
        ),
    )


def _lossy_link(num_ranks: int, pairs: Sequence[PairProbe], links: Sequence[Mapping[str, Any]]) -> Diagnosis | None:
    """Find where segments are retransmitted: first in the probes, then over the whole run.

    A probe has the network to itself. In trials, a lossy link makes all ranks of a ring wait and then send in bursts,
    which overflow healthy links too: those counts can hide the cause.
    """
    for counts in ([asdict(pair) for pair in pairs], links):
        table = _count_retransmissions(num_ranks, counts)
        lossy = _find_lossy(table) if table.used.any() else None
        if lossy is not None:
            return _lossy(table, *lossy)
    table = _count_retransmissions(num_ranks, links or [asdict(pair) for pair in pairs])
    if not table.used.any():
        return None
    busy = table.used & (table.sent > _BUSY_SEGMENTS)
    resent, sent = float(table.resent.sum()), float(table.sent.sum())
    everywhere = busy.any() and float(np.mean(table.share[busy] >= _LOSS_SHARE / 2)) > 0.5
    if resent / sent < _LOSS_SHARE or resent < 4 * _MIN_RETRANSMISSIONS or not everywhere:
        return None
    return Diagnosis(
        kind="lossy-network",
        sentence="all links lose packets, none more than the others",
        evidence=(f"{resent:.0f} of {sent:.0f} segments ({resent / sent:.2%}) were retransmitted",),
    )


def _lossy(table: _Retransmissions, ranks: tuple[int, ...], inside: float, outside: float) -> Diagnosis:
    worst = sorted(product(range(len(table.share)), repeat=2), key=lambda pair: -table.share[pair])[:4]
    counts = "; ".join(
        f"{source} → {destination} {table.resent[source, destination]:.0f} of {table.sent[source, destination]:.0f}"
        for source, destination in worst
        if table.resent[source, destination]
    )
    evidence = (f"retransmissions: {counts}", f"{inside:.2%} on its connections, {outside:.2%} on the others")
    if len(ranks) == 1:
        sentence = f"the link of rank {ranks[0]} loses packets"
        return Diagnosis(kind="lossy-link", rank=ranks[0], sentence=sentence, evidence=evidence)
    sentence = f"packets are lost between rank {ranks[0]} and rank {ranks[1]}"
    return Diagnosis(kind="lossy-link", pair=(ranks[0], ranks[1]), sentence=sentence, evidence=evidence)


class _Retransmissions(NamedTuple):
    """Retransmitted and sent segments by source and destination."""

    share: npt.NDArray[np.float64]
    """Retransmitted ÷ sent."""
    resent: npt.NDArray[np.float64]
    sent: npt.NDArray[np.float64]

    @property
    def used(self) -> npt.NDArray[np.bool_]:
        """Connections that carried data."""
        return self.sent > 0


def _count_retransmissions(num_ranks: int, counts: Sequence[Mapping[str, Any]]) -> _Retransmissions:
    resent, sent = np.zeros((num_ranks, num_ranks)), np.zeros((num_ranks, num_ranks))
    for count in counts:
        resent[count["source"], count["destination"]] += count["retransmits"]
        sent[count["source"], count["destination"]] += count["segments"]
    return _Retransmissions(np.where(sent > 0, resent / np.maximum(sent, 1), 0.0), resent, sent)


def _find_lossy(table: _Retransmissions) -> tuple[tuple[int, ...], float, float] | None:
    """Find the host, or else the pair, whose connections lose many times more than the others."""
    share, resent, used = table.share, table.resent, table.used
    num_ranks = len(share)
    best: tuple[tuple[int, ...], float, float] | None = None
    for rank in range(num_ranks):
        own = np.zeros_like(used)
        own[rank, :] = own[:, rank] = True
        inside, outside = share[own & used], share[~own & used]
        if not len(inside) or resent[own & used].sum() < _MIN_RETRANSMISSIONS:
            continue
        # It is the host only if all its connections in one direction lose packets.
        outgoing, incoming = share[rank, used[rank, :]], share[used[:, rank], rank]
        level = max(float(outgoing.min()) if len(outgoing) else 0.0, float(incoming.min()) if len(incoming) else 0.0)
        rest = float(outside.mean()) if len(outside) else 0.0
        lossy = level >= _LOSS_SHARE / 2 and inside.mean() >= max(_LOSS_SHARE, _LOSS_FACTOR * rest)
        if lossy and (best is None or inside.mean() > best[1]):
            best = ((rank,), float(inside.mean()), rest)
    if best is not None:
        return best
    source, destination = (int(rank) for rank in np.unravel_index(int(np.argmax(share)), share.shape))
    rest = float(np.delete(share[used], np.argmax(share[used])).mean()) if used.sum() > 1 else 0.0
    if resent[source, destination] >= _MIN_RETRANSMISSIONS and share[source, destination] >= max(
        _LOSS_SHARE, _LOSS_FACTOR * rest
    ):
        return (source, destination), float(share[source, destination]), rest
    return None


def _slow_link(trials: TrialTable, pairs: Sequence[PairProbe]) -> Diagnosis | None:
    if len(pairs) < 6:  # two ranks have no others to compare with
        return None
    num_ranks = trials.num_ranks
    rate, latency = np.full((num_ranks, num_ranks), np.nan), np.full((num_ranks, num_ranks), np.nan)
    disturbed = {(pair.source, pair.destination) for pair in pairs if pair.retransmits}
    for pair in pairs:
        rate[pair.source, pair.destination] = pair.bytes_per_s
        latency[pair.source, pair.destination] = pair.latency_s
    typical_s = float(np.median(latency[np.isfinite(latency)]))
    for values, kind, word in ((1 / rate, "slow-link", "is slow"), (latency, "far-link", "has high latency")):
        slowest = _slowest(values)
        if slowest is None:
            continue
        ranks, inside, outside = slowest
        if kind == "far-link" and inside - outside < max(_FAR_S, typical_s):
            continue
        if len(ranks) == 2 and ranks in disturbed:
            continue  # one lost segment slows down one burst: not a slow link
        who = f"the link of rank {ranks[0]}" if len(ranks) == 1 else f"the link between rank {ranks[0]} and {ranks[1]}"
        if kind == "slow-link":
            measured = f"its probe reaches {8e-6 / inside:.0f} Mbit/s, other pairs {8e-6 / outside:.0f} Mbit/s"
        else:
            measured = f"its one-way latency is {format_s(inside)}, that of other pairs {format_s(outside)}"
        waits = trials.rows[~trials.void]["send_wait_s"].sum(axis=1).mean(axis=0) if trials.num_trials else None
        evidence = [measured]
        if waits is not None and waits.max() > 1e-3:
            source, destination = (int(rank) for rank in np.unravel_index(int(np.argmax(waits)), waits.shape))
            evidence.append(
                f"rank {source} waits longest to send, for rank {destination}: {format_s(float(waits.max()))} per trial"
            )
        return Diagnosis(
            kind="slow-link" if kind == "slow-link" else "far-link",
            rank=ranks[0] if len(ranks) == 1 else None,
            pair=(ranks[0], ranks[1]) if len(ranks) == 2 else None,
            sentence=f"{who} {word}",
            evidence=tuple(evidence),
        )
    return None


def _slowest(cost: npt.NDArray[np.float64]) -> tuple[tuple[int, ...], float, float] | None:
    """Find the host all of whose pairs cost more than the others in one direction, or else one such pair."""
    num_ranks = len(cost)
    probed = np.isfinite(cost)
    best: tuple[tuple[int, ...], float, float] | None = None
    for rank in range(num_ranks):
        own = np.zeros_like(probed)
        own[rank, :] = own[:, rank] = True
        outside = float(np.median(cost[~own & probed]))
        for costs in (cost[rank, probed[rank, :]], cost[probed[:, rank], rank]):
            level = float(np.min(costs))  # even of its best pair
            if level > _SLOW_FACTOR * outside and (best is None or level / outside > best[1] / best[2]):
                best = ((rank,), level, outside)
    if best is not None:
        return best
    flat = np.where(probed, cost, 0.0)
    source, destination = (int(rank) for rank in np.unravel_index(int(np.argmax(flat)), flat.shape))
    rest = np.delete(cost[probed], int(np.argmax(cost[probed])))
    if flat[source, destination] > 2 * _SLOW_FACTOR * float(np.median(rest)):
        return (source, destination), float(flat[source, destination]), float(np.median(rest))
    return None


def find_symptoms(
    times_s: npt.NDArray[np.float64],
    retransmits: npt.NDArray[np.int64],
    *,
    ideal_bytes_s: float | None,
    ideal_latency_s: float | None,
    floor_s: float | None,
    diagnosis: Diagnosis,
) -> list[Symptom]:
    """Find the symptoms of one layer, from its times, its retransmissions per trial and its ideal time (α–β)."""
    if not len(times_s):
        return []
    sentences: dict[str, str] = {}  # by kind
    median = float(np.median(times_s))
    slow = times_s > float(np.min(times_s)) + _RTO_S
    if slow.any() and (retransmits[slow] > 0).mean() >= 0.5:
        steps = np.unique(np.round(times_s[slow & (retransmits > 0)] / 0.2).astype(int))
        levels = ", ".join(f"{200 * step} ms" for step in steps[:3])
        sentences["retransmission-timeout"] = (
            f"{int(slow.sum())} of {len(times_s)} trials took about {levels} and had retransmissions: TCP's "
            "retransmission timeout (RTO) is at least 200 ms; on a network with short round trips lower it: "
            "ip route change … rto_min 5ms"
        )
    if floor_s is not None and median < 2 * floor_s:
        sentences["host"] = (
            f"within 2 × of {format_s(floor_s)} on this host's loopback: the host limits, not the network"
        )
    elif ideal_bytes_s is not None and ideal_latency_s is not None:
        explains = ideal_bytes_s + ideal_latency_s > _PLATEAU_SHARE * median
        if explains and ideal_bytes_s > ideal_latency_s:
            sentences["rate"] = "bandwidth-bound: the link rate explains the time"
        elif explains:
            sentences["latency"] = "latency-bound: the latency of its steps explains the time"
    if diagnosis.kind == "late-host":
        sentences["straggler"] = f"rank {diagnosis.rank} starts late, so all ranks finish late"
    return [Symptom(kind=kind, sentence=sentence) for kind, sentence in sentences.items()]
