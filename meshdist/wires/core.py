"""The native core (``native/``), where it was built: on Linux, where there is a compiler."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from ..error_text import explain

__all__ = ["core"]

core: Any = None
"""The module, or None."""

try:
    core = import_module(".native", __package__)
except ImportError:
    _root = Path(__file__).resolve().parents[2]
    # Python finds the sources of a clone before the installed package where it starts in the clone.
    _is_clone = (_root / "CMakeLists.txt").is_file() and (_root / "native").is_dir()
    if _is_clone and sys.platform == "linux" and multiprocessing.parent_process() is None:
        warnings.warn(
            explain(
                "meshdist comes from its sources, without a native core: the ranks of a host talk "
                "over Gloo, which is slower, and messages are not compared",
                found=str(_root / "meshdist"),
                fix="build it by `pip install -e .`, or start where the installed package is found",
            ),
            stacklevel=2,
        )
