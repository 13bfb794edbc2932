"""Workload and hosts of `stagewright fabric run`, from its options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.cli.screen import note
from stagewright.errors import UsageError
from stagewright.quantity import parse_bytes, parse_s

if TYPE_CHECKING:
    from stagewright.fabric.ranks.coordinator import RankLocation
    from stagewright.fabric.traffic.workload import Workload


def rank_locations(hosts: str | None, lab: Any) -> list[RankLocation]:
    """Return the locations of the ranks: the lab's hosts, the named hosts, or none (this machine)."""
    from stagewright.fabric.ranks.agent import DEFAULT_PORT
    from stagewright.fabric.ranks.coordinator import RankLocation

    if lab is not None:
        return [
            RankLocation(name=f"host {index}", host=host["address"], namespace=host["namespace"])
            for index, host in enumerate(lab.hosts)
        ]
    locations = []
    for text in [] if hosts is None else hosts.split(","):
        name, colon, port = text.strip().rpartition(":") if text.count(":") == 1 else (text.strip(), "", "")
        if not name or (colon and not port.isdigit()):
            raise UsageError(f"{text!r} in --hosts is not a host; write a,b or a:7651,b:7651")
        locations.append(RankLocation(name=text.strip(), host=name, port=int(port) if colon else DEFAULT_PORT))
    return locations


def read_token(path: Path | None) -> bytes:
    """Read the secret shared by coordinator and agents."""
    from stagewright.fabric.ranks.wire import check_token

    if path is None:
        raise UsageError(
            "agents and coordinator share a secret: give --token-file FILE; create one with: "
            "python -c 'import secrets; print(secrets.token_hex())' > FILE"
        )
    try:
        return check_token(path.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def build_workload(
    *,
    model: str | None,
    plan: Path | None,
    sizes: str | None,
    chakra: Path | None,
    begin: str | None,
    end: str | None,
    factor: int,
    num_ranks: int,
    ranks: int | None,
    trials: int | None,
    training: tuple[int, int, int],
    bucket: str | None,
    algorithm: str,
    gaps: bool,
    limits: dict[str, Any],
) -> tuple[Workload, int]:
    """Build the workload; also return the number of steps of the real job."""
    from stagewright.fabric.collectives.algorithms import ALL_REDUCE, collective
    from stagewright.fabric.traffic.workload import from_sizes, parse_nccl_size, sweep_sizes

    collective(algorithm, num_ranks)  # reject an unknown name before loading anything
    if model is not None:
        from stagewright.fabric.traffic.from_model import from_model, num_trials
        from stagewright.zoo.validation import check_name

        if algorithm not in ALL_REDUCE:
            raise UsageError(
                f"gradients need an all-reduce, which {algorithm!r} is not; use one of {', '.join(ALL_REDUCE)}"
            )
        check_name(model)
        steps = num_trials(*training)
        from stagewright import zoo

        loaded = zoo.load(model, batch=2)
        size = parse_bytes(bucket) if bucket else None
        return (
            from_model(
                loaded,
                num_ranks,
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

        loaded_plan = read_plan(plan)
        if ranks is not None and ranks != loaded_plan.mesh.num_workers:
            raise UsageError(f"{plan} has {loaded_plan.mesh.num_workers} workers, not {ranks}: omit --ranks")
        note(f"profiling {loaded_plan.model.name} …")
        workload = from_plan(
            loaded_plan,
            profile_plan(loaded_plan),
            name=plan.name,
            algorithm=algorithm,
            gaps=gaps,
            trials=count,
            **limits,
        )
        return workload, count
    if chakra is not None:
        from stagewright.fabric.traffic.chakra import from_chakra

        return from_chakra(chakra, num_ranks=ranks, algorithm=algorithm, trials=count, **limits), count
    if begin is not None:
        if end is None:
            raise UsageError(f"a sweep from {begin} needs a last size: add -e 64M")
        swept = sweep_sizes(parse_nccl_size(begin), parse_nccl_size(end), factor)
        count = 20 if trials is None else trials
        return from_sizes(swept, num_ranks, algorithm=algorithm, trials=count, name="sweep", **limits), count
    assert sizes is not None
    listed = [parse_nccl_size(text) for text in sizes.split(",")]
    return from_sizes(listed, num_ranks, algorithm=algorithm, trials=count, **limits), count


def add_delays(workload: Workload, late: list[str]) -> Workload:
    """Add the delays of stragglers to a workload."""
    delays = {}
    for text in late:
        rank, colon, delay = text.partition(":")
        if not colon or not rank.strip().isdigit():
            raise UsageError(f"{text!r} is not a delayed rank; write RANK:TIME, like 2:20ms")
        delays[int(rank)] = parse_s(delay)
    return workload.with_delays(delays) if delays else workload
