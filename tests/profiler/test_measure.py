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
from stagewright.machine import cpu_offload
from stagewright.profiler import amount_of, profile
from stagewright.profiler.glue import glue_replays

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
    assert [unit.recompute_saved_bytes for unit in measured.units] == [4 * 784 * 4, 4096, 4096]
    assert measured.saved_bytes == 4 * 784 * 4 + 4096
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
    assert 0.6 < measured.coverage < 1.6  # loose, because tests share CPU caches; benchmarks/ measures the real ratio


class Between(nn.Module):
    """Two small units with expensive glue operations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        wide = hidden.repeat(1, 64).sin().cos().exp().sin().cos()
        return self.last(wide.view(-1, 64, 8).mean(1))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("processor_time")
@pytest.mark.parametrize("training", [True, False])
def test_glue_counts_for_the_units(training: bool) -> None:
    inputs = torch.randn(512, 8)
    graph = capture(Between(), (inputs,), units=["first", "last"])
    measured = profile(graph, (inputs,), name="between", device="cpu:0", repeats=7, training=training, cache=False)
    first, last = measured.units
    # A cut sends the narrow tensor, so all glue operations run on the same side of it.
    assert max(first.glue_s, last.glue_s) > 0.5 * (first.total_s + last.total_s)
    assert measured.glue_share > 0.5
    assert measured.coverage > 0.5, "without glue, the units explain only a small part"
    both = [first.forward, last.forward, first.backward_input, last.backward_input]
    assert sum(time.median_s for time in both) > first.glue_s + last.glue_s - 1e-12


def test_glue_replays_do_not_keep_the_autograd_graph() -> None:
    """All segments stay in memory while they are timed; with the autograd graph they'd hold a step's activations."""
    inputs = torch.randn(4, 8)
    graph = capture(Between(), (inputs,), units=["first", "last"])
    dropped: list[int] = []

    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __del__(self) -> None:
            dropped.append(self.tensor.numel())

    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> Packed:
        seen.append(tensor.numel())
        return Packed(tensor.detach())  # detached, because an operation that saves its own result would form a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        replays = glue_replays(graph, (inputs,), {}, training=True)
    assert replays
    assert seen
    assert len(dropped) == len(seen)


def test_a_chain_has_no_glue(chain: Callable[..., Any]) -> None:
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
    assert measured.saved_bytes == saved_by_an_eager_run(model, tokens)
    assert measured.units[-1].crossing_bytes == 0
    assert measured.units[-2].crossing_bytes == 2 * 8 * 32 * 4


def saved_by_an_eager_run(model: nn.Module, tokens: torch.Tensor) -> int:
    model_storages = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in model_storages:
            storages[storage.data_ptr()] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(tokens, use_cache=False)
    return sum(storage.nbytes() for storage in storages.values())


def test_model_state_is_preserved(chain: Callable[..., Any]) -> None:
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
    assert measured.saved_bytes == 0


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


def test_second_profile_comes_from_the_cache(chain: Callable[..., Any], tmp_path: Path) -> None:
    inputs = torch.randn(2, 8)
    graph = chain(nn.Linear(8, 8), nn.Tanh(), example=inputs)

    def measure_once(graph: Any = graph, **options: Any) -> Any:
        return profile(graph, (inputs,), name="m", **{"device": "cpu:0", "repeats": 1, "cache": tmp_path, **options})

    first, second = measure_once(), measure_once()
    assert (first.source, second.source) == ("measured", "cache")
    assert second == first
    third = measure_once(chain(nn.Linear(8, 8), nn.ReLU(), example=inputs))
    assert third.source.startswith("measured: ")
    assert "is stale: structure was" in third.source
    assert "repeats was 1, now 2" in measure_once(chain(nn.Linear(8, 8), nn.ReLU(), example=inputs), repeats=2).source
    assert measure_once(training=False).source == "measured"


def test_name_defaults_to_the_captured_name(chain: Callable[..., Any], tmp_path: Path) -> None:
    inputs = torch.randn(2, 8)
    options: dict[str, Any] = {"device": "cpu:0", "repeats": 1, "cache": tmp_path}
    graph = chain(nn.Linear(8, 8), nn.Tanh(), example=inputs)
    assert profile(graph, (inputs,), **options).model == "Sequential"
    assert profile(graph, (inputs,), **options).source == "cache", "torch's version identifies its classes"
    named = capture(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (inputs,), name="small")
    assert profile(named, (inputs,), **options).model == "small"


def test_unnamed_model_without_source_is_not_cached(tmp_path: Path) -> None:
    """Two classes typed at a prompt may differ in nothing but their code, which can't be read."""
    scope: dict[str, Any] = {"nn": nn, "__name__": "prompt"}
    exec("class Typed(nn.Sequential):\n    def forward(self, value):\n        return super().forward(value)", scope)
    inputs = torch.randn(2, 8)
    graph = capture(scope["Typed"](nn.Linear(8, 8), nn.Tanh()), (inputs,))
    options: dict[str, Any] = {"device": "cpu:0", "repeats": 1, "cache": tmp_path}
    for _ in range(2):
        unnamed = profile(graph, (inputs,), **options)
        assert unnamed.source == "measured: not cached, because the source of Typed can't be read; give a name"
    assert not list(tmp_path.rglob("*.json"))
    sources = [profile(graph, (inputs,), name="typed", **options).source for _ in range(2)]
    assert sources == ["measured", "cache"]


