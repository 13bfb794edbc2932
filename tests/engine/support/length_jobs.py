"""Training on micro-batches of different lengths; run by ``pool`` (first argument: the rank)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from stagewright.cluster.device import Device
from stagewright.engine.batch.splitter import count_tokens
from stagewright.engine.parallel.trainer import Trainer
from stagewright.engine.worker.context import make_context
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.model import Batch, Model

VOCABULARY = 30


class Decoder(nn.Module):
    """A causal transformer with a padding mask: the mask is glue, and depends on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, 16), nn.Embedding(32, 16)
        layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        hidden = self.embedding(ids) + self.positions(torch.arange(length, device=ids.device))
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=causal, src_key_padding_mask=~mask)
        return self.head(hidden)  # type: ignore[no-any-return]


class Tagger(nn.Module):
    """Recurrent layers that pass each other a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.LSTM(16, 8, bidirectional=True, batch_first=True) for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        lengths, embedded = mask.sum(1).cpu(), self.embedding(ids)
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            packed, _ = layer(packed)
        hidden, _ = pad_packed_sequence(packed, batch_first=True, total_length=ids.shape[1])
        return self.head(hidden)  # type: ignore[no-any-return]


MODELS: dict[str, type[nn.Module]] = {"Decoder": Decoder, "Tagger": Tagger}


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens that count."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def padded(lengths: Sequence[int], seed: int) -> Batch:
    """Sequences of these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(0, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    return Batch(args=(ids, mask), target=torch.where(mask, (ids * 7 + 3) % VOCABULARY, -100))


def make_model(module_class: type[nn.Module]) -> Model:
    """The model with an example of 4 sequences of up to 6 tokens."""
    torch.manual_seed(0)
    module = module_class().train()

    def make(count: int) -> Batch:
        return padded([6 - index % 3 for index in range(count)], seed=count)

    example = make(4)
    return Model(
        name=module_class.__name__,
        module=module,
        args=example.args,
        target=example.target,
        loss=loss,
        batch_size=4,
        make_example=make,
    )


def random_lengths(seed: int) -> list[list[int]]:
    """Lengths of the sequences of four micro-batches, each padded to its first."""
    numbers = random.Random(seed)
    longest = [numbers.choice((4, 6, 9)) for _ in range(4)]
    return [[most, *(numbers.randint(1, most) for _ in range(numbers.randint(0, 2)))] for most in longest]


def plain_step(module: nn.Module, batches: Sequence[Batch]) -> float:
    """Accumulate gradients over the micro-batches as transformers does: sum of losses over all tokens of the batch."""
    total = sum(int(batch.target.ne(-100).sum()) for batch in batches)
    value = 0.0
    for batch in batches:
        logits = module(*batch.args)
        summed = nn.functional.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), reduction="sum") / total
        summed.backward()
        value += float(summed.detach())
    return value


def training(
    rank: int, mesh: str, schedule: str = "1f1b", seeds: Sequence[int] = (0,), model: str = "Decoder", **options: Any
) -> dict[str, Any]:
    """Train one step per seed, each on other lengths; return the differences from plain torch."""
    shape = Mesh.parse(mesh)
    num_stages = shape.pipeline * SCHEDULES[schedule].stages_per_worker if shape.pipeline > 1 else 1
    layers = [f"layers.{index}" for index in range(4)]
    cuts = tuple(layers[round(4 * (index + 1) / num_stages) - 1] for index in range(num_stages - 1))
    plan = Plan(
        model=ModelSpec(name=model),
        mesh=shape,
        batch=8,
        microbatches=4 if schedule != "1f1b" else 2 if shape.pipeline > 1 else 1,  # fewer than are given
        schedule=schedule if shape.pipeline > 1 else "1f1b",
        cuts=cuts,
        devices=("cpu:0",) * shape.num_workers,
        optimizer=OptimizerSpec(name="sgd", learning_rate=0.1),
        **options,
    )
    trainer = Trainer(
        plan, make_model(MODELS[model]), make_context(shape, rank, Device.parse("cpu:0")), count_items=count_tokens
    )
    plain = make_model(MODELS[model]).module
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    errors = []
    for seed in seeds:
        batches = [padded(lengths, 100 * seed + index) for index, lengths in enumerate(random_lengths(seed))]
        with torch.no_grad():
            plain.eval()
            before = plain_evaluation(plain, batches)
            plain.train()
        evaluated = trainer.evaluate(batches).loss
        optimizer.zero_grad()
        expected = plain_step(plain, batches)
        optimizer.step()
        found = trainer.step(batches).loss
        errors.append((abs(found - expected) / expected, abs(evaluated - before) / before))
    state, expected_state = trainer.state_dict(), plain.state_dict()
    worst = max(float((state[name] - value).abs().max()) for name, value in expected_state.items())
    return {"errors": errors, "worst": worst}


def plain_evaluation(module: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean over all tokens in eval mode."""
    total = sum(int(batch.target.ne(-100).sum()) for batch in batches)
    sums = [
        nn.functional.cross_entropy(module(*batch.args).flatten(0, 1), batch.target.flatten(), reduction="sum")
        for batch in batches
    ]
    return float(sum(sums)) / total
