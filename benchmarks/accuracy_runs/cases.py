"""What `accuracy_tables` trains: tasks with their hyperparameters, codecs, strategies and seeds, by priority."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

SORT = {"sort12+4": 16, "sort9+3": 12, "sort6+2": 8, "sort3+1": 4}
"""Sort quantization, as published: bits per value."""
CODECS = ("none", "sort3+1", "block4", "sort6+2", "hadamard4", "block8", "sort9+3", "sort12+4")
FEW_CODECS = ("none", "block4", "sort3+1", "sort6+2")
"""For four workers, whose three cuts are all compressed."""
SEEDS = (0, 1, 2)
_SEARCH_SEEDS = (100, 101)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a task is trained."""

    task: str
    samples: str
    """Name of the samples in the store."""
    model: str
    weights: str
    """Folder of the pretrained weights in the store."""
    num_classes: int
    metric: str
    """accuracy or matthews."""
    size: int
    """Image size in pixels, or tokens per sample."""
    batch: int
    epochs: float
    learning_rates: tuple[float, ...]
    """Of AdamW, rising for a tenth of the steps and then falling linearly to 0. Of several, the one that is best on a
    tenth of the training samples, held out."""
    weight_decay: float
    client_cuts: tuple[str, ...]
    """Two workers: the first and last units at the client, the rest at the server, as published."""
    cuts: tuple[str, ...]
    """Four workers: three cuts, in order."""


_MINILM = Recipe(
    task="rte",
    samples="rte",
    model="bert-minilm",
    weights="minilm-l6",
    num_classes=2,
    metric="accuracy",
    size=160,
    batch=32,
    epochs=10,
    learning_rates=(5e-5, 1e-4, 2e-4),
    weight_decay=0.01,
    client_cuts=("bert.encoder.layer.0", "bert.pooler"),
    cuts=("bert.encoder.layer.0", "bert.encoder.layer.2", "bert.encoder.layer.4"),
)
RECIPES = {
    "cifar10": Recipe(
        task="cifar10",
        samples="cifar10",
        model="mobilenet-v2",
        weights="mobilenet-v2",
        num_classes=10,
        metric="accuracy",
        size=96,
        batch=128,
        epochs=2.5,
        learning_rates=(1e-3,),
        weight_decay=0.05,
        client_cuts=("mobilenet_v2.conv_stem.first_conv", "dropout"),
        cuts=("mobilenet_v2.layer.0", "mobilenet_v2.layer.3", "mobilenet_v2.layer.9"),
    ),
    "cola": replace(_MINILM, task="cola", samples="cola", metric="matthews", size=32, batch=64, epochs=6),
    "rte": _MINILM,
    "rte64": replace(_MINILM, task="rte64", batch=64),
    "rte-long": replace(_MINILM, task="rte-long", batch=64, epochs=30, learning_rates=(2e-5, 5e-5)),
}
TASKS = tuple(RECIPES)
SEARCH_ONLY = ("rte-long",)
"""Whether a longer schedule helps: only evaluated on held-out training samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training."""

    task: str
    strategy: str
    """pipeline or data."""
    workers: int
    codec: str
    """FORWARD or FORWARD/BACKWARD."""
    seed: int
    learning_rate: float | None = None
    """None: the best of the recipe's, once it is known."""
    is_search: bool = False
    """Whether it is evaluated on held-out training samples, to choose the learning rate."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies its result in a record."""
        rate = self.learning_rate if self.is_search else None
        return self.task, self.strategy, self.workers, self.codec, self.seed, rate, self.is_search

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of the case of a record's row."""
    return Case(**{name: row[name] for name in Case.__dataclass_fields__}).key


def all_cases(tasks: Sequence[str], codecs: Sequence[str], seeds: Sequence[int]) -> list[Case]:
    """List the trainings by priority: strategies and learning rates, then codecs on four and on two workers.

    Tasks alternate, because some are bound by the GPU and the others by the host; workers of a group stay for the next
    case, so cases with as many workers follow each other.
    """
    few = [codec for codec in codecs if codec in FEW_CODECS and codec != "none"]
    others = [codec for codec in codecs if codec != "none"]
    final = [task for task in tasks if task not in SEARCH_ONLY]
    published = [task for task in final if task != "rte"]  # four workers: RTE with a batch of 64
    has_none = "none" in codecs
    groups = [
        _trainings("pipeline", 2, "none", final, seeds) if has_none else (),
        _trainings("data", 2, "none", [task for task in final if task != "rte64"], seeds) if has_none else (),
        _search(final),
        _trainings("data", 4, "none", published, seeds) if has_none else (),
        _trainings("pipeline", 4, "none", published, seeds) if has_none else (),
        _search([task for task in tasks if task in SEARCH_ONLY]),
        *(_trainings("pipeline", 4, codec, ["cola", "cifar10"], seeds) for codec in few),
        *(_trainings("pipeline", 2, codec, [task for task in final if task != "rte64"], seeds) for codec in others),
        *(_trainings(strategy, 4, "none", ["rte"], seeds) for strategy in ("data", "pipeline") if has_none),
        *(_trainings("pipeline", 4, codec, ["rte"], seeds) for codec in few),
    ]
    return [case for group in groups for case in group if case.task in tasks]


def _search(tasks: Sequence[str]) -> Iterator[Case]:
    for seed in _SEARCH_SEEDS:
        for task in tasks:
            rates = RECIPES[task].learning_rates
            for rate in rates if len(rates) > 1 else ():
                yield Case(
                    task=task,
                    strategy="pipeline",
                    workers=2,
                    codec="none",
                    seed=seed,
                    learning_rate=rate,
                    is_search=True,
                )


def _trainings(strategy: str, workers: int, codec: str, tasks: Sequence[str], seeds: Sequence[int]) -> Iterator[Case]:
    for seed in seeds:
        for task in tasks:
            yield Case(task=task, strategy=strategy, workers=workers, codec=codec, seed=seed)


def best_rate(task: str, rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the learning rate with the best mean score on held-out samples; None: not all are known yet."""
    rates = RECIPES[task].learning_rates
    if len(rates) == 1:
        return rates[0]
    searched = [row for row in rows if row["is_search"] and row["task"] == task]
    if len(searched) < len(rates) * len(_SEARCH_SEEDS):
        return None
    scores = {rate: [row["score"] for row in searched if row["learning_rate"] == rate] for rate in rates}
    known = {rate: sum(values) / len(values) for rate, values in scores.items() if None not in values}
    return max(known, key=lambda rate: known[rate]) if known else rates[0]
