"""The program as a person meets it: help, errors, exit codes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from program import run_program
from stagewright.cli import main, options
from stagewright.errors import UnknownName
from stagewright.zoo import names

HERE = Path(sys.executable).parent


def run(*words: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return run_program(words, cwd=cwd, env=environment)


def test_help_imports_nothing_slow() -> None:
    assert subprocess.run([str(HERE / "stagewright"), "--help"], capture_output=True, check=False).returncode == 0
    check = (
        "import sys; sys.argv = ['stagewright', '--help']\n"
        "from stagewright.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=True, text=True)
    imported = set(done.stderr.split())
    assert "typer" in imported
    slow = {"torch", "transformers", "numpy", "scipy", "sklearn", "matplotlib", "pyarrow", "safetensors", "PIL"}
    assert imported & slow == set()


def test_listing_models_imports_no_torch() -> None:
    check = (
        "import sys; from stagewright.cli.model.models import models; models(json=True); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


def test_version() -> None:
    from stagewright import __version__

    assert run("--version").stdout.strip() == f"stagewright {__version__}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["split", "digits-vti"], "did you mean 'digits-vit'"),
        (["split", "digits-vit", "--stages", "99"], "99 stages are too many: 'digits-vit' has 7 units"),
        (["split", "digits-vit", "--stages", "0"], "0 stages are not possible"),
        (["split", "digits-vit", "--policy", "tmie"], "did you mean 'time'"),
        (["split", "digits-vit", "--policy", "time", "--all"], "exclude each other"),
        (["split", "digits-vit", "--cut", "vit.layers.9"], "vit.layers."),
        (["split", "digits-vit", "--stages", "3", "--cut", "vit.layers.1"], "--cut names 1 unit, which makes 2 stages"),
        (["split", "digits-vit", "--memory", "1KiB"], "KiB"),
        (["split", "digits-vit", "--memory", "much"], "'much' is not a size"),
        (["split", "digits-vit", "--speeds", "1,fast"], "is not a list of speeds"),
        (["split", "digits-vit", "--speeds", "1,1,1"], "3 speeds were given for 2 devices"),
        (["split", "digits-vit", "--microbatches", "none"], "not a number of micro-batches"),
        (["split", "digits-vit", "--bandwidth", "10furlongs"], "not a rate"),
        (["split", "digits-vit", "--device", "gpu"], "is not a device"),
        (["split", "digits-vit", "--device", "cpu:4096"], "asks for core 4096"),
        (["split", "digits-vit", "--plot", "x.jpg"], ".jpg"),
        (["split", "digits-vit", "--units", "vit.layer.1"], "unknown unit"),
        (["split", "digits-vit", "--weights", "nowhere"], "nowhere"),
        (["profile", "digits-vit", "--dtype", "float3"], "float3"),
        (["profile", "no.such.module:make"], "no.such"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which must stay unpinned; the tests below start the real program."""
    monkeypatch.setattr(options, "pin_process", lambda device: False)
    monkeypatch.setattr(sys, "argv", ["stagewright", *words])
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("stagewright: ")]
    assert len(lines) == 1, output.err
    assert message in lines[0]
    assert output.out == ""
    assert not list(tmp_path.glob("*.jpg"))


def test_the_real_program_ends_the_same_way(tmp_path: Path) -> None:
    result = run("split", "digits-vti", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("stagewright: " + str(UnknownName("model", "digits-vti", names())))
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_an_unwritable_cache_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("profile", "digits-vit", "--cache-dir", str(tmp_path / "file"))
    assert result.returncode == 2
    assert "use --cache-dir" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make():\n"
        "    layers = [torch.nn.Linear(8, 8) for _ in range(4)]\n"
        "    return torch.nn.Sequential(*layers), (torch.randn(4, 8),)\n"
    )
    words = ("split", "mine:make", "--stages", "2", "--fresh", "--repeats", "1")
    result = run(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "cut after 1" in result.stdout


def test_ctrl_c_is_told() -> None:
    program = (
        "import sys\nfrom stagewright.cli import app\n"
        "@app.app.command()\ndef stop():\n    raise KeyboardInterrupt\n"
        "sys.argv = ['stagewright', 'stop']\napp.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "stagewright: interrupted\n")


def test_a_device_without_memory_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in commands that run in one process; other errors keep their traceback."""

    def ends_with(error: Exception) -> None:
        def program(**options: object) -> None:
            raise error

        monkeypatch.setattr("stagewright.cli.app.app", program)

    importlib.import_module("torch")  # without it there is no such error
    monkeypatch.setattr(sys, "argv", ["stagewright", "profile", "gpt2"])
    ends_with(MemoryError())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(
        "stagewright: stagewright is out of memory during profile: more wanted on"
    )
    ends_with(RuntimeError("shapes can't be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        main()
