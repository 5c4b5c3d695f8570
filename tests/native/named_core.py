"""The native communicator with a method for each collective, as the tests of the core call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshdist.backends import native

Buffers = list[tuple[int, int]]


def _pairs(addresses: Sequence[int], counts: Sequence[int]) -> Buffers:
    return list(zip(addresses, counts, strict=True))


# For each collective, of its arguments: count, dtype, op, root, output, input, outputs and inputs.
FORMS: dict[str, Callable[..., tuple[int, int, int, int, int, int, Buffers, Buffers]]] = {
    "all_reduce": lambda x, n, dtype, op: (n, dtype, op, 0, x, 0, [], []),
    "all_reduce_list": lambda x, ns, dtype, op: (0, dtype, op, 0, 0, 0, _pairs(x, ns), []),
    "reduce": lambda x, n, dtype, op, root: (n, dtype, op, root, x, 0, [], []),
    "broadcast": lambda x, n, dtype, root: (n, dtype, 0, root, x, 0, [], []),
    "all_gather": lambda out, x, n, dtype: (n, dtype, 0, 0, out, x, [], []),
    "all_gather_v": lambda outs, ns, x, n, dtype: (
        (0, dtype, 0, 0, 0, 0, _pairs(outs, ns), [(x, n)])
    ),
    "gather": lambda outs, x, n, dtype, root: (
        (n, dtype, 0, root, 0, x, [(out, n) for out in outs], [])
    ),
    "scatter": lambda out, xs, n, dtype, root: (
        (n, dtype, 0, root, out, 0, [], [(x, n) for x in xs])
    ),
    "reduce_scatter": lambda out, x, n, dtype, op: (n, dtype, op, 0, out, x, [], []),
    "reduce_scatter_v": lambda out, n, xs, ns, dtype, op: (
        (0, dtype, op, 0, 0, 0, [(out, n)], _pairs(xs, ns))
    ),
    "all_to_all": lambda outs, ns, xs, ms, dtype: (
        (0, dtype, 0, 0, 0, 0, _pairs(outs, ns), _pairs(xs, ms))
    ),
    "barrier": lambda: (0, 0, 0, 0, 0, 0, [], []),
}


class NamedCore(native.Communicator):
    """``<operation>(..., timeout)`` returns a status, ``<operation>_async(..., timeout)`` a
    ticket."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = name.removesuffix("_async")
        if operation not in FORMS:
            raise AttributeError(name)
        call, more = (self.run, ()) if operation == name else (self.start, ((), 0))
        code, form = native.OPERATIONS[operation], FORMS[operation]
        return lambda *given: call(code, *form(*given[:-1]), 0, (), given[-1], *more)

    def send(
        self, x: int, n: int, dtype: int, peer: int, tag: int, timeout: float, note: int = 0
    ) -> int:
        return self.run_transfer(True, x, n, dtype, peer, tag, note, timeout)

    def recv(
        self, x: int, n: int, dtype: int, peer: int, tag: int, timeout: float, note: int = 0
    ) -> int:
        return self.run_transfer(False, x, n, dtype, peer, tag, note, timeout)

    def send_async(self, x: int, n: int, dtype: int, peer: int, tag: int) -> native.Started:
        return self.start_transfer(True, x, n, dtype, peer, tag, 0, (), ())

    def recv_async(self, x: int, n: int, dtype: int, peer: int, tag: int) -> native.Started:
        return self.start_transfer(False, x, n, dtype, peer, tag, 0, (), ())
