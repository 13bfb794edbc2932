"""``forecast``, ``explain``, ``plan`` and ``fit`` as a person types them, and what they refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from program import run_program

ANALYTIC = ("forecast", "--analytic", "--model", "llama-2-7b", "--layout", "tp=8", "--cluster")
PLAN = 'batch = 8\nmicrobatches = 4\n[model]\nname = "digits-vit"\n[mesh]\npipeline = 2\n'
CALIBRATION = {
    "link": {"bandwidth_bytes_per_s": 1e9, "latency_s": 5e-5},
    "collective": {"bandwidth_bytes_per_s": 5e8, "latency_s": 3e-4},
    "terms": {
        "action_s": 5e-5,
        "step_s": 1e-3,
        "chunk_s": 1e-4,
        "message_s": 0.0,
        "message_s_per_byte": 2e-10,
        "collective_share": 0.5,
        "crowding": 0.1,
    },
    "kind": "cpu",
    "pace_s": 1e-9,  # no machine is faster, so it is never measured again
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A folder with a plan and a cache that has this machine's calibration already, so that none is measured."""
    from stagewright.machine.machine import default_devices
    from stagewright.planner.calibration.calibrate import _hardware

    made = Path(tmp_path_factory.mktemp("forecast"))
    (made / "plan.toml").write_text(PLAN)
    hardware = _hardware(default_devices(2, share=True)[0])
    (made / "calibration.json").write_text(json.dumps({**CALIBRATION, "hardware": hardware}))
    return made


def run(folder: Path, *words: str, code: int = 0) -> Any:
    environment = {**os.environ, "STAGEWRIGHT_CACHE": str(folder)}
    result = run_program(words, env=environment, cwd=folder)
    assert result.returncode == code, result.stderr
    return result


def test_forecast(folder: Path) -> None:
    (folder / "small.toml").write_text(PLAN.replace("digits-vit", "mlp-mnist"))
    words = ("forecast", "small.toml", "--repeats", "1")
    data = json.loads(run(folder, *words, "--json", "--plot", "step.png", "--perfetto", "step.json").stdout)
    assert len(data["workers"]) == 2
    assert data["speedup"] == pytest.approx(data["serial_s"] / data["step_s"])
    assert data["links"][0]["num_bytes"] > 0
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "step.json").read_text())["traceEvents"]
    free = json.loads(run(folder, *words, "--json", "--free-communication").stdout)
    slow = json.loads(run(folder, *words, "--json", "--bandwidth", "100kbit/s").stdout)
    assert free["step_s"] < slow["step_s"] / 3
    assert free["serial_s"] == data["serial_s"], "what was measured is kept"
    shown = run(folder, *words)
    assert "over one device with the same micro-batches" in shown.stdout
    assert " ago; --fresh measures again" in shown.stderr
    fresh = run(folder, *words, "--fresh")
    assert "times: measured" in fresh.stderr


def test_a_step_too_long_for_a_timeline_says_so(folder: Path) -> None:
    (folder / "long.toml").write_text(
        'batch = 4096\nmicrobatches = 4096\n[model]\nname = "mlp-mnist"\n[mesh]\npipeline = 2\n'
    )
    words = ("forecast", "long.toml", "--repeats", "1", "--json")
    refused = run(folder, *words, "--perfetto", "long.json", code=2)
    assert "--perfetto long.json: a step of more than 20,000 actions and messages has no timeline" in refused.stderr
    assert not (folder / "long.json").exists()
    told = run(folder, *words)
    assert "has no timeline" in told.stderr
    assert min(worker["send_s"] for worker in json.loads(told.stdout)["workers"]) > 0


