"""Run a notebook's cells in one Python process, without Jupyter, and put what they print and return into the notebook.

    python notebooks/run.py notebooks/stages.ipynb             runs it and writes the outputs into it
    python notebooks/run.py notebooks/stages.ipynb --check     runs it and writes nothing

A cell's last expression is shown as in Jupyter: a figure as a picture, anything else as its text. A cell that raises
ends the run with its error. Cells run in the folder from which this is called.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_cell(source: str, names: dict[str, Any], title: str) -> tuple[str, object]:
    """Run one cell; what it printed, and the value of its last expression."""
    tree = ast.parse(source, filename=title)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, title, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), title, "eval"), names)
    return printed.getvalue(), value


def outputs_of(printed: str, value: object, count: int) -> list[dict[str, Any]]:
    """As a notebook has them."""
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "savefig"):
            picture = io.BytesIO()
            value.savefig(picture, format="png", metadata={"Software": None})
            data = {"image/png": base64.b64encode(picture.getvalue()).decode("ascii"), **data}
        outputs.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return outputs


def run_notebook(notebook: dict[str, Any], title: str) -> dict[str, Any]:
    """The notebook with the outputs of this run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for number, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] == "code":
            count += 1
            printed, value = run_cell("".join(cell["source"]), names, f"{title}, cell {number}")
            cell = {**cell, "execution_count": count, "outputs": outputs_of(printed, value, count)}
        cells.append(cell)
    return {**notebook, "cells": cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    chosen = parser.parse_args()
    done = run_notebook(json.loads(chosen.notebook.read_text(encoding="utf-8")), chosen.notebook.name)
    if not chosen.check:
        text = json.dumps(done, indent=1, ensure_ascii=False) + "\n"
        chosen.notebook.write_text(text, encoding="utf-8")
    count = sum(cell["cell_type"] == "code" for cell in done["cells"])
    sys.stderr.write(f"{chosen.notebook}: {count} cells ran\n")


if __name__ == "__main__":
    main()
