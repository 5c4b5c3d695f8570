"""The native core (``native/``), where it was built: on Linux, where there is a compiler."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

__all__ = ["core"]

core: Any = None
"""The module, or None."""

with suppress(ImportError):
    core = import_module(".native", __package__)
