"""torch's encoder skips padded positions in inference; the baseline computes them, as stages do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.parity.baseline import make_baseline
from stagewright.graph.capture import capture


class Padded(nn.Module):
    """As in torch's tutorials: the nested tensors of the default, whose padded positions are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    def forward(self, values: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(values, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_positions_of_the_baseline_are_those_of_stages() -> None:
    torch.manual_seed(0)
    model = Padded().eval()
    values, padding = torch.randn(4, 6, 8), torch.arange(6)[None] >= torch.tensor([3, 6, 2, 4])[:, None]
    with torch.no_grad():
        assert (model(values, padding)[padding] == 0).all(), "torch skips them"
        graph = capture(model, (values, padding))
        stages, crossing = graph.stages([0]), graph.flatten((values, padding), {})
        for stage in stages:
            crossing = stage(*crossing)
    microbatch = MicroBatch(num_samples=4, weight=1.0, args=(values, padding))
    baseline = make_baseline(
        graph, [microbatch], lambda out, _: out.sum(), training=False, seed=0, device=values.device, deferred=False
    )
    ((expected,),) = baseline.outputs
    assert torch.allclose(graph.unflatten(crossing), expected, atol=1e-6)
    assert model.encoder.use_nested_tensor, "it is put back"
