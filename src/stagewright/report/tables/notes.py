"""Sentences below a table of runs: failed parity checks, and losses that depend on how the batch is split."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stagewright.runs.result import ParityReport, RunResult, WholeBatchLoss
from stagewright.zoo.model import LOSS_NOTES


def parity_note(name: str, parity: ParityReport) -> str:
    """Say why a plan failed the parity check: the worst value, its error and the tolerance; without a full stop."""
    failed = f"{name} does NOT match the single-device baseline"
    if math.isnan(parity.max_error):
        return f"{failed}: a value is NaN; check the model on a single device first"
    if math.isinf(parity.max_error):
        return f"{failed}: {parity.worst} has a different shape, is missing, or is not finite on one side"
    if parity.float64_error is not None:
        error = f"{parity.worst} has a relative error of {parity.float64_error:.0e} in float64 too"
        without = f", so this is not the rounding of {codec_label(parity)}; see whether the plan passes without a codec"
        return f"{failed}: {error}{without if parity.codecs else ''}"
    error = f"{parity.worst} has a relative error of {parity.max_error:.0e} (tolerance {parity.tolerance:.0e})"
    if parity.undecided is not None:
        error += f"; float64 could not tell whether this is rounding: {parity.undecided}"
    if parity.codecs:
        error += (
            f"; {codec_label(parity)} can turn a rounding error into a quantization step: try a finer codec, or none"
        )
    return f"{failed}: {error}"


def codec_label(parity: ParityReport) -> str:
    """Name the codecs of a plan: ``codec block4``, ``codecs block4 and block8``."""
    return f"codec{'s' if len(parity.codecs) > 1 else ''} {' and '.join(parity.codecs)}"


def loss_notes(rows: Sequence[RunResult]) -> list[str]:
    """Return notes about the loss of one model's runs, without full stops."""
    sources = {row.loss_source for row in rows}
    notes = [text for source, text in LOSS_NOTES.items() if source in sources]
    losses_by_batch: dict[int, list[tuple[str, WholeBatchLoss]]] = {}
    for row in rows:
        whole = row.whole_batch
        if whole is not None and whole.depends:
            losses_by_batch.setdefault(row.batch, []).append((str(row.strategy), whole))
    return notes + [_batch_dependence_note(batch, losses) for batch, losses in losses_by_batch.items()]


def _batch_dependence_note(batch: int, losses_by_strategy: Sequence[tuple[str, WholeBatchLoss]]) -> str:
    """Give the loss for every way in which the batch was split, and what to do."""
    splits: dict[tuple[int, int], tuple[float, list[str]]] = {}
    for strategy, whole in losses_by_strategy:
        _, strategies = splits.setdefault((whole.pieces, whole.samples), (whole.loss_of_pieces, []))
        if strategy not in strategies:
            strategies.append(strategy)
    first = losses_by_strategy[0][1]
    losses = [first.loss, *(loss for loss, _ in splits.values())]
    # As few digits as distinguish the losses.
    digits = next((num for num in (5, 7, 10) if len({f"{loss:.{num}g}" for loss in losses}) == len(set(losses))), 17)
    dropout = " (without dropout)" if first.without_dropout else ""
    values = ", ".join(
        f"{loss:.{digits}g} on {num} micro-batches of {'up to ' if num * samples > batch else ''}{samples} "
        f"({', '.join(strategies)})"
        for (num, samples), (loss, strategies) in splits.items()
    )
    return (
        f"the loss of this model depends on which samples share a batch: {values}, {first.loss:.{digits}g} on the "
        f"whole batch of {batch}{dropout}; every plan is verified against the baseline on the same micro-batches, so "
        "a plan that splits the batch trains a different function: use fewer and larger micro-batches, or tensor "
        "parallelism, which does not split it"
    )
