"""Explain where in the user's model tracing failed, and how to fix it."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Collection
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

from stagewright.errors import CaptureError

_STAGEWRIGHT = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).resolve().parent)
_STANDARD = str(Path(sysconfig.get_paths()["stdlib"]).resolve())
_LIBRARIES = str(Path(sysconfig.get_paths()["purelib"]).resolve())


def explain_failure(error: Exception, model: nn.Module) -> CaptureError:
    """Return an error that names the line in the user's model and two fixes."""
    frame = _user_frame(error, model)
    location, owner = "", ""
    if frame is not None:
        code, line = frame
        name = _module_name(code, model)
        source = linecache.getline(code.f_code.co_filename, line).strip()
        owner = name or ""
        location = f" at {code.f_code.co_filename}:{line}, in {code.f_code.co_name}: `{source}`"
    reason = failure_reason(error)
    if _is_about_cache(error):
        return CaptureError(
            f"can't capture {type(model).__name__}: it uses a key-value cache, which can't be sent between stages; "
            f"{_advice_about_cache(model)}"
        )
    if owner:
        advice = f'keep that code inside one unit (units=["{owner}"])'
    else:
        advice = "move that code into a submodule and name it as a unit"
    hooked = None if isinstance(error, CaptureError) else _module_with_hook(model)
    if hooked is not None:
        reason += f" ({hooked!r} has a forward hook; what it stores can't be used between units, so return it instead)"
    return CaptureError(
        f"can't capture {type(model).__name__}{location}: {reason}; {advice}, "
        "or give the model as an nn.Sequential or a list of stages"
    )


def find_failing_module(error: Exception, model: nn.Module, opened: Collection[str]) -> str | None:
    """Return the innermost opened submodule whose forward raised the error."""
    innermost = None
    for frame, _ in _frames(error):
        name = _module_name(frame, model)
        if name is not None and name in opened:
            innermost = name
    return innermost


def _module_with_hook(model: nn.Module) -> str | None:
    """Return the name of the first module with a forward hook of the user's own code."""
    for name, module in model.named_modules():
        codes = [getattr(hook, "__code__", None) for hook in module._forward_hooks.values()]
        paths: list[str] = [code.co_filename for code in codes if code is not None]
        if any(not path.startswith((_STAGEWRIGHT, _TORCH, _LIBRARIES)) for path in paths):
            return str(name)
    return None


def _is_about_cache(error: Exception) -> bool:
    """Whether a Hugging Face cache object, as result or argument of a unit, caused the error."""
    text = str(error)
    return "transformers.cache_utils" in text or ("Cache" in text and "can't be sent between stages" in text)


def _advice_about_cache(model: nn.Module) -> str:
    if getattr(getattr(model, "config", None), "use_cache", None) is False:  # a learned prefix is passed as a cache
        return "use_cache is False already, so pass no past_key_values, or use prompt tuning instead of a prefix"
    return "set model.config.use_cache = False, or pass use_cache=False"


def failure_reason(error: Exception) -> str:
    """Return the reason of an error in one line."""
    text = str(error).strip()
    if isinstance(error, CaptureError):
        return text
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__ or "unbacked" in text:
        return "the code between units branches on the values of a tensor"
    if isinstance(error, TypeError) and "SymInt" in text:
        return "the code between units uses the values of a tensor as plain numbers"
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {' '.join(line.split())[:300]}"


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return all frames of an error and of its causes, outermost first."""
    frames: list[tuple[FrameType, int]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        trace: TracebackType | None = current.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        current = current.__cause__ or current.__context__
    return frames


def _user_frame(error: Exception, model: nn.Module) -> tuple[FrameType, int] | None:
    """Return the innermost frame in a module of the model, or else outside torch and this package."""
    in_model = None
    outside = None
    for frame, line in _frames(error):
        path = str(Path(frame.f_code.co_filename).resolve())
        if path.startswith((_STAGEWRIGHT, _TORCH)) or frame.f_code.co_filename.startswith("<"):
            continue
        if frame.f_code.co_name == "__call__":
            continue  # a wrapper around the module's forward
        if _module_name(frame, model) is not None:
            in_model = frame, line
        elif not path.startswith(_STANDARD) or path.startswith(_LIBRARIES):
            outside = frame, line
    return in_model or outside


def _module_name(frame: FrameType, model: nn.Module) -> str | None:
    """Return the name of the model's module whose method a frame runs."""
    owner = frame.f_locals.get("self")
    if not isinstance(owner, nn.Module):
        return None
    return next((name for name, module in model.named_modules() if module is owner), None)
