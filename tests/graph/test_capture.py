"""What a user's model may hold: structures, in-place changes, hooks, other batch sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stagewright.errors import CaptureError, UsageError
from stagewright.graph import capture


class Masked(nn.Module):
    """Optional arguments, a mask, a parameter and a dropout in the model's own code, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)
        self.token = nn.Parameter(torch.randn(1, 4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Any, mask: Any = None, scale: float = 2.0, extra: Any = None) -> Any:
        self.count.add_(1)
        x = self.first(x) + self.token
        if mask is not None:
            x = x.masked_fill(~mask, 0.0)
        x = F.dropout(x, 0.5, self.training)
        x += extra["bias"]
        y = self.drop(self.second(x) * scale)
        return {"y": y, "pair": (x, None, 3, "text"), "count": self.count * 1}


class Structured(nn.Module):
    """A unit that takes and gives dictionaries and tuples, branches on values, and returns a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Any, *, pair: Any, flag: bool = True, nothing: Any = None) -> Any:
        y = self.linear(values["x"]) + pair[0]
        if y.sum() > 0:
            y = y * 2
        return {"x": y, "list": [pair[1], y + 1]}, 3


class UsesStructures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Structured() for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        pair, y = (x, x.long()), x
        for unit in self.units:
            result, number = unit({"x": y}, pair=pair, flag=False)
            pair, y = (result["x"], result["list"][0]), result["list"][1] * number
        return self.head(y), result["list"][0]


class ChangesInPlace(nn.Module):
    """Writes to its input, to a view, to a unit's result, and keeps a value from before a write."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        x.mul_(2)
        h = self.a(x)
        before = h * 3
        self.relu(h)
        g = self.b(h + before)
        view = g[:, :2]
        view.add_(1)
        g[:, 0] = 0
        return self.c(g), before, x + 0


class Counts(nn.Module):
    """A buffer that is replaced, in a submodule whose own code is traced."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.steps = self.steps + 1
            for part in self.parts:
                x = part(x)
            return x * self.steps

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counts.Inner()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.inner(x))


class Recurrent(nn.Module):
    """The batch is second."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.lstm = nn.LSTM(8, 8, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Any) -> Any:
        y, (hidden, _) = self.lstm(self.table(ids))
        return self.head(y[-1]), hidden


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.neck, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.neck(self.body(x)) * 2
        return self.head(y + x)


EXAMPLES = {
    "masked": (Masked, (torch.randn(2, 4),), {"mask": torch.rand(2, 4) > 0.5, "extra": {"bias": torch.ones(4)}}),
    "structured": (UsesStructures, (torch.randn(2, 4),), {}),
    "in place": (ChangesInPlace, (torch.randn(2, 4),), {}),
    "counts": (Counts, (torch.randn(2, 4),), {}),
    "recurrent": (Recurrent, (torch.randint(0, 10, (5, 2)),), {}),
    "partly frozen": (PartlyFrozen, (torch.randn(2, 4),), {}),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("units", ["auto", "leaf"])
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_graph_and_stages_equal_the_model(name: str, units: str, training: bool, same_as: Any, chain: Any) -> None:
    make, args, kwargs = EXAMPLES[name]
    torch.manual_seed(0)
    model = make().train(training)
    graph = capture(model, args, kwargs, units=units)
    same_as(model, graph, args, kwargs)
    for cut in range(len(graph.cuts)):
        same_as(model, chain(graph, [cut]), args, kwargs)
    same_as(model, chain(graph, list(range(len(graph.cuts)))), args, kwargs)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_other_batch_sizes(batch: int, same_as: Any, chain: Any) -> None:
    model = UsesStructures().train()
    graph = capture(model, (torch.randn(2, 4),))
    same_as(model, graph, (torch.randn(batch, 4),))
    same_as(model, chain(graph, [0, 2]), (torch.randn(batch, 4),))


def test_an_example_of_one_sample_still_gives_other_sizes(same_as: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = capture(model, torch.randn(1, 4))
    assert graph.batch_size == 1
    assert graph.cuts[0].crossing[0].shape == (1, 4)
    same_as(model, graph, (torch.randn(5, 4),))


def test_the_batch_may_be_second(same_as: Any) -> None:
    model = Recurrent()
    graph = capture(model, (torch.randint(0, 10, (5, 2)),))
    assert graph.dynamic
    same_as(model, graph, (torch.randint(0, 10, (5, 4)),))


def test_capture_leaves_the_model_as_it_was_and_works_twice(same_as: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = capture(model, (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),))
    assert torch.equal(torch.rand(1), expected), "random state moved"
    second = capture(model, (torch.randn(6, 4),))
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == attributes
    assert list(first.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    same_as(model, first, (torch.randn(6, 4),))
    same_as(model, second, (torch.randn(6, 4),))


def test_a_graph_follows_the_mode_of_the_model(same_as: Any) -> None:
    model = Masked().eval()
    kwargs = {"extra": {"bias": torch.ones(4)}}
    graph = capture(model, (torch.randn(2, 4),), kwargs)
    model.train()
    same_as(model, graph, (torch.randn(2, 4),), kwargs)
    model.eval()
    same_as(model, graph, (torch.randn(2, 4),), kwargs)


def test_hooks_of_the_user_run_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(1))
    graph = capture(model, (torch.randn(2, 4),))
    seen.clear()
    graph(torch.randn(2, 4))
    assert seen == [1]


def test_a_list_of_stages_is_accepted(same_as: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return (self.linear(x), x) if x.sum() > 0 else (x, self.linear(x))

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Any, y: Any) -> Any:
            return self.linear(x + y)

    graph = capture([Two(), Join()], (torch.randn(2, 4),))
    assert [call.name for call in graph.calls] == ["0", "1"]
    same_as(graph.model, graph, (torch.randn(3, 4),))


def test_numbers_made_of_sizes_follow_the_batch(same_as: Any, chain: Any) -> None:
    """Also fractions of sizes, and sizes that depend on values but stay on one side of every cut."""

    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            total = 0.0 + x.shape[0] / 3
            y = self.b(self.a(x) / total)
            counts = torch.bincount(y.argmax(-1), minlength=4)
            return self.c(y) * (x.shape[0] // 2 + 1), counts / (x.shape[0] * 4)

    model = Averages()
    graph = capture(model, (torch.randn(2, 4),))
    for batch in (2, 3, 1, 6):
        same_as(model, graph, (torch.randn(batch, 4),))
        same_as(model, chain(graph, [0, 1]), (torch.randn(batch, 4),))


def test_code_that_depends_on_one_batch_size_is_reported_and_checked(same_as: Any) -> None:
    class Specialised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x)) / float(x.shape[0])

    model = Specialised()
    graph = capture(model, (torch.randn(3, 4),))
    assert not graph.dynamic
    assert "batch of 2 only" in graph.notes[0]
    same_as(model, graph, (torch.randn(2, 4),))
    with pytest.raises(UsageError, match=r"\[3, 4\].*\[2, 4\]"):
        graph(torch.randn(3, 4))


def test_modules_may_be_called_what_python_reserves(same_as: Any, chain: Any) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.heads = nn.ModuleDict({"class": nn.Linear(4, 3), "with-dash": nn.Linear(4, 2), "in": nn.Linear(4, 1)})

        def forward(self, x: Any) -> Any:
            x = self.body(x)
            return {name: head(x) for name, head in self.heads.items()}

    model = Heads()
    graph = capture(model, (torch.randn(2, 4),))
    same_as(model, graph, (torch.randn(2, 4),))
    same_as(model, chain(graph, [0, 1]), (torch.randn(2, 4),))
    assert "heads.class.weight" in graph.stage(1, 1).state_dict()
    assert [recorded.call.name for recorded in graph.record((torch.randn(2, 4),))][1] == "heads.class"


def test_a_module_that_resets_another_ones_state_keeps_it_inside(same_as: Any) -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.state = nn.Linear(4, 4), None

        def forward(self, x: Any) -> Any:
            self.state = x if self.state is None else self.state + x
            return self.linear(self.state)

    class Resets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.after = Memory(), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            self.memory.state = None
            return self.after(self.memory(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), Resets(), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.third(self.second(self.first(x)))

    model = Model()
    graph = capture(model, (torch.randn(2, 4),), units="leaf")
    assert [call.name for call in graph.calls] == ["first", "second", "third"]
    same_as(model, graph, (torch.randn(2, 4),))


def test_results_collected_by_hooks_are_in_the_graph() -> None:
    """Hugging Face's hidden states and router logits; the router lies inside what would otherwise be a unit."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(
        **sizes,
        **heads,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=100,
        use_cache=False,
        output_router_logits=True,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    graph = capture(model, (torch.randint(0, 100, (2, 8)),))
    ids = torch.randint(0, 100, (3, 8))
    expected, found = model(ids), graph(ids)
    assert torch.equal(found.aux_loss, expected.aux_loss)
    assert len(found.router_logits) == 2
    assert torch.equal(found.router_logits[1], expected.router_logits[1])


def test_a_cache_between_units_is_refused_at_once() -> None:
    """The layer that would have to be one unit is open because its router logits are collected."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4, output_router_logits=True,
    )  # fmt: skip
    ids = torch.zeros((2, 8), dtype=torch.long)
    with pytest.raises(CaptureError, match=r"key-value cache.*use_cache = False"):
        capture(transformers.MixtralForCausalLM(config), (), {"input_ids": ids, "labels": ids})
