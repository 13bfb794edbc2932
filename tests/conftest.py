"""Fixtures and selection that all tests share."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from fnmatch import translate
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples everywhere, however slow the machine; other ones with `--hypothesis-profile default`.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

sys.path.insert(0, str(Path(__file__).parent))  # `program`, also for forked workers

from long_tests import LONG, SLOW  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `long_tests.py`."""
    for patterns, mark in ((LONG, pytest.mark.long), (SLOW, pytest.mark.slow)):
        is_listed = re.compile("|".join(map(translate, patterns))).match  # a million matches one by one take seconds
        for item in items:
            if is_listed(item.nodeid):
                item.add_marker(mark)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Seed every test alike, whichever tests ran before it in the same process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """Fail a test that leaves torch's default process group initialized, rather than all that follow it."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the default process group was left initialized: use the fixture lone_group")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one cache of profiles and calibrations for all tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "stagewright-cache"
    folder.mkdir(exist_ok=True)
    return folder
