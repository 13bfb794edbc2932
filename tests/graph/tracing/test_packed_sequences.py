"""Models that pass a ``PackedSequence`` between units, compared with their graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stagewright.errors import CaptureError, UsageError
from stagewright.graph import capture
from stagewright.graph.unit_graph import UnitGraph

STEPS = 7
LENGTHS = [[7, 3, 5, 7, 2, 6, 1, 4], [2, 6, 4], [1, 1, 3, 2, 2]]


class Recurrent(nn.Module):
    """Two layers that pass a packed sequence; subclasses change one thing each."""

    layer: type[nn.RNNBase] = nn.LSTM
    batch_first = True
    enforce_sorted = False
    total_length: int | None = STEPS

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.first = self.layer(16, 12, batch_first=self.batch_first, bidirectional=True)
        self.second = self.layer(24, 8, num_layers=2, dropout=0.1, batch_first=self.batch_first)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        x = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths, batch_first=self.batch_first, enforce_sorted=self.enforce_sorted)
        packed = self.between(self.first(packed)[0])
        return self.finish(*self.second(packed))

    def between(self, packed: PackedSequence) -> PackedSequence:
        return packed

    def finish(self, packed: PackedSequence, state: Any) -> Any:
        padded, lengths = pad_packed_sequence(
            packed, batch_first=self.batch_first, padding_value=-1.0, total_length=self.total_length
        )
        return self.head(padded), lengths


class TimeFirst(Recurrent):
    layer, batch_first = nn.GRU, False


class Sorted(Recurrent):
    enforce_sorted = True


class Longer(Recurrent):
    total_length = STEPS + 2


class LastState(Recurrent):
    def finish(self, packed: PackedSequence, state: Any) -> Any:
        return self.head(state[0][-1])


class Activation(Recurrent):
    def between(self, packed: PackedSequence) -> PackedSequence:
        return PackedSequence(functional.gelu(packed.data), *packed[1:])


class AsLongAsTheLongest(Recurrent):
    total_length = None


class MeanOfRows(Recurrent):
    def between(self, packed: PackedSequence) -> PackedSequence:
        return PackedSequence(packed.data - packed.data.mean(), *packed[1:])


class ListOfLengths(Recurrent):
    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(self.embedding(tokens), lengths.tolist(), batch_first=True, enforce_sorted=False)
        return self.finish(*self.second(self.first(packed)[0]))


def batch(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return torch.randint(50, (len(lengths), STEPS), generator=generator), torch.tensor(lengths)


def results(model: nn.Module, run: Any, arguments: Any) -> list[torch.Tensor]:
    """Return results and gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    outputs = run(*arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs[0].square().sum().backward()
    return [*outputs, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def graph_of(model: nn.Module, lengths: list[int] = LENGTHS[0]) -> UnitGraph:
    return capture(model, batch(lengths), units="leaf")


@pytest.mark.parametrize("model_class", [Recurrent, TimeFirst, Sorted, Longer, LastState, Activation])
def test_results_and_gradients_equal_the_models_at_other_lengths(model_class: type[Recurrent]) -> None:
    torch.manual_seed(0)
    model = model_class()
    batches = [sorted(lengths, reverse=model.enforce_sorted) for lengths in LENGTHS]
    graph = graph_of(model, batches[0])
    assert [call.name for call in graph.calls] == ["embedding", "first", "second", "head"]
    for lengths in batches:
        found, expected = (results(model, run, batch(lengths)) for run in (graph, model))
        assert len(found) == len(expected) >= len(list(model.parameters()))
        assert all(torch.equal(value, other) for value, other in zip(found, expected, strict=True))


def test_stages_send_padded_steps_and_lengths() -> None:
    graph = graph_of(Recurrent().eval())
    cut = graph.cuts[1]
    assert (cut.after, cut.before) == ("first", "second")
    shapes = [(tuple(value.shape), value.dtype) for value in cut.crossing]
    assert shapes[0] == ((STEPS * 8, 24), "float32")
    assert ((1, 8), "int64") in shapes
    arguments = batch([2, 6, 4])
    values: Any = graph.flatten(arguments, {})
    for stage in graph.stages([1]):
        values = stage(*values)
    assert torch.equal(graph.unflatten(values)[0], graph.model(*arguments)[0])


def test_a_missing_total_length_is_named() -> None:
    graph = graph_of(AsLongAsTheLongest().eval())
    arguments = batch([7, 2, 4])
    assert torch.equal(graph(*arguments)[0], graph.model(*arguments)[0])
    with pytest.raises(UsageError, match=r"returns 6 steps here.* padded to 7; pass total_length=7"):
        graph(*batch([2, 6, 4]))
    with pytest.raises(CaptureError, match="pass total_length=7"):
        graph_of(AsLongAsTheLongest(), [6, 2, 4])


def test_too_long_a_sequence_is_rejected() -> None:
    graph = graph_of(Recurrent())
    tokens, lengths = batch([2, 6, 4])
    with pytest.raises(RuntimeError) as expected:
        graph.model(tokens, lengths + 2)
    with pytest.raises(RuntimeError) as found:
        graph(tokens, lengths + 2)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (MeanOfRows, "computes with the rows of a PackedSequence.* keep that code .* inside one submodule"),
        (ListOfLengths, r"lengths can be given to pack_padded_sequence as a tensor, without tolist\(\)"),
    ],
)
def test_what_a_padded_sequence_cannot_stand_for_is_refused(model_class: type[Recurrent], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        graph_of(model_class())


class Transposing(nn.Module):
    """A layer with ``batch_first=False`` in a model whose inputs have the batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(50, 16), nn.LSTM(16, 8), nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens).transpose(0, 1))[0].transpose(0, 1))  # type: ignore[no-any-return]


def test_the_batch_dimension_is_the_one_that_the_layers_see() -> None:
    model = Transposing()
    graph = capture(model, batch(LENGTHS[0])[:1])
    assert graph.inputs_batch_dim() == 0
    assert torch.equal(graph(batch(LENGTHS[1])[0]), model(batch(LENGTHS[1])[0]))
    direct = nn.Sequential(nn.LSTM(16, 8))
    assert capture(direct, (torch.randn(5, 3, 16),), units=["0"]).inputs_batch_dim() == 1
