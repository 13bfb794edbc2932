"""Dumps of torch's Flight Recorder (NCCL, Gloo), one file for each rank: who did not join a collective, or is late.

    group     rank 0   1 all_reduce   2 all_reduce   3 all_gather          the last calls of each rank, by number:
              rank 1   1 all_reduce   2 all_reduce                         rank 1 never called number 3

Dumps are pickles or JSON. A pickle is read without any class or function, so reading it runs no code.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.files.json_values import MAX_FILE_BYTES, parse_json
from stagewright.quantity import format_s

_SAME_SIZES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather")
_MIN_LATE_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective that a rank called."""

    group: str
    number: int
    name: str
    """all_reduce, …"""
    sizes: str
    created_s: float
    where: str
    """The line of the user's script, if recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFinding:
    """What the calls of a job show."""

    kind: str
    """missing, mismatch or late."""
    ranks: tuple[int, ...]
    group: str
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": list(self.ranks)}


class _PlainUnpickler(pickle._Unpickler):
    """Reads numbers, strings, lists and dictionaries; refuses everything that needs code.

    Python's own implementation: the one in C reserves as much memory as a damaged file asks for.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, but a dump has plain values only")


def is_flight_recorder(path: Path) -> bool:
    """Whether a file looks like a dump: a pickle, or JSON with entries before any trace events."""
    try:
        with open(path, "rb") as file:
            head = file.read(400)
    except OSError:
        return False
    return head.startswith(b"\x80") or (b'"comm_lib_version"' in head or b'"entries"' in head)


def read_dump(path: Path) -> list[Call]:
    """Read the calls of one rank's dump, oldest first."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} has more than {MAX_FILE_BYTES} bytes; is it a dump of the Flight Recorder?")
        content = path.read_bytes()
        is_pickle = content.startswith(b"\x80")
        dump = _PlainUnpickler(io.BytesIO(content)).load() if is_pickle else parse_json(content)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from None
    except UsageError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise UsageError(f"{path} is no dump of the Flight Recorder: {error}") from None
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(entries, list):
        raise UsageError(f"{path} is no dump of the Flight Recorder: it has no entries")
    return [call for entry in entries if isinstance(entry, dict) and (call := _call(entry)) is not None]


def compare_dumps(paths: Sequence[Path]) -> tuple[dict[int, list[Call]], list[CallFinding]]:
    """Read one dump for each rank, and return the calls of each and what is wrong with them."""
    calls: dict[int, list[Call]] = {}
    for index, path in enumerate(paths):
        numbers = re.findall(r"\d+", path.stem)
        rank = int(numbers[-1]) if numbers else index
        if rank in calls:
            raise UsageError(f"two files are of rank {rank}, one of them {path}; the last number of a name is the rank")
        calls[rank] = read_dump(path)
    return calls, find_problems(calls)


def find_problems(calls: Mapping[int, Sequence[Call]]) -> list[CallFinding]:
    """Compare the calls of all ranks, group by group."""
    findings: list[CallFinding] = []
    groups = dict.fromkeys(call.group for own in calls.values() for call in own)
    for group in groups:
        ranks = {
            rank: {call.number: call for call in own if call.group == group}
            for rank, own in calls.items()
            if any(call.group == group for call in own)
        }
        if len(ranks) < 2:
            continue
        finding = _mismatch(group, ranks) or _missing(group, ranks) or _late(group, ranks)
        findings += [] if finding is None else [finding]
    return findings


def _mismatch(group: str, ranks: Mapping[int, Mapping[int, Call]]) -> CallFinding | None:
    for number in sorted(set.intersection(*(set(own) for own in ranks.values()))):
        variants: dict[tuple[str, str], list[int]] = {}
        for rank, own in ranks.items():
            call = own[number]
            sizes = call.sizes if call.name in _SAME_SIZES else ""
            variants.setdefault((call.name, sizes), []).append(rank)
        if len(variants) > 1:
            (usual, _), *others = sorted(variants.items(), key=lambda item: -len(item[1]))
            odd, odd_ranks = others[-1]
            where = ranks[odd_ranks[0]][number].where
            sentence = (
                f"Call {number} of group {group} differs: {_ranks(odd_ranks)} called {' '.join(odd)}"
                f"{f' ({where})' if where else ''}, others {' '.join(usual)}; make all ranks take the same branch"
            )
            return CallFinding(kind="mismatch", ranks=tuple(odd_ranks), group=group, sentence=sentence)
    return None


def _missing(group: str, ranks: Mapping[int, Mapping[int, Call]]) -> CallFinding | None:
    last = {rank: max(own) for rank, own in ranks.items()}
    behind = [rank for rank, number in last.items() if number == min(last.values())]
    if len(set(last.values())) == 1:
        return None
    ahead = next(rank for rank, number in last.items() if number > min(last.values()))
    following = ranks[ahead].get(min(last.values()) + 1)
    last_call = ranks[behind[0]][last[behind[0]]]
    missed = "the next call" if following is None else f"call {following.number}, {following.name} {following.sizes}"
    where = f" ({following.where})" if following is not None and following.where else ""
    sentence = (
        f"{_ranks(behind).capitalize()} did not join {missed} of group {group}{where}; the last call there was "
        f"{last_call.number}, {last_call.name}{f' ({last_call.where})' if last_call.where else ''}: look for an "
        "exception, a branch or a slow loader after it"
    )
    return CallFinding(kind="missing", ranks=tuple(behind), group=group, sentence=sentence)


def _late(group: str, ranks: Mapping[int, Mapping[int, Call]]) -> CallFinding | None:
    """Name the rank that calls last most of the time; clocks of different hosts must agree."""
    common = sorted(set.intersection(*(set(own) for own in ranks.values())))
    if len(common) < 4:
        return None
    last: dict[int, int] = {}
    lateness: dict[int, float] = {}
    for number in common:
        times = {rank: own[number].created_s for rank, own in ranks.items()}
        rank = max(times, key=lambda rank: times[rank])
        last[rank] = last.get(rank, 0) + 1
        lateness[rank] = lateness.get(rank, 0.0) + times[rank] - min(times.values())
    rank = max(last, key=lambda rank: last[rank])
    mean_s = lateness[rank] / last[rank]
    if last[rank] < 0.8 * len(common) or mean_s < _MIN_LATE_S:
        return None
    sentence = (
        f"Rank {rank} calls last in {last[rank]} of {len(common)} collectives of group {group}, on average "
        f"{format_s(mean_s)} after the first: the others wait for it"
    )
    return CallFinding(kind="late", ranks=(rank,), group=group, sentence=sentence)


def _call(entry: Mapping[str, Any]) -> Call | None:
    number, name, group = entry.get("collective_seq_id"), entry.get("profiling_name"), entry.get("process_group")
    if not isinstance(number, int) or not isinstance(name, str) or entry.get("is_p2p") is True:
        return None
    created = entry.get("time_created_ns")
    label = group[-1] or group[0] if isinstance(group, list | tuple) and group else entry.get("pg_id", "")
    return Call(
        group=str(label),
        number=number,
        name=name.partition(":")[2] or name,
        sizes=str(entry.get("input_sizes", "")),
        created_s=created * 1e-9 if isinstance(created, int) else 0.0,
        where=_where(entry.get("frames")),
    )


def _where(frames: object) -> str:
    """Return the innermost line outside of torch."""
    for frame in frames if isinstance(frames, list) else []:
        if isinstance(frame, dict) and "/torch/" not in str(frame.get("filename", "/torch/")):
            return f"{Path(str(frame['filename'])).name}:{frame.get('line', '?')}"
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"
