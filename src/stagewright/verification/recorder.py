"""Record one step of a model with hooks: inputs, outputs and their gradients of every module, and its state.

    enter          parameters, buffers
    forward        inputs, outputs                  backward    output gradients, local gradients
    optimizer      gradients, just before its step (after clipping and reduction)
    exit           parameters, buffers, gradients of what no optimizer has

Recomputation by activation checkpointing is not recorded a second time. Nothing here communicates, so a script in which
ranks disagree can't hang in the recorder.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from stagewright.verification.layout import split_dtensor
from stagewright.verification.module_names import Names, plain_modules
from stagewright.verification.perturbation import Perturbation
from stagewright.verification.record import Entry, Kind, ModuleInfo


class Recorder:
    """Hooks on the modules of one rank, and what they have recorded."""

    def __init__(self, models: Sequence[nn.Module], names: Sequence[Names], perturbation: Perturbation | None) -> None:
        self.entries: list[Entry] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        self.last_module = ""
        self._perturbation = perturbation
        self._modules: dict[str, nn.Module] = {}
        self._roots: set[int] = set()
        for model, mapping in zip(models, names, strict=True):
            found = list(plain_modules(model, mapping))
            self._roots.add(id(found[0][1]))
            for index, (name, module) in enumerate(found):
                self._modules[name if index or not self._modules else f"{name}#{len(self._roots)}"] = module
        self._handles: list[Any] = []
        self._passes: dict[int, int] = {}
        self._calls: dict[tuple[str, int], int] = {}
        self._pass = -1
        self._inside = 0
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._optimized: set[int] = set()
        self._keys: set[str] = set()

    def modules(self) -> dict[str, ModuleInfo]:
        """Describe the modules."""
        return {
            name: ModuleInfo(
                type=type(module).__name__,
                training=module.training,
                dropout=float(p) if isinstance(p := getattr(module, "p", 0.0), float) else 0.0,
            )
            for name, module in self._modules.items()
        }

    def start(self) -> None:
        """Record the state before the step and install the hooks."""
        self._record_state("parameter", "buffer")
        self._handles.append(register_optimizer_step_pre_hook(self._before_optimizer_step))
        for name, module in self._modules.items():
            before, after = self._forward_hooks(name, module)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=False))
        for owner, name, parameter in self._parameters():
            if parameter.requires_grad and parameter.is_leaf:
                hook = self._local_gradient_hook(owner, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self) -> None:
        """Record the state after the step."""
        for owner, name, parameter in self._parameters():
            if id(parameter) not in self._optimized and parameter.grad is not None:
                self._add("gradient", owner, name, parameter.grad)
        self._record_state("parameter after", "buffer after")

    def _parameters(self) -> list[tuple[str, str, nn.Parameter]]:
        """Return (module, name, parameter), each parameter once; further names of shared ones go to ``tied``."""
        first: dict[int, str] = {}
        parameters = []
        for owner, module in self._modules.items():
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{owner}.{name}".lstrip(".")
                if id(parameter) in first:
                    self.tied[full] = first[id(parameter)]
                else:
                    first[id(parameter)] = full
                    parameters.append((owner, name, parameter))
        return parameters

    def _record_state(self, parameters: Kind, buffers: Kind) -> None:
        for owner, name, parameter in self._parameters():
            self._add(parameters, owner, name, parameter)
        for owner, module in self._modules.items():
            for name, buffer in module.named_buffers(recurse=False):
                self._add(buffers, owner, name, buffer)

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for owner, name, parameter in self._parameters():
            if id(parameter) in held and id(parameter) not in self._optimized:
                self._optimized.add(id(parameter))
                if parameter.grad is not None:
                    self._add("gradient", owner, name, parameter.grad)

    def _local_gradient_hook(self, owner: str, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._add("local gradient", owner, name, parameter.grad)

        return hook

    def _forward_hooks(self, name: str, module: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
        is_root = id(module) in self._roots
        is_leaf = next(module.children(), None) is None

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if _in_backward():
                return None
            if is_root:
                if not self._inside:
                    self._pass = self._passes[id(module)] = self._passes.get(id(module), -1) + 1
                self._inside += 1
            self._pass = max(self._pass, 0)
            self.last_module = name
            call = self._calls.get((name, self._pass), 0)
            for path, value in _leaves({"args": args, "kwargs": kwargs}):
                known = self._outputs.get(id(value))
                source = known[1] if known is not None and known[0]() is value else ""
                self._add("input", name, path, value, call=call, source=source)
            if is_root and self._perturbation is not None:
                return self._perturbation.tree(args), self._perturbation.tree(kwargs)
            return None

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if _in_backward():
                return None
            if is_root:
                self._inside -= 1
            call = self._calls.get((name, self._pass), 0)
            self._calls[name, self._pass] = call + 1
            if is_leaf and self._perturbation is not None:
                output = self._perturbation.tree(output)
            for path, value in _leaves(output):
                key = self._add("output", name, path, value, call=call)
                self._outputs[id(value)] = (weakref.ref(value), key)
                if value.requires_grad and torch.is_grad_enabled():
                    gradient_hook = self._output_gradient_hook(name, path, call, is_leaf)
                    value.register_hook(gradient_hook)  # type: ignore[no-untyped-call]
            return output

        return before, after

    def _output_gradient_hook(self, name: str, path: str, call: int, is_leaf: bool) -> Callable[[torch.Tensor], Any]:
        forward_pass = self._pass

        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            if is_leaf and self._perturbation is not None:
                gradient = self._perturbation.tensor(gradient)
            self._add("output gradient", name, path, gradient, call=call, forward_pass=forward_pass)
            return gradient if self._perturbation is not None else None

        return hook

    def _add(
        self,
        kind: Kind,
        module: str,
        name: str,
        value: torch.Tensor,
        *,
        call: int = 0,
        forward_pass: int | None = None,
        source: str = "",
    ) -> str:
        """Keep a copy of a tensor in host memory; a second one of the same kind replaces the first."""
        at = self._pass if forward_pass is None and kind in ("input", "output") else (forward_pass or 0)
        key = "|".join((kind, module, name, str(at), str(call)))
        with torch.no_grad():
            local, layout = split_dtensor(value.detach())
            self.tensors[key] = local.to("cpu", copy=True).contiguous()
        if key not in self._keys:
            self._keys.add(key)
            order = len(self.entries)
            entry = Entry(
                key=key, kind=kind, module=module, name=name, order=order, forward_pass=at, call=call, source=source,
                layout=layout,
            )  # fmt: skip
            self.entries.append(entry)
        return key


def _leaves(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in a nested value with their paths; a tensor that is the whole value has an empty path."""
    leaves = pytree.tree_flatten_with_path(value)[0]
    return [
        ("".join(str(part) for part in path).replace("['args']", "args").replace("['kwargs']", "kwargs"), leaf)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    ]


def _in_backward() -> bool:
    """Whether autograd is running backward on this thread, as during recomputation."""
    return torch._C._current_graph_task_id() != -1
