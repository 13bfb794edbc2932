"""Copy the results of a study into the docs: docs/studies/measured/NAME.md, and some of its figures.

    python docs/take_study.py studies/2026-…-fabric-mlp-mnist fabric --figures mlp-mnist-lossy-link,mlp-mnist-clean

Answers, tables and figures come from the study's folder, with its command and machine; nothing is written by hand.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGES = DOCS / "studies" / "measured"
PICTURES = DOCS / "pictures" / "studies"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a finished study")
    parser.add_argument("name", help="name of the page")
    parser.add_argument("--figures", default="", help="figures to show, comma-separated")
    options = parser.parse_args()
    figures = [name for name in options.figures.split(",") if name]
    PAGES.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        shutil.copyfile(options.folder / "figures" / f"{figure}.png", PICTURES / f"{options.name}-{figure}.png")
    (PAGES / f"{options.name}.md").write_text(page(options.folder, options.name, figures))


def page(folder: Path, name: str, figures: list[str]) -> str:
    """Join head, answers, figures and tables; answers and tables start with the same head."""
    answers = (folder / "answers.md").read_text()
    tables = (folder / "table.md").read_text()
    head, _, _ = answers.partition("\n## ")
    pictures = "".join(f"\n![{figure}](../../pictures/studies/{name}-{figure}.png)\n" for figure in figures)
    pictures = f"\n## Figures\n{pictures}" if pictures else ""
    return answers.rstrip("\n") + "\n" + pictures + tables.removeprefix(head).rstrip("\n") + "\n"


if __name__ == "__main__":
    main()
