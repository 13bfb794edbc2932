"""Compile units and stages with ``torch.compile``.

    units    the forward of each unit; blocks of one class and shape share one compiled graph
    stages   the generated forward of a stage: its units and the glue operations between them as one graph

Only ``forward`` is compiled, not ``__call__``: hooks of FSDP, tensor parallelism and the profiler stay outside. Shapes
are static: every micro-batch size is compiled once. The backend is inductor, or the one named by
``STAGEWRIGHT_COMPILE_BACKEND`` (``aot_eager`` and ``eager`` help to find a fault). ``torch._dynamo`` is used in this
file only.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stagewright.graph.contexts import Autocast, GradMode, enter_context, exit_context
from stagewright.graph.stage import Stage

BACKEND_VARIABLE = "STAGEWRIGHT_COMPILE_BACKEND"
_MAX_VARIANTS = 64  # compiled variants of one forward: blocks of several shapes, micro-batch sizes, train and eval
_MAX_REASONS = 3
_EAGER = "_stagewright_eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCounts:
    """What ``torch.compile`` did in this process."""

    graphs: int
    """Compiled graphs."""
    graph_breaks: int
    """Places where a forward leaves the compiled graph and continues in Python."""
    reasons: tuple[str, ...] = ()
    """The most frequent reasons of graph breaks."""


def backend_name() -> str:
    """Return the name of the ``torch.compile`` backend."""
    return os.environ.get(BACKEND_VARIABLE, "inductor")


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function; nothing happens before its first call."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MAX_VARIANTS)
    config.optimize_ddp = False  # would split graphs at DDP buckets, which are all-reduced unit by unit anyway
    if not torch.cuda.is_available():
        import torch._inductor.config

        torch._inductor.config.compile_threads = 1  # a worker is pinned to its cores
    name = backend_name()
    # Random numbers of the same generator calls as in eager mode, so that dropout masks are the same.
    options: Any = {"fallback_random": True} if name == "inductor" else None
    return torch.compile(function, backend=name, dynamic=False, options=options)


def compile_units(modules: Iterable[nn.Module]) -> None:
    """Compile the forward of each module, in place, except those that must stay eager."""
    for module in _compilable(modules):
        module.__dict__["forward"] = compile_function(module.forward)


@contextmanager
def compiled_units(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Compile the forward of each module inside the block."""
    unique = _compilable(modules)
    before = [module.__dict__.get("forward") for module in unique]
    compile_units(unique)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")  # read by dynamo
            yield
    finally:
        for module, forward in zip(unique, before, strict=True):
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward


def compile_stage(stage: Stage) -> None:
    """Compile the forward of a stage as one graph, in place; its random numbers are not keyed by unit."""
    code = stage.graph.python_code(root_module="self")
    scope = dict(code.globals)
    exec(compile(_with_statements(stage, code.src, scope), "<compiled stagewright stage>", "exec"), scope)
    stage._run = compile_function(scope["forward"])
    stage._has_contexts = False


def mark_eager(module: nn.Module) -> None:
    """Keep a module eager, also where it is a unit of its own, because it communicates in Python."""
    module.__dict__[_EAGER] = True
    module.__dict__["forward"] = keep_eager(module.forward)


def _compilable(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in dict.fromkeys(modules) if not module.__dict__.get(_EAGER)]


def keep_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that compiled code calls it in Python, by a graph break."""
    disable: Any = torch.compiler.disable
    return disable(function)  # type: ignore[no-any-return]


def keep_saved_tensors() -> None:
    """Let compiled backwards leave what forward saved as it is: a CUDA graph's backward runs again and again."""
    import torch._functorch.config

    config: Any = torch._functorch.config
    config.donated_buffer = False


def compile_counts() -> CompileCounts:
    """Count the graphs and graph breaks of this process so far."""
    from torch._dynamo.utils import counters

    breaks = counters["graph_break"]
    texts = (re.split(r"\n|  ", reason.strip())[0] for reason, _ in breaks.most_common())
    reasons = tuple(dict.fromkeys(texts))[:_MAX_REASONS]
    return CompileCounts(
        graphs=int(counters["stats"]["unique_graphs"]), graph_breaks=sum(breaks.values()), reasons=reasons
    )


def _with_statements(stage: Stage, source: str, scope: dict[str, Any]) -> str:
    """Write ``with`` statements for the contexts of a generated forward: ``torch.compile`` can trace these."""
    names = {function: name for name, function in scope.items() if function in (enter_context, exit_context)}
    if enter_context not in names:
        return source
    scope |= {"stagewright_torch": torch}
    entered = [node.args[0].target for node in stage.graph.nodes if node.target is enter_context]
    contexts = iter([getattr(stage, str(name)) for name in entered])
    lines: list[str] = []
    depth = 0
    for line in source.splitlines():
        indent = "    " * depth
        if f"{names[enter_context]}(" in line:
            lines += [f"{indent}    with {_context_source(next(contexts))}:", f"{indent}        pass"]
            depth += 1
        elif f"{names[exit_context]}(" in line:
            depth -= 1
        else:
            lines.append(indent + line)
    return "\n".join(lines) + "\n"


def _context_source(context: GradMode | Autocast) -> str:
    if isinstance(context, GradMode):
        return f"stagewright_torch.set_grad_enabled({context.enabled} and stagewright_torch.is_grad_enabled())"
    return (
        f"stagewright_torch.autocast({context.device!r}, dtype={_dtype_source(context.dtype)}, "
        f"enabled={context.enabled}, cache_enabled={context.cache})"
    )


def _dtype_source(dtype: torch.dtype | None) -> str:
    return "None" if dtype is None else f"stagewright_{dtype}"
