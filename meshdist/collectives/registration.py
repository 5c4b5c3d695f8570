"""Register public collectives: fast path, profiler record, and graph break for torch.compile.

torch's profiler shows the collective's name, group and tensor bytes (none for objects):
``meshdist::all_reduce axis 'tp' of DeviceMesh(dp=2, tp=2) 4096 bytes``. torch.compile breaks its
graph at the call.
"""

from __future__ import annotations

import inspect
import linecache
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.autograd.profiler as profiler
from torch.autograd import forward_ad

from ..backends.native_core import core
from ..backends.simulated.scheduler import find_rank_here
from ..backends.started_work import StartedWork
from ..backends.work import Work
from ..bootstrap.world import live_lists_of_worlds
from ..checking.call_sites import end_here, run_unnested
from ..errors import MeshdistError
from ..groups.process_group import ProcessGroup, resolve_group
from ..operation_table import OBJECT_OPERATIONS, OPERATIONS, Role
from ..runtime.graph_breaks import untraced

_F = TypeVar("_F", bound=Callable[..., Any])

Watcher: TypeAlias = Callable[
    [Callable[..., Any], Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any
]
"""A function that runs a call, from a collective, its implementation and the arguments."""

watchers: list[Watcher] = []
"""The function that runs the calls of public collectives inside ``md.typed``; empty outside."""


def collective(
    *,
    has_fast_path: bool = False,
    missing: tuple[int | None, ...] = (),
    stays_off_streams: bool = False,
) -> Callable[[_F], _F]:
    """Return a decorator that makes a function a public collective.

    Args:
        has_fast_path: whether ``FastPath`` implements the collective for the parameters of its
            operation spec. It is used if other arguments have their defaults, and may decline.
        missing: the default rank if the call has none; empty if a rank is required.
        stays_off_streams: skip the fast path in a group with a stream backend.
    """

    def mark(function: _F) -> _F:
        """Return ``function`` with fast path, profiler record and watchers."""
        name, slow = function.__name__, _run_slowly(function)
        if has_fast_path and core is not None:
            given = OPERATIONS[name].parameters
            parameters = inspect.signature(function).parameters
            root = next((each.name for each in given if each.role in (Role.ROOT, Role.PEER)), "")
            indices = {parameter: index for index, parameter in enumerate(parameters)}
            special = "group", "async_op", root, f"group_{root}"
            make = partial(
                core.operation_call,
                _launch_environment(),
                name,
                defaults=[parameter.default for parameter in parameters.values()],
                taken=[indices[parameter.name] for parameter in given],
                places=tuple(indices.get(each, -1) for each in special),
                missing=missing,
                stays_off_streams=stays_off_streams,
                function=function,
                slow=slow,
            )
            unwatched = make(watchers=[], watched=slow)
            run = make(watchers=watchers, watched=_watch(function, unwatched))
        else:
            watched = _watch(function, slow)

            def run(*args: Any) -> Any:
                return (watched if watchers else slow)(*args)

        return cast(_F, untraced(wraps(function)(_as_written(function, run))))

    return mark


_CALL = """\
def {name}({parameters}):
    try:
        return run({arguments})
    except MeshdistError as error:
        __tracebackhide__ = True
        end_here(error)
        raise
"""


def _as_written(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with ``function``'s parameters, which it passes to ``run`` in order."""
    # Generate the source, like dataclasses: a function of ``*args`` would cost 0.15 microseconds
    # more, a sixth of a small call.
    name, signature = function.__name__, inspect.signature(function)
    parts = list(signature.parameters)
    text = _CALL.format(name=name, parameters=", ".join(parts), arguments=", ".join(parts))
    # Name a file of this package, so that the frame does not count as the program's.
    file = os.path.join(os.path.dirname(__file__), f"<call of {name}>")
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names: dict[str, Any] = {"run": run, "MeshdistError": MeshdistError, "end_here": end_here}
    exec(compile(text, file, "exec"), names)
    made: Callable[..., Any] = names[name]
    made.__defaults__ = function.__defaults__
    return made


def _watch(function: Callable[..., Any], unwatched: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that passes calls to ``watchers[0]``, which runs ``unwatched``."""

    def watched(*args: Any) -> Any:
        return watchers[0](function, unwatched, args, {})

    return watched


def _run_slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs ``function`` as a collective, recorded by torch's profiler."""
    name = function.__name__

    def run(*args: Any) -> Any:
        # Reading the flag takes 20 ns; a record_function takes 10 us even without a profiler.
        if profiler._is_profiler_enabled:
            with recorded(_op_name(function, args)):
                return run_unnested(name, function, *args)
        return run_unnested(name, function, *args)

    return run


@cache
def _launch_environment() -> Any:
    """Return the modules and variables that the native core reads before each call."""
    contexts, group_of_process = live_lists_of_worlds()
    return core.LaunchEnvironment(
        profiler=vars(profiler),
        forward_ad=vars(forward_ad),
        contexts=contexts,
        group_of_process=group_of_process,
        group_type=ProcessGroup,
    )


# Also break graphs at the methods of what async collectives return.
for _kind in (Work, StartedWork):
    for _name, _method in inspect.getmembers(_kind, inspect.isfunction):
        if not _name.startswith("_"):
            untraced(_method)


@contextmanager
def recorded(op_name: str) -> Iterator[None]:
    """Record the block in the active profiler, labeled with the rank if it is simulated."""
    # A profiler around ``simulate`` watches only the thread that called it, so that thread begins
    # and ends the record.
    rank = find_rank_here()
    if rank is None or not rank.scheduler.is_profiled:
        with profiler.record_function(op_name):
            yield
        return
    record = profiler.record_function(f"rank {rank.index}: {op_name}")
    rank.scheduler.call_outside(record.__enter__)
    try:
        yield
    finally:
        rank.scheduler.call_outside(partial(record.__exit__, None, None, None))


def _op_name(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return the profiler label of a call: collective, group, bytes."""
    words = [f"meshdist::{function.__name__}"]
    try:
        arguments = inspect.signature(function).bind(*args).arguments
        words.append(resolve_group(_group(arguments)).name)
    except (TypeError, MeshdistError):  # the call itself raises
        return words[0]
    if function.__name__ not in OBJECT_OPERATIONS:
        words.append(f"{sum(map(num_bytes, arguments.values()))} bytes")
    return " ".join(words)


def _group(arguments: Mapping[str, Any]) -> Any:
    """Return the argument ``group``, or the group of the first operation in a list, or None."""
    if "group" in arguments:
        return arguments["group"]
    for value in arguments.values():
        if isinstance(value, list) and value and hasattr(value[0], "group"):
            return value[0].group
    return None


def num_bytes(value: Any) -> int:
    """Return the bytes of a tensor, an array or a list of these; 0 for other objects."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(num_bytes, value))
    if hasattr(value, "tensor"):  # one operation of a batch
        return num_bytes(value.tensor)
    return int(getattr(value, "nbytes", 0))
