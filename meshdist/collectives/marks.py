"""The marks of a public verb: its fast path, its place in a profile, the end of a compiled graph.

They cost a call next to nothing while they are not in use.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from threading import get_ident, main_thread
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.autograd.profiler as profiler
from torch.autograd import forward_ad

from ..checking.program import end_here, run_unnested, under_way
from ..errors import MeshdistError
from ..groups.process_group import ProcessGroup, resolve_group
from ..runtime.untraced import untraced
from ..verb_table import OBJECT_VERBS, VERBS, Role
from ..wires.simulated.scheduler import find_rank_here
from ..wires.work import Work

__all__ = ["Watcher", "num_bytes", "recorded", "verb", "watchers"]

_F = TypeVar("_F", bound=Callable[..., Any])
_FindPeer = Callable[[ProcessGroup, "int | None", "int | None", str, str], "int | None"]

Watcher: TypeAlias = Callable[
    [Callable[..., Any], Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any
]
"""Is given a verb as it is written, what runs it, and the arguments of a call; runs it."""

watchers: list[Watcher] = []
"""Functions that run the calls of public verbs in their place: one while a typed context is open in
this process, else none."""

_WATCH = """\
        if watchers:
            return watchers[0](function, unwatched, ({arguments},), {{}})
"""
_STARTING = """
        if async_op is not False and path is not None:
            path = path.starting if async_op is True else None"""
_FAST_CALL = """
def {name}({parameters}):
    try:
        target = group if type(group) is ProcessGroup else resolve_group(group)
{watch}        if profiler._is_profiler_enabled:
            with recorded(title(function, ({arguments},), {{}})):
                return run_unnested({name!r}, function, {arguments})
        path = target.fast_path{starting}
        if path is not None and forward_ad._current_level < 0{conditions}:
            found = path.{name}({given})
            if found is not False:
                return found
        if under_way[0] is None and get_ident() == main_thread:  # else as run_unnested says
            try:
                under_way[0] = {name!r}
                return function({arguments})
            finally:
                under_way[0] = None
        return run_unnested({name!r}, function, {arguments})
    except MeshdistError as error:
        __tracebackhide__ = True
        end_here(error)
        raise
