"""Workload and hosts of `stagewright fabric run`, from its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stagewright.cli.options import choice, panel
from stagewright.cli.screen import note
from stagewright.errors import UsageError
from stagewright.fabric.collectives.algorithms import ALGORITHMS, ALL_REDUCE, collective
from stagewright.quantity import parse_bytes, parse_s

if TYPE_CHECKING:
    from stagewright.fabric.ranks.coordinator import RankLocation
    from stagewright.fabric.traffic.workload import Workload

_what_option = panel("Workload")
how_option = panel("Transport")
_OTHER_COLLECTIVES = [name for name in ALGORITHMS if name not in ALL_REDUCE]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The options that choose what is sent."""

    model: Annotated[
        str | None, _what_option(metavar="MODEL", help="Model; sends its gradients, last layer first.")
    ] = None
    plan: Annotated[Path | None, _what_option(metavar="FILE", help="A plan.toml; sends one of its steps.")] = None
    sizes: Annotated[str | None, _what_option(metavar="LIST", help="Send messages of these sizes: 2600,1MiB.")] = None
    chakra: Annotated[
        Path | None, _what_option(metavar="PREFIX", help="Send Chakra traces PREFIX.0.et, …; --ranks rescales.")
    ] = None
    begin: Annotated[str | None, _what_option("-b", metavar="SIZE", help="Sweep: first size.")] = None
    end: Annotated[str | None, _what_option("-e", metavar="SIZE", help="Sweep: last size.")] = None
    factor: Annotated[int, _what_option("-f", help="Sweep: ratio of consecutive sizes.")] = 2
    batch: Annotated[int, _what_option(help="Global batch: samples in a step.")] = 64
    epochs: Annotated[int, _what_option(help="Passes over the samples.")] = 1
    samples: Annotated[int, _what_option(help="How many samples; MNIST has 60000.")] = 60000
    bucket: Annotated[str | None, _what_option(metavar="SIZE", help="Bucket size for gradients, as in DDP.")] = None
    trials: Annotated[
        int | None,
        _what_option("--trials", "-n", help="Measured trials. \\[default: batches × epochs of a model, else 100]"),
    ] = None
    warmup: Annotated[int, _what_option("--warmup", "-w", min=0, help="Warm-up; untimed trials.")] = 5
    time_limit: Annotated[str, _what_option("--time-limit", metavar="TIME", help="Stop after this time.")] = "10min"
    seed: Annotated[int, _what_option(min=0, help="Random seed; of the payload.")] = 0
    algorithm: Annotated[
        str,
        choice(
            "algorithm",
            ALGORITHMS,
            how_option,
            metavar="NAME",
            help=f"All-reduce by {', '.join(ALL_REDUCE)}; or {', '.join(_OTHER_COLLECTIVES)}.",
        ),
    ] = "ring"

    def build(self, num_ranks: int, ranks: int | None, *, gaps: bool, overlap: bool) -> tuple[Workload, int]:
        """Build the workload; also return the number of steps of the real job."""
        common: dict[str, Any] = {
            "algorithm": self.algorithm,
            "warmup": self.warmup,
            "time_limit_s": parse_s(self.time_limit),
            "seed": self.seed,
            "overlap": overlap,
        }
        options = {"--model": "model", "--plan": "plan", "--sizes": "sizes", "--chakra": "chakra", "-b": "begin"}
        chosen = [option for option, name in options.items() if getattr(self, name) is not None]
        if len(chosen) != 1:
            problem = f"{' and '.join(chosen)} exclude each other" if chosen else "nothing to send"
            choices = "--model MODEL, --plan FILE, --sizes LIST, --chakra PREFIX, or -b SIZE -e SIZE"
            raise UsageError(f"{problem}: give one of {choices}")
        from stagewright.fabric.traffic.workload import from_sizes, parse_nccl_size, sweep_sizes

        collective(self.algorithm, num_ranks)  # check the number of ranks before loading anything
        if self.model is not None:
            from stagewright.fabric.traffic.from_model import from_model, num_trials
            from stagewright.zoo.validation import check_name

            if self.algorithm not in ALL_REDUCE:
                raise UsageError(
                    f"gradients need an all-reduce, which {self.algorithm!r} is not; use one of {', '.join(ALL_REDUCE)}"
                )
            check_name(self.model)
            steps = num_trials(self.samples, self.batch, self.epochs)
            from stagewright import zoo

            loaded = zoo.load(self.model, batch=2)
            size = parse_bytes(self.bucket) if self.bucket else None
            count = steps if self.trials is None else self.trials
            return from_model(loaded, num_ranks, bucket_bytes=size, trials=count, **common), steps
        count = 100 if self.trials is None else self.trials
        if self.plan is not None:
            from stagewright.fabric.traffic.from_plan import from_plan, profile_plan
            from stagewright.spec.plan_file import read_plan

            loaded_plan = read_plan(self.plan)
            if ranks is not None and ranks != loaded_plan.mesh.num_workers:
                raise UsageError(f"{self.plan} has {loaded_plan.mesh.num_workers} workers, not {ranks}: omit --ranks")
            note(f"profiling {loaded_plan.model.name} …")
            profile = profile_plan(loaded_plan)
            return from_plan(loaded_plan, profile, name=self.plan.name, gaps=gaps, trials=count, **common), count
        if self.chakra is not None:
            from stagewright.fabric.traffic.chakra import from_chakra

            return from_chakra(self.chakra, num_ranks=ranks, trials=count, **common), count
        if self.begin is not None:
            if self.end is None:
                raise UsageError(f"a sweep from {self.begin} needs a last size: add -e 64M")
            swept = sweep_sizes(parse_nccl_size(self.begin), parse_nccl_size(self.end), self.factor)
            count = 20 if self.trials is None else self.trials
            return from_sizes(swept, num_ranks, trials=count, name="sweep", **common), count
        assert self.sizes is not None
        listed = [parse_nccl_size(text) for text in self.sizes.split(",")]
        return from_sizes(listed, num_ranks, trials=count, **common), count


def add_delays(workload: Workload, late: list[str]) -> Workload:
    """Add the delays of stragglers to a workload."""
    delays = {}
    for text in late:
        rank, colon, delay = text.partition(":")
        if not colon or not rank.strip().isdigit():
            raise UsageError(f"{text!r} is not a delayed rank; write RANK:TIME, like 2:20ms")
        delays[int(rank)] = parse_s(delay)
    return workload.with_delays(delays) if delays else workload
