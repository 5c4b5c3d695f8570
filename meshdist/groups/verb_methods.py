"""The methods of torch's process groups: ``group.allreduce(x)`` is ``all_reduce(x, group=group)``.

Each takes every form that torch's own method has: a bare tensor or a list of one, torch's options
or their fields; it starts the verb and returns its Work. What a verb does, and what it raises, is
described there. Roots and peers are counted in the group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple

from ..arguments import check_timeout
from ..errors import ArgumentError
from ..reduce_ops import ReduceOp

__all__ = ["Asked", "VerbMethods", "only", "only_list", "read_options", "verbs"]

verbs: dict[str, Callable[..., Any]] = {}
"""The public verbs by name; ``collectives``, which lies above, enters them."""


class Asked(NamedTuple):
    """How a call is to be done.

    Args:
        timeout: how long it may take, in place of the group's; None is the group's.
        root: of a verb that has one, counted in the group.
    """

    is_async: bool = True
    timeout: timedelta | None = None
    op: Any = ReduceOp.SUM
    root: int = 0
    device_ids: list[int] | None = None


_NOTHING = Asked()


def _method(*fields: str, **also: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method that can be called in every form that torch's own has.

    Args:
        fields: those of ``Asked`` that may be given behind the tensors, in the place of options.
        also: what another of torch's forms calls an argument, and what it is called here.
    """

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(function).parameters.values())[2:]
        names = [one.name for one in own]

        @wraps(function)
        def called(self: VerbMethods, *given: Any, **named: Any) -> Any:
            if not named:  # as torch's front end calls it
                asked = read_options(fields, *given[len(names) :])
                return function(self, asked, *given[: len(names)])
            named = {also.get(name, name): value for name, value in named.items()}
            tensors = {name: named.pop(name) for name in names if name in named}
            asked = read_options(fields, *given[len(names) :], **named)
            return function(self, asked, *given[: len(names)], **tensors)

        more = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
            for name in ("opts", *fields)
        ]
        self_alone = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        called.__signature__ = inspect.Signature([*self_alone, *own, *more])  # type: ignore[attr-defined]
        return called

    return made


def read_options(fields: tuple[str, ...], *given: Any, opts: Any = None, **named: Any) -> Asked:
    """How a call is to be done, in either form: torch's options, or the values of ``fields``."""
    if given and hasattr(given[0], "asyncOp"):
        opts, *given = given  # type: ignore[assignment]
    elif opts is not None and not hasattr(opts, "asyncOp"):
        opts, given = None, (opts, *given)
    if len(given) > len(fields):
        raise TypeError(
            f"{len(given)} arguments where there are {len(fields)}: {', '.join(fields)}"
        )
    asked = _NOTHING
    if given or named:
        values = {**dict(zip(fields, given, strict=False)), **named}
        asked = Asked(**{name: x for name, x in values.items() if x is not None})
        check_timeout(asked.timeout)
    if opts is None:
        return asked
    timeout, op = opts.timeout, getattr(opts, "reduceOp", asked.op)
    return asked._replace(
        is_async=opts.asyncOp,
        timeout=timeout if timeout > timedelta(0) else None,  # torch's sign for "none" is negative
        op=asked.op if op == asked.op else op,  # its plain kind is known fast
        root=getattr(opts, "rootRank", asked.root),
        device_ids=getattr(opts, "device_ids", None) or None,
    )


