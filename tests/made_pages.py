"""The folder of a study with its findings, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make_study(folder: Path, **findings: Any) -> Path:
    """Two answers with one table and figure, and one of each that belongs to no answer."""
    (folder / "figures").mkdir(parents=True)
    about = {"study": "stages", "title": "Stages of deit", "status": "done", "command": "stagewright study stages deit"}
    (folder / "study.json").write_text(json.dumps(about))
    table = {"columns": ["a", "n"], "align": ["left", "right"], "rows": [["x", "2"]], "notes": ["A note."]}
    content: dict[str, Any] = {
        "summary": [["Measured", "1.6 ×"], ["Ideal", "2 ×"]],
        "answers": [
            {"question": "Which policy?", "sentences": ["Time.", "It is 4 % faster."], "tables": ["B"], "figures": []},
            {"question": "Why?", "sentences": ["So."], "tables": ["B"], "figures": ["why"]},
        ],
        "tables": [{"title": "A", **table}, {"title": "B", **table}],
        "figures": [{"name": "bars", "caption": "All bars."}, {"name": "why", "caption": "The reason."}],
        "runs": {},
        **findings,
    }
    (folder / "findings.json").write_text(json.dumps(content))
    for figure in content["figures"]:
        (folder / "figures" / f"{figure['name']}.png").write_bytes(figure["name"].encode())
    return folder
