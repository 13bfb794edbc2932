"""``stagewright doctor``: show this machine, and write its cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stagewright.cli.options import Json, check_output
from stagewright.cli.screen import note, print_json, print_table, screen


def doctor(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write; this machine's cluster.toml, after measuring the link between two devices (10 s).",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show this machine: cores, memory, GPUs, backends, versions; write its cluster file."""
    if output is not None:
        check_output(output, "-o", "cluster.toml")
    from stagewright.cluster.file import write_cluster
    from stagewright.machine.machine import default_devices, probe_machine
    from stagewright.machine.probe_links import cluster_of, measure_link

    machine = probe_machine()
    measured = cluster = None
    if output is not None:
        # Two GPUs or two cores; one GPU alone has no link, so then it is the cores'.
        devices = default_devices(2, share=True)
        note(f"measuring the link between {devices[0]} and {devices[1]} …")
        measured = measure_link(devices)
        cluster = cluster_of(machine, measured)
        comment = f"This machine, measured between {devices[0]} and {devices[1]} through {measured.backend}."
        write_cluster(cluster, output, comment)
    if json:
        data: dict[str, Any] = {"machine": machine.to_dict(), "remarks": list(machine.remarks)}
        if measured is not None and cluster is not None:
            data |= {"link": measured.to_dict(), "cluster": cluster.to_dict(), "file": str(output)}
        print_json(data)
        return
    from stagewright.report.tables.cluster import link_table, machine_table

    console = screen()
    print_table(machine_table(machine))
    if measured is not None:
        print_table(link_table(measured))
    for remark in machine.remarks:
        console.print(remark, markup=False)
    if output is not None:
        note(f"wrote {output}")
