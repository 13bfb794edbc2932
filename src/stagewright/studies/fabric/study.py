"""The study *fabric*: all-reduce of a model's gradients over 4 emulated hosts, on networks with one fault each.

    the layers of the MNIST MLP, then the buckets of another model:
      floor        on this host's loopback: what the host itself costs
      clean        every link with the same bandwidth
      slow-link    one host's link has a tenth of it
      lossy-link   one host's link loses packets
      failing-link one host's link loses many, so that timeouts add up to seconds
      late-host    one host (a straggler) is late before each message
    each ─► latency of every trial of every layer ─► CDF, tail, and a diagnosis, compared with the emulated fault

The lab needs root. Without root everything runs on the loopback device, which can't emulate slow or lossy links: only
clean and late-host run, and the answers say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stagewright.errors import RunError
from stagewright.studies.fabric.answers import EVIDENCE, QUESTIONS, answers
from stagewright.studies.fabric.measured import shown_network
from stagewright.studies.fabric.options import BATCH, Options
from stagewright.studies.fabric.summary import summarize
from stagewright.studies.fabric.tables import figures, tables
from stagewright.studies.framework.study import Findings, Part, PartContext, Results, Study, with_evidence
from stagewright.studies.parts.measurements import finite

if TYPE_CHECKING:
    from stagewright.fabric.ranks.coordinator import Measurements, RankLocation, Settings
    from stagewright.fabric.traffic.workload import Workload

_FLOOR_TRIALS = 30


def build_study(options: Options) -> Study:
    return Study(
        name="fabric",
        title=f"Gradients of {' and '.join(options.models)} over {options.hosts} hosts",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(_parts(options)),
        conclude=partial(
            conclude,
            asdict(options)
            | {
                "num_trials": options.num_trials,
                "part_name": _part_name(options.model),
                "sent": [(m, _part_name(m), n) for m in options.models for n in options.networks_of(m)],
            },
        ),
    )


def _part_name(model: str) -> str:
    """Write a model's name as it appears in names of parts."""
    return re.sub(r"[^a-z0-9.]+", "-", model.lower()).strip("-.") or "model"


def conclude(options: Mapping[str, Any], results: Results) -> Findings:
    shown, drawn = tables(results, options), figures(results, options)
    # The distributions show the tails.
    evidence = {**EVIDENCE, QUESTIONS[2]: tuple(figure.name for figure in drawn)}
    return Findings(
        summary=summarize(results, options),
        tables=shown,
        answers=with_evidence(answers(results, options), evidence, shown, drawn),
        figures=drawn,
    )


def _parts(options: Options) -> Iterator[Part]:
    for model in options.models:
        name = _part_name(model)
        yield Part(
            name=f"floor-{name}",
            about=f"all-reduce the gradients of {model} on this host's loopback",
            run_name=f"{model}, loopback",
            run=partial(_floor, options, model),
        )
        for network in options.networks_of(model):
            yield Part(
                name=f"sent-{name}-{network}",
                about=f"all-reduce the gradients of {model}, {shown_network(network)}",
                run_name=f"{model}, {shown_network(network)}",
                run=partial(_send, options, model, network),
                needs=(f"floor-{name}",),
            )


def _workload(options: Options, model: str) -> Workload:
    from stagewright import zoo
    from stagewright.fabric.traffic.from_model import from_model

    by_layer = model == options.model
    return from_model(
        zoo.load(model, batch=2),
        options.hosts,
        algorithm=options.algorithm,
        bucket_bytes=None if by_layer else options.bucket_bytes,
        trials=options.num_trials if by_layer else options.bucket_trials,
        warmup=5 if by_layer else 1,
        time_limit_s=options.time_limit_s,
        seed=options.seed,
    )


def workload_on(options: Options, model: str, network: str) -> Workload:
    """Return what is sent on a network."""
    workload = _workload(options, model)
    if network == "failing-link":  # a trial takes seconds: measure instead of warming up
        return replace(workload, warmup=1)
    return workload.with_delays({options.wrong_host: options.late_s}) if network == "late-host" else workload


