"""Runs when Python starts in a process of ``stagewright attach``: attach as soon as torch's optimizers are imported.

This folder is first on PYTHONPATH there. Another ``sitecustomize`` of the environment runs as it would without us.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_TRIGGER = "torch.utils.data.dataloader"  # imported by every training script, after torch.optim


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``attach`` after one module has been imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != _TRIGGER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                loader.exec_module = execute
                _attach()

            loader.exec_module = exec_module
        return spec


def _attach() -> None:
    """Attach once torch is complete: it imports its data loaders before itself has finished."""
    import builtins

    original = builtins.__import__

    def after_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        module = original(name, *args, **kwargs)
        torch = sys.modules.get("torch")
        spec = getattr(torch, "__spec__", None)
        if spec is not None and not getattr(spec, "_initializing", False):
            builtins.__import__ = original
            from stagewright.attachment.attach import attach

            attach(os.environ.get("STAGEWRIGHT_ATTACH_ROOT", "runs"))
        return module

    builtins.__import__ = after_torch


def _run_other() -> None:
    """Run the environment's own sitecustomize, which ours hides."""
    rest = [folder for folder in sys.path if os.path.abspath(folder or ".") != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("STAGEWRIGHT_ATTACH"):
    sys.meta_path.insert(0, _AfterImport())
_run_other()