def test_unwritable_cache_is_reported_before_measuring(chain: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inputs = torch.randn(2, 8)
    steps: list[int] = []
    with pytest.raises(CacheError, match=r"can't write profiles to .*file.*--cache-dir"):
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
    with pytest.raises(UsageError, match="no parameter of the model requires a gradient"):
        profile(chain(nn.Linear(8, 8).requires_grad_(False), example=inputs), (inputs,), name="m", cache=False)
    with pytest.raises(UsageError, match="repeats is 0"):
        profile(chain(nn.Linear(8, 8), example=inputs), (inputs,), name="m", repeats=0, cache=False)
    graph = chain(nn.Linear(8, 8), example=inputs)
    with pytest.raises(UsageError, match="on meta, but the profile is for cpu:0"):
        profile(graph, (inputs.to("meta"),), name="m", device="cpu:0", cache=False)


def test_parameters_on_the_cpu_are_accepted_only_if_offloaded(chain: Callable[..., Any]) -> None:
    """``meta`` stands for a GPU: inputs are on it, parameters are not."""
    inputs, place = torch.randn(2, 8), torch.device("meta")

    class Elsewhere(Device):
        def torch_device(self) -> torch.device:
            return place

    def check(graph: Any) -> None:
        device = Elsewhere(text="cuda:0", kind="cuda")
        measure._check(graph, (inputs.to(place),), {}, device=device, repeats=1, training=True)

    forgotten, without_room = (chain(nn.Linear(8, 8), example=inputs) for _ in range(2))
    with pytest.raises(
        UsageError, match=r"0\.weight is on cpu, but the profile is for cuda:0.* \.to\(\"meta\"\) .*move_or_offload$"
    ):
        check(forgotten)
    cpu_offload.move_or_offload(without_room.model, place, room_bytes=0)
    check(without_room)
    cpu_offload.move_or_offload(forgotten.model, place)
    check(forgotten)


def test_equal_units_pool_their_samples(chain: Callable[..., Any]) -> None:
    inputs = torch.randn(4, 32)
    parts = [nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32, bias=False)]
    measured = profile(chain(*parts, example=inputs), (inputs,), name="m", device="cpu:0", cache=False)
    first, _, second, third, other = measured.units
    assert (second.forward, second.backward_input) == (third.forward, third.backward_input)
    assert first.backward_input.median_s == 0  # its input requires no gradient, so it is not equal
    assert other.forward != second.forward


def test_too_few_samples_are_explained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graph = capture(model, (torch.randn(4, 4),))
    with pytest.raises(
        ModelError, match=r"'few' in training does not run on float32 \[1, 4\]: ValueError: Expected more"
    ):
        profile(graph, (torch.randn(1, 4),), name="few", device="cpu:0", cache=False)


def test_operations_behind_the_last_unit_count_for_its_memory() -> None:
    """Like a loss that the model computes itself, on logits in another data type."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 1000)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.log_softmax(self.head(inputs).double(), 1).mean()

    inputs = torch.randn(16, 8)
    graph = capture(WithLoss().eval(), (inputs,))
    measured = profile(graph, (inputs,), name="loss", device="cpu:0", repeats=1, training=False, cache=False)
    logits = 16 * 1000 * 4
    assert measured.units[-1].forward_working_bytes >= logits + 2 * (2 * logits)
