"""The step of a layout: kernels, collectives, host and pipeline put together.

rank           forward and backward of its blocks: the longer of device and host, plus exposed collectives
pipeline       1F1B: every rank's micro-batch once, and the slowest rank's for each further one
               T = Σ tᵢ + (m − 1) · max tᵢ        interleaved: the warm-up is divided by the stages per rank
end of step    exposed gradient collectives, optimizer, gathered parameters (ZeRO)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stagewright.analytic.block import Operators
from stagewright.analytic.hardware.collectives import Network
from stagewright.analytic.hardware.kernels import Kernels
from stagewright.analytic.layout import Layout
from stagewright.analytic.memory import RankMemory, ahead_bytes, block_saved_bytes, moe_blocks, rank_parameters
from stagewright.analytic.operator import Operator
from stagewright.analytic.pipeline import (
    Part,
    Pass,
    RankTime,
    SharedParts,
    block_counts,
    bubble_s,
    distinct_ranks,
    in_flight,
)
from stagewright.analytic.plan_layout import balance
from stagewright.analytic.shape import TransformerShape
from stagewright.analytic.stacks import STACKS, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Computes the step of a layout."""

    shape: TransformerShape
    layout: Layout
    kernels: Kernels
    network: Network
    devices_speed: tuple[float, ...] = ()
    """Relative speed of each pipeline rank's devices; (): all alike."""
    shared: SharedParts = field(default_factory=SharedParts, repr=False, compare=False)

    @property
    def stack(self) -> Stack:
        return STACKS[self.layout.stack]

    @property
    def operators(self) -> Operators:
        return Operators(shape=self.shape, layout=self.layout, kernels=self.kernels)

    def part(self, part: Part) -> tuple[Operator, ...]:
        """Return the operators of a part, computed once."""
        found = self.shared.operators.get(part)
        if found is None:
            if part == "head":
                found = self.operators.head()
            elif part == "embedding":
                found = (self.operators.embedding(),)
            else:
                found = self.operators.block(experts=part == "experts")
            self.shared.operators[part] = found
        return found

    def part_pass(self, part: Part, *, backward: bool) -> Pass:
        """Return forward or backward of a part with its collectives, computed once."""
        found = self.shared.passes.get((part, backward))
        if found is None:
            found = self.pass_of(self.part(part), backward=backward)
            if part in ("dense", "experts"):
                found += self.block_collectives(experts=part == "experts", backward=backward)
            self.shared.passes[part, backward] = found
        return found

    def pass_of(self, operators: tuple[Operator, ...], *, backward: bool) -> Pass:
        stack = self.stack
        if backward:
            kernels = sum(operator.backward_kernels for operator in operators)
            seconds = sum(operator.backward_s for operator in operators)
            return Pass(
                device_s=stack.kernel_factor * seconds,
                host_s=kernels * stack.host_backward_s,
                weight_s=stack.kernel_factor * sum(operator.weight_s for operator in operators),
            )
        kernels = sum(operator.kernels for operator in operators)
        seconds = sum(operator.forward_s for operator in operators)
        return Pass(device_s=stack.kernel_factor * seconds, host_s=kernels * stack.host_kernel_s)

    def block_collectives(self, *, experts: bool, backward: bool) -> Pass:
        """Return the collectives inside one block."""
        shape, layout, network, stack = self.shape, self.layout, self.network, self.stack
        tokens = layout.rank_tokens(shape.sequence_length)
        hidden = tokens * shape.width * layout.item_bytes
        seconds, count = 0.0, 0
        if layout.tensor > 1:
            group = network.group(layout.tensor, layout.stride("tensor"))
            if layout.sequence_parallel:
                gather = network.collective_s("all_gather", group, hidden)
                scatter = network.collective_s("reduce_scatter", group, hidden)
                # Backward gathers the divided inputs again, for the weight gradients.
                seconds += 2 * (gather + scatter)
                overlapped, count = 2 * (gather + scatter), 4
                if backward and layout.regather:
                    seconds += 2 * gather
                    count += 2
            else:
                overlapped = 2 * network.collective_s("all_reduce", group, hidden)
                seconds, count = overlapped, 2
            if backward and layout.overlap_tensor:
                seconds -= stack.tensor_overlap * overlapped
        exchange_s, exchanges = self.operators.attention.exchange(network, backward=backward)
        seconds += exchange_s
        count += exchanges
        if experts and shape.experts is not None and layout.expert > 1:
            group = network.group(layout.expert, layout.stride("expert"))
            routed = hidden * shape.experts.top_k / (layout.tensor if layout.sequence_parallel else 1)
            seconds += 2 * network.collective_s("all_to_all", group, routed)
            count += 2
        host = count * stack.host_collective_s
        if layout.tensor > 1:
            spread = layout.pipeline > 1 and layout.num_devices > network.devices_per_host
            across = network.group(layout.tensor, layout.stride("tensor")).num_hosts > 1
            host += stack.host_tensor_s + spread * layout.tensor * stack.host_peer_s[across]
            if across:
                seconds += layout.tensor * stack.peer_latency_s[spread]
        return Pass(collective_s=seconds, host_s=host)

    def balanced(self) -> StepModel:
        """Return the model with blocks divided so that the slowest rank is as fast as possible."""
        layout = self.layout
        block: Part = "dense" if self.shape.experts is None else "experts"
        passes, embedding, head = (
            [self.part_pass(part, backward=backward).total_s for backward in (False, True)]
            for part in (block, "embedding", "head")
        )
        block_s = sum(passes) + (passes[0] if layout.recompute == "full" else 0.0)
        layers = balance(
            self.shape.num_layers,
            self.devices_speed or (1.0,) * layout.pipeline,
            block_s,
            sum(embedding),
            sum(head),
            layout.head_rank,
        )
        return replace(self, layout=replace(layout, layers=layers))

    def rank_time(self, rank: int) -> RankTime:
        """Return the time of one micro-batch on a pipeline rank."""
        shape, layout = self.shape, self.layout
        blocks = layout.blocks(shape.num_layers)[rank]
        moe = moe_blocks(shape, layout, rank)
        forward, backward = Pass(), Pass()
        recompute_s = 0.0
        checkpointed = layout.checkpointed(rank, blocks)
        for part, count in block_counts(blocks, moe):
            operators = self.part(part)
            ahead = self.part_pass(part, backward=False)
            back = self.part_pass(part, backward=True)
            forward += ahead.times(count)
            backward += back.times(count)
            if layout.recompute == "full":
                again = ahead.times(count * checkpointed / max(1, blocks))
                again += Pass(host_s=self.stack.host_checkpoint_s * count * checkpointed / max(1, blocks))
                backward += again
                recompute_s += again.total_s
            elif layout.recompute == "selective":
                again = self.pass_of(tuple(op for op in operators if op.selective), backward=False).times(count)
                backward += again
                recompute_s += again.total_s
        ends: tuple[tuple[Part, int], ...] = (("embedding", 0), ("head", layout.head_rank))
        for part, end in ends:
            if rank == end:
                forward += self.part_pass(part, backward=False)
                backward += self.part_pass(part, backward=True)
        speed = self.devices_speed[rank] if self.devices_speed else 1.0
        if speed != 1.0:
            forward, backward = forward.at_speed(speed), backward.at_speed(speed)
        device = forward.device_s + backward.device_s
        collective = forward.collective_s + backward.collective_s
        hop = self.message_s()
        return RankTime(
            forward_s=forward.total_s,
            backward_s=backward.total_s,
            compute_s=device,
            recompute_s=recompute_s,
            weight_s=backward.weight_s,
            collective_s=collective,
            host_wait_s=forward.total_s + backward.total_s - device - collective,
            message_s=hop * layout.virtual * (1 if layout.pipeline == 2 else self.stack.message_neighbors),
            hop_s=hop,
        )

    def message_s(self) -> float:
        """Return a message to the next pipeline rank and the one that comes back."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        # The engine here joins the shards of a sequence before a stage ends.
        tokens = layout.end_tokens(self.shape.sequence_length)
        ranks = layout.tensor if layout.sequence_parallel and layout.stack != "stagewright" else 1
        size = tokens * self.shape.width * layout.item_bytes / ranks
        codec_s = 0.0
        if layout.message_share != 1.0:  # encoding and decoding read and write memory
            codec_s = 2 * self.kernels.stream_s((1 + layout.message_share) * size)
        sent = self.network.message_s(size * layout.message_share, layout.stride("pipeline"))
        return 2 * (sent + codec_s + layout.message_stall_s)

    def gradient_s(self, rank: int) -> float:
        """Return the collectives of gradients and, with ZeRO, of parameters of a rank."""
        layout = self.layout
        replicated, routed = self.parameters(rank)
        size = layout.data * layout.context
        total = 0.0
        for count, ranks in ((replicated, size), (routed, size // layout.expert)):
            if ranks < 2 or not count:
                continue
            stride = min(layout.stride(axis) for axis in ("data", "context") if axis == "data" or layout.context > 1)
            group = self.network.group(layout.shards or ranks, stride)
            gradients, bucket = count * layout.gradient_bytes, self.stack.bucket_bytes
            if layout.zero:
                total += self.network.bucketed_s("reduce_scatter", group, gradients, bucket)
                if layout.zero < 3 or layout.gather_once:
                    parameters = count * layout.item_bytes
                    total += self.network.bucketed_s("all_gather", group, parameters, bucket)
                if layout.shards is not None:
                    same = self.network.group(ranks // layout.shards, stride * layout.shards)
                    total += self.network.bucketed_s("all_reduce", same, gradients / layout.shards, bucket)
            else:
                total += self.network.bucketed_s("all_reduce", group, gradients, bucket)
        return total

    def parameters(self, rank: int) -> tuple[float, float]:
        """Return the parameters of a rank: those that data ranks replicate, and those of routed experts."""
        layout = self.layout
        blocks, moe = layout.blocks(self.shape.num_layers)[rank], moe_blocks(self.shape, layout, rank)
        key = (blocks, moe, rank == 0, rank == layout.head_rank)
        if key not in self.shared.parameters:
            self.shared.parameters[key] = rank_parameters(self.shape, layout, rank, blocks)
        return self.shared.parameters[key]

    def optimizer_s(self, rank: int) -> float:
        """Return the time of the optimizer: reads and writes of states, gradients and parameters."""
        layout = self.layout
        replicated, routed = self.parameters(rank)
        replicas = (layout.shards or layout.data * layout.context) if layout.zero else 1
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
        if layout.zero < 3 or layout.data == 1 or layout.gather_once:
            return 0.0
        replicated, routed = self.parameters(rank)
        group = self.network.group(layout.shards or layout.data, layout.stride("data"))
        size = (replicated + routed) * layout.item_bytes
        gathers = 2 * self.network.collective_s("all_gather", group, size)
        return max(0.0, gathers - 0.8 * (micro.forward_s + micro.backward_s))

    def memory(self) -> tuple[RankMemory, ...]:
        """Return the peak memory of each rank."""
        distinct, like = self._distinct_ranks()
        rows = [self._microbatch_memory(rank) for rank in distinct]
        return tuple(self._rank_memory(rank, rows[kind]) for rank, kind in enumerate(like))

    def peak_memory_bytes(self) -> int:
        """Return the largest peak memory of any rank; of equal ranks the first holds the most micro-batches."""
        distinct, _ = self._distinct_ranks()
        return max(self._rank_memory(rank, self._microbatch_memory(rank)).peak_bytes for rank in distinct)

    def _rank_memory(self, rank: int, one: RankMemory) -> RankMemory:
        """Return the memory of a rank, from that with one micro-batch in flight."""
        ahead = ahead_bytes(self.shape, self.layout, rank, self.stack.blocks_ahead)
        return one.holding(rank, in_flight(self.layout, rank), ahead)

    def _microbatch_memory(self, rank: int) -> RankMemory:
        """Return the memory of a rank with one micro-batch in flight."""
        shape, layout = self.shape, self.layout
        replicated, routed = self.parameters(rank)
        replicas = layout.shards or layout.data * layout.context
        expert_replicas = max(1, replicas // layout.expert)
        divide = replicated / replicas + routed / expert_replicas
        whole = replicated + routed
        sharded = layout.zero
        state = 4 if layout.master_weights or layout.item_bytes == 4 else layout.item_bytes
        states = state * layout.optimizer_states + (4 if layout.master_weights and layout.item_bytes == 2 else 0)
        blocks = layout.blocks(shape.num_layers)[rank]
        moe = moe_blocks(shape, layout, rank)
        full = layout.recompute == "full"
        checkpointed = layout.checkpointed(rank, blocks)
        saved = largest = 0.0
        for part, count in block_counts(blocks, moe):
            kept = block_saved_bytes(self.part(part), shape, layout, full=False)
            again = block_saved_bytes(self.part(part), shape, layout, full=True)
            whole_blocks = count * checkpointed / blocks if full else 0.0
            segments = whole_blocks
            if layout.checkpoint_segments is not None:
                segments = min(segments, layout.checkpoint_segments)
            saved += segments * again + (count - whole_blocks) * kept
            if whole_blocks:
                largest = max(largest, kept * whole_blocks / segments)
        tokens = layout.end_tokens(shape.sequence_length)
        hidden = tokens * shape.width * layout.item_bytes
        logits = 0.0
        if rank == layout.head_rank:
            columns = shape.vocabulary // (layout.tensor if layout.divided_vocabulary else 1)
            logits = sum(operator.saved_bytes for operator in self.part("head"))
            logits += tokens * columns * self.stack.logit_bytes
        # FSDP gathers the next block's parameters while it uses those of one.
        gathered = 2 * layout.item_bytes * whole / max(2, blocks) if sharded >= 3 and replicas > 1 else 0.0
        if layout.gather_once:
            gathered = layout.item_bytes * whole
        return RankMemory(
            rank=rank,
            parameters_bytes=layout.item_bytes * (divide if sharded >= 3 else whole),
            gradients_bytes=layout.gradient_bytes * (divide if sharded >= 2 and not layout.gather_once else whole)
            + self.stack.gradient_buffer_bytes * (whole if replicas > 1 else 0.0),
            optimizer_bytes=states * (divide if sharded >= 1 else whole),
            activations_bytes=saved * (1 + self.stack.fragmentation),
            logits_bytes=logits,
            temporary_bytes=largest + 4 * hidden + gathered + self.operators.attention.temporary_bytes,
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
        bubble = bubble_s(layout, by_rank, slowest)
        # The messages of the first micro-batch are those of the warm-up and the drain.
        exchanged = micro - 1 if layout.virtual == 1 else micro
        body = micro * slots[slowest] - (micro - exchanged) * by_rank[slowest].message_s + bubble
        ends = []
        for index in sorted(set(ranks)):
            rank = distinct[index]
            gradient = self.gradient_s(rank)
            if layout.overlap_gradients:
                hidden = self.stack.gradient_overlap * times[index].backward_s
                gradient = max(gradient - hidden, 0.1 * gradient)
            if layout.data * layout.context > 1:
                gradient += layout.gradient_stall_s
            optimizer = self.optimizer_s(rank)
            ends.append((gradient + optimizer, gradient, optimizer))
        end, gradient, optimizer = max(ends)
        sharded = micro * self.sharded_s(slowest, by_rank[slowest])
        time = by_rank[slowest]
        parts = {
            "compute": micro * (time.compute_s - time.recompute_s),
            "recompute": micro * time.recompute_s,
            "tensor collectives": micro * time.collective_s,
            "host": micro * time.host_wait_s + self.stack.step_s,
            "messages": exchanged * time.message_s,
            "bubble": bubble,
            "gradient collectives": gradient + sharded,
            "optimizer": optimizer,
        }
        return body + end + sharded + self.stack.step_s, parts

    def _distinct_ranks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return ranks whose times differ, and for each rank the index of the one that it equals."""
        layout = self.layout
        blocks = layout.blocks(self.shape.num_layers)
        checkpointed = tuple(layout.checkpointed(rank, count) for rank, count in enumerate(blocks))
        return distinct_ranks(blocks, checkpointed, self.shape.experts, layout.head_rank, self.devices_speed)
