"""What to tell about a loss under a table of runs: that nobody gave it, or that it depends on how a batch is cut."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.runs.result import RunResult, WholeBatchLoss
from stagewright.zoo.model import LOSS_NOTES

__all__ = ["loss_notes"]


def loss_notes(rows: Sequence[RunResult]) -> list[str]:
    """Sentences without full stops, about rows of one model."""
    sources = {row.loss_source for row in rows}
    found = [text for source, text in LOSS_NOTES.items() if source in sources]
    by_batch: dict[int, list[tuple[str, WholeBatchLoss]]] = {}
    for row in rows:
        whole = row.whole_batch
        if whole is not None and whole.depends:
            by_batch.setdefault(row.batch, []).append((str(row.strategy), whole))
    return found + [_depends(batch, some) for batch, some in by_batch.items()]


def _depends(batch: int, losses_by_strategy: Sequence[tuple[str, WholeBatchLoss]]) -> str:
    """Both numbers of every way in which the batch was cut, and what to do."""
    pieces: dict[tuple[int, int], tuple[float, list[str]]] = {}
    for strategy, whole in losses_by_strategy:
        cut = pieces.setdefault((whole.pieces, whole.samples), (whole.loss_of_pieces, []))
        if strategy not in cut[1]:
            cut[1].append(strategy)
    first = losses_by_strategy[0][1]
    losses = [first.loss, *(loss for loss, _ in pieces.values())]
    digits = next((some for some in (5, 7, 10) if len({f"{one:.{some}g}" for one in losses}) == len(set(losses))), 17)
    kept = " (without dropout)" if first.without_dropout else ""
    told = ", ".join(
        f"{loss:.{digits}g} on {num} micro-batches of {'up to ' if num * samples > batch else ''}{samples} "
        f"({', '.join(names)})"
        for (num, samples), (loss, names) in pieces.items()
    )
    return (
        f"the loss of this model depends on which samples share a batch: {told}, {first.loss:.{digits}g} on the "
        f"whole batch of {batch}{kept}; every plan is proven against serial on the same micro-batches, so those that "
        "cut the batch train another function than one that does not: use fewer and larger micro-batches, or tensor, "
        "which cuts none"
    )
