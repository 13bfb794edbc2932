"""Multiply-accumulates (MACs) of an eager run: torch's FLOP counter, halved, with formulas for what it misses.

torch counts 0 for attention on a CPU, grouped expert products, fused recurrent layers, FFTs and matrix-vector products.
With the attention fast path it misses whole transformer layers, so that `eval()` and `train()` disagree. Here each of
these has a formula, and the fast path is disabled while counting. Attention counts masked positions too, as in torch.
Element-wise operations count 0.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stagewright.graph.preserve import preserved

Shape = Sequence[int]


class MacCounter:
    """A counter of the MACs of everything that runs inside `with`.

    The MACs of one call are the difference of `total` before and after it.
    """

    def __init__(self) -> None:
        self._flops = FlopCounterMode(display=False, custom_mapping=_formulas())
        self._flops.mod_tracker = _NoTracker()  # type: ignore[assignment]
        self._stack = contextlib.ExitStack()

    @property
    def total(self) -> int:
        """MACs since the `with` block began."""
        return int(self._flops.get_total_flops()) // 2

    def __enter__(self) -> MacCounter:
        self._stack.enter_context(_no_attention_fast_path())
        self._stack.enter_context(self._flops)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


class _NoTracker:
    """A replacement of torch's module tracker, which totals don't need and whose hooks fail on views of parameters."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoTracker:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def count_macs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> int:
    """Count the MACs of one forward pass by running it; the module's state is preserved."""
    with preserved(module), torch.no_grad(), MacCounter() as counter:
        module(*args, **(kwargs or {}))
    return counter.total


@contextlib.contextmanager
def _no_attention_fast_path() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


# FLOP formulas (2 per MAC) over the shapes of an operator's tensors; out_shape is the shape of its result.


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Scores and their product with the values, once per query head; key and value heads may be shared."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _grouped_product(left: Shape, right: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Each row (or column) belongs to one group and is multiplied once, so there is no factor for the groups.

    (rows, inner) × (groups, inner, columns); (groups, rows, inner) × (inner, columns);
    (rows, inner) × (inner, columns) with groups along inner; with two 3-d sides the groups multiply.
    """
    return 2 * math.prod(left if len(left) == 3 and len(right) == 3 else left[-2:]) * right[-1]


def _recurrent_layer(
    layer_input: Shape, input_weight: Shape, hidden_weight: Shape, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """One layer, one direction: each step of each sequence is multiplied with both weights once."""
    return 2 * math.prod(layer_input[:-1]) * (math.prod(input_weight) + math.prod(hidden_weight))


def _recurrent_stack(layer_input: Shape, weights: Sequence[Shape], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """All layers and directions of cuDNN's recurrent layers; biases are 1-d."""
    return 2 * math.prod(layer_input[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _fourier(scale: float) -> Callable[..., int]:
    """5·N·log2(N) FLOPs for each complex transform of N values (the radix-2 count), half for a real one."""

    def flops(signal: Shape, dims: Sequence[int], *_: Any, out_shape: Any = None, **__: Any) -> int:
        # The real side is the longer one: (… n) against (… n/2 + 1).
        lengths = [max(signal[dim], out_shape[dim]) for dim in dims]
        count = math.prod(map(max, signal, out_shape))
        return int(scale * count * math.log2(max(1, math.prod(lengths))))

    return flops


def _matrix_vector(matrix: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * math.prod(matrix)


def _add_matrix_vector(_added: Shape, matrix: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * math.prod(matrix)


def _add_matrix_product(_added: Shape, left: Shape, right: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * math.prod(left) * right[-1]


def _matrix_product(left: Shape, right: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * math.prod(left) * right[-1]


def _bilinear(left: Shape, weight: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Per row: out × left × right products with the right side, and out × left with the left side."""
    num_out, num_left, num_right = weight
    return 2 * math.prod(left[:-1]) * num_out * num_left * (num_right + 1)


def _distances(left: Shape, right: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * math.prod(left) * right[-2]


_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm": _grouped_product,
    "transformers::grouped_mm_fallback": _grouped_product,
    "aten::mkldnn_rnn_layer": _recurrent_layer,
    "aten::_cudnn_rnn": _recurrent_stack,
    "aten::_fft_r2c": _fourier(2.5),
    "aten::_fft_c2r": _fourier(2.5),
    "aten::_fft_c2c": _fourier(5.0),
    "aten::mv": _matrix_vector,
    "aten::dot": _matrix_vector,
    "aten::addmv": _add_matrix_vector,
    "aten::_addmm_activation": _add_matrix_product,
    "aten::addbmm": _add_matrix_product,
    "aten::_int_mm": _matrix_product,
    "aten::_trilinear": _bilinear,
    "aten::_euclidean_dist": _distances,
}


def _formulas() -> dict[Any, Callable[..., int]]:
    """Map each operator that is registered in this process to its formula."""
    formulas = {}
    for name, formula in _FORMULAS.items():
        namespace, _, operator = name.partition("::")
        with contextlib.suppress(AttributeError):
            formulas[getattr(getattr(torch.ops, namespace), operator)] = formula
    return formulas
