"""The folder of real data sets, where there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("STAGEWRIGHT_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no data sets: STAGEWRIGHT_DATA is not set and {folder} is not there")
    return folder
