"""What a run keeps of its predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stagewright.errors import UsageError
from stagewright.runs.predictions import Predictions


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = Predictions(labels=np.array([3, 0, 7]), predicted=np.array([3, 1, 7]))
    written.save(tmp_path)
    assert (tmp_path / "predictions.csv").read_text() == "sample,label,predicted\n0,3,3\n1,0,1\n2,7,7\n"
    for read in (Predictions.load(tmp_path), Predictions.from_dict(written.to_dict())):
        assert read is not None
        assert (read.labels.tolist(), read.predicted.tolist()) == ([3, 0, 7], [3, 1, 7])
    assert Predictions.load(tmp_path / "none") is None
    assert Predictions.from_dict(None) is None


@pytest.mark.parametrize("text", ["", "sample,label\n0,1\n", "sample,label,predicted\n0,1\n", "a,b,c\n0,1,1\n",
                                  "sample,label,predicted\n1,1,1\n", "sample,label,predicted\n0,x,1\n"])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "predictions.csv").write_text(text)
    with pytest.raises(UsageError, match=r"predictions\.csv is damaged"):
        Predictions.load(tmp_path)
