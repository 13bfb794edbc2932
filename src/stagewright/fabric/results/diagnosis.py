"""Who is slow and why: from what ranks waited for, what pairs showed alone, and what the kernel sent again.

    late host     its own time (duration − waits) is longer than everybody else's: it computes, or sleeps, or starves
    lossy link    segments to or from it are sent again, many more than elsewhere (or everywhere: the network)
    slow link     a pair alone is slower than others alone; if most pairs of a host are, it is that host's link

A mean per rank names the wrong one, since everybody waits for the slow one, its neighbour the longest. Modes say what a
layer's times look like: a stair of retransmission timeouts, a plateau at a rate, latency, this host's own limit.
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

__all__ = ["Mode", "Verdict", "judge", "modes_of"]

_LATE_S = 2e-3  # own time beyond the others' that is worth a word
_LATE_SHARE = 0.25  # of a trial
_ALIKE = 1.05  # ranks whose work differs by no more can be compared
_LOSS_SHARE = 2e-3  # segments sent again, of all
_LOSS_FACTOR = 4.0
_LOSS_LEAST = 6
_BUSY_SEGMENTS = 500  # connections that carried less tell nothing alone
_SLOW_FACTOR = 2.0
_FAR_S = 0.5e-3
_RTO_S = 0.18  # Linux waits 200 ms at least
_PLATEAU_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who is to blame."""

    kind: Literal["none", "late-host", "lossy-link", "lossy-network", "slow-link", "far-link"]
    """What is wrong; none where nothing stands out."""
    rank: int | None
    """The rank whose host or link it is; None where it is a pair, or nobody."""
    pair: tuple[int, int] | None
    """The two ranks between which it is, where one host is not enough."""
    sentence: str
    """The verdict as a sentence."""
    evidence: tuple[str, ...]
    """What it rests on, a line each."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What the times of one layer look like."""

    kind: str
    """retransmission-timeout, rate, latency, straggler or host."""
    sentence: str
    """In words, with a way out where there is one."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    trials: TrialTable,
    pairs: Sequence[PairProbe],
    links: Sequence[Mapping[str, Any]],
    *,
    same_host: bool,
    work: Sequence[int] | None = None,
) -> Verdict:
    """The one cause that stands out most; links between ranks on one host are memory and are not judged.

    `work` is what each rank sends and receives in a trial. Where it is not equal (trees, broadcast), own times can't be
    compared, and only ranks that know that they were late are.
    """
    late = _late_host(trials, work)
    if late is not None:
        return late
    if not same_host:
        for found in (_lossy_link(trials.num_ranks, pairs, links), _slow_link(trials, pairs)):
            if found is not None:
                return found
    return Verdict(kind="none", rank=None, pair=None, sentence="no host and no link stands out", evidence=())


def own_times(trials: TrialTable) -> npt.NDArray[np.float64]:
    """Median over trials of each rank's own time: its duration without its waits, summed over the messages."""
    rows = trials.rows[~trials.void]
    waits = rows["receive_wait_s"].max(axis=-1) + rows["send_wait_s"].max(axis=-1)
    if not waits.any():  # an engine that does not tell them
        return known_late(trials)
    own = np.where(rows["took_part"] > 0, np.maximum(rows["duration_s"] - waits, 0.0), 0.0)
    medians: npt.NDArray[np.float64] = np.median(own.sum(axis=1), axis=0)
    return medians


def known_late(trials: TrialTable) -> npt.NDArray[np.float64]:
    """Median over trials of how late each rank knew to be."""
    medians: npt.NDArray[np.float64] = np.median(trials.rows[~trials.void]["late_s"].sum(axis=1), axis=0)
    return medians


def _late_host(trials: TrialTable, work: Sequence[int] | None) -> Verdict | None:
    if trials.num_ranks < 2 or not np.any(~trials.void):
        return None
    alike = work is None or max(work) <= _ALIKE * min(work)
    own = own_times(trials) if alike else known_late(trials)
    rank = int(np.argmax(own))
    others = float(np.median(np.delete(own, rank)))
    excess = float(own[rank]) - others
    typical = float(np.median(trials.totals()))
    if excess < _LATE_S or excess < _LATE_SHARE * typical:
        return None
    return Verdict(
        kind="late-host",
        rank=rank,
        pair=None,
        sentence=f"rank {rank} is late: the others wait for its host, not for the network",
        evidence=(
            f"its own time is {format_s(float(own[rank]))} of a trial, that of the others {format_s(others)}",
            f"a trial takes {format_s(typical)} (median)",
        ),
    )


