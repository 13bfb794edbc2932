"""The public face of the package, pinned."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import stagewright as sw

NAMES = """
    AnalyticForecast Batch Cluster Codec Comparison Device Explanation ExportedConfig FitResult Forecast Layout Model
    Plan
    PlanResult Profile Run RunError
    Split SplitPolicy StagewrightError Trainer TrainingResult UnitGraph UsageError attach capture compare explain export
    fit forecast parallelize plan profile split train verify
"""


def test_exported_names() -> None:
    assert sw.__all__ == NAMES.split()
    assert [name for name in sw.__all__ if getattr(sw, name).__name__ != name] == []
    assert dir(sw) == sorted([*sw.__all__, "__version__"])


def test_no_package_has_the_name_of_a_public_function() -> None:
    assert {module.name for module in pkgutil.iter_modules(sw.__path__)}.isdisjoint(sw.__all__)


def test_importing_the_package_imports_neither_torch_nor_the_engine() -> None:
    code = "import sys, stagewright; sys.exit('torch' in sys.modules or 'stagewright.engine' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(sw, "nothing")
