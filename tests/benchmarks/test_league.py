"""A sample of the league: published steps that the analytic forecast must stay close to.

The whole tables are read by `benchmarks/league.py --data FOLDER`; limits here are those of these rows, with a margin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, table 5.
MEGATRON = """\
model,layers,hidden,heads,gpus,tensor,pipeline,interleaved_stages,global_batch,micro_batch,full_recompute_s,sequence_parallel_selective_s
22B,48,6144,64,8,8,1,1,4,4,1.42,1.1
175B,96,12288,96,64,8,8,3,64,1,18.13,13.75
530B,105,20480,128,280,8,35,3,280,1,49.05,37.83
1T,128,25600,160,512,8,64,1,512,1,94.42,71.49
"""
# MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.json: measured time and memory.
SIMUMAX = """\
case,model,parallel,layer_num,mbc,vp_size,real_ms,real_alloc_gib
llama3_70b_l12_tp1_pp2_dp4_mbc8_cef,llama3-70b,tp1pp2,12,8,1,1476.8,66.55
llama3_70b_tp2_pp1_dp4_l12_mbc8_cef,llama3-70b,tp2pp1,12,8,1,1387.0,60.68
llama3_405b_l4_tp8_pp1_dp1_mbc32_cef,llama3-405b,tp8pp1,4,32,1,1901.8,38.57
deepseekv2_tp1_ep8_pp1_dp8_l4_mbc8_cef,deepseekv2,tp1ep8pp1,4,8,1,676.2,45.63
deepseekv2_tp1_ep4_pp2_dp4_l4_mbc8_cef,deepseekv2,tp1ep4pp2,4,8,1,492.6,44.7
deepseekv3_l4_tp1_ep8_pp1_dp8_mbc8_cef,deepseekv3,tp1ep8pp1,4,8,1,1101.7,104.3
deepseekv3_l4_tp1_ep4_pp2_dp4_mbc8_cef,deepseekv3,tp1ep4pp2,4,8,1,771.6,114.0
llama3_70b_l12_tp2_cp4_pp1_dp1_seq32768_mbc4_cef,llama3-70b,tp2cp4pp1,12,4,1,1758.0,68.43
llama3_70b_l12_tp1_cp8_pp1_dp1_seq32768_mbc4_cef,llama3-70b,tp1cp8pp1,12,4,1,1768.1,104.51
"""
# Hugging Face, Ultra-Scale Playbook, benchmarks of nanotron: a random sample of the runs that constants were not
# fitted on.
NANOTRON = """\
axis,Nodes,DP,TP,PP,ZeRO,MBS,GradAcc,GBS,MFU,tok/s/gpu,GPU memory
x2,4.0,2.0,8.0,2.0,1.0,2.0,64.0,256.0,4.3,1513.0,8.0
x,16.0,16.0,8.0,1.0,0.0,2.0,8.0,256.0,12.0,12313.0,7.0
x2,16.0,16.0,2.0,4.0,1.0,2.0,8.0,256.0,25.2,8881.0,25.1
x3,16.0,1.0,8.0,16.0,0.0,1.0,256.0,256.0,2.9,475.0,8.5
x,2.0,2.0,4.0,2.0,1.0,4.0,32.0,256.0,17.7,15554.0,11.4
x,4.0,4.0,2.0,4.0,1.0,1.0,64.0,256.0,11.6,10181.0,8.9
x3,2.0,4.0,4.0,1.0,0.0,2.0,32.0,256.0,41.4,6864.0,61.9
x,8.0,4.0,4.0,4.0,1.0,8.0,8.0,256.0,24.3,21305.0,25.5
x2,8.0,1.0,8.0,8.0,0.0,8.0,32.0,256.0,13.8,4847.0,27.3
x3,8.0,1.0,8.0,8.0,0.0,8.0,32.0,256.0,24.5,4073.0,47.0
x,4.0,8.0,1.0,4.0,1.0,1.0,32.0,256.0,36.6,32105.0,15.1
x,2.0,2.0,8.0,1.0,1.0,8.0,16.0,256.0,25.8,26434.0,21.4
"""
STEPS = Path(__file__).resolve().parents[2] / "docs" / "measured" / "gpu_steps_h200.json"


@pytest.fixture
def tables(tmp_path: Path, benchmark_paths: None) -> dict[str, dict[str, Any]]:
    """The figures of each table of the sample."""
    import league
    from stagewright.analytic.forecast import forecast_layout
    from stagewright.analytic.hardware.named_cluster import named_cluster
    from tables import own, published

    (tmp_path / "megatron_a100.csv").write_text(MEGATRON)
    (tmp_path / "simumax_b200.csv").write_text(SIMUMAX)
    (tmp_path / "nanotron.csv").write_text(NANOTRON)
    rows = [
        *published.megatron(tmp_path),
        *published.simumax(tmp_path),
        *published.nanotron(tmp_path / "nanotron.csv"),
        *own.own_steps(STEPS),
    ]
    found: dict[str, list[Any]] = {}
    for row in rows:
        pair = (row, forecast_layout(row.shape, row.layout, named_cluster(row.cluster)))
        found.setdefault(row.table, []).append(pair)
    return {name: league.score(pairs) for name, pairs in found.items()}


def test_errors_do_not_grow(tables: dict[str, dict[str, Any]]) -> None:
    limits = {
        "Megatron-LM": 0.05,
        "SimuMax dense": 0.03,
        "SimuMax MoE": 0.08,
        "SimuMax context parallel": 0.05,
        "nanotron": 0.06,
        "own steps": 0.03,
    }
    assert {
        name: figures["mean_error"] for name, figures in tables.items() if figures["mean_error"] > limits[name]
    } == {}
    assert abs(tables["Megatron-LM"]["worst_error"]) < 0.10
    assert set(tables) == set(limits)


def test_memory_and_intervals(tables: dict[str, dict[str, Any]]) -> None:
    memory = {name: figures["memory_error"] for name, figures in tables.items() if figures["memory_error"] is not None}
    assert all(memory[name] < 0.04 for name in memory if name.startswith("SimuMax")), memory
    assert memory["nanotron"] < 0.08
    assert memory["own steps"] < 0.07
    assert all(figures["inside"] >= 0.8 for figures in tables.values())
    assert all(figures["not_fitting"] == 0 for figures in tables.values())
    assert tables["nanotron"]["rank_correlation"] > 0.95


def test_blocks_of_nanotron(benchmark_paths: None) -> None:
    from tables import published

    blocks = {axis: published._nanotron_blocks(size, 4) for axis, size in published.NANOTRON.items()}
    assert blocks == {"x": (5, 5, 5, 1), "x2": (8, 8, 8, 4), "x3": (9, 9, 8, 6), "x4": (21, 20, 20, 19)}


def test_stalled_runs_of_nanotron(tmp_path: Path, benchmark_paths: None) -> None:
    from tables import published

    layouts = (
        *("x2,64,8,16,4,1,8,4", "x2,16,2,32,2,1,8,16", "x2,8,8,2,4,0,1,32", "x3,4,8,1,4,1,2,16"),
        *("x2,64,32,16,1,1,8,1", "x2,32,32,8,1,1,8,1", "x2,8,8,2,4,1,1,32"),
    )
    lines = [NANOTRON.splitlines()[0], *(f"{layout},256,0.0,1000.0,10.0" for layout in layouts)]
    (tmp_path / "nanotron.csv").write_text("\n".join(lines) + "\n")
    layouts_read = [row.layout for row in published.nanotron(tmp_path / "nanotron.csv")]
    assert [layout.message_stall_s > 0 for layout in layouts_read] == [True] * 4 + [False] * 3
    assert [layout.gradient_stall_s for layout in layouts_read] == [0.0] * 4 + [0.56, 0.0, 0.0]
    for layout in layouts_read:
        healthy = published.without_stall(layout)
        assert healthy.message_stall_s == healthy.gradient_stall_s == 0.0
        assert published.with_stall(healthy) != healthy


def test_memory_tells_whether_messages_stall(tmp_path: Path, benchmark_paths: None) -> None:
    """A run whose messages do not stall holds gathered inputs of forward passes that the host enqueued ahead."""
    import league
    from tables import published

    head = NANOTRON.splitlines()[0]
    # 16 nodes with 32 tensor ranks are marked; 8 nodes with 8 are not.
    runs = [
        "x2,16.0,1.0,32.0,4.0,0.0,8.0,32.0,256.0,0.0,135.0,{}",
        "x3,8.0,1.0,8.0,8.0,0.0,8.0,32.0,256.0,0.0,4000.0,{}",
    ]
    for sizes, agree in (((6, 47), 2), ((6, 36), 1), ((11, 36), 0)):
        (tmp_path / "nanotron.csv").write_text(
            "\n".join([head, *(run.format(size) for run, size in zip(runs, sizes, strict=True))])
        )
        assert league.memory_agreement(published.nanotron(tmp_path / "nanotron.csv")) == (agree, 2)
