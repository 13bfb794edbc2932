"""The study *codecs*: what crosses the links between a client and a server, and how each codec compresses it.

    for each task:    samples ─► crossing tensors ─► error, compression ratio and time of each codec ─► transfer rates
    for each codec:   parity check of one pipeline step against the baseline with the same codec (quick: one codec)
    for each seed:    the same fine-tuning with each codec on the links ─► accuracy

A real pipeline does the fine-tuning; quick, one process with the same codecs at the same cuts, which the parity check
shows to be the same computation. With a single device (one GPU) it is always one process, without the parity check, and
transfers are between two workers that share the device. With 0 epochs only bytes, errors, times and rates are measured.

The model is cut as published: its first and last units at the client, the rest at the server, so that two tensors cross
the links, and two gradients back. Sort quantization at 16, 12, 8 and 4 bits is the published reference. Codecs are
named FORWARD or FORWARD/BACKWARD.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from stagewright.studies.codecs.answers import EVIDENCE, QUESTIONS, answers
from stagewright.studies.codecs.measured import measured_codecs, part_name
from stagewright.studies.codecs.options import Options
from stagewright.studies.codecs.summary import summarize
from stagewright.studies.codecs.tables import figures, tables
from stagewright.studies.framework.study import Findings, Part, PartContext, Results, Study, with_evidence
from stagewright.studies.parts.measurements import finite
from stagewright.studies.parts.samples import samples_folder, samples_part


def build_study(options: Options) -> Study:
    recipes = options.recipes
    trained = ", ".join(f"{recipe.model} on {recipe.shown_data}" for recipe in recipes.values())
    return Study(
        name="codecs",
        title=f"Codecs on the links of a pipeline: {trained}",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(_parts(options)),
        conclude=partial(conclude, asdict(options) | {"recipes": recipes}),
    )


def conclude(options: Mapping[str, Any], results: Results) -> Findings:
    codecs = {task: measured_codecs(results, options, task) for task in options["tasks"]}
    shown, drawn = tables(results, options, codecs), figures(options, codecs)
    return Findings(
        summary=summarize(results, options, codecs),
        tables=shown,
        answers=with_evidence(answers(results, options, codecs), EVIDENCE, shown, drawn),
        figures=drawn,
    )


def _parts(options: Options) -> Iterator[Part]:
    for task in options.tasks:
        yield samples_part(task, options.data, options.train_samples, options.judged_samples)
        yield Part(
            name=f"crossing-{task}",
            about=f"measure each codec on the tensors that cross the links of {task}",
            run=partial(_crossing, options, task),
            needs=(f"data-{task}",),
        )
        yield Part(
            name=f"transfer-{task}",
            about=f"measure the transfer rate of {task} with each codec",
            run=partial(_transfer, options, task),
            needs=(f"crossing-{task}",),
        )
    for task in options.tasks:
        for codec in options.checked_codecs:
            yield Part(
                name=part_name(task, codec, None),
                about=f"parity check of a pipeline step of {task} with {codec}",
                run=partial(_check_parity, options, task, codec),
                needs=(f"crossing-{task}",),
            )
    for task in options.tasks:
        for seed in options.seeds if options.epochs else ():
            for codec in options.codecs:
                yield Part(
                    name=part_name(task, codec, seed),
                    about=f"train {task} with {codec}, seed {seed}",
                    run=partial(_train, options, task, codec, seed),
                    needs=(f"data-{task}", f"crossing-{task}"),
                )


def _crossing(options: Options, task: str, context: PartContext) -> dict[str, Any]:
    """Find the cuts and the shapes that cross; measure each codec on a micro-batch of them, forward and backward."""
    import torch

    from stagewright.cluster.device import Device
    from stagewright.engine.batch.crossing_tensors import collect_crossing_tensors
    from stagewright.engine.jobs.codec_bench import bench_codecs
    from stagewright.engine.jobs.train import with_samples
    from stagewright.engine.parallel.model import capture_for, cut_indices
    from stagewright.studies.parts.training import client_cuts
    from stagewright.zoo.model import Batch
    from stagewright.zoo.tasks import load_task

    recipe, seed = options.recipe(task), options.seeds[0]
    cuts = client_cuts(options.plan(task, "none", seed), *recipe.client)
    plan = options.plan(task, "none", seed, cuts)
    device = Device.parse(plan.devices[0])
    torch_device = device.torch_device()
    model = plan.model.load(batch=max(2, plan.batch // plan.microbatches))
    model.module.train().to(torch_device)
    samples = load_task(task, model, data_dir=samples_folder(options.data, task, context)).dataset("train")
    model = with_samples(model, samples, torch_device)
    graph = capture_for(plan, model)
    indices = cut_indices(graph, cuts)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    tensors = collect_crossing_tensors(graph, indices, batch, None)[False]
    size = model.batch_size
    names = list(dict.fromkeys(half for codec in options.codecs for half in codec.split("/")))
    with device.pinned():
        measured = bench_codecs(
            model,
            graph,
            indices,
            names,
            (),
            device=plan.devices[0],
            repeats=options.rounds,
            progress=lambda done, total, name: context.note(f"{name}: {done} of {total}") if done % 8 == 0 else None,
        )
    return {
        "cuts": list(cuts),
        # Shapes of a whole batch, as tables show them; what is measured is one micro-batch.
        "shapes": [[[plan.batch, *tensor.shape[1:]] for tensor in row] for row in tensors],
        "message": list(max((tensor for row in tensors for tensor in row), key=torch.numel).shape),
        "messages": plan.batch / size,
        "kernels": measured.kernels,
        "rows": [finite(row.to_dict(())) for row in measured.rows],
    }


def _transfer(options: Options, task: str, context: PartContext) -> dict[str, Any]:
    """Time the transfer of the largest tensor with each codec, and of uncompressed messages by size."""
    from stagewright.studies.codecs.transfer_job import measure_transfers

    names = list(dict.fromkeys(half for codec in options.codecs for half in codec.split("/")))
    # delta and feedback codecs are stateful: a single message says nothing about them.
    stateless = [name for name in names if not name.startswith(("delta", "feedback"))]
    shape = context.results[f"crossing-{task}"]["message"]
    return measure_transfers(stateless, shape, options.ends, rounds=options.rounds)


def _check_parity(options: Options, task: str, codec: str, context: PartContext) -> dict[str, Any]:
    cuts = tuple(context.results[f"crossing-{task}"]["cuts"])
    plan = options.plan(task, codec, options.seeds[0], cuts)
    return context.run(replace(plan, task=None, epochs=None, steps=1, warmup=0))


def _train(options: Options, task: str, codec: str, seed: int, context: PartContext) -> dict[str, Any]:
    from stagewright.studies.parts.training import train_by_pipeline, train_in_one_process

    plan = options.plan(task, codec, seed, tuple(context.results[f"crossing-{task}"]["cuts"]))
    data = samples_folder(options.data, task, context)
    if options.how == "one-process":
        return train_in_one_process(plan, data=data, device=options.devices[0], note=context.note)
    return train_by_pipeline(plan, context.runs, data=data, note=context.note)
