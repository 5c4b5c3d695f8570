"""One small call of each collective, the same for the count of its frames and for its time.

Only public names of meshdist are used, since ``before_after`` runs this beside another checkout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import meshdist as md

__all__ = ["BLOCKING", "IN_FLIGHT", "calls_of_operations"]

Call = Callable[[], Any]

BLOCKING = (
    "all_reduce MAX",
    "all_reduce",
    "all_reduce AVG",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor MAX",
    "all_to_all_single",
    "all_gather",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "send, recv",
)
"""Calls that return when they are done; of two ranks each."""

IN_FLIGHT = (
    *(f"{name}, async" for name in BLOCKING[:-1]),
    "isend, irecv",
    "batch_isend_irecv",
    "coalesced",
)
"""Calls that start a collective and wait for its Work."""


def calls_of_operations(num_bytes: int = 8, group: Any = None) -> dict[str, Call]:
    """Each call of ``BLOCKING`` and ``IN_FLIGHT`` on this rank of two; float32, plain tensors.

    ``group`` has both; None takes the world's, as a batch always does.
    """
    rank, other = md.get_rank(), 1 - md.get_rank()
    group = group or md.group.WORLD
    x = torch.ones(max(1, num_bytes // 4))
    whole, result = x.repeat(2), x.repeat(2)
    inputs, outputs = list(x.repeat(2).chunk(2)), list(x.repeat(2).chunk(2))
    at_root = outputs if rank == 0 else None
    largest = md.ReduceOp.MAX

    def operations(**more: Any) -> dict[str, Call]:
        return {
            "all_reduce MAX": lambda: md.all_reduce(x, largest, group, **more),
            "all_reduce": lambda: md.all_reduce(x, group=group, **more),
            "all_reduce AVG": lambda: md.all_reduce(x, md.ReduceOp.AVG, group, **more),
            "broadcast": lambda: md.broadcast(x, 0, group, **more),
            "reduce": lambda: md.reduce(x, 0, group=group, **more),
            "all_gather_into_tensor": lambda: md.all_gather_into_tensor(result, x, group, **more),
            "reduce_scatter_tensor MAX": lambda: md.reduce_scatter_tensor(
                x, whole, largest, group, **more
            ),
            "all_to_all_single": lambda: md.all_to_all_single(result, whole, group=group, **more),
            "all_gather": lambda: md.all_gather(outputs, x, group, **more),
            "all_to_all": lambda: md.all_to_all(outputs, inputs, group, **more),
            "gather": lambda: md.gather(x, at_root, 0, group, **more),
            "scatter": lambda: md.scatter(x, at_root, 0, group, **more),
            "barrier": lambda: md.barrier(group, **more),
        }

    def exchange() -> None:
        for sender in (0, 1):
            if sender == rank:
                md.send(x, other, group)
            else:
                md.recv(x, sender, group)

    def exchange_in_flight() -> None:
        received = md.irecv(result, other, group)
        sent = md.isend(whole, other, group)
        sent.wait()
        received.wait()

    def batch() -> None:
        messages = [md.P2POp(md.irecv, result, other), md.P2POp(md.isend, whole, other)]
        for work in md.batch_isend_irecv(messages):
            work.wait()

    def coalesced() -> None:
        md.all_reduce_coalesced(inputs, group=group)

    calls = {**operations(), "send, recv": exchange}
    for name, call in operations(async_op=True).items():
        calls[f"{name}, async"] = lambda start=call: start().wait()
    calls |= {
        "isend, irecv": exchange_in_flight,
        "batch_isend_irecv": batch,
        "coalesced": coalesced,
    }
    return calls
