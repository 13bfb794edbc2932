"""Errors of the command line itself (an unknown option, a number out of range) as one sentence.

    Input should be greater than or equal to 1   ─►   --epochs 0: must be at least 1; `stagewright train --help` …

The sentence has the value that was typed and its whole range, which typer leaves out.
"""

from __future__ import annotations

from typing import Any

_KINDS = {"int": "a whole number", "float": "a number", "bool": "yes or no"}


def is_usage_error(error: Exception) -> bool:
    """Return whether typer raised the error for what was typed; its classes have moved between its versions."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def usage_sentence(error: Any) -> str:
    """Return the error as one sentence that ends with where to read more."""
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", None) or "stagewright"
    sentence = _value_sentence(error) or _lower_first(error.format_message())
    return f"{sentence}{'' if sentence.endswith('?') else ';'} see `{command} --help`"


def _value_sentence(error: Any) -> str | None:
    """Name the option with a wrong value, and what it takes."""
    option, cause = getattr(error, "param", None), error.__cause__
    if option is None or not hasattr(cause, "errors"):
        return None
    first = cause.errors()[0]
    kind = _KINDS.get(str(first["type"]).partition("_")[0])
    wanted = ", ".join(word for word in (kind, _range(option)) if word) or _lower_first(str(first["msg"]))
    name = option.opts[0] if str(option.opts[0]).startswith("-") else getattr(option, "metavar", None) or option.name
    return f"{name} {first['input']}: must be {wanted}"


def _range(option: Any) -> str:
    low, high = getattr(option, "min", None), getattr(option, "max", None)
    if low is not None and high is not None:
        return f"from {low:g} to {high:g}"
    if low is not None:
        return f"at least {low:g}"
    return "" if high is None else f"at most {high:g}"


def _lower_first(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:]