class VerbMethods:
    """The verbs as methods of a process group; a class of groups says how each is done."""

    rank: Any
    _start: Any
    _send: Any
    _recv: Any

    @_method("op", "timeout", tensor="tensors")
    def allreduce(self, asked: Asked, tensors: Any) -> Any:
        """``all_reduce``; the call of torch's comm hooks."""
        return self._start("all_reduce", asked, only(tensors, "all_reduce"), asked.op)

    @_method()
    def allreduce_coalesced(self, asked: Asked, tensors: Any) -> Any:
        """``all_reduce_coalesced``."""
        return self._start("all_reduce_coalesced", asked, tensors, asked.op)

    @_method("root", "op", "timeout", tensor="tensors")
    def reduce(self, asked: Asked, tensors: Any) -> Any:
        """``reduce``."""
        tensor = only(tensors, "reduce")
        return self._start("reduce", asked, tensor, op=asked.op, group_dst=asked.root)

    @_method("op", "timeout", output="output_tensors", input="input_tensors")
    def reduce_scatter(self, asked: Asked, output_tensors: Any, input_tensors: Any) -> Any:
        """``reduce_scatter``."""
        output = only(output_tensors, "reduce_scatter")
        parts = only_list(input_tensors, "reduce_scatter")
        return self._start("reduce_scatter", asked, output, parts, asked.op)

    @_method()
    def reduce_scatter_single(self, asked: Asked, outputTensor: Any, inputTensor: Any) -> Any:
        """``reduce_scatter_tensor``."""
        return self._start("reduce_scatter_tensor", asked, outputTensor, inputTensor, asked.op)

    @_method("root", "timeout", tensor="tensors")
    def broadcast(self, asked: Asked, tensors: Any) -> Any:
        """``broadcast``."""
        return self._start("broadcast", asked, only(tensors, "broadcast"), group_src=asked.root)

    @_method("timeout", input_tensor="input_tensors")
    def allgather(self, asked: Asked, output_tensors: Any, input_tensors: Any) -> Any:
        """``all_gather``."""
        into, tensor = only_list(output_tensors, "all_gather"), only(input_tensors, "all_gather")
        return self._start("all_gather", asked, into, tensor)

    @_method()
    def allgather_coalesced(self, asked: Asked, output_lists: Any, input_list: Any) -> Any:
        """``all_gather_coalesced``."""
        return self._start("all_gather_coalesced", asked, output_lists, input_list)

    @_method()
    def all_gather_single(self, asked: Asked, output: Any, input: Any) -> Any:
        """``all_gather_into_tensor``."""
        return self._start("all_gather_into_tensor", asked, output, input)

    @_method("root", "timeout", input_tensor="input_tensors")
    def gather(self, asked: Asked, output_tensors: Any, input_tensors: Any) -> Any:
        """``gather``."""
        is_root = asked.root == self.rank()
        into = only_list(output_tensors, "gather") if is_root else None
        return self._start(
            "gather", asked, only(input_tensors, "gather"), into, group_dst=asked.root
        )

    @_method("root", "timeout", output_tensor="output_tensors")
    def scatter(self, asked: Asked, output_tensors: Any, input_tensors: Any) -> Any:
        """``scatter``."""
        is_root = asked.root == self.rank()
        parts = only_list(input_tensors, "scatter") if is_root else None
        return self._start(
            "scatter", asked, only(output_tensors, "scatter"), parts, group_src=asked.root
        )

    @_method()
    def alltoall(self, asked: Asked, output_tensors: Any, input_tensors: Any) -> Any:
        """``all_to_all``."""
        return self._start("all_to_all", asked, output_tensors, input_tensors)

    @_method("timeout")
    def all_to_all_single(
        self,
        asked: Asked,
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
    ) -> Any:
        """``all_to_all_single``; no sizes, or an empty list, means equal parts."""
        sizes = output_split_sizes or None, input_split_sizes or None
        return self._start("all_to_all_single", asked, output, input, *sizes)

    @_method("timeout")
    def barrier(self, asked: Asked) -> Any:
        """``barrier``."""
        return self._start("barrier", asked, device_ids=asked.device_ids)

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        """``isend`` to member ``dstRank``."""
        return self._send(only(tensors, "send"), dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        """``irecv`` from member ``srcRank``."""
        return self._recv(only(tensors, "recv"), srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """``irecv`` from the first member that sends."""
        return self._recv(only(tensors, "recv"), None, tag)

    # The names of torch before 2.13, by which its C++ and programs call as well.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def only(tensors: Any, verb: str) -> Any:
    """The one tensor of a list that torch's interface has for several devices of one process."""
    if not isinstance(tensors, (list, tuple)):
        return tensors
    if len(tensors) != 1:
        raise ArgumentError(
            f"{verb}: a list of {len(tensors)} tensors, one for each device of this process",
            expected="one tensor",
            fix="call it once for each, or the coalesced form",
        )
    return tensors[0]


def only_list(lists: Any, verb: str) -> Any:
    """The one list of tensors of a list of lists; a plain list passes for it."""
    if not isinstance(lists, (list, tuple)) or (lists and not isinstance(lists[0], (list, tuple))):
        return lists
    if len(lists) != 1:
        raise ArgumentError(
            f"{verb}: {len(lists)} lists of tensors, one for each device of this process",
            expected="one list",
            fix="pass it on the root" if not lists else "call it once for each",
        )
    return lists[0]
