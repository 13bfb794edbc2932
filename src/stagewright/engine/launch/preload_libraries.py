"""Imported last by the fork server: libraries that many models use.

One that can't be imported (transformers, beside a torchvision that does not match torch) must not end the server: its
error belongs to the models that need it.
"""

from __future__ import annotations

import contextlib
import importlib

_LIBRARIES = ("transformers.modeling_utils",)

for _name in _LIBRARIES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