def test_explain(folder: Path) -> None:
    data = json.loads(run(folder, "explain", "plan.toml", "--repeats", "1", "--json", "--plot", "why.svg").stdout)
    assert data["ideal_s"] + sum(one["seconds"] for one in data["parts"]) == pytest.approx(data["step_s"])
    assert (folder / "why.svg").is_file()
    fewer = run(folder, "explain", "plan.toml", "--repeats", "1", "--devices", "64", code=2)
    assert "digits-vit has 7 units and so at most 7 stages, not 64: use --devices 7, --infinite-devices" in fewer.stderr


def test_plan(folder: Path) -> None:
    (folder / "two.toml").write_text('[[devices]]\nkind = "cpu"\ncount = 2\n')
    words = (
        "plan",
        "mlp-mnist",
        "--batch",
        "8",
        "--cluster",
        "two.toml",
        "--repeats",
        "1",
        "--schedules",
        "1f1b,gpipe",
    )
    data = json.loads(run(folder, *words, "--json", "-o", "best.toml").stdout)
    steps = [one["step_s"] for one in data["best"]]
    assert steps == sorted(steps)
    assert data["data_parallel"]["mesh"] == "data=2"
    from stagewright.spec.plan_file import read_plan

    assert str(read_plan(folder / "best.toml").mesh) == data["best"][0]["mesh"]
    assert data["serial"]["speedup"] == 1.0
    assert data["best"][0]["speedup"] == pytest.approx(data["serial"]["step_s"] / steps[0])
    assert data["optimizer"] == "adamw"
    same = json.loads(run(folder, "forecast", "best.toml", "--cluster", "two.toml", "--repeats", "1", "--json").stdout)
    assert same["step_s"] == pytest.approx(steps[0]), "plan and forecast take the same measurements"


def test_a_searched_order_is_forecast_and_runs(folder: Path) -> None:
    """Its run stores it, so that its plan is forecast and runs the same way again."""
    from stagewright.spec.plan_file import read_plan

    words = ["digits-vit", "--devices", "cpu:0;cpu:0", "--strategy", "pipeline", "--schedule", "searched"]
    words += ["--batch", "8", "--microbatches", "4", "--memory", "1GiB", "--steps", "1", "--warmup", "0", "--json"]
    (row,) = json.loads(run(folder, "compare", *words).stdout)["rows"]
    assert (row["schedule"], row["equal"]) == ("searched", True)
    ran = read_plan(folder / row["run"] / "plan.toml")
    assert [len(line.split()) >= 2 * 4 for line in ran.actions] == [True, True]
    words = ["forecast", f"{row['run']}/plan.toml", "--repeats", "1", "--plot", "searched.svg", "--json"]
    data = json.loads(run(folder, *words).stdout)
    assert data["schedule"] == "searched"
    drawn = [one for one in data["timeline"] if one["stream"] == "compute" and one["name"] in "FBIW"]
    assert len(drawn) == sum(len(line.split()) for line in ran.actions)
    words = ["forecast", f"{row['run']}/plan.toml", "--analytic", "--cluster", "8xh100", "--model", "gpt3-175b"]
    assert 'schedule = "searched" is ordered for measured times' in run(folder, *words, code=2).stderr
    words = ["plan", "digits-vit", "--analytic", "--cluster", "8xh100", "--schedules", "searched"]
    assert 'schedule "searched" is ordered for measured times' in run(folder, *words, code=2).stderr


