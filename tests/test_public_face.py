"""The public face of the package, pinned."""

from __future__ import annotations

import subprocess
import sys

import stagewright as sw


def test_exported_names() -> None:
    assert sw.__all__ == [
        "Profile",
        "Split",
        "Stage",
        "StagewrightError",
        "Trainer",
        "UnitGraph",
        "capture",
        "parallelize",
        "profile",
        "split",
    ]
    assert [name for name in sw.__all__ if getattr(sw, name) is None] == []
    assert dir(sw) == sorted([*sw.__all__, "__version__"])


def test_packages_are_callable_whoever_imports_them_first() -> None:
    code = (
        "import stagewright.graph.values, stagewright.profiler.profile, stagewright.partition.values\n"
        "import torch, stagewright as sw\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])\n"
        "graph = sw.capture(model, (torch.randn(2, 8),))\n"
        "profile = sw.profile(graph, (torch.randn(2, 8),), name='four', cache=False, repeats=1)\n"
        "assert sw.split(profile, 2).num_stages == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(sw, "nothing")
