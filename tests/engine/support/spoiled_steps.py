"""Faults for a step on purpose, which the parity check must catch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stagewright.engine.parallel.step_runner import StepRunner


def drop_gradient(runner: StepRunner) -> None:
    train_step = runner.train_step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        next(iter(runner.part.trainable_parameters().values())).grad = None
        return result

    runner.train_step = step  # type: ignore[method-assign]


def swap_microbatches(runner: StepRunner) -> None:
    split = runner.split

    def swapped(*args: Any, **kwargs: Any) -> Any:
        first, second = split(*args, **kwargs)
        return [replace(first, inputs=second.inputs), replace(second, inputs=first.inputs)]

    runner.split = swapped  # type: ignore[method-assign]


def change_scale(runner: StepRunner) -> None:
    split = runner.split

    def scaled(*args: Any, **kwargs: Any) -> Any:
        return [replace(microbatch, weight=1.25 * microbatch.weight) for microbatch in split(*args, **kwargs)]

    runner.split = scaled  # type: ignore[method-assign]
