"""Job files of torchtitan become layouts, and better ones are named by its keys."""

from pathlib import Path

import pytest

from stagewright.analytic.forecast import forecast_layout
from stagewright.analytic.hardware.named_cluster import named_cluster
from stagewright.analytic.models import load_shape
from stagewright.analytic.torchtitan import better_layouts, read_torchtitan, torchtitan_changes
from stagewright.errors import UsageError

JOB = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 128
seq_len = 4096
[parallelism]
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
"""


def write(tmp_path: Path, text: str = JOB) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_a_job_file_is_a_layout(tmp_path: Path) -> None:
    job = read_torchtitan(write(tmp_path), num_devices=64)

    assert (job.model, job.sequence_length) == ("llama-3-8b", 4096)
    layout = job.layout
    assert (layout.data, layout.tensor, layout.pipeline, layout.zero) == (8, 8, 1, 3)
    assert (layout.microbatch, layout.microbatches, layout.batch) == (2, 8, 128)
    assert layout.recompute == "full"


def test_a_pipeline_counts_micro_batches_of_its_own_size(tmp_path: Path) -> None:
    text = JOB.replace("tensor_parallel_degree = 8", "pipeline_parallel_degree = 4").replace(
        "local_batch_size = 2", "local_batch_size = 8"
    )

    layout = read_torchtitan(write(tmp_path, text), num_devices=16).layout

    assert (layout.data, layout.pipeline, layout.microbatch, layout.microbatches) == (4, 4, 1, 32)


def test_context_ranks_are_a_ring(tmp_path: Path) -> None:
    text = JOB.replace("tensor_parallel_degree = 8", "context_parallel_degree = 8")

    layout = read_torchtitan(write(tmp_path, text), num_devices=64).layout

    assert (layout.context, layout.context_attention) == (8, "ring")


def test_a_better_layout_is_faster_and_fits(tmp_path: Path) -> None:
    cluster = named_cluster("8x8xh100")
    job = read_torchtitan(write(tmp_path), cluster.num_devices)
    shape = load_shape("llama-3-8b", job.sequence_length)

    better, forecast = better_layouts(shape, job.layout, cluster)[0]

    assert forecast.fits
    assert forecast.step_s < forecast_layout(shape, job.layout, cluster).step_s
    assert (better.batch, better.num_devices) == (128, 64)
    assert f"tensor_parallel_degree = {better.tensor}" in torchtitan_changes(job.layout, better)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[training", "not TOML"),
        (JOB.replace("tensor_parallel_degree = 8", "tensor_parallel_degree = 7"), "do not divide 64 devices"),
        (JOB.replace("global_batch_size = 128", "global_batch_size = 100"), "100 is not a multiple"),
        (JOB.replace("seq_len = 4096", 'seq_len = "long"'), "seq_len = 'long'"),
    ],
)
def test_a_wrong_job_is_refused_with_one_sentence(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        read_torchtitan(write(tmp_path, text), num_devices=64)
