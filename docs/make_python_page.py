"""Write docs/python.md from the public names: `python docs/make_python_page.py`.

    stagewright.__all__ ─► the file that defines each name ─► signature, whole docstring, fields, methods, example

Sources are parsed, not imported, so the page is the same on every machine.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("python.md")
SOURCE = Path(__file__).resolve().parents[1] / "src"
WIDTH = 100

HEAD = """\
# Python

`import stagewright as sw` has everything that is public. All other modules are private and may change without notice.
This page is generated from the code by `python docs/make_python_page.py`; to learn by doing, read the
[tutorial](tutorial.md).

Values are frozen dataclasses (`dataclasses.replace` makes a changed copy). Times end in `_s` and are seconds, sizes end
in `_bytes`. Results print as tables, also in a notebook: each has `table()` and `to_dict()`, and `plot(path)` where a
figure says more.

The examples below use this model:

```python
import torch

import stagewright as sw

model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
x = torch.randn(32, 64)
```
"""

SECTIONS = {
    "Work on a model object": ("capture", "profile", "split"),
    "Run and plan by name": ("compare", "plan", "forecast", "explain", "fit", "train", "export"),
    "Train in your own script": ("parallelize", "Trainer"),
    "Verify and measure your own script": ("verify", "attach"),
    "Inputs": ("Plan", "Layout", "Cluster", "Device", "Batch", "Model"),
    "Results": (
        "UnitGraph",
        "Profile",
        "Split",
        "Comparison",
        "PlanResult",
        "Forecast",
        "AnalyticForecast",
        "Explanation",
        "FitResult",
        "TrainingResult",
        "ExportedConfig",
        "Run",
    ),
    "Plug-ins": ("Codec", "SplitPolicy"),
    "Errors": ("StagewrightError", "UsageError", "RunError"),
}

# Created by functions, so their constructors are not shown.
RETURNED = ("UnitGraph", "Trainer")
_SECTIONS = re.compile(r"^(Args|Example|Returns|Raises):$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One public name and its definition."""

    name: str
    node: ast.ClassDef | ast.FunctionDef


def python_page() -> str:
    """Return the whole page."""
    homes = _homes()
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [_section(_entry(homes[name], name)) for name in names]
    return "\n".join(parts)


def _homes() -> dict[str, str]:
    """Return the module of each public name, from the package's own table."""
    for node in _parse("stagewright").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            homes: dict[str, str] = ast.literal_eval(node.value)
            return homes
    raise ValueError("stagewright has no _HOMES")


def _parse(module: str) -> ast.Module:
    path = SOURCE / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _entry(module: str, name: str) -> Entry:
    for node in _parse(module).body:
        is_overload = any(ast.unparse(mark) == "overload" for mark in getattr(node, "decorator_list", ()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and not is_overload:
            return Entry(name=name, node=node)
    raise ValueError(f"{module} does not define {name}")


def _section(entry: Entry) -> str:
    node = entry.node
    lines = [f"### {entry.name}\n"]
    if isinstance(node, ast.FunctionDef):
        lines.append(_code(_signature(node, f"sw.{entry.name}")))
    lines.append(_docstring(ast.get_docstring(node) or ""))
    if isinstance(node, ast.ClassDef):
        if entry.name not in RETURNED:
            lines += _fields(node)
        lines += _methods(node)
    return "\n".join(line for line in lines if line)


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _signature(node: ast.FunctionDef, name: str, *, method: bool = False) -> str:
    """Return a function's signature, broken into lines where it is long."""
    arguments = ast.unparse(node.args)
    if method:
        arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
    result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    pieces = _split_arguments(arguments)
    line = f"{name}({', '.join(pieces)}){result}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {piece},\n" for piece in pieces) + f"){result}"


def _split_arguments(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [re.sub(r"^(\w+: .*?)=(?!=)", r"\1 = ", piece.strip()) for piece in pieces]


def _docstring(text: str) -> str:
    """Return a docstring as Markdown: prose, arguments as a list, the example as a block that the tests run."""
    pieces = _SECTIONS.split(text)
    parts = [_prose(pieces[0])]
    for kind, body in zip(pieces[1::2], pieces[2::2], strict=True):
        content = textwrap.dedent(body).strip("\n")
        if kind == "Example":
            parts.append(f"```python\n{content}\n```\n")
        else:
            parts.append(_list(content))
    return "\n".join(part for part in parts if part)


def _prose(text: str) -> str:
    """Return paragraphs; indented text is a block."""
    parts = []
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("    "):
            parts.append(_code(textwrap.dedent(paragraph).strip("\n")))
        else:
            parts.append(_markup(" ".join(paragraph.split())) + "\n")
    return "\n".join(parts)


def _markup(text: str) -> str:
    return text.replace("``", "`")


def _list(text: str) -> str:
    """Return the arguments of a Google-style docstring as a list."""
    items: list[str] = []
    for line in text.splitlines():
        if line.startswith("    ") and items:
            items[-1] += f" {line.strip()}"
        elif line.strip():
            name, _, about = line.partition(": ")
            items.append(f"- `{name.strip()}`: {about}")
    return _markup("\n".join(items)) + "\n"


def _fields(node: ast.ClassDef) -> list[str]:
    """Return the fields of a dataclass with their docstrings."""
    items = []
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or ast.unparse(statement.target).startswith("_"):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = ": " + _markup(" ".join(str(after.value.value).split()))
        items.append(f"- `{ast.unparse(statement)}`{text}")
    return ["Fields:\n", "\n".join(items) + "\n"] if items else []


def _methods(node: ast.ClassDef) -> list[str]:
    """Return public methods and properties with the first paragraph of their docstrings."""
    items = []
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
            continue
        decorators = [ast.unparse(decorator) for decorator in method.decorator_list]
        about = _markup(" ".join((ast.get_docstring(method) or "").split("\n\n")[0].split()))
        shown = method.name if "property" in decorators else _one_line(_signature(method, method.name, method=True))
        items.append(f"- `{shown}`" + (f": {about}" if about else ""))
    return ["Methods and properties:\n", "\n".join(items) + "\n"] if items else []


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("( ", "(").replace(", )", ")")


if __name__ == "__main__":
    PAGE.write_text(python_page(), encoding="utf-8")
