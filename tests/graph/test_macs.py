from __future__ import annotations

import pytest
import torch
from torch import nn

from stagewright.graph.macs import MacCounter, count_macs
from stagewright.graph.tracing.observation import observe


def macs_by_module(model: nn.Module, *args: torch.Tensor) -> dict[str, list[int]]:
    """The MACs of each call of each module, as capture observes them."""
    macs: dict[str, list[int]] = {}
    for call in observe(model, args, {}).calls:
        macs.setdefault(call.name, []).append(call.macs)
    return macs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers(kind: type[nn.RNNBase], gates: int, training: bool) -> None:
    model = kind(8, 16, num_layers=2, bidirectional=True).train(training)
    first, second = gates * 16 * (8 + 16), gates * 16 * (32 + 16)
    assert count_macs(model, (torch.randn(5, 3, 8),)) == 15 * 2 * (first + second)


@pytest.mark.parametrize("training", [True, False])
def test_transformer_layer_counts_the_same_in_both_modes(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).train(training)
    value = torch.randn(2, 6, 16)
    projections, attention, feed_forward = 12 * 4 * 16 * 16, 2 * 2 * 6 * 6 * 16, 12 * 2 * 16 * 32
    assert count_macs(layer, (value,)) == projections + attention + feed_forward


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention(training: bool, need_weights: bool) -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    value = torch.randn(2, 6, 16)
    macs = count_macs(attention, (value, value, value), {"need_weights": need_weights})
    assert macs == 12 * 4 * 16 * 16 + 2 * 2 * 6 * 6 * 16
    assert torch.backends.mha.get_fastpath_enabled()


def test_operators_that_torch_does_not_count() -> None:
    class Several(nn.Module):
        def forward(self, matrix: torch.Tensor) -> torch.Tensor:
            return matrix @ matrix[0] + torch.dot(matrix[0], matrix[1])

    assert count_macs(Several(), (torch.randn(6, 6),)) == 36 + 6
    assert count_macs(nn.Bilinear(3, 4, 5), (torch.randn(2, 3), torch.randn(2, 4))) == 2 * 5 * 3 * 5


def test_fourier_transforms() -> None:
    class Transform(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(value)) + torch.fft.fft2(value).real

    real, complex_ = 2.5 * 256 * 3, 5 * 256 * 6
    assert count_macs(Transform(), (torch.randn(4, 8, 8),)) == (2 * real + complex_) / 2


def test_grouped_products() -> None:
    class Experts(nn.Module):
        def forward(self, tokens: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(tokens, experts, offs=ends)

    ends = torch.tensor([3, 8], dtype=torch.int32)
    tokens, experts = torch.randn(8, 16).bfloat16(), torch.randn(2, 16, 32).bfloat16()
    assert count_macs(Experts(), (tokens, experts, ends)) == 8 * 16 * 32


def test_mixture_of_experts_counts_the_selected_experts() -> None:
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=50,
    )
    model = transformers.MixtralForCausalLM(config).eval()
    macs = macs_by_module(model, torch.arange(12).view(2, 6))
    assert macs["model.layers.0.mlp.experts"] == [12 * 2 * 3 * 32 * 64]
    # Four query heads share two key and value heads: projections (q, k, v, o), then scores and values.
    assert macs["model.layers.0.self_attn"] == [12 * 32 * (32 + 16 + 16 + 32) + 2 * 2 * 6 * 6 * 32]
    assert macs[""] == [count_macs(model, (torch.arange(12).view(2, 6),))]


def test_each_call_of_a_shared_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(value)[:1])  # type: ignore[no-any-return]

    assert macs_by_module(Twice(), torch.randn(3, 4)) == {"layer": [48, 16], "": [64]}


def test_running_total_and_state() -> None:
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with MacCounter() as counter:
        norm[0](torch.randn(2, 4))
        half = counter.total
        norm[0](torch.randn(2, 4))
    assert (half, counter.total) == (32, 64)
    count_macs(norm, (torch.randn(2, 4),))
    assert int(norm[1].num_batches_tracked) == 0  # type: ignore[arg-type]


def image_models() -> list[tuple[str, float]]:
    return [("deit", 4.62), ("mobilenet", 0.30), ("resnet", 4.09)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "billions"), image_models())
def test_known_models_at_224_pixels(name: str, billions: float) -> None:
    import transformers

    if name == "deit":
        config = transformers.DeiTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
        model: nn.Module = transformers.DeiTForImageClassificationWithTeacher(config)
    elif name == "mobilenet":
        model = transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config())
    else:
        model = transformers.ResNetForImageClassification(transformers.ResNetConfig())
    macs = count_macs(model.eval(), (torch.randn(1, 3, 224, 224),))
    assert macs / 1e9 == pytest.approx(billions, abs=0.005)
