"""``stagewright profile``: what each unit of a model costs."""

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
from stagewright.cli.screen import note, note_coverage, print_json, progress, screen

__all__ = ["profile"]


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
    """Measure what each unit of a model costs: parameters, MACs, time, bytes."""
    place = begin(model, device)
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

    loaded, graph = choice.captured(place)
    with progress(f"measuring {model} on {place}") as report:
        result = measure(
            graph,
            loaded.args,
            loaded.kwargs,
            name=model,
            device=place,
            repeats=repeats,
            training=not inference,
            cache=False if no_cache else cache_dir or True,
            progress=report,
        )
    if json:
        print_json({**result.to_dict(), "coverage": result.coverage, "source": result.source})
        return
    from stagewright.report.tables.profile import profile_table

    console = screen()
    console.print(profile_table(result))
    note(f"times: {result.source}")
    note_coverage(result.coverage)
