"""Define torch's process group methods, for example ``group.allreduce(x)``.

Each method accepts torch's call forms: a tensor or a list of one tensor, and torch's options or
their fields. It starts the collective and returns its Work. Roots and peers are group ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from ..arguments import check_timeout
from ..errors import ArgumentError
from ..operation_table import OPERATIONS, Role, TensorLayout
from ..reduce_ops import ReduceOp

operations: dict[str, Callable[..., Any]] = {}
"""The public collectives by name; ``collectives``, which lies above, enters them."""


class Asked(NamedTuple):
    """The options of a method call.

    Args:
        timeout: the call's timeout (None: the group's).
        root: the root's group rank.
    """

    is_async: bool = True
    timeout: timedelta | None = None
    op: Any = ReduceOp.SUM
    root: int = 0
    device_ids: list[int] | None = None


_NOTHING = Asked()
_NO_TIME = timedelta()


def only(tensors: Any, operation: str) -> Any:
    """Return the tensor of a list of one tensor, or ``tensors`` if it is not a list."""
    if not isinstance(tensors, (list, tuple)):
        return tensors
    if len(tensors) != 1:
        raise ArgumentError(
            f"{operation}: a list of {len(tensors)} tensors, one for each device of this process",
            expected="one tensor",
            fix="call it once for each, or the coalesced form" if tensors else "pass [tensor]",
        )
    return tensors[0]


def only_list(lists: Any, operation: str) -> Any:
    """Return the list in a list of one list, or ``lists`` if they are tensors."""
    if not isinstance(lists, (list, tuple)) or (lists and not isinstance(lists[0], (list, tuple))):
        return lists
    if len(lists) != 1:
        raise ArgumentError(
            f"{operation}: {len(lists)} lists of tensors, one for each device of this process",
            expected="one list",
            fix="call it once for each" if lists else "pass [tensors], with one for each rank",
        )
    return lists[0]


def _method(operation: str) -> Callable[..., Any]:
    """Return the method for ``operation``, with torch's call forms."""
    # torch's ``output_tensors`` may also be called ``output_tensor`` or ``output``.
    spec = OPERATIONS[operation]
    torch_method = spec.torch_method
    assert torch_method is not None
    tensors, options = torch_method.tensors, torch_method.options
    listed = [name for name in tensors if name.endswith("tensors")]
    also = {short: name for name in listed for short in (name[:-1], name.removesuffix("_tensors"))}
    # torch's methods take outputs before inputs.
    ours = spec.named(Role.IN_PLACE, Role.OUTPUT, Role.INPUT)
    sides = [spec.executor.takes if name in spec.reads else spec.executor.gives for name in ours]
    readers = [
        (
            name,
            only_list if side in (TensorLayout.EACH, TensorLayout.AT_ROOT) else only,
            side is TensorLayout.AT_ROOT,
        )
        for name, side in zip(ours, sides, strict=True)
        if torch_method.is_listed
    ]
    needed, ours = {*ours}, (*ours, *spec.named(Role.SIZES))
    roots, ops = [f"group_{name}" for name in spec.named(Role.ROOT)], spec.named(Role.OP)

    def method(self: GroupMethods, *given: Any, opts: Any = None, **named: Any) -> Any:
        values = dict(zip(ours, given, strict=False))
        if named:
            under = {also.get(name, name): value for name, value in named.items()}
            if len(under) < len(named) or not under.keys().isdisjoint(tensors[: len(given)]):
                raise TypeError(f"one of {tensors} is given twice")
            named, pairs = under, zip(ours, tensors, strict=True)
            values |= {our: named.pop(theirs) for our, theirs in pairs if theirs in named}
        asked = read_options(options, *given[len(ours) :], opts=opts, **named)
        if not values.keys() >= needed:
            raise TypeError(f"one of {tensors[: len(needed)]} is missing")
        for name, read, is_of_root in readers:
            is_passed = not is_of_root or asked.root == self.rank()
            values[name] = read(values[name], operation) if is_passed else None
        for name in roots:
            values[name] = asked.root
        for name in ops:
            values[name] = asked.op
        if asked.device_ids is not None:
            values["device_ids"] = asked.device_ids
        return self._start(operation, asked, values)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [inspect.Parameter(name, kind) for name in ("self", *tensors[: len(needed)])]
    rest = (*tensors[len(needed) :], "opts", *options)
    names += [inspect.Parameter(name, kind, default=None) for name in rest]
    method.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    method.__doc__ = f"``{operation}``."
    return method


def read_options(fields: tuple[str, ...], *given: Any, opts: Any = None, **named: Any) -> Asked:
    """Return a call's options, from torch's options or the values of ``fields``."""
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
        if not named.keys().isdisjoint(fields[: len(given)]):
            raise TypeError(f"one of {fields} is given twice")
        values = {**dict(zip(fields, given, strict=False)), **named}
        asked = Asked(**{name: x for name, x in values.items() if x is not None})
        check_timeout(asked.timeout)
    if opts is None:
        return asked
    timeout, op = opts.timeout, getattr(opts, "reduceOp", asked.op)
    return Asked(
        opts.asyncOp,
        timeout if timeout > _NO_TIME else None,  # torch's sign for "none" is negative
        asked.op if op == asked.op else op,  # its plain kind is known fast
        getattr(opts, "rootRank", asked.root),
        getattr(opts, "device_ids", None) or None,
    )


class GroupMethods:
    """The collectives as methods; a subclass defines how each runs."""

    rank: Any
    _start: Any
    _message: Any

    allreduce = _method("all_reduce")  # the call of torch's comm hooks
    allreduce_coalesced = _method("all_reduce_coalesced")
    reduce = _method("reduce")
    reduce_scatter = _method("reduce_scatter")
    reduce_scatter_single = _method("reduce_scatter_tensor")
    broadcast = _method("broadcast")
    allgather = _method("all_gather")
    allgather_coalesced = _method("all_gather_coalesced")
    all_gather_single = _method("all_gather_into_tensor")
    gather = _method("gather")
    scatter = _method("scatter")
    alltoall = _method("all_to_all")
    all_to_all_single = _method("all_to_all_single")
    barrier = _method("barrier")

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        """``isend`` to member ``dstRank``."""
        return self._message("send", only(tensors, "send"), dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        """``irecv`` from member ``srcRank``."""
        return self._message("recv", only(tensors, "recv"), srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """``irecv`` from the first member that sends."""
        return self._message("recv", only(tensors, "recv"), None, tag)

    # The names of torch before 2.13, by which its C++ and programs call as well.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
