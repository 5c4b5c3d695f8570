"""Import the native core (``native/``), if built, and its codes of dtypes and reductions.

It needs Linux and a compiler.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from importlib import import_module
from pathlib import Path
from threading import main_thread
from typing import Any

import torch

from ..checking.call_sites import under_way
from ..dtypes import DTYPES
from ..error_text import explain
from ..reduce_ops import PLAIN_OPS

core: Any = None
"""The module, or None."""

try:
    core = import_module(".native", __package__)
    core.note_operations_in(under_way, main_thread().ident)
except ImportError:
    _root = Path(__file__).resolve().parents[2]
    # Started in a clone, Python finds the sources before the installed package.
    _is_clone = (_root / "CMakeLists.txt").is_file() and (_root / "native").is_dir()
    if _is_clone and sys.platform == "linux" and multiprocessing.parent_process() is None:
        warnings.warn(
            explain(
                "meshdist is imported from its source folder, without the native core: ranks of "
                "one host use Gloo, which is slower, and messages are not checked for mismatches",
                found=str(_root / "meshdist"),
                fix="build it with `pip install -e .`, or start Python in another folder",
            ),
            stacklevel=2,
        )

_known: dict[str, int] = {} if core is None else core.DTYPES
DTYPE_CODES = {dtype: _known[row.name] for dtype, row in DTYPES.items() if row.name in _known}
"""The core's code of each dtype that it knows; others are sent as bytes."""

REDUCTION_CODES: dict[tuple[torch.dtype, int], tuple[int, int]] = {
    (dtype, op.value): (code, core.OPS[op.name])
    for op in PLAIN_OPS
    for dtype, code in DTYPE_CODES.items()
    if op.name in core.OPS and core.can_reduce(code, core.OPS[op.name])
}
"""The core's codes for each dtype and the number of each reduction that it supports."""
