"""Wrong input over all verbs: one sentence with what was typed and a way out, exit code 2, nothing made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stagewright.cli import main
from stagewright.engine.launch import fork_server as copies, launcher as launch
from stagewright.machine import machine
from stagewright.runs.result import RunResult

PLAN = 'batch = 8\n{keys}\n[model]\nname = "{model}"\n'
Told = Callable[..., str]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Runs the program in this process, in a folder of its own; the sentence that it ended with."""
    (tmp_path / "my_shop.py").write_text("def plain(): ...\ndef wide(depth): ...\n")
    plans = {"model": ("", "digits-vti"), "own": ("", "my_shop:plan"), "gpu": ('devices = ["cuda:3"]', "digits-vit")}
    for name, (keys, model) in plans.items():
        (tmp_path / f"{name}.toml").write_text(PLAN.format(keys=keys, model=model))
    before = {one.name for one in tmp_path.iterdir()}
    for name in ("compare", "train"):
        monkeypatch.setattr(f"stagewright.cli.running.{name}.start_fork_server", lambda: None)
    monkeypatch.setattr(copies, "_ensure_running", lambda: pytest.fail("a process was started"))
    monkeypatch.setattr(launch, "Supervisor", lambda *args, **keys: pytest.fail("a worker was started"))
    for module in ("cli.options", "cluster.device", "engine.worker.worker"):
        monkeypatch.setattr(f"stagewright.{module}.pin_process", lambda device: False)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STAGEWRIGHT_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("my_shop", None)

    def run(words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["stagewright", *words.split()])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        assert end.value.code == 2, output.err
        assert output.out == ""
        lines = [line for line in output.err.splitlines() if line.startswith("stagewright: ")]
        assert len(lines) == 1, output.err
        assert lines[0] == output.err.splitlines()[-1]
        made = {one.name for one in tmp_path.iterdir()} - before - {"__pycache__"}
        assert not made, "nothing is left behind"
        return lines[0]

    return run


@pytest.mark.parametrize("verb", ["compare {} --strategy serial", "train {} digits", "study stages --quick --model {}"])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("digits-vti", "unknown model 'digits-vti'; did you mean 'digits-vit'"),
        ("my_shpo:plain", "no module named 'my_shpo' for the model 'my_shpo:plain'"),
        ("my_shop:plan", "unknown factory 'plan'; did you mean 'plain'"),
        ("my_shop:wide", "it requires depth; add a default"),
        ("hf:./nowhere", "the folder './nowhere' does not exist"),
    ],
)
def test_a_model_that_is_not_there(verb: str, model: str, message: str, told: Told) -> None:
    assert message in told(verb.format(model))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare digits-vit --weights nowhere", "the weights folder 'nowhere' does not exist; give a folder"),
        ("train digits-vit digits --weights nowhere", "the weights folder 'nowhere' does not exist"),
        ("study codecs --quick --weights nowhere", "nowhere' does not exist; give a folder"),
        ("compare digits-vit --devices gpu", "--devices 'gpu': 'gpu' is neither a number of devices nor a device"),
        ("compare digits-vit --devices -1", "--devices -1: must be at least 1"),
        ("train digits-vit digits --devices 0", "--devices 0: must be at least 1"),
        (
            "compare digits-vit --recompute some",
            "unknown recompute mode 'some'; did you mean 'none'? (or names of units: --recompute layers.0,layers.1",
        ),
        ("compare digits-vit --seed -1", "seed = -1, but must be from 0"),
        ("compare digits-vit --cut nope --strategy pipeline", "unknown cut 'nope'; known: vit.embeddings"),
        ("compare digits-vit --units nope --strategy serial", "unknown unit 'nope'"),
        ("compare digits-vit --image-size 7", "use image_size 6 or 8"),
        ("train deit-tiny cifar10", "'cifar10' is not on this machine (STAGEWRIGHT_DATA is not set)"),
        (
            "train digits-vit digits --plan own.toml",
            "is a plan for 'my_shop:plan', not for 'digits-vit'; name that model",
        ),
        (
            "train digits-vit digits --plan no.toml",
            "no plan no.toml; create it with `stagewright plan MODEL -o no.toml`",
        ),
        ("worker model.toml", "unknown model 'digits-vti'; did you mean 'digits-vit'"),
        ("worker no.toml", "no plan no.toml"),
        ("worker own.toml", "unknown factory 'plan'; did you mean 'plain'"),
        ("study stages --quick --contrast mobilnet-v2", "unknown model 'mobilnet-v2'; did you mean 'mobilenet-v2'"),
        ("study stages --quick --policies tmie", "unknown policy 'tmie'; did you mean 'time'"),
        ("study stages --quick --cluster no.toml", "--cluster: there is no cluster file no.toml; `stagewright doctor"),
        ("study stages --quick --stages 1", "1 stages are not a pipeline: give numbers from 2 up"),
        ("study stages --quick --batch 4", "a batch of 4 can't be split into 8 micro-batches: use --batch 8"),
        ("study stages --resume nowhere", "it has no study.json; name one below studies/"),
        ("trace .", ". is not a run folder: it has no plan.toml"),
        ("explain .", ". is not a run folder: it has no plan.toml"),
        ("doctor -o .", "-o .: it is a folder; name a file in it"),
        ("doctor -o no/here.toml", "there is no folder no; create it first: mkdir -p no"),
        ("fabric run --sizes 1MiB --congestion nope", "cannot use congestion control 'nope' here"),
        ("train digits-vit digits --epochs 0", "--epochs 0: must be at least 1; see `stagewright train --help`"),
        ("train digits-vit digits --seeds 0,-1", "seed = -1, but must be from 0 to 4294967295"),
        ("train digits-vit digits --epochs x", "--epochs x: must be a whole number, at least 1"),
        ("watch --port 70000", "--port 70000: must be from 0 to 65535"),
        ("fabric lab --num-hosts 99 -- true", "--num-hosts 99: must be from 2 to 64"),
        ("train digits-vit", "missing argument 'TASK'"),
        ("compare my_shop.plain", "write a factory with a colon: my_shop:plain"),
        ("compare my_shop", "'my_shop' is a file; name the function in it that returns the model: my_shop:"),
        (
            "forecast my_shop:plain",
            "no plan file my_shop:plain; for a model, write one first: `stagewright plan my_shop:",
        ),
        ("compare digits-vit --strategy ,", "--strategy ',' names none"),
        ("compare digits-vit --strategy serial;dat", "unknown strategy 'dat'; did you mean 'data'"),
        ("train digits-vit digits --save-weights my_shop.py", "--save-weights my_shop.py is a file; name a folder"),
        ("train digits-vit digits --tokenizer no", "--tokenizer no: there is no such folder; name one that has"),
        ("train digits-vit digits --plan .", ". is a folder; name a TOML file in it, like plan.toml"),
        ("codecs bench digits-vit --links 0Gbit/s", "a rate must be above 0"),
        ("study codecs --quick --learning-rate nan", "--learning-rate nan: must be above 0, like 0.001"),
        ("study stages --quick --seed -1", "--seed -1: must be from 0 to 4294967295"),
        ("study stages --quick --devices cpu:0", "1 device can't run a pipeline: give two"),
        ("study memory --quick --batch 1", "a batch of 1 can't be split over two replicas"),
        ("fabric compare . .", "create one with: stagewright fabric run --sizes 1MiB"),
        ("trian digits-vit", "no such command 'trian'"),
        ("runs --rot x", "no such option: --rot"),
    ],
)
def test_what_is_wrong_and_a_way_out(words: str, message: str, told: Told) -> None:
    assert message in told(words)


