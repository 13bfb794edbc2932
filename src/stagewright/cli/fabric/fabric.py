"""``stagewright fabric``: what collectives cost on a network, who is slow, and a network to try it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.fabric.options import add_delays, build_workload, rank_locations, read_token
from stagewright.cli.options import Json
from stagewright.cli.screen import note, print_json, print_table, progress, screen
from stagewright.cluster.device import has_gpu
from stagewright.errors import RunError, UsageError
from stagewright.quantity import parse_bytes, parse_s

if TYPE_CHECKING:
    from stagewright.fabric.ranks.coordinator import Measurements, RankLocation, Settings
    from stagewright.fabric.traffic.workload import Workload

__all__ = ["fabric"]

fabric = typer.Typer(
    name="fabric",
    help="What this model's collectives cost on this network: thousands of trials, the tail, and who is slow.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_WHAT = "What is sent"
_HOW = "How it is sent"
_WHERE = "Where"
_SHOW = "What is shown"
_FLOOR_TRIALS = 30

TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", help="The secret that coordinator and agents share.", rich_help_panel=_WHERE
    ),
]


@fabric.command()
def run(
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Gradients of a model, last layer first.", rich_help_panel=_WHAT)
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One step of a plan.toml.", rich_help_panel=_WHAT)
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="LIST", help="Sizes with commas: 2600,1MiB.", rich_help_panel=_WHAT)
    ] = None,
    chakra: Annotated[
        Path | None,
        typer.Option(metavar="PREFIX", help="Chakra traces PREFIX.0.et, …; --ranks rescales.", rich_help_panel=_WHAT),
    ] = None,
    begin: Annotated[
        str | None, typer.Option("-b", metavar="SIZE", help="Sweep from this size.", rich_help_panel=_WHAT)
    ] = None,
    end: Annotated[str | None, typer.Option("-e", metavar="SIZE", help="To this one.", rich_help_panel=_WHAT)] = None,
    factor: Annotated[int, typer.Option("-f", help="Each so many times the last.", rich_help_panel=_WHAT)] = 2,
    batch: Annotated[int, typer.Option(help="Samples in a step of the model.", rich_help_panel=_WHAT)] = 64,
    epochs: Annotated[int, typer.Option(help="Passes over the samples.", rich_help_panel=_WHAT)] = 1,
    samples: Annotated[int, typer.Option(help="Samples in a pass; 60000 is MNIST.", rich_help_panel=_WHAT)] = 60000,
    bucket: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Put layers together, as DDP does.", rich_help_panel=_WHAT)
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", "-n", help="\\[default: batches × epochs of a model, else 100]", rich_help_panel=_WHAT
        ),
    ] = None,
    warmup: Annotated[int, typer.Option("--warmup", "-w", min=0, help="Trials before.", rich_help_panel=_WHAT)] = 5,
    time_limit: Annotated[
        str, typer.Option("--time-limit", metavar="TIME", help="End after this.", rich_help_panel=_WHAT)
    ] = "10min",
    seed: Annotated[int, typer.Option(min=0, help="Of the payload.", rich_help_panel=_WHAT)] = 0,
    algorithm: Annotated[
        str,
        typer.Option(
            help="ring, bidirectional-ring, halving-doubling, double-tree (all-reduce); reduce-scatter, all-gather, "
            "all-to-all, broadcast, pipeline.",
            rich_help_panel=_HOW,
        ),
    ] = "ring",
    engine: Annotated[str, typer.Option(help="sockets, gloo or nccl.", rich_help_panel=_HOW)] = "sockets",
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Messages need not wait for each other.", rich_help_panel=_HOW)
    ] = False,
    no_gaps: Annotated[
        bool, typer.Option("--no-gaps", help="Leave out a plan's computation.", rich_help_panel=_HOW)
    ] = False,
    late: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK:TIME", help="This rank is late before each message.", rich_help_panel=_HOW),
    ] = None,
    streams: Annotated[
        int, typer.Option(min=1, max=64, help="Connections between two ranks.", rich_help_panel=_HOW)
    ] = 1,
    congestion: Annotated[
        str | None, typer.Option(help="Congestion control: cubic, bbr, …", rich_help_panel=_HOW)
    ] = None,
    buffer: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of sockets. \\[default: the kernel's]", rich_help_panel=_HOW)
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="\\[default: the hosts', the lab's, the plan's, or 4]", rich_help_panel=_WHERE),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Hosts with agents, with commas: a,b:7651. \\[default: the lab's, or this one's loopback]",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    token_file: TokenFile = None,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Do not try pairs alone first.", rich_help_panel=_SHOW)
    ] = False,
    no_floor: Annotated[
        bool, typer.Option("--no-floor", help="Do not run on this host's loopback first.", rich_help_panel=_SHOW)
    ] = False,
    fail_above: Annotated[
        list[str] | None,
        typer.Option("--fail-above", metavar="p99=50ms", help="Exit 3 where a layer is above.", rich_help_panel=_SHOW),
    ] = None,
    nccl: Annotated[bool, typer.Option("--nccl", help="nccl-tests' columns.", rich_help_panel=_SHOW)] = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="The pairs' table too.", rich_help_panel=_SHOW)] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CDF and trials: .png, .svg, .pdf.", rich_help_panel=_SHOW)
    ] = None,
    root: Annotated[Path, typer.Option(help="Where run folders go.", rich_help_panel=_SHOW)] = Path("runs"),
    chakra_out: Annotated[
        Path | None,
        typer.Option("--chakra-out", metavar="PREFIX", help="Write what is sent as traces.", rich_help_panel=_SHOW),
    ] = None,
    json: Json = False,
) -> None:
    """Send a workload between hosts, or between processes here, and show what it took."""
    from stagewright.fabric.lab.session import current_lab
    from stagewright.fabric.ranks.connections import check_congestion
    from stagewright.fabric.ranks.coordinator import Settings
    from stagewright.fabric.results.distribution import Threshold
    from stagewright.fabric.results.result import summarize
    from stagewright.fabric.results.run_folder import FabricFolder

    thresholds = [Threshold.parse(text) for text in fail_above or ()]
    if plot is not None:
        from stagewright.report.figures.file import check_figure_path

        check_figure_path(plot)
    if engine not in ("sockets", "gloo", "nccl"):
        raise UsageError(f"unknown engine {engine!r}; use sockets, gloo or nccl")
    for option, given in (
        ("--overlap", overlap),
        ("--streams", streams > 1),
        ("--congestion", congestion is not None),
        ("--buffer", buffer is not None),
    ):
        if given and engine != "sockets":
            raise UsageError(f"{option} needs the sockets engine; {engine} makes its own connections")
    lab = current_lab() if hosts is None else None
    if congestion is not None and hosts is None:
        check_congestion(congestion)
    if engine == "nccl" and hosts is None and not has_gpu():
        raise UsageError("--engine nccl needs a GPU, and this machine shows none: use gloo or sockets")
    places = rank_locations(hosts, lab)
    limits = {"warmup": warmup, "time_limit_s": parse_s(time_limit), "seed": seed, "overlap": overlap}
    number = ranks if ranks is not None else len(places) if places else 4
    sources = {"--model": model, "--plan": plan, "--sizes": sizes, "--chakra": chakra, "-b": begin}
    chosen = [name for name, value in sources.items() if value is not None]
    if len(chosen) != 1:
        what = f"{' and '.join(chosen)} exclude each other" if chosen else "nothing to send"
        ways = "--model MODEL, --plan FILE, --sizes LIST, --chakra PREFIX, or -b SIZE -e SIZE"
        raise UsageError(f"{what}: give one of {ways}")
    workload, job_steps = build_workload(
        model=model,
        plan=plan,
        sizes=sizes,
        chakra=chakra,
        begin=begin,
        end=end,
        factor=factor,
        number=number,
        ranks=ranks,
        trials=trials,
        schooling=(samples, batch, epochs),
        bucket=bucket,
        algorithm=algorithm,
        gaps=not no_gaps,
        limits=limits,
    )
    workload = add_delays(workload, late or [])
    if chakra_out is not None:
        from stagewright.fabric.traffic.chakra import to_chakra

        note(f"wrote {', '.join(map(str, to_chakra(workload, chakra_out)))}")
    if not places:
        from stagewright.fabric.ranks.coordinator import RankLocation

        places = [RankLocation(name="local")] * workload.num_ranks
    if len(places) < workload.num_ranks:
        raise UsageError(f"{workload.num_ranks} ranks need as many hosts, but there are {len(places)}")
    places = places[: workload.num_ranks]
    settings = Settings(
        engine=engine,
        streams=streams,
        congestion=congestion,
        buffer_bytes=parse_bytes(buffer) if buffer else None,
        probe=not no_probe,
        token=read_token(token_file) if hosts is not None else b"",
    )
    same_host = hosts is None and lab is None
    folder = FabricFolder.create(
        root, workload, {"engine": engine, "streams": streams, "hosts": [place.name for place in places]}
    )
    floor = None
    try:
        if not same_host and not no_floor:
            note("floor: the same on this host's loopback …")
            floor = _floor(workload, settings).trials
        with _progress(workload) as report:
            measured = _measure(workload, places, settings, report)
    except BaseException:
        folder.remove()
        raise
    if measured.error is not None and not measured.trials.num_trials:
        folder.remove()
        if measured.error == "interrupted":
            raise KeyboardInterrupt
        raise RunError(measured.error)
    if lab is not None:
        measured.trials.void[:] = lab.late_trials(measured.trials)
    result = summarize(
        workload,
        engine,
        measured,
        same_host=same_host,
        floor=floor,
        network=None if lab is None else lab.network,
        job_steps=job_steps,
    )
    data = {**result.to_dict(), "folder": str(folder.path)}
    missed = [line for threshold in thresholds for line in result.above(threshold)]
    data["missed"] = missed
    folder.write(workload, measured, data)
    if plot is not None and measured.trials.num_trials:
        from stagewright.report.figures.fabric import draw_fabric

        times = [measured.trials.durations(at) for at in range(len(workload.messages))]
        draw_fabric(data, times, plot)
        note(f"wrote {plot}")
    if json:
        print_json(data)
    else:
        _show(data, nccl=nccl or begin is not None, pairs=pairs)
    if measured.error == "interrupted":
        raise KeyboardInterrupt
    if measured.error is not None:
        raise RunError(f"{measured.error}; {result.trials} finished trials are kept in {folder.path}")
    if not result.verified:
        wrong = sum(layer.wrong for layer in result.layers)
        raise RunError(f"{wrong} buffers of {result.trials} trials held wrong sums")
    if missed:
        for line in missed:
            note(f"above: {line}")
        raise typer.Exit(3)


@fabric.command()
def agent(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to wait for coordinators.")] = "0.0.0.0:7651",
    token_file: TokenFile = None,
    once: Annotated[bool, typer.Option("--once", help="Leave after one coordinator.")] = False,
) -> None:
    """Wait on a host for a coordinator, and be a rank of its runs."""
    from stagewright.fabric.ranks.agent import serve_agent

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{listen!r} is not an address to listen at; write it like 0.0.0.0:7651")
    serve_agent(host.strip("[]"), int(port), read_token(token_file), once=once, tell=note)


@fabric.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Another one.", show_default=False)],
    json: Json = False,
) -> None:
    """Compare two runs, layer by layer."""
    from stagewright.fabric.results.compare import compare_runs
    from stagewright.fabric.results.run_folder import FabricFolder

    changes = [change.to_dict() for change in compare_runs(FabricFolder.open(first), FabricFolder.open(second))]
    if json:
        print_json({"first": str(first), "second": str(second), "layers": changes})
        return
    from stagewright.report.tables.fabric import change_table

    print_table(change_table(changes, f"{first.name} and then {second.name}"))


@fabric.command(
    context_settings={"allow_interspersed_args": False},
)
def lab(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="What to run in it.", show_default=False)],
    hosts: Annotated[int, typer.Option(min=2, max=64, help="Hosts, one namespace each.")] = 4,
    rate: Annotated[str | None, typer.Option(help="Of each host's link, both ways: 1gbit.")] = None,
    delay: Annotated[str | None, typer.Option(metavar="TIME", help="One way between two hosts: 10ms.")] = None,
    loss: Annotated[str | None, typer.Option(help="Packets lost on each host's link: 1%.")] = None,
    slow_link: Annotated[
        list[str] | None, typer.Option("--slow-link", metavar="HOST:RATE", help="This host's link is slower.")
    ] = None,
    lossy_link: Annotated[
        list[str] | None, typer.Option("--lossy-link", metavar="HOST:LOSS", help="This host's link loses more.")
    ] = None,
    congestion: Annotated[str, typer.Option(help="Congestion control, pinned on every route.")] = "cubic",
    rto_min: Annotated[
        str | None, typer.Option("--rto-min", metavar="TIME", help="Least retransmission timeout. \\[default: 200 ms]")
    ] = None,
    mtu: Annotated[int, typer.Option(min=576, max=9000, help="Of each host's device.")] = 1500,
    each: Annotated[
        bool, typer.Option("--each", help="Run COMMAND in every host, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.")
    ] = False,
) -> None:
    """Make a network of hosts on this machine, run a command in it, and remove it."""
    from stagewright.fabric.lab.network import LabNetwork
    from stagewright.fabric.lab.session import run_in_lab

    network = LabNetwork.parse(
        hosts=hosts,
        rate=rate,
        delay=delay,
        loss=loss,
        slow_links=slow_link or [],
        lossy_links=lossy_link or [],
        congestion=congestion,
        rto_min=rto_min,
        mtu=mtu,
    )
    code = run_in_lab(network, command, each=each, tell=note)
    if code:
        raise typer.Exit(code if 0 < code < 256 else 1)


def _measure(
    workload: Workload, places: list[RankLocation], settings: Settings, report: Callable[[int, int], None] | None
) -> Measurements:
    from stagewright.fabric.ranks.coordinator import Coordinator

    with Coordinator(workload, places, settings) as coordinator:
        return coordinator.run(report)


def _floor(workload: Workload, settings: Settings) -> Measurements:
    """The same messages where there is no network: what this host alone needs."""
    from stagewright.fabric.ranks.coordinator import RankLocation

    few = replace(workload, trials=min(workload.trials, _FLOOR_TRIALS), delays_s=(), time_limit_s=60.0)
    plain = replace(settings, probe=False, steps=False, token=b"")
    return _measure(few, [RankLocation(name="local")] * workload.num_ranks, plain, None)


@contextmanager
def _progress(workload: Workload) -> Iterator[Callable[[int, int], None]]:
    with progress(f"{workload.name} on {workload.num_ranks} ranks") as report:
        yield lambda done, total: report(done, total, "trials")


def _show(data: dict[str, Any], *, nccl: bool, pairs: bool) -> None:
    from stagewright.report.tables.fabric import fabric_remarks, fabric_table, nccl_lines, pair_table

    console = screen()
    if nccl:
        for line in nccl_lines(data):
            print(line)
    else:
        title = f"{data['workload']}: {data['ranks']} ranks, {data['engine']}" + (
            ", overlapped" if data["overlap"] else ""
        )
        print_table(fabric_table(data, title))
    if pairs and data["pairs"]:
        print_table(pair_table(data["pairs"], data["ranks"]))
    for line in fabric_remarks(data):
        console.print(line, markup=False, soft_wrap=True)
    note(f"raw trials: {data['folder']}")
