"""Attention of one rank between its projections, and what context parallel ranks exchange for it.

ring            keys and values go to the next rank; queries attend to one share of them at a time, n times
                forward    n − 1 sends of a share's keys and values
                backward   n − 1 sends of them with their gradients
                exposed    (n − 1) · max(0, send − attention to one share)
ring of         backward sends gradients in 32 bits, n times, one step behind, so that they end at their rank; the
the engine      last is exposed. Attention in 32 bits or with dropout has no fused kernels
all-to-all      each rank attends over the whole sequence with 1/n of the heads: four all-to-alls, of queries, keys,
                values and output

Ranks have a chunk from the front and one from the back, so under a causal mask every share costs equally much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from stagewright.analytic.hardware.collectives import Network
from stagewright.analytic.hardware.kernels import Kernels
from stagewright.analytic.layout import Layout
from stagewright.analytic.operator import Operator, stream_operator
from stagewright.analytic.shape import TransformerShape
from stagewright.analytic.stacks import STACKS, Stack
from stagewright.spec.plan import ContextAttention

# The engine's ring without fused kernels (engine/context/ring.py), counted by a test, forward and backward: bytes per
# score that elementwise kernels move with 32-bit activations, and what 16-bit ones add; those of its own share's
# triangle; kernels of a step. Four of backward's five products have 32 bits; it holds four 32-bit tensors of scores.
_SCORE_BYTES, _CAST_BYTES, _TRIANGLE_BYTES = (28, 52), (12, 6), 8
_STEP_KERNELS = (28, 45)
_PEAK_SCORE_BYTES = 16
_FUSED_STEP_KERNELS = (13, 21)
TILE_SCORES = 1 << 24
"""Scores that the engine holds at a time."""


def context_attentions(shape: TransformerShape, layout: Layout) -> tuple[ContextAttention, ...]:
    """Return the kinds of attention that a layout's context parallel ranks can use.

    All-to-alls divide the heads of a tensor rank. Where they do not divide those of keys, the engine repeats them;
    others refuse.
    """
    heads, key_heads = rank_heads(shape, layout)
    divides = heads % layout.context == 0 and (layout.stack == "stagewright" or key_heads % layout.context == 0)
    return ("ring", "all-to-all") if divides else ("ring",)


def rank_heads(shape: TransformerShape, layout: Layout) -> tuple[int, int]:
    """Return the heads of queries and of keys on a tensor rank."""
    return max(1, shape.num_heads // layout.tensor), max(1, shape.num_key_heads // layout.tensor)


@lru_cache(maxsize=64)
def _in_32_bits(kernels: Kernels) -> Kernels:
    """Return the same device with products in 32 bits; cached, because kernels repeat."""
    return Kernels(
        device=kernels.device, precision="float32", fused_attention=kernels.fused_attention, constants=kernels.constants
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of one rank."""

    shape: TransformerShape
    layout: Layout
    kernels: Kernels

    @property
    def stack(self) -> Stack:
        return STACKS[self.layout.stack]

    @property
    def is_ring(self) -> bool:
        return self.layout.context > 1 and self.layout.context_attention != "all-to-all"

    @property
    def is_engine_ring(self) -> bool:
        return self.is_ring and self.stack.engine_ring

    @property
    def is_unfused_ring(self) -> bool:
        """Whether a ring computes scores."""
        return self.is_engine_ring and (self.layout.item_bytes == 4 or self.shape.dropout)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on the context ranks that have the most."""
        return self.layout.rank_tokens(self.shape.sequence_length)

    @property
    def heads(self) -> int:
        """Heads of queries on a tensor rank."""
        return rank_heads(self.shape, self.layout)[0]

    @property
    def query_elements(self) -> int:
        """Elements of queries and output of this rank's tokens."""
        return self.tokens * self.heads * (self.shape.key_size + self.shape.value_size)

    @property
    def key_elements(self) -> int:
        """Elements of keys and values of this rank's tokens, with the heads that are exchanged."""
        _, key_heads = rank_heads(self.shape, self.layout)
        if not self.is_ring and key_heads % self.layout.context:
            key_heads = self.heads  # too few to divide: repeated
        return self.tokens * key_heads * (self.shape.key_size + self.shape.value_size)

    def operators(self) -> Iterator[Operator]:
        """Yield the operators."""
        if self.is_unfused_ring:
            yield self._unfused_ring()
        elif self.layout.attention == "flash":
            yield self._ring() if self.is_ring else self._flash()
        else:
            yield from self._unfused()

    def exchange(self, network: Network, *, backward: bool) -> tuple[float, int]:
        """Return the exposed time of what context parallel ranks send each other, and how many collectives it takes."""
        layout, item = self.layout, self.layout.item_bytes
        size = layout.context
        if size == 1:
            return 0.0, 0
        group = network.group(size, layout.stride("context"))
        if not self.is_ring:
            moved = (self.query_elements + self.key_elements) * item
            seconds, count = 4 * network.collective_s("all_to_all", group, moved / 4), 4
        else:
            operators = [*self.operators()]
            times = [operator.backward_s if backward else operator.forward_s for operator in operators]
            share_s = self.stack.kernel_factor * sum(times) / size
            send_s, count = network.ring_step_s(group, self.sent_bytes(backward=backward)), size - 1
            seconds = count * max(0.0, send_s - share_s)
            if backward and self.is_engine_ring:
                seconds += network.ring_step_s(group, self.gradient_bytes)
                count = 2 * size - 1
        if layout.stack == "stagewright":  # the engine joins the shares of hidden states where a block ends
            whole = size * self.tokens * self.shape.width * item
            seconds, count = seconds + network.collective_s("all_gather", group, whole), count + 1
        return seconds, count

    def sent_bytes(self, *, backward: bool) -> int:
        """Return the bytes that a rank sends to the next of a ring while it computes a step."""
        return self.key_elements * self.layout.item_bytes + (self.gradient_bytes if backward else 0)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of keys and values that a rank sends to the next."""
        return self.key_elements * (4 if self.is_engine_ring else self.layout.item_bytes)

    @property
    def temporary_bytes(self) -> float:
        """Memory of a ring while it runs: the share that is used and the one that arrives, with gradients."""
        if not self.is_ring:
            return 0.0
        keys, gradients = 2 * self.sent_bytes(backward=False), 2 * self.gradient_bytes
        if self.is_unfused_ring:
            held = min(self.layout.microbatch * self.heads * self._rows**2, TILE_SCORES)
            return float(_PEAK_SCORE_BYTES * held) + keys + gradients
        if self.is_engine_ring:  # keys are repeated, their gradients too; added up, sent and received; those of queries
            keys += 2 * self.layout.item_bytes * self._repeated_elements
            gradients = 2 * gradients + 4 * self.tokens * self.heads * self.shape.key_size
        return float(keys + gradients)

    @property
    def _rows(self) -> int:
        """Tokens of a sample on this rank."""
        return self.tokens // self.layout.microbatch

    @property
    def _repeated_elements(self) -> int:
        """Elements of keys and values of this rank's tokens, repeated for all heads of queries."""
        return self.tokens * self.heads * (self.shape.key_size + self.shape.value_size)

    @property
    def _flops(self) -> float:
        return 2.0 * self.shape.sequence_length * self.query_elements

    @property
    def _saved_bytes(self) -> float:
        """Activations that fused attention and rings save: all its tensors, and the logarithm of the sums."""
        return (self.query_elements + self.key_elements) * self.layout.item_bytes + 4 * self.tokens * self.heads

    def _flash(self) -> Operator:
        shape, samples = self.shape, self.layout.microbatch
        share, length = self.heads // self.layout.context, shape.sequence_length
        times = [
            self.kernels.attention_s(
                samples, share, length, length, shape.key_size, shape.value_size, backward=backward
            )
            for backward in (False, True)
        ]
        return Operator(
            name="attention",
            forward_s=times[0],
            backward_s=times[1],
            flops=self._flops,
            backward_kernels=3,
            saved_bytes=self._saved_bytes,
        )

    def _ring(self) -> Operator:
        """Fused attention to one share of the keys after the other; results are added up."""
        shape, samples, item = self.shape, self.layout.microbatch, self.layout.item_bytes
        size, rows, heads, key, value = self.layout.context, self._rows, self.heads, shape.key_size, shape.value_size
        forward_s, backward_s = (
            self.kernels.attention_s(samples, heads, rows, rows, key, value, backward=backward)
            for backward in (False, True)
        )
        if self.is_engine_ring:
            moved, launches = self._engine_bytes(), _FUSED_STEP_KERNELS
        else:
            # The sum so far is read and written: the output's in 32 bits, gradients in their own type.
            output = self.tokens * heads * value * (item + 8)
            gradients = 3 * item * (self.tokens * heads * key + self.key_elements)
            moved, launches = ((size - 1) * output, (size - 1) * gradients), (1, 2)
        steps = size if self.is_engine_ring else size - 1
        return Operator(
            name="ring attention",
            forward_s=size * forward_s + self.kernels.stream_s(moved[0], steps * launches[0]),
            backward_s=size * backward_s + self.kernels.stream_s(moved[1], steps * launches[1]),
            flops=self._flops,
            kernels=size + steps * launches[0],
            backward_kernels=3 * size + steps * launches[1],
            saved_bytes=self._saved_bytes,
        )

    def _engine_bytes(self) -> tuple[float, float]:
        """Return the bytes that the engine's fused ring moves beside attention: repeated heads, sums of results."""
        item, size, repeated = self.layout.item_bytes, self.layout.context, self._repeated_elements
        output, queries = (self.tokens * self.heads * width for width in (self.shape.value_size, self.shape.key_size))
        shares = 1 + (size - 1) / 2  # of queries or keys that a causal mask shows
        forward = shares * 2 * item * repeated + (shares - 1) * (item + 24) * output + 2 * (item + 4) * output
        backward = shares * (4 * item * repeated + (3 * item + 12) * queries) + size * 40 * self.key_elements
        return forward, backward

    def _unfused_ring(self) -> Operator:
        """The engine's ring with scores: of its own share all, of others those that a causal mask shows."""
        shape, item, kernels = self.shape, self.layout.item_bytes, self.kernels
        rows, key, value = self._rows, shape.key_size, shape.value_size
        batch = self.layout.microbatch * self.heads
        of_scores = [(_SCORE_BYTES[index] + (_CAST_BYTES[index] if item == 2 else 0)) for index in (0, 1)]
        queries, repeated = self.tokens * self.heads * key, self._repeated_elements
        # Keys and values are repeated for all heads; output and gradients of queries, keys and values are sums.
        moved = [
            2 * item * repeated + (item + 24) * self.tokens * self.heads * value,
            (3 * item + 8) * repeated + 12 * queries + 16 * self.key_elements,
        ]
        wide = kernels if item == 4 else _in_32_bits(kernels)
        products = [
            kernels.matmul_s(rows, rows, key, batch=batch) + kernels.matmul_s(rows, value, rows, batch=batch),
            kernels.matmul_s(rows, rows, key, batch=batch)
            + wide.matmul_s(rows, rows, value, batch=batch)
            + wide.matmul_s(rows, value, rows, batch=batch)
            + 2 * wide.matmul_s(rows, key, rows, batch=batch),
        ]
        size = self.layout.context
        shares = 1 + (size - 1) / 2
        forward_s, backward_s = (
            shares * products[index]
            + kernels.stream_s((shares * of_scores[index] + _TRIANGLE_BYTES) * batch * rows * rows)
            + kernels.stream_s(size * moved[index], size * _STEP_KERNELS[index])
            for index in (0, 1)
        )
        return Operator(
            name="ring attention",
            forward_s=forward_s,
            backward_s=backward_s,
            flops=self._flops,
            kernels=size * _STEP_KERNELS[0],
            backward_kernels=size * _STEP_KERNELS[1],
            saved_bytes=self._saved_bytes,
        )

    def _unfused(self) -> Iterator[Operator]:
        shape, layout, item = self.shape, self.layout, self.layout.item_bytes
        kernels, tokens, rows, length = self.kernels, self.tokens, self._rows, shape.sequence_length
        batch, key, value = layout.microbatch * self.heads, shape.key_size, shape.value_size
        scores = batch * rows * length
        yield Operator(
            name="scores",
            forward_s=kernels.matmul_s(rows, length, key, batch=batch),
            backward_s=kernels.matmul_s(rows, key, length, batch=batch)
            + kernels.matmul_s(length, key, rows, batch=batch),
            flops=self._flops / 2,
            saved_bytes=(tokens * self.heads * key + self.key_elements) * item,
            selective=True,
        )
        yield stream_operator(
            kernels, "softmax", 3 * item * scores, 4 * item * scores, saved=item * scores, selective=True
        )
        if shape.dropout:
            yield stream_operator(
                kernels,
                "attention dropout",
                1.5 * (2 * item + 1) * scores,
                (2 * item + 1) * scores,
                saved=(item + 1) * scores,
                selective=True,
            )
        yield Operator(
            name="weighted values",
            forward_s=kernels.matmul_s(rows, value, length, batch=batch),
            backward_s=kernels.matmul_s(rows, length, value, batch=batch)
            + kernels.matmul_s(length, value, rows, batch=batch),
            flops=self._flops / 2,
            saved_bytes=tokens * self.heads * value * item,
            selective=True,
        )
