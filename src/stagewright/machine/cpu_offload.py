"""Weights that stay on the host and visit a device: how a model is run once where it does not fit.

A plan for a model that is larger than a device still has to be captured, measured and proven before each worker keeps
its part. Its parameters then stay in the host's memory; an operation on the device that needs one gets a copy, which
is gone when the operation is done. Gradients come back to the host; what autograd keeps is moved there, too.

    settle(module, place)            the module on a device; parameters stay on the host where there is no room for them
    with visiting(module, place):    run it there: a parameter comes for each operation that needs it
    with resident(module, place):    a part of it (a unit, a stage) is on the device in full, e.g. to be timed

Slow, for weights cross the bus at each use; so it is for what is done once, never for a step that counts.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["ROOM", "is_hosted", "is_visitor", "may_stay", "resident", "room_of", "settle", "visiting"]

ROOM = 4
"""A model moves to a device that has so many times its bytes: its weights, twice their gradients (capture compares
those of the graph with the model's), and what an example batch needs."""

# Questions about a tensor, which its home can answer, and what must reach the parameter itself.
_QUESTIONS = """
    __get__ __set__ __delete__ __hash__ __len__ __repr__ _is_view data_ptr dim element_size has_names is_complex
    is_contiguous is_floating_point is_pinned is_same_size ndimension nelement numel register_hook
    register_post_accumulate_grad_hook requires_grad_ retain_grad size storage storage_offset stride untyped_storage
"""
_LEFT_ALONE = frozenset(_QUESTIONS.split())
# Attributes that tell the place, and those that are views: of the visitor, not of the parameter at home.
_PLACES = tuple(getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu"))
_VIEWS = tuple(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
_DIFFERENTIATE = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def room_of(place: torch.device, limit_bytes: int | None = None) -> int:
    """Bytes that a device has, or may give."""
    total = torch.cuda.get_device_properties(place).total_memory if place.type == "cuda" else sys.maxsize
    return int(total if limit_bytes is None else min(total, limit_bytes))


def settle(module: nn.Module, place: torch.device, room_bytes: int | None = None) -> nn.Module:
    """Move a module to a device; its parameters stay on the host where the device (or ``room_bytes``) has no room."""
    if place.type == "cpu":
        return module
    if ROOM * sum(one.numel() * one.element_size() for one in module.parameters()) <= room_of(place, room_bytes):
        return module.to(place)
    for one in module.modules():
        for name, buffer in one._buffers.items():
            if buffer is not None:
                one._buffers[name] = buffer.to(place)
    _without_room.add(module)
    return module


_without_room: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def may_stay(module: nn.Module) -> bool:
    """Whether ``settle`` found no room for a module: where others have parameters on the host, they were forgotten."""
    return module in _without_room


def is_hosted(module: nn.Module, place: torch.device) -> bool:
    """Whether parameters of a module stayed on the host, though it runs on a device."""
    return place.type != "cpu" and any(one.device.type == "cpu" for one in module.parameters())


@contextlib.contextmanager
def visiting(module: nn.Module, place: torch.device) -> Iterator[None]:
    """Run a module on a device; parameters that stayed on the host come for each operation that needs them."""
    if not is_hosted(module, place):
        yield
        return
    with _visits(place):
        yield


@contextlib.contextmanager
def resident(module: nn.Module, place: torch.device) -> Iterator[None]:
    """Have all of a module's parameters on a device meanwhile; they must not change there."""
    away = [(one, one.data) for one in module.parameters() if one.device != place] if place.type != "cpu" else []
    try:
        for one, home in away:
            one.data = home.to(place)
        yield
    finally:
        for one, home in away:
            one.data = home


def is_visitor(tensor: torch.Tensor) -> bool:
    """Whether a tensor that autograd is about to keep is the copy of a parameter, which will come again."""
    return any(mode.origin_of(tensor) is not None for mode in _open)


_open: list[_Visits] = []


@contextlib.contextmanager
def _visits(place: torch.device) -> Iterator[None]:
    mode = _Visits(place)
    _open.append(mode)
    try:
        with mode, torch.autograd.graph.saved_tensors_hooks(mode.pack, mode.unpack):
            yield
    finally:
        _open.remove(mode)


@dataclass(frozen=True, slots=True)
class _Packed:
    """What autograd keeps."""

    tensor: torch.Tensor
    """A tensor on the host, or a parameter."""
    place: torch.device | None = None
    """Where it comes from; None: as it is."""
    view: tuple[Any, ...] | None = None
    """Of a parameter's copy: shape, strides and offset of what was kept."""


class _Visits(TorchFunctionMode):
    """Gives every operation copies of the host's parameters, on a device."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self._place = place
        # Of each copy that is there, by its address: its storage and its parameter. Its views may outlive an operation.
        self._origins: dict[int, tuple[Any, torch.Tensor]] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Operators are named with their overloads: add_.Tensor.
        name = getattr(function, "__name__", "").partition(".")[0]
        first = next(iter((*args, *kwargs.values())), None)
        if function in _PLACES and _is_at_home(first):
            return function(torch.empty(0, device=self._place))
        if function in _DIFFERENTIATE:
            return self._differentiate(function, *args, **kwargs)
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if (name in _LEFT_ALONE and function not in _VIEWS) or (writes and _is_at_home(first)):
            return function(*args, **kwargs)
        copies: dict[int, torch.Tensor] = {}
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda one: self._copy(one, copies), (args, kwargs))
        return function(*args, **kwargs)

    def _differentiate(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run autograd with visits in its threads, too: a checkpoint runs a part of the model again there.

        Edges of the graph stand for tensors, of which torch would ask this mode again, without end.
        """
        if function == torch.Tensor.backward:
            function, kwargs["grad_tensors"] = torch.autograd.backward, kwargs.pop("gradient", None)
        if kwargs.get("materialize_grads"):  # torch has zeros for tensors alone
            return function(*args, **kwargs)
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = _edges(kwargs["inputs"])
        edges = [_edges(one) for one in args]
        with self:
            return function(*edges, **kwargs)

    def _copy(self, tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
        if not _is_at_home(tensor):
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = copy = tensor.to(self._place, copy=not isinstance(tensor, FakeTensor))
            if not isinstance(copy, FakeTensor):
                storage = copy.untyped_storage()
                self._origins = {key: one for key, one in self._origins.items() if not one[0].expired()}
                self._origins[storage.data_ptr()] = (StorageWeakRef(storage), tensor)  # type: ignore[no-untyped-call]
        return copies[id(tensor)]

    def origin_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter of which a tensor is the copy, or a view of the copy, that visits now; changed, it is none."""
        if not self._origins or isinstance(tensor, FakeTensor):
            return None
        storage, origin = self._origins.get(tensor.untyped_storage().data_ptr(), (None, None))
        return None if storage is None or storage.expired() or tensor._version else origin

    def pack(self, tensor: torch.Tensor) -> _Packed:
        """Keep a parameter's copy as the parameter, anything else on the host."""
        if isinstance(tensor, FakeTensor):
            return _Packed(tensor)
        origin = self.origin_of(tensor)
        if origin is not None and origin.dtype == tensor.dtype:
            return _Packed(origin, self._place, (tensor.shape, tensor.stride(), tensor.storage_offset()))
        # Attention keeps the state of its dropout on the host, and wants it there.
        return _Packed(tensor) if tensor.device.type == "cpu" else _Packed(tensor.cpu(), tensor.device)

    def unpack(self, kept: _Packed) -> torch.Tensor:
        """What was kept, where it was."""
        back = kept.tensor if kept.place is None else kept.tensor.detach().to(kept.place)
        return back if kept.view is None else back.as_strided(*kept.view)


def _edges(tensors: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.autograd.graph.get_gradient_edge, tensors)


def _is_at_home(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.device.type == "cpu"
