"""How a verb runs once its arguments are known to be good: start, wait or hand out, copy back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch

from ..arrays import finish_writes
from ..groups.channel import Channel
from ..wires.communicator import Communicator
from ..wires.failures import WireFailure
from ..wires.operations import Operation, Terms
from ..wires.work import Work
from .checks import forbid_gradient, is_overwriting_history, note_write

__all__ = ["Written", "copy_back", "copy_one_back", "run"]

Written: TypeAlias = tuple[Any, torch.Tensor, torch.Tensor]
"""An array that a verb writes: the caller's, a tensor on its memory, and the one that travels."""


def run(
    channel: Channel,
    verb: str,
    start: Callable[[Communicator, Terms], Operation],
    written: Sequence[Written],
    async_op: bool,
    timeout: timedelta | None = None,
    *,
    result: Sequence[Any] | None = None,
) -> Work | None:
    """Start a verb that ``channel.enter`` has let through; wait for it, or return its Work.

    Args:
        channel: of the group and device type.
        verb: its public name.
        start: starts it on the communicator, under the terms that it is given.
        written: what it writes.
        async_op: whether to return the Work.
        timeout: in place of the group's.
        result: what the Work returns as its result, where that is more than what is written.

    Raises:
        CollectiveTimeoutError, AbortedError, AgreementError, BackendError: as the group explains.
    """
    for _, data, _ in written:
        note_write(data)
    # What travels as the caller's own tensor is not copied back.
    elsewhere = [one for one in written if one[0] is not one[2]]
    limit = timeout or channel.timeout
    terms = Terms(limit, verb, channel.recorder.sequence, not async_op)
    try:
        operation = start(channel.communicator, terms)
        if not async_op:
            operation.finish(limit)
    except WireFailure as failure:
        failure.limit = timeout
        raise channel.explain(failure) from None
    for _, data, _ in elsewhere:
        if is_overwriting_history(data):
            forbid_gradient(data, verb)
    if async_op:
        results = [original for original, _, _ in written] if result is None else list(result)
        then = partial(copy_back, elsewhere) if elsewhere else None
        return channel.work(operation, results, then, verb=verb)
    copy_back(elsewhere)
    return None


def copy_back(written: Sequence[Written]) -> None:
    """Copy what a verb wrote back to the caller's arrays, where they differ."""
    for original, data, buffer in written:
        copy_one_back(original, data, buffer)


def copy_one_back(original: Any, data: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy what a verb wrote into ``buffer`` back to the caller's array, where they differ."""
    if data.data_ptr() != buffer.data_ptr() or data.stride() != buffer.stride():
        with torch.inference_mode():
            data.copy_(buffer)
    if data is not original:
        finish_writes(original)