"""


def verb(
    *,
    has_fast_path: bool = False,
    peer: _FindPeer | None = None,
    when: Callable[[ProcessGroup], bool] | None = None,
) -> Callable[[_F], _F]:
    """Mark a function as a public verb.

    While a profiler of torch's is on, a call appears in it under the verb's name, its group and
    the bytes of all tensors it was given (none for a verb on objects): ``meshdist::all_reduce axis
    'tp' of DeviceMesh(dp=2, tp=2) 4096 bytes``. torch.compile ends its graph before the call, runs
    the call as it is, and begins another graph behind it.

    Args:
        has_fast_path: whether ``FastPath`` has the verb, too. The method there is given the
            parameters of the verb's row. It is tried where all others have their defaults, and the
            verb follows where it declines. Its ``group`` is the ProcessGroup that is meant.
        peer: finds the root or peer that the verb's parameters name, as ``get_peer`` does.
        when: whether a group's fast path may be tried.
    """

    def mark(function: _F) -> _F:
        """``function`` in its own name, with what the mark adds."""
        added = _with_fast_path(function, peer, when) if has_fast_path else _plain(function)
        call = wraps(function)(added)
        return cast(_F, untraced(call))

    return mark


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if watchers:
                return watchers[0](function, unwatched, args, kwargs)
            return unwatched(*args, **kwargs)
        except MeshdistError as error:
            __tracebackhide__ = True
            end_here(error)
            raise

    def unwatched(*args: Any, **kwargs: Any) -> Any:
        # Reading the flag takes 20 ns; a record_function takes 10 us even where no profiler runs.
        if profiler._is_profiler_enabled:
            with recorded(_title(function, args, kwargs)):
                return run_unnested(name, function, *args, **kwargs)
        return run_unnested(name, function, *args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=name)
    return call


def _with_fast_path(
    function: Callable[..., Any],
    peer: _FindPeer | None,
    when: Callable[[ProcessGroup], bool] | None,
) -> Callable[..., Any]:
    """A function with the parameters of ``function`` that tries the fast path first.

    It is made from text, as dataclasses make theirs: one that takes any arguments would cost 0.2
    microseconds more, a tenth of the whole call. Its parameters are positional or by name.
    """
    name, parameters = function.__name__, inspect.signature(function).parameters
    given = VERBS[name].parameters
    role = next((one.name for one in given if one.role in (Role.ROOT, Role.PEER)), "")
    passed = {"group", "async_op", f"group_{role}", *(one.name for one in given)}
    conditions = [f"{one} is default_{one}" for one in parameters if one not in passed]
    namespace: dict[str, Any] = {
        **{f"default_{one.name}": one.default for one in parameters.values()},
        "MeshdistError": MeshdistError,
        "ProcessGroup": ProcessGroup,
        "end_here": end_here,
        "run_unnested": run_unnested,
        "find_peer": peer,
        "forward_ad": forward_ad,
        "get_ident": get_ident,
        "main_thread": main_thread().ident,
        "under_way": under_way,
        "function": function,
        "profiler": profiler,
        "recorded": recorded,
        "resolve_group": resolve_group,
        "title": _title,
        "watchers": watchers,
        "when": when,
    }
    found_peer = f"find_peer(target, {role}, group_{role}, {name!r}, {role!r})"
    arguments = ", ".join("target" if one == "group" else one for one in parameters)
    parts = {
        "name": name,
        "parameters": ", ".join(parameters),
        "arguments": arguments,
        "conditions": "".join(
            f" and {one}" for one in [*conditions, *(["when(target)"] if when else [])]
        ),
        "starting": _STARTING if "async_op" in parameters else "",
        "given": ", ".join(found_peer if one.name == role else one.name for one in given),
    }
    # A file of this package, so that the frame is none of the program's.
    file = os.path.join(os.path.dirname(__file__), f"<fast path of {name}>")
    for watch in ("", _WATCH.format(arguments=arguments)):
        exec(compile(_FAST_CALL.format(watch=watch, **parts), file, "exec"), namespace)
        made = namespace[name]
        made.__defaults__ = function.__defaults__
        namespace.setdefault("unwatched", made)
    return cast(Callable[..., Any], made)


# What async verbs hand out is part of them.
for _name, _method in inspect.getmembers(Work, inspect.isfunction):
    if not _name.startswith("_"):
        untraced(_method)


@contextmanager
def recorded(title: str) -> Iterator[None]:
    """Show what runs inside in the profiler that is on; in one around ``simulate`` as its rank's.

    That one watches the thread that has called ``simulate`` alone: it begins and ends the record.
    """
    rank = find_rank_here()
    if rank is None or not rank.scheduler.is_profiled:
        with profiler.record_function(title):
            yield
        return
    record = profiler.record_function(f"rank {rank.index}: {title}")
    rank.scheduler.call_outside(record.__enter__)
    try:
        yield
    finally:
        rank.scheduler.call_outside(partial(record.__exit__, None, None, None))


def _title(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The name of one call in a profile."""
    words = [f"meshdist::{function.__name__}"]
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        words.append(resolve_group(_group(arguments)).name)
    except (TypeError, MeshdistError):  # the call itself will say what is wrong with it
        return words[0]
    if function.__name__ not in OBJECT_VERBS:
        words.append(f"{sum(map(num_bytes, arguments.values()))} bytes")
    return " ".join(words)


def _group(arguments: Mapping[str, Any]) -> Any:
    """The argument that names the group; operations in a list name it themselves."""
    if "group" in arguments:
        return arguments["group"]
    for value in arguments.values():
        if isinstance(value, list) and value and hasattr(value[0], "group"):
            return value[0].group
    return None


def num_bytes(value: Any) -> int:
    """The bytes of a tensor, of an array of another library, or of all in a list."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(num_bytes, value))
    if hasattr(value, "tensor"):  # one operation of a batch
        return num_bytes(value.tensor)
    return int(getattr(value, "nbytes", 0))
