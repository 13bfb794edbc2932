"""The step of a layout: kernels, collectives, host and pipeline put together.

rank           forward and backward of its blocks: the longer of device and host, plus exposed collectives
pipeline       1F1B: every rank's micro-batch once, and the slowest rank's for each further one
               T = Σ tᵢ + (m − 1) · max tᵢ        interleaved: the warm-up is divided by the stages per rank
end of step    exposed gradient collectives, optimizer, gathered parameters (ZeRO)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stagewright.analytic.block import Operator, Operators
from stagewright.analytic.collectives import Network
from stagewright.analytic.kernels import Kernels
from stagewright.analytic.layout import Layout
from stagewright.analytic.memory import RankMemory, block_saved_bytes, in_flight, moe_blocks, rank_parameters
from stagewright.analytic.shape import TransformerShape
from stagewright.analytic.stacks import STACKS, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Time of one micro-batch on one pipeline rank."""

    forward_s: float
    backward_s: float
    """With recomputation."""
    compute_s: float
    """Kernels alone."""
    recompute_s: float
    collective_s: float
    """Exposed tensor, context and expert collectives."""
    host_wait_s: float
    """How long the device waits for the host."""
    message_s: float
    """Exposed point-to-point messages of a micro-batch in the steady state."""
    hop_s: float
    """Messages to the next rank and back, while the pipeline fills and drains."""

    @property
    def total_s(self) -> float:
        """Time of a micro-batch in the steady state."""
        return self.forward_s + self.backward_s + self.message_s

    @property
    def fill_s(self) -> float:
        """Time by which the rank delays the pipeline's warm-up and drain."""
        return self.forward_s + self.backward_s + self.hop_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Device time, exposed collectives and host time of forward or backward."""

    device_s: float = 0.0
    collective_s: float = 0.0
    host_s: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            device_s=self.device_s + other.device_s,
            collective_s=self.collective_s + other.collective_s,
            host_s=self.host_s + other.host_s,
        )

    def times(self, count: float) -> Pass:
        return Pass(device_s=self.device_s * count, collective_s=self.collective_s * count, host_s=self.host_s * count)

    @property
    def total_s(self) -> float:
        return max(self.device_s + self.collective_s, self.host_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Computes the step of a layout."""

    shape: TransformerShape
    layout: Layout
    kernels: Kernels
    network: Network
    devices_speed: tuple[float, ...] = ()
    """Relative speed of each pipeline rank's devices; (): all alike."""
    _blocks: dict[bool, tuple[Operator, ...]] = field(default_factory=dict, repr=False, compare=False)
    _passes: dict[tuple[bool, bool], Pass] = field(default_factory=dict, repr=False, compare=False)

    @property
    def stack(self) -> Stack:
        return STACKS[self.layout.stack]

    @property
    def operators(self) -> Operators:
        return Operators(shape=self.shape, layout=self.layout, kernels=self.kernels)

    def block(self, *, experts: bool) -> tuple[Operator, ...]:
        """Return the operators of a block, computed once."""
        if experts not in self._blocks:
            self._blocks[experts] = self.operators.block(experts=experts)
        return self._blocks[experts]

    def block_pass(self, *, experts: bool, backward: bool) -> Pass:
        """Return forward or backward of a block with its collectives, computed once."""
        key = (experts, backward)
        if key not in self._passes:
            operators = self.block(experts=experts)
            collectives = self.block_collectives(experts=experts, backward=backward)
            self._passes[key] = self.pass_of(operators, backward=backward) + collectives
        return self._passes[key]

    def pass_of(self, operators: tuple[Operator, ...], *, backward: bool) -> Pass:
        stack = self.stack
        if backward:
            kernels = sum(operator.backward_kernels for operator in operators)
            seconds = sum(operator.backward_s for operator in operators)
            return Pass(device_s=stack.kernel_factor * seconds, host_s=kernels * stack.host_backward_s)
        kernels = sum(operator.kernels for operator in operators)
        seconds = sum(operator.forward_s for operator in operators)
        return Pass(device_s=stack.kernel_factor * seconds, host_s=kernels * stack.host_kernel_s)

    def block_collectives(self, *, experts: bool, backward: bool) -> Pass:
        """Return the collectives inside one block."""
        shape, layout, network, stack = self.shape, self.layout, self.network, self.stack
        tokens = layout.microbatch * shape.sequence_length / layout.context
        hidden = tokens * shape.width * layout.item_bytes
        seconds, count = 0.0, 0
        if layout.tensor > 1:
            group = network.group(layout.tensor, layout.stride("tensor"))
            if layout.sequence_parallel:
                if stack.tensor_adapters and group.num_hosts > 1:
                    gather = network.collective_s("all_to_all", group, hidden / stack.tensor_adapters)
                    scatter = gather
                else:
                    gather = network.collective_s("all_gather", group, hidden)
                    scatter = network.collective_s("reduce_scatter", group, hidden)
                # Backward gathers the divided inputs again, for the weight gradients.
                seconds += 2 * (gather + scatter)
                overlapped, count = 2 * (gather + scatter), 4
                seconds += 2 * gather if backward else 0.0
                count += 2 if backward else 0
            else:
                overlapped = 2 * network.collective_s("all_reduce", group, hidden)
                seconds, count = overlapped, 2
            if backward and layout.overlap_tensor:
                seconds -= stack.tensor_overlap * overlapped
        if layout.context > 1:
            group = network.group(layout.context, layout.stride("context"))
            width = (shape.attention_width * 2 + 2 * shape.key_width) / layout.tensor
            seconds += 4 * network.collective_s("all_to_all", group, tokens * width * layout.item_bytes / 4)
            count += 4
        if experts and shape.experts is not None and layout.expert > 1:
            group = network.group(layout.expert, layout.stride("expert"))
            routed = hidden * shape.experts.top_k / (layout.tensor if layout.sequence_parallel else 1)
            seconds += 2 * network.collective_s("all_to_all", group, routed)
            count += 2
        host = count * stack.host_collective_s
        if layout.tensor > 1:
            spread = layout.pipeline > 1 and layout.num_devices > network.devices_per_host
            host += layout.tensor * (stack.host_peer_s[spread] + spread * layout.tensor * stack.host_pair_s) / 2
        return Pass(collective_s=seconds, host_s=host)

    def rank_time(self, rank: int) -> RankTime:
        """Return the time of one micro-batch on a pipeline rank."""
        shape, layout = self.shape, self.layout
        builder = self.operators
        blocks = layout.blocks(shape.num_layers)[rank]
        moe = moe_blocks(shape, layout, rank)
        forward, backward = Pass(), Pass()
        recompute_s = 0.0
        checkpointed = blocks if layout.recompute_layers is None else min(blocks, layout.recompute_layers)
        for experts, count in ((False, blocks - moe), (True, moe)):
            if not count:
                continue
            operators = self.block(experts=experts)
            ahead = self.block_pass(experts=experts, backward=False)
            back = self.block_pass(experts=experts, backward=True)
            forward += ahead.times(count)
            backward += back.times(count)
            if layout.recompute == "full":
                again = ahead.times(count * checkpointed / max(1, blocks))
                backward += again
                recompute_s += again.total_s
            elif layout.recompute == "selective":
                again = self.pass_of(tuple(op for op in operators if op.selective), backward=False).times(count)
                backward += again
                recompute_s += again.total_s
        if rank == 0:
            operator = (builder.embedding(),)
            forward += self.pass_of(operator, backward=False)
            backward += self.pass_of(operator, backward=True)
        if rank == layout.pipeline - 1:
            forward += self.pass_of(builder.head(), backward=False)
            backward += self.pass_of(builder.head(), backward=True)
        speed = self.devices_speed[rank] if self.devices_speed else 1.0
        if speed != 1.0:
            forward = Pass(device_s=forward.device_s / speed, collective_s=forward.collective_s, host_s=forward.host_s)
            backward = Pass(
                device_s=backward.device_s / speed, collective_s=backward.collective_s, host_s=backward.host_s
            )
        device = forward.device_s + backward.device_s
        collective = forward.collective_s + backward.collective_s
        return RankTime(
            forward_s=forward.total_s,
            backward_s=backward.total_s,
            compute_s=device,
            recompute_s=recompute_s,
            collective_s=collective,
            host_wait_s=forward.total_s + backward.total_s - device - collective,
            message_s=self.message_s() * layout.virtual * (1 if layout.pipeline == 2 else self.stack.message_neighbors),
            hop_s=self.message_s(),
        )

    def message_s(self) -> float:
        """Return a message to the next pipeline rank and the one that comes back."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        tokens = layout.microbatch * self.shape.sequence_length / layout.context
        size = tokens * self.shape.width * layout.item_bytes / (layout.tensor if layout.sequence_parallel else 1)
        return 2 * (self.network.message_s(size, layout.stride("pipeline")) + layout.message_stall_s)

    def gradient_s(self, rank: int) -> float:
        """Return the collectives of gradients and, with ZeRO, of parameters of a rank."""
        layout = self.layout
        replicated, routed = self.parameters(rank)
        size = layout.data * layout.context
        total = 0.0
        for count, ranks in ((replicated, size), (routed, size // layout.expert)):
            if ranks < 2 or not count:
                continue
            group = self.network.group(ranks, layout.stride("data") // (layout.context if layout.context > 1 else 1))
            gradients, bucket = count * layout.gradient_bytes, self.stack.bucket_bytes
            if layout.zero:
                total += self.network.bucketed_s("reduce_scatter", group, gradients, bucket)
                if layout.zero < 3:
                    parameters = count * layout.item_bytes
                    total += self.network.bucketed_s("all_gather", group, parameters, bucket)
            else:
                total += self.network.bucketed_s("all_reduce", group, gradients, bucket)
        return total

    def parameters(self, rank: int) -> tuple[float, float]:
        blocks = self.layout.blocks(self.shape.num_layers)[rank]
        return rank_parameters(self.shape, self.layout, rank, blocks)

    def optimizer_s(self, rank: int) -> float:
        """Return the time of the optimizer: reads and writes of states, gradients and parameters."""
        layout = self.layout
        replicated, routed = self.parameters(rank)
        replicas = layout.data * layout.context if layout.zero else 1
        count = replicated / replicas + routed / max(1, replicas // layout.expert)
        state = 4 if layout.master_weights or layout.item_bytes == 4 else layout.item_bytes
        width: float = layout.gradient_bytes + 2 * state * (1 + layout.optimizer_states)
        width += layout.item_bytes if layout.master_weights else 0
        # Fused Adam reaches less than the streaming rate: 28 bytes of 32-bit states and 14 of 16-bit ones take as long
        # as 40 and 32 (H200 grid).
        width *= 1.4 if state == 4 else 2.3
        clip = (replicated + routed) * layout.gradient_bytes * 2  # zeroing, and the gradient norm
        return self.kernels.stream_s(count * width + clip, 4)

    def sharded_s(self, rank: int, micro: RankTime) -> float:
        """Return the exposed gathers of parameters of ZeRO-3, for each micro-batch."""
        layout = self.layout
        if layout.zero < 3 or layout.data == 1:
            return 0.0
        replicated, routed = self.parameters(rank)
        group = self.network.group(layout.data, layout.stride("data"))
        size = (replicated + routed) * layout.item_bytes
        gathers = 2 * self.network.collective_s("all_gather", group, size)
        return max(0.0, gathers - 0.8 * (micro.forward_s + micro.backward_s))

    def memory(self, rank: int) -> RankMemory:
        """Return the peak memory of a rank."""
        shape, layout = self.shape, self.layout
        replicated, routed = self.parameters(rank)
        replicas = layout.data * layout.context
        expert_replicas = max(1, replicas // layout.expert)
        divide = replicated / replicas + routed / expert_replicas
        whole = replicated + routed
        sharded = layout.zero
        state = 4 if layout.master_weights or layout.item_bytes == 4 else layout.item_bytes
        states = state * layout.optimizer_states + (4 if layout.master_weights and layout.item_bytes == 2 else 0)
        builder = self.operators
        blocks = layout.blocks(shape.num_layers)[rank]
        moe = moe_blocks(shape, layout, rank)
        full = layout.recompute == "full"
        checkpointed = blocks if layout.recompute_layers is None else min(blocks, layout.recompute_layers)
        saved = largest = 0.0
        for experts, count in ((False, blocks - moe), (True, moe)):
            if count:
                operators = self.block(experts=experts)
                kept = block_saved_bytes(operators, shape, layout, full=False)
                again = block_saved_bytes(operators, shape, layout, full=True)
                part = count * checkpointed / blocks if full else 0.0
                saved += part * again + (count - part) * kept
                if part:
                    largest = max(largest, kept)
        tokens = builder.tokens
        hidden = tokens * shape.width * layout.item_bytes
        logits = 0.0
        if rank == layout.pipeline - 1:
            columns = shape.vocabulary // (layout.tensor if layout.divided_vocabulary else 1)
            logits = sum(operator.saved_bytes for operator in builder.head())
            logits += builder.tokens * columns * self.stack.logit_bytes
        return RankMemory(
            rank=rank,
            parameters_bytes=layout.item_bytes * (divide if sharded >= 3 else whole),
            gradients_bytes=layout.gradient_bytes * (divide if sharded >= 2 else whole),
            optimizer_bytes=states * (divide if sharded >= 1 else whole),
            activations_bytes=saved * in_flight(layout, rank) * (1 + self.stack.fragmentation),
            logits_bytes=logits,
            temporary_bytes=largest + 4 * hidden,
            base_bytes=self.stack.base_bytes,
        )

    def step(self) -> tuple[float, dict[str, float]]:
        """Return the time of a step, and its parts on the bottleneck rank."""
        layout = self.layout
        distinct, ranks = self._distinct_ranks()
        times = [self.rank_time(rank) for rank in distinct]
        by_rank = [times[index] for index in ranks]
        slots = [time.total_s for time in by_rank]
        slowest = max(range(len(slots)), key=lambda index: slots[index])
        micro = layout.microbatches
        bubble = (sum(time.fill_s for time in by_rank) - by_rank[slowest].fill_s) / layout.virtual
        body = micro * slots[slowest] + bubble
        ends = []
        for index in sorted(set(ranks)):
            rank = distinct[index]
            gradient = self.gradient_s(rank)
            if layout.overlap_gradients:
                hidden = self.stack.gradient_overlap * times[index].backward_s
                gradient = max(gradient - hidden, 0.1 * gradient)
            ends.append((gradient + self.optimizer_s(rank), gradient, self.optimizer_s(rank)))
        end, gradient, optimizer = max(ends)
        sharded = micro * self.sharded_s(slowest, by_rank[slowest])
        time = by_rank[slowest]
        parts = {
            "compute": micro * (time.compute_s - time.recompute_s),
            "recompute": micro * time.recompute_s,
            "tensor collectives": micro * time.collective_s,
            "host": micro * time.host_wait_s + self.stack.step_s,
            "messages": micro * time.message_s,
            "bubble": bubble,
            "gradient collectives": gradient + sharded,
            "optimizer": optimizer,
        }
        return body + end + sharded + self.stack.step_s, parts

    def _distinct_ranks(self) -> tuple[list[int], list[int]]:
        """Return ranks whose times differ, and for each rank the index of the one that it equals."""
        layout = self.layout
        counts = layout.blocks(self.shape.num_layers)
        seen: dict[tuple[int, int, int, float], tuple[int, int]] = {}
        like = []
        for rank in range(layout.pipeline):
            place = (rank == 0) + 2 * (rank == layout.pipeline - 1)
            speed = self.devices_speed[rank] if self.devices_speed else 1.0
            kind = (counts[rank], moe_blocks(self.shape, layout, rank), place, speed)
            like.append(seen.setdefault(kind, (len(seen), rank))[0])
        return [rank for _, rank in seen.values()], like
