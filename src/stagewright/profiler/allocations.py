"""Count the bytes of tensors from when an operation makes them to when nobody holds them any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.profiler.storage import tensors_in

__all__ = ["Made"]


class Made(TorchDispatchMode):
    """The most bytes that tensors made meanwhile have at once; ``watch`` is told how many there are by now."""

    def __init__(self, watch: Callable[[int], None] = lambda num_bytes: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = 0
        self._watch = watch
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tensors_in((args, kwargs))}
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        for storage in (one.untyped_storage() for one in tensors_in(found)):
            if storage._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        num_bytes = sum(num_bytes for _, num_bytes in self._alive.values())
        self.most_bytes = max(self.most_bytes, num_bytes)
        self._watch(num_bytes)
        return found
