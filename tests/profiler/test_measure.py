from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.cluster.device import Device
from stagewright.errors import CacheError, ModelError, UsageError
from stagewright.graph import capture
from stagewright.machine import cpu_offload as hosted
from stagewright.profiler import amount_of, profile

measure = importlib.import_module("stagewright.profiler.measure")  # the package has a function of this name


def test_numbers_of_a_small_network(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(4, 784)
    graph = chain(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10), example=inputs)
    measured = profile(graph, (inputs,), name="mlp", device="cpu:0", repeats=2, cache=False)
    first, activation, last = measured.units
    assert [unit.parameters.total for unit in measured.units] == [200960, 0, 2570]
    assert first.parameter_bytes.total == 803840
    assert [unit.macs for unit in measured.units] == [4 * 784 * 256, 0, 4 * 2560]
    assert measured.whole_macs == sum(unit.macs for unit in measured.units)
    assert [unit.output_bytes for unit in measured.units] == [4096, 4096, 160]
    assert [unit.crossing_bytes for unit in measured.units] == [4096, 4096, 0]
    assert [unit.recompute_kept_bytes for unit in measured.units] == [4 * 784 * 4, 4096, 4096]
    assert measured.kept_bytes == 4 * 784 * 4 + 4096
    assert first.backward_input.median_s == 0.0
    assert first.backward_weight.median_s > 0
    assert activation.backward_weight.median_s == 0.0
    assert activation.backward_input.median_s > 0
    assert last.backward_input.median_s > 0
    assert (measured.batch_size, measured.dtype, measured.device) == (4, "float32", "cpu:0")
    assert measured.whole_forward.median_s > 0
    assert measured.whole_backward.median_s > 0
    assert measured.source == "measured"


