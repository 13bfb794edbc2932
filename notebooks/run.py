"""Run the cells of a notebook in one Python process, without Jupyter, and store their outputs in the notebook.

    python notebooks/run.py notebooks/stages.ipynb             run it and store the outputs
    python notebooks/run.py notebooks/stages.ipynb --check     run it and write nothing

The last expression of a cell is shown as in Jupyter: a figure as an image, anything else as text. A cell that raises
ends the run with its error. Cells run in the current folder.
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
    """Run one cell; return what it printed and the value of its last expression."""
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
    """Build the outputs of a cell in the notebook format."""
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "savefig"):
            image = io.BytesIO()
            value.savefig(image, format="png", metadata={"Software": None})
            data = {"image/png": base64.b64encode(image.getvalue()).decode("ascii"), **data}
        outputs.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return outputs


def run_notebook(notebook: dict[str, Any], title: str) -> dict[str, Any]:
    """Run all cells; return the notebook with their outputs."""
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
    arguments = parser.parse_args()
    notebook = run_notebook(json.loads(arguments.notebook.read_text(encoding="utf-8")), arguments.notebook.name)
    if not arguments.check:
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        arguments.notebook.write_text(text, encoding="utf-8")
    count = sum(cell["cell_type"] == "code" for cell in notebook["cells"])
    sys.stderr.write(f"{arguments.notebook}: {count} cells ran\n")


if __name__ == "__main__":
    main()
