"""Optional packages that are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stagewright.errors import MissingPackage, UsageError
from stagewright.extras import require

HIDE = (
    "import sys\n"
    "class Hidden:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.partition('.')[0] in {hidden!r}:\n"
    "            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)\n"
    "sys.meta_path.insert(0, Hidden())\n"
    "from stagewright.cli import main\n"
    "sys.argv = ['stagewright', *{arguments!r}]\n"
    "main()\n"
)


def without(hidden: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = HIDE.format(hidden=hidden, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


def test_installed_package_passes() -> None:
    require("matplotlib")


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackage, match=r"pip install 'stagewright\[hf\]'") as caught:
        require("transformers", "the model 'gpt2'")
    assert str(caught.value).startswith("the model 'gpt2' needs the package transformers")
    assert isinstance(caught.value, UsageError)
    assert isinstance(caught.value, ImportError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "arguments", "extra"),
    [
        ({"transformers"}, ("profile", "gpt2"), "hf"),
        ({"matplotlib"}, ("split", "mlp-mnist", "--stages", "2", "--plot", "x.png"), "plots"),
        ({"pyarrow"}, ("fabric", "run", "--sizes", "1000", "--ranks", "2", "--trials", "1"), "data"),
    ],
)
def test_commands_say_which_extra_is_missing(hidden: set[str], arguments: tuple[str, ...], extra: str) -> None:
    result = without(hidden, *arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].endswith(f"pip install 'stagewright[{extra}]'")