@pytest.mark.usefixtures("processor_time")
def test_units_explain_the_whole(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(256, 512)
    parts = [nn.Linear(512, 512) for _ in range(4)]
    measured = profile(chain(*parts, example=inputs), (inputs,), name="even", device="cpu:0", cache=False)
    assert 0.6 < measured.coverage < 1.6  # loose: the suite shares its caches; benchmarks/ tells the real ratio


class Between(nn.Module):
    """Two small units, and much that is done between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.first(inputs)
        wide = found.repeat(1, 64).sin().cos().exp().sin().cos()
        return self.last(wide.view(-1, 64, 8).mean(1))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("processor_time")
@pytest.mark.parametrize("training", [True, False])
def test_what_lies_between_units_counts_with_them(training: bool) -> None:
    inputs = torch.randn(512, 8)
    graph = capture(Between(), (inputs,), units=["first", "last"])
    measured = profile(graph, (inputs,), name="between", device="cpu:0", repeats=7, training=training, cache=False)
    first, last = measured.units
    # A cut sends the narrow one: all of it is done either before or behind the cut, as the smallest crossing is.
    assert max(first.glue_s, last.glue_s) > 0.5 * (first.total_s + last.total_s)
    assert measured.glue_share > 0.5
    assert measured.coverage > 0.5, "without what lies between them, the units are a small part"
    both = [first.forward, last.forward, first.backward_input, last.backward_input]
    assert sum(one.median_s for one in both) > first.glue_s + last.glue_s - 1e-12


def test_what_lies_between_units_does_not_keep_the_models_graph() -> None:
    """All pieces are held while they are timed: with the graph of one run they would hold a step's activations."""
    inputs = torch.randn(4, 8)
    graph = capture(Between(), (inputs,), units=["first", "last"])
    dropped: list[int] = []

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __del__(self) -> None:
            dropped.append(self.tensor.numel())

    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> Kept:
        seen.append(tensor.numel())
        return Kept(tensor.detach())  # or else what saves its own result would keep itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        replays = measure._glue_replays(graph, (inputs,), {}, training=True)
    assert replays
    assert seen
    assert len(dropped) == len(seen)


def test_a_chain_has_nothing_between_its_units(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(4, 8)
    graph = chain(nn.Linear(8, 8), nn.Linear(8, 8), example=inputs)
    measured = profile(graph, (inputs,), name="plain", device="cpu:0", repeats=1, cache=False)
    assert [unit.glue_s for unit in measured.units] == [0.0, 0.0]
    assert measured.glue_share == 0.0


def test_tied_parameters_are_counted_once(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(2, 8)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    graph = chain(first, nn.Tanh(), last, example=inputs)
    measured = profile(graph, (inputs,), name="tied", device="cpu:0", repeats=1, cache=False)
    assert measured.units[2].parameters.shares == ((0, 64),)
    assert measured.parameters == 64 + 8 + 8
    assert amount_of([unit.parameter_bytes for unit in measured.units], 1, 2) == 4 * 72


def test_a_captured_model_with_tied_weights() -> None:
    import transformers

    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=50, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, 50, (2, 8))
    graph = capture(model, (tokens,), {"use_cache": False})
    measured = profile(graph, (tokens,), {"use_cache": False}, name="gpt2", device="cpu:0", repeats=1, cache=False)
    assert measured.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert [amount for unit in measured.units for _, amount in unit.parameters.shares] == [50 * 32]
    assert sum(unit.macs for unit in measured.units) == measured.whole_macs
    block = 12 * 16 * 32 * 32 + 2 * 2 * 8 * 8 * 32
    assert measured.whole_macs == 2 * block + 16 * 32 * 50
    assert measured.kept_bytes == kept_by_a_plain_run(model, tokens)
    assert measured.units[-1].crossing_bytes == 0
    assert measured.units[-2].crossing_bytes == 2 * 8 * 32 * 4


def kept_by_a_plain_run(model: nn.Module, tokens: torch.Tensor) -> int:
    own = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(tokens, use_cache=False)
    return sum(storage.nbytes() for storage in storages.values())


def test_model_is_left_as_it_was(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(4, 3, 6, 6)
    graph = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), example=inputs)
    before = {name: value.clone() for name, value in graph.model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    num_threads = torch.get_num_threads()
    profile(graph, (inputs,), name="norm", device="cpu:0", repeats=1, cache=False)
    assert torch.equal(torch.rand(2), expected)
    after = graph.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(before) == len(after)
    assert all(parameter.grad is None for parameter in graph.model.parameters())
    assert torch.get_num_threads() == num_threads


def test_inference(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(2, 8)
    graph = chain(nn.Linear(8, 8), nn.Tanh(), example=inputs)
    measured = profile(graph, (inputs,), name="m", device="cpu:0", repeats=1, training=False, cache=False)
    assert measured.whole_backward.median_s == 0.0
    assert [unit.backward_s for unit in measured.units] == [0.0, 0.0]
    assert measured.kept_bytes == 0


def test_progress_counts_up_to_the_end(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(2, 8)
    graph = chain(nn.Linear(8, 8), nn.Tanh(), example=inputs)
    seen: list[tuple[int, int, str]] = []
    profile(
        graph,
        (inputs,),
        name="m",
        device="cpu:0",
        repeats=2,
        cache=False,
        progress=lambda done, total, name: seen.append((done, total, name)),
    )
    assert [done for done, _, _ in seen] == list(range(seen[0][1] + 1))
    assert seen[-1][2] == "m"


def test_second_time_comes_from_the_cache(chain: Callable[..., Any], tmp_path: Path) -> None:
    inputs = torch.randn(2, 8)
    graph = chain(nn.Linear(8, 8), nn.Tanh(), example=inputs)

    def ask(graph: Any = graph, **more: Any) -> Any:
        return profile(graph, (inputs,), name="m", **{"device": "cpu:0", "repeats": 1, "cache": tmp_path, **more})

    first, second = ask(), ask()
    assert (first.source, second.source) == ("measured", "cache")
    assert second == first
    third = ask(chain(nn.Linear(8, 8), nn.ReLU(), example=inputs))
    assert third.source.startswith("measured: ")
    assert "is stale: structure was" in third.source
    assert "repeats was 1, now 2" in ask(chain(nn.Linear(8, 8), nn.ReLU(), example=inputs), repeats=2).source
    assert ask(training=False).source == "measured"


def test_unwritable_cache_is_told_before_measuring(chain: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inputs = torch.randn(2, 8)
    steps: list[int] = []
    with pytest.raises(CacheError, match=r"can't write profiles to .*file.*--no-cache"):
        profile(
            chain(nn.Linear(8, 8), example=inputs),
            (inputs,),
            name="m",
            device="cpu:0",
            cache=tmp_path / "file",
            progress=lambda done, total, name: steps.append(done),
        )
    assert not steps


def test_wrong_use(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(2, 8)
    with pytest.raises(UsageError, match="no parameter of the model needs a gradient"):
        profile(chain(nn.Linear(8, 8).requires_grad_(False), example=inputs), (inputs,), name="m", cache=False)
    with pytest.raises(UsageError, match="repeats is 0"):
        profile(chain(nn.Linear(8, 8), example=inputs), (inputs,), name="m", repeats=0, cache=False)
    graph = chain(nn.Linear(8, 8), example=inputs)
    with pytest.raises(UsageError, match="on meta, but cpu:0 is asked for"):
        profile(graph, (inputs.to("meta"),), name="m", device="cpu:0", cache=False)


def test_a_model_that_was_forgotten_on_the_host_is_told_from_one_without_room(chain: Callable[..., Any]) -> None:
    """``meta`` stands for a GPU: inputs are there, parameters are not."""
    inputs, place = torch.randn(2, 8), torch.device("meta")

    class Elsewhere(Device):
        def torch_device(self) -> torch.device:
            return place

    def check(graph: Any) -> None:
        device = Elsewhere(text="cuda:0", kind="cuda")
        measure._check(graph, (inputs.to(place),), {}, device=device, repeats=1, training=True)

    forgotten, without_room = (chain(nn.Linear(8, 8), example=inputs) for _ in range(2))
    with pytest.raises(UsageError, match=r"the model's 0\.weight is on cpu, but cuda:0 .* \.to\(\"meta\"\) .*settle$"):
        check(forgotten)
    hosted.settle(without_room.model, place, room_bytes=0)
    check(without_room)
    hosted.settle(forgotten.model, place)
    check(forgotten)


def test_units_that_are_alike_share_their_samples(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(4, 32)
    parts = [nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32, bias=False)]
    measured = profile(chain(*parts, example=inputs), (inputs,), name="m", device="cpu:0", cache=False)
    first, _, second, third, other = measured.units
    assert (second.forward, second.backward_input) == (third.forward, third.backward_input)
    assert first.backward_input.median_s == 0  # its input needs no gradient, so it is not alike
    assert other.forward != second.forward


def test_a_model_that_does_not_run_on_so_few_samples_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graph = capture(model, (torch.randn(4, 4),))
    with pytest.raises(
        ModelError, match=r"'few' in training does not run on float32 \[1, 4\]: ValueError: Expected more"
    ):
        profile(graph, (torch.randn(1, 4),), name="few", device="cpu:0", cache=False)
