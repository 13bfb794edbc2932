"""What all tests share."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples everywhere, however slow the machine; other ones with `--hypothesis-profile default`.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

sys.path.insert(0, str(Path(__file__).parent))  # `program`, also for copies of a process


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """In every test, whichever were run before it in the same process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of profiles and calibrations for a whole run: what two pages show is measured once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "stagewright-cache"
    folder.mkdir(exist_ok=True)
    return folder