@pytest.mark.parametrize(
    "words",
    [
        "compare digits-vit --devices cuda:3 --strategy serial",
        "train digits-vit digits --devices cuda:3",
        "train digits-vit digits --plan gpu.toml",
        "study memory --quick --devices cuda:2,cuda:3",
        "worker gpu.toml",
    ],
)
def test_a_gpu_that_is_not_there(words: str, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sentence = told(words)
    assert "cuda:" in sentence
    assert "use another device, like cpu:0" in sentence


def test_nccl_without_a_gpu(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.cli.fabric.fabric.has_gpu", lambda: False)
    assert "--engine nccl needs a GPU" in told("fabric run --sizes 8 --engine nccl")


def test_more_devices_than_cores(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machine, "spread_cores", lambda: (0, 1))
    sentence = told("compare digits-vit --devices 64")
    assert "64 devices were asked for, but this machine has 2 cores; use 2 or fewer" in sentence
    assert "--devices cpu:0,cpu:1,cpu:0,cpu:1,…" in sentence


@pytest.mark.parametrize(("devices", "strategies"), [("cpu:0", ["serial"]), ("cpu:0,cpu:0", ["serial", "data"])])
def test_one_device_leaves_nothing_to_compare(
    devices: str, strategies: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every strategy of one device is serial: it runs once, and that is said."""
    seen: list[str] = []

    def pretend(plans: list[object], root: object, **more: object) -> list[RunResult]:
        seen.extend(plan.mesh.strategy for plan in plans)  # type: ignore[attr-defined]
        return [RunResult(strategy="serial", refused=True, error="enough seen")]

    monkeypatch.setattr("stagewright.cli.running.compare.start_fork_server", lambda: None)
    monkeypatch.setattr("stagewright.api.compare.run_plans", pretend)
    words = ["compare", "digits-vit", "--devices", devices, "--strategy", "serial,data"]
    monkeypatch.setattr(sys, "argv", ["stagewright", *words])
    with pytest.raises(SystemExit):
        main()
    assert seen == strategies
    assert ("the baseline runs alone" in capsys.readouterr().err) == (len(strategies) == 1)
