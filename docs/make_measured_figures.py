"""Write benchmark figures into the pages, from the records in docs/measured: `python docs/make_measured_figures.py`.

    docs/measured/codec_cpu.json ──► docs/codecs.md    <!-- measured: codec_cpu -->
    (written by the benchmark,                         a table, its command, machine and day
     with command and machine)                         <!-- end -->

A record is the output of a benchmark's `--output`; long lists of single times may be removed from it. Do not edit the
text between the two marks. Figures of studies are on the pages of the studies (`docs/take_study.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from measured_figures import (
    accuracy,
    axes,
    capture,
    codecs,
    fabric,
    forecast,
    gpu,
    labs,
    overhead,
    pipeline,
    reliability,
    stragglers,
)
from measured_figures.markdown import RECORDS

__all__ = ["BLOCK", "BLOCKS", "RECORDS", "block", "fill", "pages"]

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"(?<=<!-- measured: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
BLOCKS: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        accuracy.accuracy_tables,
        labs.lab_times,
        labs.study_conclusions,
        *labs.PAGE_BLOCKS,
        axes.axes_grid,
        axes.axes_grid_gpu,
        axes.offload_gpu,
        axes.memory_of_parts,
        axes.memory_of_parts_resumed,
        capture.capture_libraries,
        capture.detectors,
        codecs.codec_cpu,
        codecs.codec_cuda,
        codecs.codec_links,
        pipeline.pipeline_deit_small,
        pipeline.pipeline_small_blocks,
        pipeline.pipeline_others,
        pipeline.pipeline_resnet_50,
        pipeline.pipeline_sixteen,
        pipeline.gloo_threads,
        pipeline.all_reduces,
        pipeline.ring_attention,
        pipeline.pipeline_parts,
        fabric.fabric_loss,
        fabric.fabric_numbers,
        forecast.forecast_accuracy,
        forecast.forecast_accuracy_more,
        forecast.forecast_accuracy_unsteady,
        forecast.forecast_memory_cuda,
        forecast.forecast_memory_cuda_again,
        forecast.forecast_speed,
        gpu.gpu_table,
        gpu.gpu_forecasts,
        gpu.gpu_model_forecasts,
        gpu.gpu_shares,
        gpu.gpu_shares_microbatches,
        gpu.gpu_share_rounds,
        overhead.trace_overhead,
        overhead.attach_overhead,
        overhead.report_size,
        overhead.live_page,
        reliability.faults,
        reliability.two_machines,
        reliability.resume_matrix,
        reliability.damaged_input,
        stragglers.stragglers_real,
    )
}


def block(name: str) -> str:
    """Return the text between two marks; without a record, how to make one."""
    try:
        return BLOCKS[name]()
    except FileNotFoundError:
        return f"No record yet: run `python benchmarks/{name}.py --output docs/measured/{name}.json`.\n"


def fill(text: str) -> str:
    """Return a page's text with regenerated blocks."""
    return BLOCK.sub(lambda match: f"{match[1]}{match[2]}\n{block(match[1])}\n", text)


def pages() -> list[Path]:
    """Return the pages that have blocks."""
    return sorted(page for page in DOCS.rglob("*.md") if "<!-- measured: " in page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in pages():
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
