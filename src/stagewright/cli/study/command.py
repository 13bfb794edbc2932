"""Generate a study's command from its declared options.

Options (frozen dataclass) ─► signature with typer options and help ─► typed values ─► parsed options of the study
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from stagewright.api.inputs import parse_devices
from stagewright.cli import options as cli_options
from stagewright.cli.study.conduct import conduct
from stagewright.studies.framework.options import OptionInfo, declared_options, help_of
from stagewright.studies.runner.load import options_class

_execution_option = cli_options.panel("Execution")
_SHARED: dict[str, tuple[Any, Any]] = {
    "quick": (Annotated[bool, _execution_option("--quick", help="Small sizes: about 3 minutes on 2 cores.")], False),
    "resume": (
        Annotated[
            Path | None,
            _execution_option(
                "--continue",
                metavar="DIR",
                help="Continue the study in this folder with its options, and repeat the parts that failed.",
                show_default=False,
            ),
        ],
        None,
    ),
    "restart": (
        Annotated[bool, _execution_option("--restart", help="Start a new study, even if one was interrupted.")],
        False,
    ),
    "root": (
        Annotated[
            Path,
            _execution_option(
                "--root", "--output-dir", metavar="DIR", help="Where results go; a folder for each study."
            ),
        ],
        Path("studies"),
    ),
    "json": (cli_options.Json, False),
}
"""Options of every study: annotation and default."""


def study_command(name: str) -> Callable[..., None]:
    """Build the function of `stagewright study NAME`: its help is the docstring of the study's options."""
    options = options_class(name)
    declared = declared_options(options)

    def command(context: typer.Context, **typed: Any) -> None:
        shared = {option: typed.pop(option) for option in _SHARED}
        conduct(context, options, lambda: _parse(declared, typed), **shared)

    annotations = {name: _annotation(options, name, info) for name, (_, info) in declared.items()}
    defaults: dict[str, Any] = dict.fromkeys(annotations)
    annotations |= {name: annotation for name, (annotation, _) in _SHARED.items()}
    defaults |= {name: default for name, (_, default) in _SHARED.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature(
        [
            inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            *(
                inspect.Parameter(name, keyword, default=defaults[name], annotation=annotation)
                for name, annotation in annotations.items()
            ),
        ]
    )
    command.__name__, command.__doc__ = name, options.__doc__
    command.__annotations__ = {"context": typer.Context, **annotations, "return": None}
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def _annotation(options: type, name: str, info: OptionInfo) -> Any:
    """Build the typer annotation of one option; it is None where the user does not give it."""
    limits: dict[str, Any] = {} if info.minimum is None else {"min": info.minimum}
    return Annotated[
        info.typed | None,
        typer.Option(
            info.flag or f"--{name.replace('_', '-')}",
            help=help_of(options, name).replace("[", "\\["),
            metavar=info.metavar or _choices(info),
            rich_help_panel=info.panel,
            show_default=False,
            **limits,
        ),
    ]


def _choices(info: OptionInfo) -> str | None:
    """Write the words of an option for its help: "even|client,…"."""
    return "|".join(info.choices) + (",…" if info.parse is not None else "") if info.choices else None


def _parse(declared: Mapping[str, tuple[Any, OptionInfo]], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Turn typed values into values of the options' fields; None stays None."""
    given: dict[str, Any] = {}
    for name, (_, info) in declared.items():
        value = typed[name]
        if value is not None and name == "devices":
            value = parse_devices(value)
        elif value is not None and info.parse is not None:
            value = info.parse(value)
        values = (value,) if not info.also else (None,) * (1 + len(info.also)) if value is None else value
        given |= dict(zip((name, *info.also), values, strict=True))
    return given
