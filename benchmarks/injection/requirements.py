"""What a machine lacks for a kind of fault: root, a file system, a command, a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from injection import KINDS, small_disk
from namespaces import two_machines

_COMMANDS = {"slow disk": "fsfreeze", "clock jump": "cc", "unwritable folder": "chattr"}


def find_missing() -> dict[str, str]:
    """Return the kinds of faults that can't be injected on this machine, with the reason, by trying."""
    reasons = {kind: _missing(kind) for kind in KINDS}
    return {kind: reason for kind, reason in reasons.items() if reason}


def _missing(name: str) -> str:
    kind = KINDS[name]
    if kind.needs_root and os.geteuid() != 0:
        return "needs root"
    command = _COMMANDS.get(name, "ip" if kind.where == "machines" else "")
    if command and shutil.which(command) is None:
        return f"there is no {command}"
    try:
        if kind.where == "machines":
            with two_machines():
                pass
        if kind.disk:
            with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder) / "disk", kind.disk) as root:
                if name == "unwritable folder":
                    for flag in ("+i", "-i"):
                        subprocess.run(["chattr", flag, root], check=True, capture_output=True)
                if name == "slow disk":
                    for flag in ("--freeze", "--unfreeze"):
                        subprocess.run(["fsfreeze", flag, root], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", None) or b""
        return " ".join([str(error), told.decode(errors="replace").strip()]).strip()
    return ""
