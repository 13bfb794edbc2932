"""Hide the parameters and buffers of units from ``torch.export``.

Export makes every parameter and buffer of a model an input of its graph, which takes most of its time if there are
many. A graph of opaque units uses almost none of them. So the registries of all modules in units look empty to export.
If code between units reads one anyway (a tied weight, the dtype of the first parameter), the trace is repeated with
that module's visible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from torch import nn

_REGISTRIES = ("_parameters", "_buffers")
_Result = TypeVar("_Result")


class HiddenStateError(Exception):
    """Code between units read a parameter or buffer that was hidden."""


@dataclass(slots=True)
class HiddenState:
    """Which modules are hidden, and whether the model is running, so that reads of them count."""

    is_running: bool = False
    read: list[nn.Module] = field(default_factory=list)
    """Modules whose hidden parameters or buffers the model read."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Detect reads until the block ends."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False


class _HiddenRegistry(dict[str, Any]):
    """An empty dictionary in place of a module's parameters or buffers; reading a hidden one is an error."""

    def __init__(self, module: nn.Module, names: Collection[str], state: HiddenState) -> None:
        super().__init__()
        self.module = module
        self.names = names
        self.state = state

    def _fail(self) -> NoReturn:
        self.state.read.append(self.module)
        raise HiddenStateError(f"the code between units reads a parameter or buffer of {type(self.module).__name__}")

    def _check(self) -> None:
        if self.state.is_running:
            self._fail()

    def __contains__(self, name: object) -> bool:
        if name in self.names:
            self._check()
        return False

    def __getitem__(self, name: str) -> Any:
        if name in self.names:
            self._check()
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self.names:
            self._check()
        return default

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        self._fail()

    def __delitem__(self, name: str) -> NoReturn:
        self._fail()

    def __iter__(self) -> Iterator[str]:
        self._check()
        return super().__iter__()

    def __len__(self) -> int:
        self._check()
        return 0

    def keys(self) -> Any:
        self._check()
        return super().keys()

    def values(self) -> Any:
        self._check()
        return super().values()

    def items(self) -> Any:
        self._check()
        return super().items()


def run_with_hidden_state(units: Collection[nn.Module], run: Callable[[HiddenState], _Result]) -> _Result:
    """Call ``run`` while the state of ``units`` is hidden; call it again if the model reads what is hidden.

    First the modules that it read are shown; if it then reads others, all are.
    """
    modules = {module for unit in units for module in unit.modules()}
    shown: set[nn.Module] = set()
    while True:
        with _hidden(modules - shown) as state:
            try:
                result = run(state)
            except Exception:  # also another one, where the model's code caught the error of the read
                if not state.read:
                    raise
            else:
                if not state.read:
                    return result
        shown = set(state.read) if not shown else modules


@contextmanager
def _hidden(modules: Collection[nn.Module]) -> Iterator[HiddenState]:
    """Replace the registries of these modules until the block ends."""
    state = HiddenState()
    originals: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in modules:
            for name in _REGISTRIES:
                registry = vars(module).get(name)
                if registry and type(registry) is dict:
                    originals.append((module, name, registry))
                    vars(module)[name] = _HiddenRegistry(module, frozenset(registry), state)
        yield state
    finally:
        for module, name, registry in originals:
            vars(module)[name] = registry
