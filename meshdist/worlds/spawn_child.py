"""The other side of ``spawn``: the whole life of a process that it started.

Imports neither torch nor numpy, which the function to call may not need.
"""

from __future__ import annotations

import gc
import io
import multiprocessing.spawn
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from ..launching.orphan_reaper import end_with_parent

_is_loading = False


def is_loading_main() -> bool:
    """Return whether this process was spawned and is importing its parent's main module now."""
    return _is_loading


def serve_rank(call: int, answer: int, parent: int) -> None:
    """Load the call from descriptor ``call``, run it, write to ``answer``; die with ``parent``."""
    end_with_parent(parent)
    for descriptor in (call, answer):
        os.set_inheritable(descriptor, False)
    code = 0
    is_loading = True
    try:
        fn, args = _load(call)
        is_loading = False
        message = ("result", fn(*args))
    except SystemExit as ending:
        if ending.code in (None, 0):
            message = ("result", None)
        else:
            code = ending.code if isinstance(ending.code, int) else 1
            message = _failure(ending, is_loading)
    except BaseException as failure:
        code = 1
        message = _failure(failure, is_loading)
    try:
        data = cloudpickle.dumps(message)
    except Exception as failure:
        code = 1
        kind = type(message[1]).__name__
        text = f"the result, a {kind}, cannot be sent: {type(failure).__name__}: {failure}"
        data = cloudpickle.dumps(("failure", (time.monotonic(), None, text, False)))
    with open(answer, "wb") as pipe:
        pipe.write(data)
    if code:
        sys.last_value = message[1]  # so that nothing at exit takes this for an end in good order
    gc.freeze()  # else the interpreter looks for cycles among all of torch's objects: half a second
    sys.exit(code)


def _load(call: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    global _is_loading
    # All ranks share one file, hence one position: it is read from a place of one's own.
    file = io.BytesIO(os.pread(call, os.fstat(call).st_size, 0))
    os.close(call)
    _is_loading = True
    try:
        multiprocessing.spawn.prepare(pickle.load(file))
        fn, args = pickle.load(file)
    finally:
        _is_loading = False
    return fn, args


def _failure(exception: BaseException, is_loading: bool) -> tuple[str, Any]:
    moment = time.monotonic()
    text = traceback.format_exc()
    try:
        pickle.loads(cloudpickle.dumps(exception))
    except Exception:
        return "failure", (moment, None, text, is_loading)
    return "failure", (moment, exception, text, is_loading)
