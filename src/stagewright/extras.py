"""Optional packages: which extra installs them, and one sentence where one is missing."""

from __future__ import annotations

import importlib

from stagewright.errors import MissingPackage

# Package → (extra, what needs it).
_EXTRAS = {
    "datasets": ("data", "downloading a data set"),
    "matplotlib": ("plots", "drawing a figure"),
    "PIL": ("data", "reading images"),
    "pyarrow": ("data", "reading and writing parquet files"),
    "sklearn": ("data", "the digits data set"),
    "transformers": ("hf", "this model"),
}


def require(package: str, purpose: str | None = None) -> None:
    """Raise MissingPackage with the command that installs a package, if it is missing."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        extra, default = _EXTRAS[package]
        raise MissingPackage(
            f"{purpose or default} needs the package {package}, which is not installed; "
            f"install it with: pip install 'stagewright[{extra}]'"
        ) from None