def _measure(
    workload: Workload, locations: list[RankLocation], settings: Settings, context: PartContext
) -> Measurements:
    from stagewright.fabric.ranks.coordinator import Coordinator

    reported_quarters = 0

    def report(done: int, total: int) -> None:
        nonlocal reported_quarters
        if done * 4 // max(1, total) > reported_quarters:
            reported_quarters = done * 4 // max(1, total)
            context.note(f"{done} of {total} trials")

    with Coordinator(workload, locations, settings) as coordinator:
        measured = coordinator.run(report)
    if measured.error is not None:
        if measured.error == "interrupted":
            raise KeyboardInterrupt
        raise RunError(measured.error)
    return measured


def _floor(options: Options, model: str, context: PartContext) -> dict[str, Any]:
    """Run a few trials of the same messages without a network; list the sizes of the layers' outputs too."""
    from stagewright import zoo
    from stagewright.fabric.ranks.coordinator import RankLocation, Settings
    from stagewright.fabric.traffic.from_model import activation_sizes

    workload = _workload(options, model)
    few = replace(workload, trials=min(workload.trials, _FLOOR_TRIALS))
    measured = _measure(few, [RankLocation(name="local")] * options.hosts, Settings(probe=False, steps=False), context)
    sizes = activation_sizes(zoo.load(model, batch=2), BATCH) if model == options.model else []
    return {**_save(few, measured, context, same_host=True), "activations": [list(pair) for pair in sizes]}


def _send(options: Options, model: str, network: str, context: PartContext) -> dict[str, Any]:
    """Run all trials on one network."""
    from stagewright.fabric.ranks.coordinator import Settings
    from stagewright.fabric.results.run_folder import FabricFolder

    workload = workload_on(options, model, network)
    floor = FabricFolder.open(context.folder / context.results[f"floor-{_part_name(model)}"]["run"]).trials()
    with _hosts(options, network) as (locations, view):
        measured = _measure(workload, locations, Settings(steps=False), context)
        if view is not None:
            measured.trials.void[:] = view.late_trials(measured.trials)
    result = _save(workload, measured, context, same_host=view is None, floor=floor, network=view and view.network)
    return {**result, "made": network}


@contextmanager
def _hosts(options: Options, network: str) -> Iterator[tuple[list[RankLocation], Any]]:
    """Provide the hosts on which ranks run: those of a lab, or this host's loopback."""
    from stagewright.fabric.lab.namespaces import LabView, open_lab
    from stagewright.fabric.lab.network import LabNetwork
    from stagewright.fabric.ranks.coordinator import RankLocation

    if options.where == "loopback":
        yield [RankLocation(name="local")] * options.hosts, None
        return
    losses = {"lossy-link": options.loss, "failing-link": options.failing_loss}
    lab_network = LabNetwork.parse(
        hosts=options.hosts,
        rate=options.rate,
        slow_links=[f"{options.wrong_host}:{options.slow_rate}"] if network == "slow-link" else [],
        lossy_links=[f"{options.wrong_host}:{losses[network]}"] if network in losses else [],
    )
    with open_lab(lab_network) as lab:
        locations = [
            RankLocation(name=f"host {host}", host=lab_network.address(host), namespace=lab.namespace(host))
            for host in range(options.hosts)
        ]
        yield locations, LabView(hosts=(), network={**asdict(lab_network), "used": list(lab.methods)}, lateness=None)


def _save(
    workload: Workload,
    measured: Measurements,
    context: PartContext,
    *,
    same_host: bool,
    floor: Any = None,
    network: Any = None,
) -> dict[str, Any]:
    """Write a run folder with the raw trials; return the result with the times of every trial by layer."""
    from stagewright.fabric.results.result import summarize
    from stagewright.fabric.results.run_folder import FabricFolder

    result = summarize(workload, "sockets", measured, same_host=same_host, floor=floor, network=network)
    folder = FabricFolder.create(context.runs, workload, {"engine": "sockets"})
    data = {**result.to_dict(), "folder": str(folder.path)}
    folder.write(workload, measured, data)
    if not result.verified:
        raise RunError(f"{sum(layer.wrong for layer in result.layers)} buffers hold a wrong all-reduce result")
    kept = finite({name: value for name, value in data.items() if name not in ("connections", "pairs", "folder")})
    times = [measured.trials.durations(index).tolist() for index in range(len(workload.messages))]
    return {**kept, "times_s": times, "run": folder.path.relative_to(context.folder).as_posix()}
