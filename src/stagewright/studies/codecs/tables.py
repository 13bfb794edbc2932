"""The tables and figures of the study *codecs*. Pure but for the drawing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.codecs.measured import BITS, PUBLISHED, MeasuredCodec
from stagewright.studies.parts.training_recipe import Lesson
from stagewright.studies.framework.study import Drawing, Results, Table

__all__ = ["between", "drawings", "shown_rate", "shown_shape", "tables"]

Codecs = Mapping[str, Sequence[MeasuredCodec]]


def tables(results: Results, options: Mapping[str, Any], codecs: Codecs) -> tuple[Table, ...]:
    """The ablation, what each codec does to what crosses, and transfers by size."""
    sizes = _sizes(results, options)
    return (_ablation(results, options, codecs), _work(codecs, options), *([sizes] if sizes.rows else []))


def drawings(options: Mapping[str, Any], codecs: Codecs) -> tuple[Drawing, ...]:
    """Accuracy over true ratio, one panel a task."""
    if not any(one.mean is not None for every in codecs.values() for one in every):
        return ()
    return (
        Drawing(
            name="accuracy",
            caption="Accuracy over the true ratio of bytes, mean and deviation over seeds; the line is without codec.",
            draw=partial(_draw, dict(codecs), dict(options["lessons"])),
        ),
    )


def shown_rate(rate: float) -> str:
    """Bytes a second as networks have them: bits."""
    bits = 8 * rate
    return f"{bits / 1e9:.2f} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mb/s"


def between(options: Mapping[str, Any]) -> str:
    """Between which devices transfers are."""
    first, last = options["devices"][0], options["devices"][-1]
    return f"between two workers that share {first}" if first == last else f"between {first} and {last}"


def shown_shape(shape: Sequence[int]) -> str:
    """[64,32,48,48]."""
    return "[" + ",".join(str(one) for one in shape) + "]"


def _crossing(results: Results, task: str) -> str:
    found = results.get(f"crossing-{task}")
    return "–" if found is None else ", ".join(shown_shape(one) for row in found["shapes"] for one in row)


def _ablation(results: Results, options: Mapping[str, Any], codecs: Codecs) -> Table:
    rows = []
    for task, every in codecs.items():
        lesson: Lesson = options["lessons"][task]
        for one in every:
            rows.append(
                (
                    lesson.shown_data,
                    lesson.model,
                    f"{lesson.batch} ({options['microbatches']})",
                    _crossing(results, task),
                    one.codec + (f" ({BITS[one.codec]} bits)" if one.codec in BITS else ""),
                    f"{one.ratio:.3f}" if one.raw_bytes else "–",
                    one.shown,
                    format_bytes(one.step_bytes) if one.raw_bytes else "–",
                    shown_rate(one.rate) if one.rate is not None else "–",
                    shown_rate(one.received_rate) if one.received_rate is not None else "–",
                    PUBLISHED.get(task, {}).get(one.codec, "–"),
                )
            )
    matthews = any(options["lessons"][task].metric == "matthews" for task in codecs)
    trained = (
        f"Accuracy: mean ± deviation over {len(options['seeds'])} seeds, epochs: {options['epochs']}"
        + (", for CoLA Matthews × 100." if matthews else ".")
        if options["epochs"]
        else "Nothing was trained."
    )
    return Table(
        title="Codecs",
        columns=(
            "data set",
            "backbone",
            "batch (micro-batches)",
            "what crosses",
            "codec",
            "true ratio",
            "accuracy %",
            "bytes a step",
            "transfer rate",
            "received",
            "published",
        ),
        rows=tuple(rows),
        note=f"{trained} Ratio and bytes: what travels, there and back, packed, with headers and scales, against fp32. "
        "Transfer rate: the largest tensor of a micro-batch, from the sender's tensor to the receiver's, acknowledged, "
        f"{between(options)}; received: the bytes that travel for it, over the same time. "
        "Published: larger data and models, nominal ratios 0.5, 0.375, 0.25 and 0.125, of which 12 and 4 bits "
        "travelled unpacked.",
    )


def _work(codecs: Codecs, options: Mapping[str, Any]) -> Table:
    rows = []
    for task, every in codecs.items():
        for one in every:
            if one.codec == "none" or not one.raw_bytes:
                continue
            even = one.break_even_rate
            rows.append(
                (
                    options["lessons"][task].shown_data,
                    one.codec,
                    _error(one.error),
                    _error(one.error_backward),
                    format_s(one.codec_s),
                    "never" if even == 0 else "always" if even == float("inf") else f"below {shown_rate(even)}",
                )
            )
    return Table(
        title="What each codec does to what crosses",
        columns=("data set", "codec", "error", "error of gradients", "time a step", "pays on a link"),
        rows=tuple(rows),
        note="Errors: root mean square over that of the tensor, before the first step, the worse link. Time: encoding "
        "and decoding all of a step, one after the other. Pays: where that takes less than the bytes that it saves.",
    )


def _error(error: float | None) -> str:
    return "–" if error is None else f"{error:.4f}"


def _sizes(results: Results, options: Mapping[str, Any]) -> Table:
    rows = []
    for task in options["tasks"]:
        transfer = results.get(f"transfer-{task}")
        for size, seconds in (transfer or {"sizes": {}})["sizes"].items():
            rows.append((format_bytes(int(size)), format_s(seconds), shown_rate(int(size) / max(seconds, 1e-9))))
        if rows:
            break
    return Table(
        title="Transfers by size, without a codec",
        columns=("bytes", "time", "rate"),
        rows=tuple(rows),
        note=f"{between(options).capitalize()}, until the receiver has everything.",
    )


def _draw(codecs: Codecs, lessons: Mapping[str, Lesson], path: Path) -> None:
    from stagewright.report.figures.accuracy import AccuracyPoint, draw_accuracy

    names = {task: f"{lessons[task].shown_data}, {lessons[task].model}" for task in codecs}
    panels = {
        names[task]: [
            AccuracyPoint(
                label=one.codec,
                ratio=one.ratio,
                accuracy=one.mean,
                deviation=one.deviation or 0.0,
                is_baseline=one.codec == "none",
                is_published=one.codec in BITS,
            )
            for one in every
            if one.mean is not None and one.raw_bytes
        ]
        for task, every in codecs.items()
    }
    measures = {
        name: "Matthews correlation × 100" for task, name in names.items() if lessons[task].metric == "matthews"
    }
    draw_accuracy(panels, path, title="What is learned with what crosses compressed", measures=measures)
