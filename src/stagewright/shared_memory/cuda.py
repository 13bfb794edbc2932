"""Memory of a GPU that other processes read: CUDA IPC, with events that streams wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_ROUND_BYTES = 2 * 2**20
_Event: Any = torch.cuda.Event


class CudaMemory:
    """Memory of one GPU, shared by CUDA IPC."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def allocate(self, num_bytes: int) -> torch.Tensor:
        rounded = -(-num_bytes // _ROUND_BYTES) * _ROUND_BYTES
        return torch.empty(rounded, dtype=torch.uint8, device=self.device)

    def export(self, buffer: torch.Tensor) -> dict[str, Any]:
        storage: Any = buffer.untyped_storage()
        values = storage._share_cuda_()
        return {"storage": [value.hex() if isinstance(value, bytes) else value for value in values]}

    def open(self, exported: dict[str, Any]) -> torch.Tensor:
        values = [bytes.fromhex(value) if isinstance(value, str) else value for value in exported["storage"]]
        storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *values[1:])
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def make_event(self) -> tuple[Any, str]:
        event = _Event(interprocess=True)
        event.record()  # creates it on the device
        return event, event.ipc_handle().hex()

    def open_event(self, exported: str) -> Any:
        return _Event.from_ipc_handle(self.device, bytes.fromhex(exported))

    def record(self, event: Any) -> None:
        event.record()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def beside_compute(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Run on a stream of its own, after what the current one has now.

        In the stream of backward, every bucket of gradients would be a barrier: all would wait for the latest worker.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def close(self) -> None:
        pass  # the driver closes handles with their buffers
