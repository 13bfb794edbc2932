"""What layers with ``batch_first`` take as the batch and as the steps of their sequences."""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]


def batch_and_steps(shapes: Sequence[Shape], *, batch_first: bool) -> tuple[int, int] | None:
    """Return the batch size and the number of steps of a layer's first argument; None if it has no such dimensions.

    ``shapes``: of its first two arguments, ``()`` for one that is no tensor.
    """
    if shapes and len(shapes[0]) == 3:
        first, second, _ = shapes[0]
        return (first, second) if batch_first else (second, first)
    if list(map(len, shapes)) == [2, 2] and shapes[1][0] == 1:  # a padded sequence and its lengths
        return shapes[1][1], shapes[0][0] // shapes[1][1]
    return None