def _lossy_link(num_ranks: int, pairs: Sequence[PairProbe], links: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """Where segments are sent again: seen by the probes, or else over all that the connections carried.

    A probe has the network to itself. In trials a lossy link makes every rank of a ring wait and then send in bursts,
    which overflow clean links too: their counts can hide the cause.
    """
    for counts in ([pair.to_dict() for pair in pairs], links):
        table = _resends(num_ranks, counts)
        found = _stands_out(table) if table.used.any() else None
        if found is not None:
            return _lossy(table, *found)
    table = _resends(num_ranks, links or [pair.to_dict() for pair in pairs])
    if not table.used.any():
        return None
    busy = table.used & (table.sent > _BUSY_SEGMENTS)
    again, sent = float(table.again.sum()), float(table.sent.sum())
    everywhere = busy.any() and float(np.mean(table.share[busy] >= _LOSS_SHARE / 2)) > 0.5
    if again / sent < _LOSS_SHARE or again < 4 * _LOSS_LEAST or not everywhere:
        return None
    return Verdict(
        kind="lossy-network",
        rank=None,
        pair=None,
        sentence="packets are lost on every link, on none more than on the others",
        evidence=(f"{again:.0f} of {sent:.0f} segments ({again / sent:.2%}) were sent again",),
    )


def _lossy(table: _Resends, ranks: tuple[int, ...], inside: float, outside: float) -> Verdict:
    places = sorted(product(range(len(table.share)), repeat=2), key=lambda place: -table.share[place])[:4]
    told = "; ".join(
        f"{source} → {destination} {table.again[source, destination]:.0f} of {table.sent[source, destination]:.0f}"
        for source, destination in places
        if table.again[source, destination]
    )
    evidence = (
        f"segments sent again: {told}",
        f"{inside:.2%} on its connections, {outside:.2%} on the others",
    )
    if len(ranks) == 1:
        sentence = f"the link of rank {ranks[0]} loses packets"
        return Verdict(kind="lossy-link", rank=ranks[0], pair=None, sentence=sentence, evidence=evidence)
    sentence = f"packets are lost between rank {ranks[0]} and rank {ranks[1]}"
    return Verdict(kind="lossy-link", rank=None, pair=(ranks[0], ranks[1]), sentence=sentence, evidence=evidence)


class _Resends(NamedTuple):
    """By source and destination."""

    # Of the segments that were sent.
    share: npt.NDArray[np.float64]
    # Segments sent again, and sent.
    again: npt.NDArray[np.float64]
    sent: npt.NDArray[np.float64]

    @property
    def used(self) -> npt.NDArray[np.bool_]:
        """Connections that carried something."""
        return self.sent > 0


def _resends(num_ranks: int, counts: Sequence[Mapping[str, Any]]) -> _Resends:
    again, sent = np.zeros((num_ranks, num_ranks)), np.zeros((num_ranks, num_ranks))
    for one in counts:
        again[one["source"], one["destination"]] += one["retransmits"]
        sent[one["source"], one["destination"]] += one["segments"]
    return _Resends(np.where(sent > 0, again / np.maximum(sent, 1), 0.0), again, sent)


def _stands_out(table: _Resends) -> tuple[tuple[int, ...], float, float] | None:
    """The host, or else the pair, whose connections lose many times what the others do."""
    share, again, used = table.share, table.again, table.used
    num_ranks = len(share)
    best: tuple[tuple[int, ...], float, float] | None = None
    for rank in range(num_ranks):
        mine = np.zeros_like(used)
        mine[rank, :] = mine[:, rank] = True
        inside, outside = share[mine & used], share[~mine & used]
        if not len(inside) or again[mine & used].sum() < _LOSS_LEAST:
            continue
        # All of a host's connections in one direction at least, or it is not the host.
        sends, takes = share[rank, used[rank, :]], share[used[:, rank], rank]
        level = max(float(sends.min()) if len(sends) else 0.0, float(takes.min()) if len(takes) else 0.0)
        rest = float(outside.mean()) if len(outside) else 0.0
        lossy = level >= _LOSS_SHARE / 2 and inside.mean() >= max(_LOSS_SHARE, _LOSS_FACTOR * rest)
        if lossy and (best is None or inside.mean() > best[1]):
            best = ((rank,), float(inside.mean()), rest)
    if best is not None:
        return best
    place = np.unravel_index(int(np.argmax(share)), share.shape)
    one, two = int(place[0]), int(place[1])
    rest = float(np.delete(share[used], np.argmax(share[used])).mean()) if used.sum() > 1 else 0.0
    if again[one, two] >= _LOSS_LEAST and share[one, two] >= max(_LOSS_SHARE, _LOSS_FACTOR * rest):
        return (one, two), float(share[one, two]), rest
    return None


def _slow_link(trials: TrialTable, pairs: Sequence[PairProbe]) -> Verdict | None:
    if len(pairs) < 6:  # two ranks have nobody to be compared with
        return None
    num_ranks = trials.num_ranks
    rate, latency = np.full((num_ranks, num_ranks), np.nan), np.full((num_ranks, num_ranks), np.nan)
    disturbed = {(pair.source, pair.destination) for pair in pairs if pair.retransmits}
    for pair in pairs:
        rate[pair.source, pair.destination] = pair.bytes_per_s
        latency[pair.source, pair.destination] = pair.latency_s
    typical_s = float(np.median(latency[np.isfinite(latency)]))
    for values, kind, word in ((1 / rate, "slow-link", "slow"), (latency, "far-link", "far away")):
        found = _slowest(values)
        if found is None:
            continue
        ranks, inside, outside = found
        if kind == "far-link" and inside - outside < max(_FAR_S, typical_s):
            continue
        if len(ranks) == 2 and ranks in disturbed:
            continue  # one lost segment slows one burst: that is no slow link
        who = f"the link of rank {ranks[0]}" if len(ranks) == 1 else f"the link between rank {ranks[0]} and {ranks[1]}"
        if kind == "slow-link":
            told = f"alone it carries {8e-6 / inside:.0f} Mbit/s, other pairs {8e-6 / outside:.0f} Mbit/s"
        else:
            told = f"one way takes {format_s(inside)} alone, between other pairs {format_s(outside)}"
        waits = trials.rows[~trials.void]["send_wait_s"].sum(axis=1).mean(axis=0) if trials.num_trials else None
        evidence = [told]
        if waits is not None and waits.max() > 1e-3:
            source, destination = (int(at) for at in np.unravel_index(int(np.argmax(waits)), waits.shape))
            evidence.append(
                f"rank {source} waits longest to send, to rank {destination}: {format_s(float(waits.max()))} a trial"
            )
        return Verdict(
            kind="slow-link" if kind == "slow-link" else "far-link",
            rank=ranks[0] if len(ranks) == 1 else None,
            pair=(ranks[0], ranks[1]) if len(ranks) == 2 else None,
            sentence=f"{who} is {word}",
            evidence=tuple(evidence),
        )
    return None


def _slowest(cost: npt.NDArray[np.float64]) -> tuple[tuple[int, ...], float, float] | None:
    """The host all of whose pairs cost more than the others, in one direction at least; or else one pair that does."""
    num_ranks = len(cost)
    known = np.isfinite(cost)
    best: tuple[tuple[int, ...], float, float] | None = None
    for rank in range(num_ranks):
        mine = np.zeros_like(known)
        mine[rank, :] = mine[:, rank] = True
        outside = float(np.median(cost[~mine & known]))
        for own in (cost[rank, known[rank, :]], cost[known[:, rank], rank]):
            level = float(np.min(own))  # even its best pair
            if level > _SLOW_FACTOR * outside and (best is None or level / outside > best[1] / best[2]):
                best = ((rank,), level, outside)
    if best is not None:
        return best
    flat = np.where(known, cost, 0.0)
    place = np.unravel_index(int(np.argmax(flat)), flat.shape)
    one, two = int(place[0]), int(place[1])
    rest = np.delete(cost[known], int(np.argmax(cost[known])))
    if flat[one, two] > 2 * _SLOW_FACTOR * float(np.median(rest)):
        return (one, two), float(flat[one, two]), float(np.median(rest))
    return None


def modes_of(
    times_s: npt.NDArray[np.float64],
    again: npt.NDArray[np.int64],
    *,
    ideal_bytes_s: float | None,
    ideal_latency_s: float | None,
    floor_s: float | None,
    verdict: Verdict,
) -> list[Mode]:
    """The labels of one layer: `again` are segments sent again in each trial, ideals the two parts of α–β."""
    found: list[Mode] = []
    if not len(times_s):
        return found
    middle = float(np.median(times_s))
    slow = times_s > float(np.min(times_s)) + _RTO_S
    if slow.any() and (again[slow] > 0).mean() >= 0.5:
        steps = np.unique(np.round(times_s[slow & (again > 0)] / 0.2).astype(int))
        stairs = ", ".join(f"{200 * step} ms" for step in steps[:3])
        found.append(
            Mode(
                kind="retransmission-timeout",
                sentence=f"{int(slow.sum())} of {len(times_s)} trials stand on a stair (about {stairs}) and had "
                "segments sent again: TCP's retransmission timeout, at least 200 ms; on a network with short round "
                "trips lower it: ip route change … rto_min 5ms",
            )
        )
    if floor_s is not None and middle < 2 * floor_s:
        found.append(
            Mode(
                kind="host",
                sentence=f"within 2 × of this host's own {format_s(floor_s)}: the host, not the network, is measured",
            )
        )
    elif ideal_bytes_s is not None and ideal_latency_s is not None:
        ideal = ideal_bytes_s + ideal_latency_s
        if ideal > _PLATEAU_SHARE * middle and ideal_bytes_s > ideal_latency_s:
            found.append(Mode(kind="rate", sentence="a plateau: the bytes at the link's rate explain the time"))
        elif ideal > _PLATEAU_SHARE * middle:
            found.append(Mode(kind="latency", sentence="the latency of its steps explains the time"))
    if verdict.kind == "late-host":
        found.append(Mode(kind="straggler", sentence=f"rank {verdict.rank} begins late, so everybody ends late"))
    return found
