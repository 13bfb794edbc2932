"""``stagewright split``: cut a model into pipeline stages, by one policy or all."""

from __future__ import annotations

from typing import Annotated, Any

from stagewright.cli.option_groups import with_groups
from stagewright.cli.options import (
    Cut,
    Json,
    ModelName,
    Plot,
    ProfileOptions,
    check_plot,
    choice,
    numbers,
    panel,
    unit_names,
)
from stagewright.cli.screen import note, note_coverage, print_json, print_table, progress
from stagewright.errors import UnknownName, UsageError
from stagewright.quantity import parse_bytes, parse_rate, parse_s
from stagewright.spec.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS

_where_option = panel("Where to cut")
_what_for_option = panel("Conditions")


@with_groups
def split(
    model: ModelName,
    stages: Annotated[int | None, _where_option(help="How many stages. \\[default: 2, or as --cut says]")] = None,
    policy: Annotated[
        str | None,
        _where_option(
            help="Split policy; parameters, macs, blocks, time, optimal, client-server, or module:function. "
            "\\[default: optimal]"
        ),
    ] = None,
    all_policies: Annotated[bool, _where_option("--all", help="Compare all policies.")] = False,
    cut: Cut = None,
    measure: Annotated[bool, _where_option("--measure", help="Build the stages and time each as a whole.")] = False,
    plot: Plot = None,
    json: Json = False,
    microbatches: Annotated[str, _what_for_option(help="Micro-batches of a replica; inf: an endless stream.")] = "8",
    memory: Annotated[
        str | None, _what_for_option(help="Memory limit of each device, like 2GiB; or several, with commas.")
    ] = None,
    speeds: Annotated[
        str | None, _what_for_option(help="Relative speeds of devices, like 1,1,0.5; runs also take: measured.")
    ] = None,
    bandwidth: Annotated[
        str | None, _what_for_option(help="Bandwidth of every link, like 10Gbit/s. \\[default: free]")
    ] = None,
    latency: Annotated[str, _what_for_option(help="Latency of every link, like 50us.")] = "0s",
    overlap_links: Annotated[bool, _what_for_option("--overlap-links", help="Transfers overlap with compute.")] = False,
    schedule: Annotated[
        str, choice("schedule", ("1f1b", "gpipe"), _what_for_option, help="Pipeline schedule; for its memory.")
    ] = "1f1b",
    recompute: Annotated[
        str, choice("recompute mode", ("none", "always"), _what_for_option, help="Activation checkpointing.")
    ] = "none",
    optimizer: Annotated[
        str, choice("optimizer", OPTIMIZERS, _what_for_option, help="Optimizer; for its memory.")
    ] = DEFAULT_OPTIMIZER,
    client_first: Annotated[
        int | None, _what_for_option(help="client-server: first units at the client. \\[default: the best]")
    ] = None,
    client_last: Annotated[
        int | None, _what_for_option(help="client-server: last units at the client. \\[default: the best]")
    ] = None,
    *,
    options: ProfileOptions,
) -> None:
    """Cut a model into pipeline stages and show the cost of each stage and the speed-up bound."""
    cuts = list(unit_names(cut))
    if sum([bool(policy), all_policies, bool(cuts)]) > 1:
        raise UsageError("--policy, --all and --cut exclude each other; use one of them")
    conditions_of: dict[str, Any] = {
        "num_microbatches": _microbatches(microbatches),
        "speeds": numbers(speeds, "speeds") if speeds else None,
        "bandwidth_bytes_per_s": parse_rate(bandwidth) if bandwidth else None,
        "latency_s": parse_s(latency),
        "overlap_links": overlap_links,
        "memory_limit_bytes": _memory(memory),
        "schedule": schedule,
        "recompute": recompute != "none",
        "optimizer_states": OPTIMIZERS[optimizer].num_states,
        "client_first": client_first,
        "client_last": client_last,
    }
    device = options.begin(model)
    from stagewright.partition.conditions import Conditions
    from stagewright.partition.registry import find_policy
    from stagewright.partition.split import compare, split as split_by, split_at
    from stagewright.partition.split_result import Comparison

    conditions = Conditions(**conditions_of)
    if policy:
        find_policy(policy)
    check_plot(plot)
    loaded, graph = options.capture(model, device)
    num_stages = stages if stages is not None else len(cuts) + 1 if cuts else 2
    if cuts and len(cuts) + 1 != num_stages:
        raise UsageError(
            f"--cut names {len(cuts)} unit{'s' if len(cuts) > 1 else ''}, which makes {len(cuts) + 1} stages; "
            f"leave out --stages {num_stages}"
        )
    _check_stages(num_stages, len(graph.calls), model)
    known = {name for call in graph.calls for name in (call.name, call.block) if name}
    for name in cuts:
        if name not in known:
            raise UnknownName("unit", name, sorted(known))
    profile = options.profile(model, loaded, graph, device, use_cache=not measure)  # stages are timed in the same run
    if cuts:
        comparison = Comparison(splits=(split_at(profile, cuts, conditions),))
    elif all_policies:
        comparison = compare(profile, num_stages, conditions=conditions)
    else:
        comparison = Comparison(splits=(split_by(profile, num_stages, policy or "optimal", conditions),))
    measured = None
    if measure:
        from stagewright.profiler import measure_stages

        with progress(f"measuring stages of {model} on {device}") as report:
            measured = measure_stages(
                graph,
                loaded.args,
                loaded.kwargs,
                splits=[split.cuts for split in comparison],
                device=device,
                repeats=options.repeats,
                training=not options.inference,
                progress=report,
            )
    if plot is not None:
        from stagewright.report.figures.split import draw_split

        draw_split(comparison.splits, plot, title=f"{model} in {num_stages} stages")
        note(f"drawn: {plot}")
    if json:
        print_json(_data(comparison, measured, profile))
        return

    for table in comparison.split_tables(measured):
        print_table(table)
    if len(comparison) > 1:
        print_table(comparison.table(measured))
    else:
        for skipped in comparison.skipped:
            note(f"skipped: {skipped.reason}")
    summed = f"units add up to {profile.coverage:.0%} of the whole model's time"
    note(
        f"micro-batches of {profile.batch_size} samples on {profile.device}, {profile.dtype}; "
        f"{summed if profile.has_whole else 'the whole model does not fit there'}; times: {profile.source}"
    )
    note_coverage(profile.coverage)


