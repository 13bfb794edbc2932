"""What `stagewright fabric run` is asked to send, and between whom, from its options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.cli.screen import note
from stagewright.errors import UsageError
from stagewright.quantity import parse_bytes, parse_s

if TYPE_CHECKING:
    from stagewright.fabric.ranks.coordinator import RankLocation
    from stagewright.fabric.traffic.workload import Workload

__all__ = ["add_delays", "build_workload", "rank_locations", "read_token"]


def rank_locations(hosts: str | None, lab: Any) -> list[RankLocation]:
    """Where the ranks run: the lab's hosts, those that were named, or none (this machine)."""
    from stagewright.fabric.ranks.agent import DEFAULT_PORT
    from stagewright.fabric.ranks.coordinator import RankLocation

    if lab is not None:
        return [
            RankLocation(name=f"host {at}", host=host["address"], namespace=host["namespace"])
            for at, host in enumerate(lab.hosts)
        ]
    found = []
    for text in [] if hosts is None else hosts.split(","):
        name, colon, port = text.strip().rpartition(":") if text.count(":") == 1 else (text.strip(), "", "")
        if not name or (colon and not port.isdigit()):
            raise UsageError(f"{text!r} in --hosts is not a host; write a,b or a:7651,b:7651")
        found.append(RankLocation(name=text.strip(), host=name, port=int(port) if colon else DEFAULT_PORT))
    return found


def read_token(path: Path | None) -> bytes:
    """The shared secret of coordinator and agents, from its file."""
    from stagewright.fabric.ranks.wire import check_token

    if path is None:
        raise UsageError(
            "agents and coordinator share a secret: give --token-file FILE; make one with: "
            "python -c 'import secrets; print(secrets.token_hex())' > FILE"
        )
    try:
        return check_token(path.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from None


def build_workload(
    *,
    model: str | None,
    plan: Path | None,
    sizes: str | None,
    chakra: Path | None,
    begin: str | None,
    end: str | None,
    factor: int,
    number: int,
    ranks: int | None,
    trials: int | None,
    schooling: tuple[int, int, int],
    bucket: str | None,
    algorithm: str,
    gaps: bool,
    limits: dict[str, Any],
) -> tuple[Workload, int]:
    """What to send, and how many steps the real job has."""
    from stagewright.fabric.collectives.algorithms import ALL_REDUCE, collective
    from stagewright.fabric.traffic.workload import from_sizes, parse_nccl_size, sweep_sizes

    collective(algorithm, number)  # an unknown name is told before anything is loaded
    if model is not None:
        from stagewright.fabric.traffic.from_model import from_model, num_trials
        from stagewright.zoo.check import check_name

        if algorithm not in ALL_REDUCE:
            raise UsageError(f"gradients are all-reduced; {algorithm!r} does not: use one of {', '.join(ALL_REDUCE)}")
        check_name(model)
        steps = num_trials(*schooling)
        from stagewright import zoo

        loaded = zoo.load(model, batch=2)
        size = parse_bytes(bucket) if bucket else None
        return (
            from_model(
                loaded,
                number,
                algorithm=algorithm,
                bucket_bytes=size,
                trials=steps if trials is None else trials,
                **limits,
            ),
            steps,
        )
    count = 100 if trials is None else trials
    if plan is not None:
        from stagewright.fabric.traffic.from_plan import from_plan, profile_plan
        from stagewright.spec.plan_file import read_plan

        wanted = read_plan(plan)
        if ranks is not None and ranks != wanted.mesh.num_workers:
            raise UsageError(f"{plan} has {wanted.mesh.num_workers} workers, so --ranks {ranks} can't be: leave it out")
        note(f"profiling {wanted.model.name} …")
        workload = from_plan(
            wanted, profile_plan(wanted), name=plan.name, algorithm=algorithm, gaps=gaps, trials=count, **limits
        )
        return workload, count
    if chakra is not None:
        from stagewright.fabric.traffic.chakra import from_chakra

        return from_chakra(chakra, num_ranks=ranks, algorithm=algorithm, trials=count, **limits), count
    if begin is not None:
        if end is None:
            raise UsageError(f"a sweep from {begin} needs an end: add -e 64M")
        swept = sweep_sizes(parse_nccl_size(begin), parse_nccl_size(end), factor)
        count = 20 if trials is None else trials
        return from_sizes(swept, number, algorithm=algorithm, trials=count, name="sweep", **limits), count
    assert sizes is not None
    listed = [parse_nccl_size(text) for text in sizes.split(",")]
    return from_sizes(listed, number, algorithm=algorithm, trials=count, **limits), count


def add_delays(workload: Workload, late: list[str]) -> Workload:
    """The workload with ranks that compute longer."""
    delays = {}
    for text in late:
        rank, colon, delay = text.partition(":")
        if not colon or not rank.strip().isdigit():
            raise UsageError(f"{text!r} is not a late rank; write RANK:TIME, like 2:20ms")
        delays[int(rank)] = parse_s(delay)
    return workload.with_delays(delays) if delays else workload
