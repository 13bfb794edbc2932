"""Capture models that pass a ``PackedSequence`` between units: in the graph it is padded.

The number of rows of a packed sequence depends on the data, so it has no shape that a graph can hold. While such a
model is observed and traced, ``pack_padded_sequence`` returns a ``PackedSequence`` of the same class whose parts are

    data         [steps * samples, …]   all steps of all samples, also padded ones, step by step
    batch_sizes  [1, samples]           the lengths

A captured unit that takes one gets the real one, and its result is padded again: rows are only copied, so results and
gradients keep every bit. ``pad_packed_sequence`` has to return as many steps as were packed: the longest sequence of
another micro-batch may be shorter, and then ``total_length`` has to be given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.utils import rnn

from stagewright.errors import CaptureError, UsageError
from stagewright.structure import Structure

_PackedSequence: Any = rnn.PackedSequence  # a generic named tuple for mypy
_FUNCTIONS: Any = torch._VF
_NOT_GIVEN = 1  # the number of rows of the padded form's batch_sizes, which pad_packed_sequence takes for the length

_library = torch.library.Library("stagewright", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("check_lengths(Tensor lengths, SymInt num_steps, bool given) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "check_lengths", "CompositeExplicitAutograd")
def _check_lengths(lengths: torch.Tensor, num_steps: int, given: bool) -> torch.Tensor:
    """Return the lengths; reject a longest sequence with which the model would return another number of steps."""
    longest = int(lengths.max())
    if given and longest > num_steps:
        raise UsageError(f"total_length is {num_steps}, but a sequence has {longest} steps")
    if not given and longest != num_steps:
        raise UsageError(
            f"pad_packed_sequence without total_length returns {longest} steps here, as the longest sequence of the "
            f"micro-batch has, but its input was padded to {num_steps}; pass total_length={num_steps}"
        )
    return lengths.clone()


@torch.library.register_fake("stagewright::check_lengths")  # type: ignore[untyped-decorator]
def _fake_check(lengths: torch.Tensor, num_steps: int, given: bool) -> torch.Tensor:
    return torch.empty_like(lengths)


@contextmanager
def detect_packed_sequences() -> Iterator[list[None]]:
    """Record each call of ``pack_padded_sequence``."""
    calls: list[None] = []

    def pack(*args: Any) -> Any:
        calls.append(None)
        return _FUNCTIONS._pack_padded_sequence(*args)

    with _replaced(_pack_padded_sequence=pack):
        yield calls


@contextmanager
def padded_sequences(*, checked: bool) -> Iterator[None]:
    """Keep packed sequences padded; with ``checked``, a graph traced meanwhile rejects lengths that it can't handle."""

    def pad(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _pad_packed_sequence(*args, checked=checked)

    with _replaced(_pack_padded_sequence=_pack_padded_sequence, _pad_packed_sequence=pad):
        yield


def call_packed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Call a recurrent layer with the packed form of padded arguments, and pad its result again."""

    def padded(*args: Any, **kwargs: Any) -> Any:
        steps: list[int] = []

        def pack(value: rnn.PackedSequence) -> rnn.PackedSequence:
            steps.append(value.data.shape[0] // value.batch_sizes.shape[1])
            return _pack(value)

        args, kwargs = _convert((args, kwargs), pack)
        result = call(*args, **kwargs)
        return _convert(result, lambda value: _pad(value, steps[0])) if steps else result

    return padded


def rebuild_packed(spec: Structure, leaves: Sequence[Any]) -> Any:
    """Rebuild an argument of a unit with packed sequences instead of padded ones."""
    parts = list(leaves)
    for position in _positions(spec):
        parts[position + 1] = parts[position + 1].cpu()  # a GPU receives everything into its own memory
    return _convert(spec.unflatten(parts), _pack)


def pad_results(value: Any, num_steps: Sequence[int]) -> Any:
    """Return a unit's result with padded sequences, each of its number of steps, instead of packed ones."""
    following = iter(num_steps)
    return _convert(value, lambda packed: _pad(packed, next(following)))


def padded_steps(spec: Structure, leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the number of steps of each padded sequence in an observed value."""
    return tuple(leaves[index].shape[0] // leaves[index + 1].shape[1] for index in _positions(spec))


def _positions(spec: Structure, start: int = 0) -> list[int]:
    """Return the index of the first leaf of each packed sequence."""
    if getattr(spec.node, "context", None) is _PackedSequence:  # pytree takes it for a namedtuple
        return [start]
    positions = []
    for child in spec.children:
        positions += _positions(child, start)
        start += child.num_leaves
    return positions


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is one of torch's layers that take packed sequences."""
    return isinstance(module, nn.RNNBase)


def explain_packed(model: nn.Module, error: CaptureError, padded_error: CaptureError) -> CaptureError:
    """Return the error of a model that can be captured neither with packed nor with padded sequences."""
    text = str(padded_error)
    if "total_length" in text:
        start = text.index("pad_packed_sequence") if "pad_packed_sequence" in text else 0
        return CaptureError(f"can't capture {type(model).__name__}: {text[start:].split('); ')[0]}")
    if "values of a tensor" in str(error):
        return CaptureError(f"{error}; lengths can be given to pack_padded_sequence as a tensor, without tolist()")
    if "not allocated" not in str(error):  # torch's words for a tensor without values
        return error
    return CaptureError(
        f"can't capture {type(model).__name__}: code between units computes with the rows of a PackedSequence, whose "
        "number depends on the data; pad it there with pad_packed_sequence and pack it again, keep that code and the "
        "layers around it inside one submodule, or give the model as an nn.Sequential or a list of stages"
    )


class _Functions:
    """torch's functions of packed sequences, some of them replaced."""

    def __init__(self, replacements: dict[str, Callable[..., Any]]) -> None:
        vars(self).update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(_FUNCTIONS, name)


@contextmanager
def _replaced(**replacements: Callable[..., Any]) -> Iterator[None]:
    with mock.patch.object(rnn, "_VF", _Functions(replacements)):
        yield


def _pack_padded_sequence(
    padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data and the batch sizes of the padded form."""
    steps = padded.transpose(0, 1) if batch_first else padded
    return steps.flatten(0, 1), lengths[None]


def _pad_packed_sequence(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
    *,
    checked: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the padded sequences, with the padding value after each one's last step, and their lengths."""
    lengths = batch_sizes[0]
    steps = _by_step(data, lengths)
    given = total_length != _NOT_GIVEN
    num_steps = total_length if given else steps.shape[0]
    if checked:
        lengths = torch.ops.stagewright.check_lengths(lengths, num_steps, given)
    missing = num_steps - steps.shape[0]
    if missing > 0:
        steps = torch.cat([steps, steps.new_zeros(missing, *steps.shape[1:])])
    is_step = torch.arange(num_steps, device=data.device)[:, None] < lengths.to(data.device)
    is_step = is_step.view(*is_step.shape, *(1 for _ in steps.shape[2:]))
    padded = torch.where(is_step, steps[:num_steps], padding_value)
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _by_step(data: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    num_samples = lengths.shape[0]
    return data.reshape(data.shape[0] // num_samples, num_samples, *data.shape[1:])


def _pack(padded: rnn.PackedSequence) -> rnn.PackedSequence:
    lengths = padded.batch_sizes[0]
    data, batch_sizes = _FUNCTIONS._pack_padded_sequence(_by_step(padded.data, lengths), lengths, False)
    return _rebuild(padded, data, batch_sizes)


def _pad(packed: rnn.PackedSequence, num_steps: int) -> rnn.PackedSequence:
    steps, lengths = _FUNCTIONS._pad_packed_sequence(packed.data, packed.batch_sizes, False, 0.0, num_steps)
    return _rebuild(packed, steps.flatten(0, 1), lengths[None])


def _rebuild(like: rnn.PackedSequence, data: torch.Tensor, batch_sizes: torch.Tensor) -> rnn.PackedSequence:
    """Create a packed sequence with the same order of samples; its constructor would derive one anew."""
    parts = (data, batch_sizes, like.sorted_indices, like.unsorted_indices)
    rebuilt: rnn.PackedSequence = tuple.__new__(_PackedSequence, parts)
    return rebuilt


def _convert(value: Any, convert: Callable[[rnn.PackedSequence], Any]) -> Any:
    """Convert the packed sequences in nested tuples, lists and dictionaries."""
    if isinstance(value, _PackedSequence):
        return convert(value)
    if type(value) in (tuple, list):
        return type(value)(_convert(item, convert) for item in value)
    if type(value) is dict:
        return {key: _convert(item, convert) for key, item in value.items()}
    return value
