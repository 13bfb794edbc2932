"""Tables and figures of the study *codecs*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.codecs.measured import BITS, PUBLISHED, Codecs, task_scale
from stagewright.studies.framework.phrases import times
from stagewright.studies.framework.study import Figure, Results
from stagewright.studies.framework.tables import study_table
from stagewright.studies.parts.training_recipe import TrainingRecipe
from stagewright.table import Table


def tables(results: Results, options: Mapping[str, Any], codecs: Codecs) -> tuple[Table, ...]:
    """The ablation, error and time of each codec, and transfers by size."""
    sizes = _size_table(results, options)
    return (_ablation_table(results, options, codecs), _codec_table(codecs, options), *([sizes] if sizes.rows else []))


def figures(options: Mapping[str, Any], codecs: Codecs) -> tuple[Figure, ...]:
    """Accuracy over compression ratio, one panel per task."""
    if not any(codec.mean is not None for measured in codecs.values() for codec in measured):
        return ()
    return (
        Figure(
            name="accuracy",
            caption="Accuracy by compression ratio, mean and standard deviation over seeds; the line is without codec.",
            draw=partial(_draw, dict(codecs), dict(options["recipes"])),
        ),
    )


def shown_rate(rate: float) -> str:
    """Write bytes/s as bits/s: "1.68 Gb/s"."""
    bits = 8 * rate
    return f"{bits / 1e9:.2f} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mb/s"


def rates_by_size(rates: Mapping[int, float]) -> str:
    """Say how the transfer rate in bytes/s depends on the size: where it is highest, and that it falls beyond."""
    small, large = min(rates), max(rates)
    fastest = max(rates, key=lambda size: rates[size])
    low, high = (f"{format_bytes(size)} at {shown_rate(rates[size])}" for size in (small, fastest))
    if fastest == small:
        return f"The rate does not grow with the size: {low}, {format_bytes(large)} at {shown_rate(rates[large])}."
    ratio = times(rates[fastest] / rates[small])
    text = f"The rate grows with the size, since latency counts less: {low}, {high}, {ratio} as fast"
    if rates[large] < 0.9 * rates[fastest]:
        text += f"; larger tensors are slower, {format_bytes(large)} at {shown_rate(rates[large])}"
    return f"{text}."


def shown_link(options: Mapping[str, Any]) -> str:
    """Write between which devices transfers are measured."""
    first, last = options["devices"][0], options["devices"][-1]
    return f"between two workers that share {first}" if first == last else f"between {first} and {last}"


def shown_shape(shape: Sequence[int]) -> str:
    """Write a shape: "[64,32,48,48]"."""
    return "[" + ",".join(str(size) for size in shape) + "]"


def _ablation_table(results: Results, options: Mapping[str, Any], codecs: Codecs) -> Table:
    rows = []
    for task, measured in codecs.items():
        recipe: TrainingRecipe = options["recipes"][task]
        crossing = results.get(f"crossing-{task}") or {"shapes": []}
        scale = task_scale(results, options, task, measured)
        shapes = ", ".join(shown_shape(shape) for row in crossing["shapes"] for shape in row) or "–"
        rows += [
            (
                recipe.shown_data,
                recipe.model,
                f"{recipe.batch} ({options['microbatches']})",
                shapes,
                codec.codec + (f" ({BITS[codec.codec]} bits)" if codec.codec in BITS else ""),
                f"{codec.ratio:.3f}" if codec.raw_bytes else "–",
                codec.shown,
                f"± {scale.half_width(codec):.1f}" if codec.mean is not None else "–",
                f"{scale.chance:g}",
                format_bytes(codec.step_bytes) if codec.raw_bytes else "–",
                shown_rate(codec.rate) if codec.rate is not None else "–",
                shown_rate(codec.received_rate) if codec.received_rate is not None else "–",
                PUBLISHED.get(task, {}).get(codec.codec, "–"),
            )
            for codec in measured
        ]
    matthews = (
        ", for CoLA Matthews × 100" if any(options["recipes"][task].metric == "matthews" for task in codecs) else ""
    )
    seeds, epochs = len(options["seeds"]), options["epochs"]
    training = (
        f"Accuracy: mean ± standard deviation over {seeds} seeds, epochs: {epochs}{matthews}; 95 %: half of the "
        "interval of the mean, from the evaluated samples and the variation between seeds; guessing: always the "
        "most frequent class."
        if epochs
        else "Nothing was trained."
    )
    columns = ("data set", "backbone", "batch (micro-batches)", "crossing tensors", "codec", "compression ratio")
    return study_table(
        "Codecs",
        (
            *columns,
            "accuracy %",
            "95 %",
            "guessing",
            "bytes per step",
            "transfer rate",
            "wire rate",
            "published accuracy",
        ),
        rows,
        f"{training} Compression ratio and bytes: what is sent forward and backward, packed, with headers and scales, "
        "relative to fp32. Transfer rate: bytes/s of the largest tensor of a micro-batch, from the sender's tensor to "
        f"the receiver's, acknowledged, {shown_link(options)}. Wire rate: bytes actually sent for it in the same time. "
        "Published: larger data sets and models, nominal ratios 0.5, 0.375, 0.25 and 0.125; there 12 and 4 bits were "
        "sent unpacked.",
    )


def _codec_table(codecs: Codecs, options: Mapping[str, Any]) -> Table:
    rows = []
    for task, measured in codecs.items():
        for codec in measured:
            if codec.codec == "none" or not codec.raw_bytes:
                continue
            rate = codec.break_even_rate
            rows.append(
                (
                    options["recipes"][task].shown_data,
                    codec.codec,
                    _error(codec.error),
                    _error(codec.error_backward),
                    format_s(codec.codec_s),
                    "never" if rate == 0 else "always" if rate == float("inf") else f"below {shown_rate(rate)}",
                )
            )
    return study_table(
        "Error and time of each codec",
        ("data set", "codec", "error of activations", "error of gradients", "time per step", "saves time on links"),
        rows,
        "Error: root mean square relative to that of the tensor, before the first step, on the link where it is larger."
        " Time: to encode and decode everything that a step sends, in sequence. A codec saves time on links so slow"
        " that sending the saved bytes would take longer.",
    )


def _error(error: float | None) -> str:
    return "–" if error is None else f"{error:.4f}"


def _size_table(results: Results, options: Mapping[str, Any]) -> Table:
    transfers = (results.get(f"transfer-{task}") for task in options["tasks"])
    sizes: Mapping[str, float] = next(
        (transfer["sizes"] for transfer in transfers if transfer is not None and transfer["sizes"]), {}
    )
    return study_table(
        "Transfers by size, without a codec",
        ("bytes", "time", "rate"),
        [
            (format_bytes(int(size)), format_s(seconds), shown_rate(int(size) / max(seconds, 1e-9)))
            for size, seconds in sizes.items()
        ],
        f"{shown_link(options).capitalize()}, until the receiver has everything.",
    )


def _draw(codecs: Codecs, recipes: Mapping[str, TrainingRecipe], path: Path) -> None:
    from stagewright.report.figures.accuracy import AccuracyPoint, draw_accuracy

    names = {task: f"{recipes[task].shown_data}, {recipes[task].model}" for task in codecs}
    panels = {
        names[task]: [
            AccuracyPoint(
                label=codec.codec,
                ratio=codec.ratio,
                accuracy=codec.mean,
                deviation=codec.deviation or 0.0,
                is_baseline=codec.codec == "none",
                is_published=codec.codec in BITS,
            )
            for codec in measured
            if codec.mean is not None and codec.raw_bytes
        ]
        for task, measured in codecs.items()
    }
    measures = {
        name: "Matthews correlation × 100" for task, name in names.items() if recipes[task].metric == "matthews"
    }
    draw_accuracy(panels, path, title="Accuracy with compressed crossing tensors", measures=measures)
