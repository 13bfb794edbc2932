"""Count the bytes of live tensors: from the operation that allocates them until the last reference is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.profiler.storage import tensors_in


class AllocationCounter(TorchDispatchMode):
    """The peak bytes of tensors allocated inside ``with``; ``on_change`` gets the live bytes after each operation."""

    def __init__(self, on_change: Callable[[int], None] = lambda num_bytes: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._on_change = on_change
        self._live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = {_storage(tensor)._cdata for tensor in tensors_in((args, kwargs))}
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for storage in (_storage(tensor) for tensor in tensors_in(result)):
            if storage._cdata not in inputs:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        num_bytes = sum(num_bytes for _, num_bytes in self._live.values())
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        self._on_change(num_bytes)
        return result


def _storage(tensor: Any) -> Any:
    """Return the storage of a tensor, or of this worker's part of one that workers divide."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
