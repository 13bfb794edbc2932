"""The operators of a transformer on one rank: time of forward and backward, kernels, saved activations.

A block is a list of operators, in order. With t tensor ranks, linear layers have 1/t of their columns (or rows); with
sequence parallelism norms, dropouts and residuals have 1/t of the tokens. Collectives between operators are listed
apart, because some overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stagewright.analytic.attention import Attention, rank_heads
from stagewright.analytic.hardware.kernels import Kernels
from stagewright.analytic.layout import Layout
from stagewright.analytic.operator import Operator, stream_operator
from stagewright.analytic.shape import TransformerShape
from stagewright.analytic.stacks import STACKS, Stack

# Bytes per 16-bit element that a norm and a rotary embedding move, forward and backward, and their kernels: as one
# fused kernel (measured: norms reach less than the streaming rate, which counts as more bytes), and as transformers
# computes them in eager mode (32-bit intermediates), counted from its source.
_NORM = {False: (6, 15, 1, 2), True: (34, 56, 6, 12)}
_GROUP_ROWS = 150
# Embedding's backward sorts the tokens: seconds per token (H200 grid, median).
_EMBEDDING_TOKEN_S = 8e-8
_ROTARY = {False: (4, 4, 2, 2), True: (20, 24, 10, 12)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """Builds the operators of one rank."""

    shape: TransformerShape
    layout: Layout
    kernels: Kernels

    @property
    def stack(self) -> Stack:
        return STACKS[self.layout.stack]

    @property
    def eager_norms(self) -> bool:
        """Whether norms are chains of kernels: RMS norms and rotary embeddings in eager mode; layer norms never."""
        return self.stack.eager_norms and self.shape.rotary

    @property
    def input_share(self) -> float:
        """Share of a divided layer's input that is saved; sequence parallelism gathers it again in backward."""
        return 1 / self.layout.tensor if self.layout.sequence_parallel and self.layout.regather else 1.0

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on the context ranks that have the most."""
        return self.layout.rank_tokens(self.shape.sequence_length)

    @property
    def end_tokens(self) -> int:
        """Tokens of a micro-batch in embedding and head."""
        return self.layout.end_tokens(self.shape.sequence_length)

    def norm_elements(self, tokens: int) -> int:
        """Elements of the norm of so many tokens on one tensor rank."""
        return max(1, tokens // (self.layout.tensor if self.layout.sequence_parallel else 1)) * self.shape.width

    @property
    def attention(self) -> Attention:
        """Attention between its projections."""
        return Attention(shape=self.shape, layout=self.layout, kernels=self.kernels)

    def block(self, *, experts: bool) -> tuple[Operator, ...]:
        """Return the operators of one block."""
        feed_forward = self._experts() if experts else self._feed_forward()
        return (*self._attention(), *feed_forward)

    def _linear(
        self, name: str, rows: int, columns: int, inner: int, *, saves_input: bool = True, input_share: float = 1.0
    ) -> Operator:
        """A linear layer: forward, input gradient, and weight gradient that is added to the accumulated one."""
        kernels, item = self.kernels, self.layout.item_bytes
        forward = kernels.matmul_s(rows, columns, inner)
        gradient = kernels.matmul_s(rows, inner, columns)
        if self.stack.fused_accumulation:
            weight = kernels.matmul_s(columns, inner, rows, out_bytes=2 * self.layout.gradient_bytes)
        else:
            weight = kernels.matmul_s(columns, inner, rows) + self._accumulation_s(columns * inner)
        return Operator(
            name=name,
            forward_s=forward,
            backward_s=gradient + weight,
            weight_s=weight,
            flops=2.0 * rows * columns * inner,
            kernels=1,
            backward_kernels=3,
            saved_bytes=rows * inner * item * input_share if saves_input else 0.0,
        )

    def _accumulation_s(self, elements: int) -> float:
        """Time of a kernel that adds a gradient to the accumulated one; the first of a step is kept as it is, unless
        the accumulated one is wider."""
        layout = self.layout
        wider = layout.gradient_bytes > layout.item_bytes
        seconds = self.kernels.stream_s(elements * (layout.item_bytes + 2 * layout.gradient_bytes))
        return seconds if wider else seconds * (1 - 1 / layout.microbatches)

    def _linears(
        self, name: str, rows: int, columns: Sequence[int], inner: int, *, input_share: float
    ) -> Iterator[Operator]:
        """Linear layers of one input: one product where the stack joins them; else one each, and sums of gradients."""
        if not self.stack.eager_norms:
            yield self._linear(name, rows, sum(columns), inner, input_share=input_share)
            return
        for index, width in enumerate(columns):
            yield self._linear(name, rows, width, inner, saves_input=index == 0, input_share=input_share)
        size = rows * inner * self.layout.item_bytes * (len(columns) - 1)
        yield self._stream(f"{name}: sum of gradients", 0.0, 3 * size, kernels=0, backward_kernels=len(columns) - 1)

    def _stream(
        self,
        name: str,
        forward_bytes: float,
        backward_bytes: float,
        *,
        saved: float = 0.0,
        kernels: int = 1,
        backward_kernels: int = 1,
    ) -> Operator:
        return stream_operator(
            self.kernels,
            name,
            forward_bytes,
            backward_bytes,
            saved=saved,
            num_kernels=kernels,
            backward_kernels=backward_kernels,
        )

    def _norm(self, name: str, elements: int) -> Operator:
        forward, backward, kernels, backward_kernels = _NORM[self.eager_norms]
        item = self.layout.item_bytes
        wide = 1 if self.eager_norms else item / 2
        return self._stream(
            name,
            forward * elements * wide,
            backward * elements * wide,
            # An eager norm saves its input, the 32-bit input and the normalized values.
            saved=elements * (item + 4 + item if self.eager_norms else item),
            kernels=kernels,
            backward_kernels=backward_kernels,
        )

    def _residual(self, name: str) -> Operator:
        """Residual addition, with dropout and its mask where the model has one."""
        elements = self.norm_elements(self.tokens)
        item = self.layout.item_bytes
        if not self.shape.dropout:
            # Its gradient and that of the norm are added, by a kernel of its own in eager mode.
            summed = 3 * elements * item if self.eager_norms else 0.0
            return self._stream(name, 3 * elements * item, summed, backward_kernels=int(self.eager_norms))
        return self._stream(name, 1.5 * (3 * item + 1) * elements, (2 * item + 1) * elements, saved=elements)

    def _attention(self) -> Iterator[Operator]:
        shape, layout, item = self.shape, self.layout, self.layout.item_bytes
        tokens, saved_share = self.tokens, self.input_share
        heads, key_heads = rank_heads(shape, layout)
        key_size, value_size = shape.key_size, shape.value_size
        yield self._norm("attention norm", self.norm_elements(self.tokens))
        if shape.latent is None:
            columns = [count * shape.head_size for count in (heads, key_heads, key_heads)]
            yield from self._linears("queries, keys, values", tokens, columns, shape.width, input_share=saved_share)
        else:
            latent = shape.latent
            rank = latent.query_rank
            if rank:
                yield self._linear("queries down", tokens, rank, shape.width, input_share=saved_share)
                yield self._stream("query norm", 2 * tokens * rank * item, 4 * tokens * rank * item)
            yield self._linear("queries", tokens, heads * key_size, rank or shape.width)
            down = latent.key_value_rank + latent.rotary_width
            yield self._linear("keys and values down", tokens, down, shape.width, saves_input=False)
            yield self._stream("key norm", 2 * tokens * down * item, 4 * tokens * down * item)
            up = heads * (shape.head_size + value_size)
            yield self._linear("keys and values", tokens, up, latent.key_value_rank)
        if shape.rotary:
            size = tokens * (heads + key_heads) * key_size * item / 2
            forward, backward, kernels, backward_kernels = _ROTARY[self.eager_norms]
            yield self._stream(
                "rotary embedding", forward * size, backward * size, kernels=kernels, backward_kernels=backward_kernels
            )
        if self.stack.eager_norms and key_heads < heads:
            size = tokens * 2 * heads * key_size * item
            yield self._stream("repeated keys", 2 * size, 2 * size, kernels=2, backward_kernels=2)
        yield from self.attention.operators()
        if self.stack.eager_norms:
            size = tokens * heads * value_size * item
            yield self._stream("transposed heads", 2 * size, 2 * size)
        yield self._linear("attention output", tokens, shape.width, heads * value_size, saves_input=False)
        yield self._residual("attention residual")

    def _feed_forward(self) -> Iterator[Operator]:
        shape, layout = self.shape, self.layout
        yield self._norm("feed-forward norm", self.norm_elements(self.tokens))
        yield from self._dense_layers(self.tokens, shape.feed_forward // layout.tensor)
        yield self._residual("feed-forward residual")

    def _dense_layers(self, tokens: int, inner: int, label: str = "feed-forward") -> Iterator[Operator]:
        shape, item = self.shape, self.layout.item_bytes
        saved_share = self.input_share
        inner = max(1, inner)
        columns = [inner] * (shape.num_matrices - 1)
        yield from self._linears(f"{label} in", tokens, columns, shape.width, input_share=saved_share)
        gate = shape.num_matrices == 3
        size = tokens * inner * item
        eager = gate and self.stack.eager_activations
        forward, backward = (5, 8) if eager else (3, 5) if gate else (2, 3)
        yield self._stream(
            f"{label} activation",
            forward * size,
            backward * size,
            saved=(3 if eager else 2 if gate else 1) * size,
            kernels=2 if eager else 1,
            backward_kernels=4 if eager else 1,
        )
        yield self._linear(f"{label} out", tokens, shape.width, inner)

    def _experts(self) -> Iterator[Operator]:
        shape, layout, item = self.shape, self.layout, self.layout.item_bytes
        experts = shape.experts
        assert experts is not None
        tokens = max(1, self.tokens // (layout.tensor if layout.sequence_parallel else 1))
        yield self._norm("feed-forward norm", self.norm_elements(self.tokens))
        router = tokens * experts.num_experts
        yield Operator(
            name="router",
            forward_s=self.kernels.matmul_s(tokens, experts.num_experts, shape.width)
            + self.kernels.stream_s(router * 4 * 6, 12),
            backward_s=2 * self.kernels.matmul_s(tokens, experts.num_experts, shape.width)
            + self.kernels.stream_s(router * 4 * 6, 12),
            flops=2.0 * tokens * experts.num_experts * shape.width,
            kernels=14,
            backward_kernels=16,
            saved_bytes=router * 4 * 3,
        )
        routed = tokens * experts.top_k
        size = routed * shape.width * item
        yield self._stream("permute", 3 * size, 3 * size, saved=size, kernels=6, backward_kernels=6)
        yield from self._grouped(routed)
        yield self._stream("unpermute", 3 * size, 4 * size, saved=size, kernels=6, backward_kernels=6)
        if experts.shared_feed_forward:
            yield from self._dense_layers(self.tokens, experts.shared_feed_forward // layout.tensor, "shared expert")
        yield self._residual("feed-forward residual")

    def _grouped(self, routed: int) -> Iterator[Operator]:
        """The experts of a rank as grouped matrix products; tokens are assumed to be spread evenly."""
        shape, layout, item = self.shape, self.layout, self.layout.item_bytes
        experts = shape.experts
        assert experts is not None
        local = max(1, experts.num_experts // layout.expert)
        rows = max(1, routed // local)
        inner, columns = experts.feed_forward, experts.feed_forward * (shape.num_matrices - 1)
        for name, out, width in (("experts in", columns, shape.width), ("experts out", shape.width, inner)):
            # Few rows per expert waste a grouped product, and its weight gradients are separate products (published
            # grouped kernels on B200: 0.5 at 150 rows, 0.6 at 300, 0.9 at 1000; weight gradients 0.85).
            waste = 1 + _GROUP_ROWS / rows
            forward = waste * self.kernels.matmul_s(rows, out, width, batch=local)
            gradient = waste * self.kernels.matmul_s(rows, width, out, batch=local)
            weight = self.kernels.matmul_s(out, width, rows, batch=local, out_bytes=2 * layout.gradient_bytes) / 0.85
            yield Operator(
                name=name,
                forward_s=forward,
                backward_s=gradient + weight,
                weight_s=weight,
                flops=2.0 * routed * out * width,
                kernels=1,
                backward_kernels=local + 2,
                saved_bytes=routed * width * item,
            )
            if name == "experts in":
                size = routed * inner * item
                yield self._stream("experts activation", 3 * size, 5 * size, saved=2 * size)

    def embedding(self) -> Operator:
        """Token embedding, with learned positions where the model has them."""
        shape = self.shape
        size = self.end_tokens * shape.width * self.layout.item_bytes
        tables = 1 if shape.rotary else 2
        operator = self._stream("embedding", 2 * tables * size, 3 * tables * size, kernels=2, backward_kernels=2)
        return replace(operator, backward_s=operator.backward_s + self.end_tokens * _EMBEDDING_TOKEN_S)

    def head(self) -> tuple[Operator, ...]:
        """Final norm, the product with the vocabulary, and cross-entropy."""
        shape, layout = self.shape, self.layout
        columns = shape.vocabulary // (layout.tensor if layout.divided_vocabulary else 1)
        saved_share = self.input_share
        logits = self.end_tokens * columns
        return (
            self._norm("final norm", self.norm_elements(self.end_tokens)),
            self._linear("head", self.end_tokens, columns, shape.width, input_share=saved_share),
            self._stream(
                "cross-entropy",
                self.stack.loss_bytes[0] * logits,
                self.stack.loss_bytes[1] * logits,
                saved=0.0,
                kernels=6,
                backward_kernels=4,
            ),
        )