def test_a_large_model_without_weights(folder: Path) -> None:
    (folder / "large").mkdir(exist_ok=True)
    config = {
        "model_type": "gpt2",
        "n_layer": 24,
        "n_embd": 2048,
        "n_head": 16,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    (folder / "large" / "config.json").write_text(json.dumps(config))
    (folder / "gpus.toml").write_text(
        '[[devices]]\nkind = "cuda"\ncount = 8\nhosts = 2\nmemory = "40GiB"\nhardware = "A100"\n'
        '[links.intra_host]\nbandwidth = "250GB/s"\n[links.inter_host]\nbandwidth = "25GB/s"\n'
    )
    words = ("plan", "hf:large", "--analytic", "--cluster", "gpus.toml", "--batch", "64", "--precision", "bf16")
    data = json.loads(run(folder, *words, "--schedules", "1f1b", "--json").stdout)
    assert data["serial"]["microbatches"] > 1, "one device does not hold the batch, and adds up gradients"
    assert 1 < data["best"][0]["speedup"] < 16.1
    assert all(one["fits"] for one in data["best"])


def test_fit(folder: Path) -> None:
    data = json.loads(run(folder, "fit", "mlp-mnist", "--memory", "8MiB", "--json").stdout)
    rows = {(row["strategy"], row["recompute"]): row for row in data["rows"]}
    serial, pipeline, tensor = (rows[name, False] for name in ("serial", "pipeline", "tensor"))
    assert tensor["largest"] > serial["largest"], "its layers are split by features"
    assert serial["peak_bytes"] <= 8 * 2**20 < serial["above_bytes"]
    assert pipeline["largest"] > serial["largest"], "two devices hold more"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("forecast", "none.toml"), "no plan none.toml"),
        (("forecast", "plan.toml", "--cluster", "one.toml"), "has 2 workers, but the cluster has 1 devices"),
        (("forecast", "plan.toml", "--cluster", "hosts.toml"), "no link between hosts is given"),
        (("forecast", "plan.toml", "--cluster", "cuda.toml", "--repeats", "1"), "use --rescale"),
        (("forecast", "other.toml", "--repeats", "1"), "is it a plan for another model?"),
        (("forecast", "plan.toml", "--plot", "no/step.png"), "there is no folder"),
        (("explain", "nowhere"), "unknown run 'nowhere'"),
        (
            ("plan", "mlp-mnist", "--batch", "8", "--cluster", "small.toml", "--repeats", "1"),
            "no plan for a batch of 8 fits",
        ),
        (("plan", "mlp-mnist", "--schedules", "1f2b"), "did you mean '1f1b'"),
        (("plan", "mlp-mnist", "--batch", "0"), "--batch 0: must be at least 1"),
        (("forecast", "plan.toml", "--repeats", "-2"), "--repeats -2: must be at least 1"),
        (("explain", "plan.toml", "--devices", "0"), "--devices 0: must be at least 1"),
        (("fit", "mlp-mnist", "--memory", "0"), "--memory 0: nothing fits in no memory"),
        (("fit", "mlp-mnist"), "Give --memory 80GiB"),
        ((*ANALYTIC, "8xh101"), "the hardware 'h101' is unknown; known are H200"),
        ((*ANALYTIC, "8xh100", "--free-communication"), "--free-communication belongs to a forecast from measurements"),
        ((*ANALYTIC, "8xh100", "--chakra-out", "x"), "leave out --chakra-out, or --analytic"),
        ((*ANALYTIC, "8xh100", "--innermost", "data"), "innermost = data belongs to a plan"),
        (("explain", *ANALYTIC[1:], "8xh100", "--plot", "x.png"), "--plot belongs to a forecast from measurements"),
        (("fit", "mlp-mnist", "--memory", "8MiB", "--what", "layers"), "has a fixed number of layers"),
    ],
)
def test_refused(folder: Path, words: tuple[str, ...], message: str) -> None:
    (folder / "one.toml").write_text('[[devices]]\nkind = "cpu"\ncount = 1\n')
    (folder / "hosts.toml").write_text('[[devices]]\nkind = "cpu"\ncount = 1\nhosts = 2\n')
    (folder / "cuda.toml").write_text('[[devices]]\nkind = "cuda"\ncount = 2\n')
    (folder / "small.toml").write_text('[[devices]]\nkind = "cpu"\ncount = 2\nmemory = "64KiB"\n')
    (folder / "other.toml").write_text(PLAN.replace("microbatches", 'cuts = ["deit.layers.5"]\nmicrobatches'))
    found = run(folder, *words, code=2)
    assert message in found.stderr
    assert found.stderr.strip().count("stagewright: ") == 1
