"""``stagewright profile``: measure the cost of each unit of a model."""

from __future__ import annotations

from stagewright.cli.options import (
    Batch,
    CacheDir,
    DeviceName,
    Dtype,
    ImageSize,
    Inference,
    Json,
    ModelChoice,
    ModelName,
    NoCache,
    NumClasses,
    Repeats,
    Seed,
    SequenceLength,
    Units,
    Weights,
    begin,
)
from stagewright.cli.screen import note, note_coverage, print_json, print_table, progress


def profile(
    model: ModelName,
    json: Json = False,
    batch: Batch = None,
    weights: Weights = None,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    num_classes: NumClasses = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    units: Units = "auto",
    device: DeviceName = None,
    repeats: Repeats = 5,
    inference: Inference = False,
    no_cache: NoCache = False,
    cache_dir: CacheDir = None,
) -> None:
    """Measure each unit of a model: parameters, MACs, forward and backward time, saved activations."""
    target = begin(model, device)
    choice = ModelChoice(
        name=model,
        units=units,
        inference=inference,
        options={
            "batch": batch,
            "weights": weights,
            "image_size": image_size,
            "sequence_length": sequence_length,
            "num_classes": num_classes,
            "dtype": dtype,
            "seed": seed,
        },
    )
    from stagewright.profiler import profile as measure

    loaded, graph = choice.capture(target)
    with progress(f"measuring {model} on {target}") as report:
        result = measure(
            graph,
            loaded.args,
            loaded.kwargs,
            name=model,
            device=target,
            repeats=repeats,
            training=not inference,
            cache=False if no_cache else cache_dir or True,
            progress=report,
        )
    if json:
        print_json({**result.to_dict(), "coverage": result.coverage, "source": result.source})
        return
    print_table(result.table())
    note(f"times: {result.source}")
    note_coverage(result.coverage)
