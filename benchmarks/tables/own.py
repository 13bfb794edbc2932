"""Own training steps on one GPU, as `benchmarks/gpu_steps.py` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from stagewright.analytic.layout import Layout
from stagewright.analytic.shape import TransformerShape
from tables.row import Row

# Host time of eager kernels was fitted on these, which the host bounds; kernels were fitted on benchmarks/kernel_grid.
FITTED = (("317M", 16, 8, False), ("600M", 4, 4, True))


def own_steps(path: Path) -> Iterator[Row]:
    record = json.loads(path.read_text(encoding="utf-8"))
    device = record["device"].replace("NVIDIA ", "")
    for row in record["steps"]:
        key = (row["model"], row["batch"], row["microbatches"], row["recompute"])
        yield Row(
            table="own steps",
            name=f"{row['model']} batch {row['batch']} in {row['microbatches']}{' recompute' * row['recompute']}",
            shape=TransformerShape(
                num_layers=row["layers"],
                width=row["width"],
                num_heads=row["heads"],
                num_key_heads=row["kv_heads"],
                feed_forward=row["feed_forward"],
                num_matrices=3,
                vocabulary=row["vocabulary"],
                sequence_length=row["length"],
                tied=False,
                rotary=True,
            ),
            layout=Layout(
                microbatch=row["batch"] // row["microbatches"],
                microbatches=row["microbatches"],
                recompute="full" if row["recompute"] else "none",
                master_weights=False,
                gradient_bytes=2,
                stack="stagewright",
            ),
            cluster=f"1x{device}",
            step_s=row["step_s"],
            memory_bytes=row["allocated_bytes"],
            group=row["model"],
            fitted=key in FITTED,
        )
