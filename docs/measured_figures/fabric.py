"""Blocks of docs/fabric.md."""

from __future__ import annotations

from measured_figures.markdown import load_record, ms, paragraph, percent, short_time, source, table


def fabric_loss() -> str:
    """Compare a lab run with another whose routes have a lower retransmission timeout."""
    record, lower = load_record("fabric_loss"), load_record("fabric_loss_rto")
    patterns = {"retransmission-timeout": "timeouts", "host": "this host"}
    rows = []
    for result, result_lower in zip(
        [*record["layers"], record["total"]], [*lower["layers"], lower["total"]], strict=True
    ):
        is_layer = "name" in result
        rows.append(
            (
                result["name"] if is_layer else "whole trial",
                f"{result['bytes'] if is_layer else sum(layer['bytes'] for layer in record['layers'])}",
                *(short_time(result[key]) for key in ("p50_s", "p90_s", "p95_s", "p99_s", "max_s", "jitter_s")),
                percent(result["share_of_ideal"]) if is_layer else "",
                short_time(result["floor_s"]) if is_layer else "",
                ", ".join(patterns.get(mode["kind"], mode["kind"]) for mode in result["modes"]) if is_layer else "",
                short_time(result_lower["p99_s"]),
            )
        )
    head = (
        *("layer", "bytes", "p50", "p90", "p95", "p99", "max", "jitter", "of ideal", "floor", "pattern"),
        "p99, second run",
    )
    sentence = record["verdict"]["sentence"]
    return (
        source("fabric_loss", "fabric_loss_rto")
        + "\n"
        + table(head, rows, right=True)
        + "\n"
        + paragraph(f"{record['trials']} trials; verdict: {sentence}.")
    )


def fabric_numbers() -> str:
    record, networks = load_record("fabric_numbers"), load_record("fabric_blame")["networks"]
    rate, small, many, kill = (record[name] for name in ("rate", "small", "many", "kill"))
    sizes = ("8", "2600", "33024")
    sockets = ", ".join(f"{ms(small['sockets, ring'][size], 2)} for {size} bytes" for size in sizes)
    gloo = ", ".join(ms(small["gloo"][size], 1) for size in sizes)
    num_right = sum(network["right"] for network in networks)
    rows = [
        (
            "ring all-reduce of 64 MiB, lab hosts at 1 Gbit/s (`rate`)",
            ms(rate["sockets"]["median_s"]),
            f"{ms(rate['with_headers_s'])} on the wire with headers, {ms(rate['ideal_s'])} without; Gloo "
            f"{ms(rate['gloo']['median_s'])}",
        ),
        ("small messages on loopback, median (`small`)", sockets, f"Gloo {gloo}"),
        (
            "10,000 trials × 4 layers of mlp-mnist on loopback, with figure and JSON (`many`)",
            f"{many['wall_s']:.0f} s",
            f"the trials alone {many['trials_s']:.0f} s",
        ),
        (
            "agent killed, or stopped (`kill`): time until the others stop",
            f"{kill['SIGKILL']['stopped_s']:.2f} s, {kill['SIGSTOP']['stopped_s']:.1f} s",
            "",
        ),
        (
            "correct host and cause in seeded labs (`fabric_blame.py`): slow link, lossy link, late host, none",
            f"{num_right} of {len(networks)}",
            "",
        ),
    ]
    return source("fabric_numbers", "fabric_blame") + "\n" + table(("measurement", "result", "reference"), rows)
