"""Imported first by the fork server: the server ends with the launcher, and its workers with it, at once.

Without it the server notices a killed launcher only when it has finished its imports.
"""

from __future__ import annotations

import os

from stagewright.engine.worker.process import LAUNCHER_PID, end_with_parent

_launcher = os.environ.pop(LAUNCHER_PID, None)
if _launcher is not None:
    end_with_parent(int(_launcher))
