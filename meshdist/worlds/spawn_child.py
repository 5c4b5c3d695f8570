"""Run one rank of ``spawn``: load the call, run it and send the result.

Imports neither torch nor numpy, because the function may need neither.
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
    """Return whether this spawned process is importing its parent's main module."""
    return _is_loading


def serve_rank(call: int, answer: int, parent: int) -> None:
    """Run the call from descriptor ``call`` and write to ``answer``; exit with ``parent``."""
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
        sys.last_value = message[1]  # so that exit handlers do not take this for a normal exit
    gc.freeze()  # else the interpreter looks for cycles among all of torch's objects: half a second
    sys.exit(code)


def _load(call: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    global _is_loading
    # All ranks share the file and its position, so read it without moving the position.
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