def _data(comparison: Any, measured: Any, profile: Any) -> dict[str, Any]:
    """Return the JSON of this verb (documented in docs/json.md)."""
    data: dict[str, Any] = comparison.to_dict()
    for index, policy in enumerate(data["policies"]):
        if measured is not None:
            policy["measured_bottleneck_s"] = max(time.total_s for time in measured[index])
            for stage, time in zip(policy["stages"], measured[index], strict=True):
                stage["measured"] = time.to_dict()
    about = ("model", "device", "dtype", "batch_size", "training", "coverage", "source")
    data["profile"] = {name: getattr(profile, name) for name in about}
    return data


def _check_stages(num_stages: int, num_units: int, model: str) -> None:
    """Refuse an impossible number of stages before anything is measured."""
    if num_stages < 1:
        raise UsageError(f"{num_stages} stages are not possible: a model has at least 1")
    if num_stages > num_units:
        raise UsageError(
            f"{num_stages} stages are too many: {model!r} has {num_units} units, so at most {num_units} "
            "stages; use fewer stages or finer units (--units leaf)"
        )


def _microbatches(text: str) -> int | None:
    if text.strip().lower() in ("inf", "infinite"):
        return None
    if not text.strip().isdigit():
        raise UsageError(f"{text!r} is not a number of micro-batches; write one like 8, or inf")
    return int(text)


def _memory(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    sizes = [parse_bytes(part) for part in text.split(",")]
    return sizes[0] if len(sizes) == 1 else sizes
