"""What the command line itself refuses (an option that is not there, a number out of its range), as one sentence.

    Input should be greater than or equal to 1   ─►   --epochs 0: must be at least 1; `stagewright train --help` …

The value that was typed and its whole range are told, which typer leaves out.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_refusal", "refusal"]

_KINDS = {"int": "a whole number", "float": "a number", "bool": "yes or no"}


def is_refusal(error: Exception) -> bool:
    """Whether typer raised it for what was typed; its classes have moved between its versions."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def refusal(error: Any) -> str:
    """The sentence, with where to read on."""
    context = getattr(error, "ctx", None)
    asked = getattr(context, "command_path", None) or "stagewright"
    told = _of_value(error) or _plain(error.format_message())
    return f"{told}{'' if told.endswith('?') else ';'} `{asked} --help` shows what it takes"


def _of_value(error: Any) -> str | None:
    """Of a value that does not pass: which one, and what would."""
    option, cause = getattr(error, "param", None), error.__cause__
    if option is None or not hasattr(cause, "errors"):
        return None
    first = cause.errors()[0]
    kind = _KINDS.get(str(first["type"]).partition("_")[0])
    wanted = ", ".join(word for word in (kind, _range(option)) if word) or _plain(str(first["msg"]))
    name = option.opts[0] if str(option.opts[0]).startswith("-") else getattr(option, "metavar", None) or option.name
    return f"{name} {first['input']}: must be {wanted}"


def _range(option: Any) -> str:
    least, most = getattr(option, "min", None), getattr(option, "max", None)
    if least is not None and most is not None:
        return f"from {least:g} to {most:g}"
    if least is not None:
        return f"at least {least:g}"
    return "" if most is None else f"at most {most:g}"


def _plain(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:]
