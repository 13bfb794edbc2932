"""Memory of a GPU that other processes read: CUDA IPC, with events that streams wait for."""

from __future__ import annotations

from typing import Any

import torch

_ROUND_BYTES = 2 * 2**20
_Event: Any = torch.cuda.Event


class CudaMemory:
    """Memory of one GPU, shared by CUDA IPC."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

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

    def close(self) -> None:
        pass  # the driver closes handles with their buffers
