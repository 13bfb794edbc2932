"""Options that several verbs share, declared once as the fields of a dataclass.

@with_groups
def profile(model: ModelName, options: ModelOptions)   ─►   stagewright profile MODEL --batch … --units …
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def with_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb with each dataclass among its parameters replaced by the fields, which become options."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options: list[tuple[str, Any, Any]] = []  # name, annotation, default
    for parameter in inspect.signature(verb).parameters.values():
        if parameter.name in groups:
            kinds = get_type_hints(groups[parameter.name], include_extras=True)
            options += [(field.name, kinds[field.name], field.default) for field in fields(groups[parameter.name])]
        else:
            options.append((parameter.name, hints[parameter.name], parameter.default))

    @wraps(verb)
    def command(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        verb(**given)

    command.__annotations__ = {name: annotation for name, annotation, _ in options}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, annotation, default in options
        ]
    )
    return command
