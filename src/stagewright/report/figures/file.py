"""Writing figures: the suffix chooses the format, and a file is written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from stagewright.errors import UsageError

_SUFFIXES = (".png", ".svg", ".pdf")


def check_figure_path(path: str | Path) -> Path:
    """Check that a figure can be written to a path; call it before long work."""
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"can't draw {str(path)!r}: its suffix is {path.suffix!r}, use one of {', '.join(_SUFFIXES)}")
    if path.is_dir():
        raise UsageError(f"can't write {str(path)!r}: that is a folder; name a file in it, like {path / 'figure.png'}")
    if not path.parent.is_dir():
        raise UsageError(f"can't write {str(path)!r}: there is no folder {str(path.parent)!r}; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"can't write {str(path)!r}: the folder {str(path.parent)!r} can't be written to")
    return path


def write_figure(figure: Figure, path: str | Path) -> Path:
    """Write the figure as .png, .svg or .pdf; an existing file is replaced only when the new one is complete."""
    path = check_figure_path(path)
    suffix = path.suffix.lower()
    # Without dates and random identifiers, equal figures give equal files.
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        with matplotlib.rc_context({"svg.hashsalt": "stagewright", "svg.fonttype": "none", "pdf.fonttype": 42}):
            figure.savefig(temporary, format=suffix[1:], metadata=metadata)
        # A temporary file is readable by its owner only; a figure gets the default permissions.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"can't write {str(path)!r}: {reason}; choose another file with --plot") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return path
