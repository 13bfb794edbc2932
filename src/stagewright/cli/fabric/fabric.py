"""``stagewright fabric``: benchmark collectives, diagnose slow hosts and links, emulate a network."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.fabric.execution import measure, measure_floor, print_result, show_progress
from stagewright.cli.fabric.options import WorkloadOptions, add_delays, how_option, rank_locations, read_token
from stagewright.cli.option_groups import with_groups
from stagewright.cli.options import ChakraOut, Json, Plot, Root, check_plot, choice, panel
from stagewright.cli.screen import note, print_json, print_table
from stagewright.cluster.device import has_gpu
from stagewright.errors import RunError, UsageError
from stagewright.quantity import parse_bytes

fabric = typer.Typer(
    name="fabric",
    help="Benchmark a model's collectives on this network: tail latency, bus bandwidth, stragglers and slow links.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ENGINES = ("sockets", "gloo", "nccl")
_where_option = panel("Hosts")
_show_option = panel("Output")

TokenFile = Annotated[
    Path | None,
    _where_option("--token-file", metavar="FILE", help="File with the secret; shared by coordinator and agents."),
]


@fabric.command()
@with_groups
def run(
    options: WorkloadOptions,
    engine: Annotated[str, choice("engine", ENGINES, how_option, help="What sends the messages.")] = "sockets",
    trusted_network: Annotated[
        bool, how_option("--trusted-network", help="Allow gloo and nccl between hosts: their ports have no token.")
    ] = False,
    overlap: Annotated[bool, how_option("--overlap", help="Let messages overlap.")] = False,
    no_gaps: Annotated[bool, how_option("--no-gaps", help="Omit the computation between a plan's messages.")] = False,
    late: Annotated[
        list[str] | None, how_option(metavar="RANK:TIME", help="Delay a rank before each message (a straggler).")
    ] = None,
    streams: Annotated[int, how_option(min=1, max=64, help="Connections per pair of ranks.")] = 1,
    congestion: Annotated[str | None, how_option(help="Congestion control; cubic, bbr, …")] = None,
    buffer: Annotated[
        str | None, how_option(metavar="SIZE", help="Socket buffer size. \\[default: the kernel's]")
    ] = None,
    ranks: Annotated[
        int | None,
        _where_option(min=1, help="Number of ranks. \\[default: as many as hosts, or as the plan needs, or 4]"),
    ] = None,
    hosts: Annotated[
        str | None,
        _where_option(
            metavar="LIST",
            help="Hosts that run an agent: a,b:7651. \\[default: the lab's hosts, or this host's loopback]",
        ),
    ] = None,
    token_file: TokenFile = None,
    no_probe: Annotated[bool, _show_option("--no-probe", help="Do not probe pairs first.")] = False,
    no_floor: Annotated[bool, _show_option("--no-floor", help="Do not measure this host's loopback first.")] = False,
    fail_above: Annotated[
        list[str] | None, _show_option("--fail-above", metavar="p99=50ms", help="Exit with 3 if a layer is above.")
    ] = None,
    nccl: Annotated[bool, _show_option("--nccl", help="Print the columns of nccl-tests.")] = False,
    pairs: Annotated[bool, _show_option("--pairs", help="Print a table of all pairs.")] = False,
    plot: Plot = None,
    root: Root = Path("runs"),
    chakra_out: ChakraOut = None,
    json: Json = False,
) -> None:
    """Send a workload between hosts, or between local processes, and report its times."""
    from stagewright.fabric.lab.namespaces import current_lab
    from stagewright.fabric.ranks.connections import check_congestion
    from stagewright.fabric.ranks.coordinator import Settings
    from stagewright.fabric.results.distribution import Threshold
    from stagewright.fabric.results.result import summarize
    from stagewright.fabric.results.run_folder import FabricFolder

    thresholds = [Threshold.parse(text) for text in fail_above or ()]
    check_plot(plot)
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
    if hosts is not None and engine != "sockets" and not trusted_network:
        raise UsageError(
            f"--engine {engine} opens ports on the hosts that ask for no token; use --engine sockets, or add "
            "--trusted-network where nobody else can reach them"
        )
    if engine == "nccl" and hosts is None and not has_gpu():
        raise UsageError("--engine nccl needs a GPU, but this machine has none; use gloo or sockets")
    locations = rank_locations(hosts, lab)
    num_ranks = ranks if ranks is not None else len(locations) if locations else 4
    workload, job_steps = options.build(num_ranks, ranks, gaps=not no_gaps, overlap=overlap)
    workload = add_delays(workload, late or [])
    if chakra_out is not None:
        from stagewright.fabric.traffic.chakra import to_chakra

        note(f"wrote {', '.join(map(str, to_chakra(workload, chakra_out)))}")
    if not locations:
        from stagewright.fabric.ranks.coordinator import RankLocation

        locations = [RankLocation(name="local")] * workload.num_ranks
    if len(locations) < workload.num_ranks:
        raise UsageError(f"{workload.num_ranks} ranks need as many hosts, got {len(locations)}")
    locations = locations[: workload.num_ranks]
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
        root, workload, {"engine": engine, "streams": streams, "hosts": [location.name for location in locations]}
    )
    floor = None
    try:
        if not same_host and not no_floor:
            note("measuring the floor on this host's loopback …")
            floor = measure_floor(workload, settings).trials
        with show_progress(workload) as report:
            measured = measure(workload, locations, settings, report)
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
    violations = [line for threshold in thresholds for line in result.violations(threshold)]
    data["missed"] = violations
    folder.write(workload, measured, data)
    if plot is not None and measured.trials.num_trials:
        from stagewright.report.figures.fabric import draw_fabric

        times = [measured.trials.durations(index) for index in range(len(workload.messages))]
        draw_fabric(data, times, plot)
        note(f"wrote {plot}")
    if json:
        print_json(data)
    else:
        print_result(data, nccl=nccl or options.begin is not None, pairs=pairs)
    if measured.error == "interrupted":
        raise KeyboardInterrupt
    if measured.error is not None:
        raise RunError(f"{measured.error}; {result.trials} finished trials are in {folder.path}")
    if not result.verified:
        wrong = sum(layer.wrong for layer in result.layers)
        raise RunError(f"{wrong} buffers in {result.trials} trials had wrong contents")
    if violations:
        for line in violations:
            note(f"above the limit: {line}")
        raise typer.Exit(3)


@fabric.command()
def agent(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on; 0.0.0.0:7651 for every network.")
    ] = "127.0.0.1:7651",
    token_file: TokenFile = None,
    once: Annotated[bool, typer.Option("--once", help="Exit after one coordinator.")] = False,
) -> None:
    """Run an agent on this host, which executes ranks for coordinators."""
    from stagewright.fabric.ranks.agent import serve_agent

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{listen!r} is not an address to listen on; write HOST:PORT, like 0.0.0.0:7651")
    serve_agent(host.strip("[]"), int(port), read_token(token_file), once=once, report=note)


@fabric.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the first run.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the second run.", show_default=False)],
    json: Json = False,
) -> None:
    """Compare the layers of two runs."""
    from stagewright.fabric.results.compare import compare_runs
    from stagewright.fabric.results.run_folder import FabricFolder

    changes = [asdict(change) for change in compare_runs(FabricFolder.open(first), FabricFolder.open(second))]
    if json:
        print_json({"first": str(first), "second": str(second), "layers": changes})
        return
    from stagewright.report.tables.fabric import change_table

    print_table(change_table(changes, f"{first.name} vs. {second.name}"))


@fabric.command(context_settings={"allow_interspersed_args": False})
def lab(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND…", help="Command to run in the lab.", show_default=False)
    ],
    num_hosts: Annotated[
        int, typer.Option("--num-hosts", min=2, max=64, help="How many emulated hosts; a network namespace each.")
    ] = 4,
    rate: Annotated[str | None, typer.Option(help="Rate of each host's link; in both directions, like 1gbit.")] = None,
    delay: Annotated[str | None, typer.Option(metavar="TIME", help="One-way delay between two hosts: 10ms.")] = None,
    loss: Annotated[str | None, typer.Option(help="Packet loss; of each host's link, like 1%.")] = None,
    slow_link: Annotated[
        list[str] | None, typer.Option("--slow-link", metavar="HOST:RATE", help="Rate of one host's link.")
    ] = None,
    lossy_link: Annotated[
        list[str] | None, typer.Option("--lossy-link", metavar="HOST:LOSS", help="Packet loss of one host's link.")
    ] = None,
    congestion: Annotated[str, typer.Option(help="Congestion control; set on every route.")] = "cubic",
    rto_min: Annotated[
        str | None,
        typer.Option("--rto-min", metavar="TIME", help="Minimum retransmission timeout (RTO). \\[default: 200 ms]"),
    ] = None,
    mtu: Annotated[int, typer.Option(min=576, max=9000, help="MTU of each host's device.")] = 1500,
    each: Annotated[
        bool, typer.Option("--each", help="Run COMMAND on every host, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.")
    ] = False,
) -> None:
    """Emulate a network of hosts on this machine, run a command in it, and remove it."""
    from stagewright.fabric.lab.namespaces import run_in_lab
    from stagewright.fabric.lab.network import LabNetwork

    network = LabNetwork.parse(
        hosts=num_hosts,
        rate=rate,
        delay=delay,
        loss=loss,
        slow_links=slow_link or [],
        lossy_links=lossy_link or [],
        congestion=congestion,
        rto_min=rto_min,
        mtu=mtu,
    )
    code = run_in_lab(network, command, each=each, report=note)
    if code:
        raise typer.Exit(code if 0 < code < 256 else 1)
