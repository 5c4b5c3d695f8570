"""How a verb runs once its arguments are known to be good: start, wait or hand out, bring home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch

from ..arrays import finish_writes
from ..mesh.channel import Channel
from ..wires.base import Communicator, Pending, WireFailure
from ..wires.work import Work
from .checks import forbid_gradient, is_overwriting_history, note_write

__all__ = ["Written", "bring_home", "bring_one_home", "run"]

Written: TypeAlias = tuple[Any, torch.Tensor, torch.Tensor]
"""An array that a verb writes: the caller's, a tensor on its memory, and the one that travels."""


def run(
    channel: Channel,
    verb: str,
    start: Callable[[Communicator, timedelta], Pending],
    written: Sequence[Written],
    async_op: bool,
    timeout: timedelta | None = None,
    *,
    result: Sequence[Any] | None = None,
) -> Work | None:
    """Start a verb that ``channel.enter`` has let through; wait for it, or return its Work.

    Args:
        channel: on which.
        verb: its public name.
        start: starts it on the communicator, given how long it may take.
        written: what it writes.
        async_op: whether to return the Work.
        timeout: in place of the group's.
        result: what the Work tells as its result, where that is more than what is written.

    Raises:
        CollectiveTimeoutError, AbortedError, AgreementError, BackendError: as the group explains.
    """
    for _, data, _ in written:
        note_write(data)
    # What travels as the caller's own tensor has nothing to settle.
    elsewhere = [one for one in written if one[0] is not one[2]]
    communicator = channel.communicator if async_op else channel.waiting
    limit = timeout or channel.timeout
    try:
        pending = start(communicator, limit)
        if not async_op:
            communicator.finish(pending, limit)
    except WireFailure as failure:
        failure.limit = timeout
        raise channel.group.explain(failure, channel) from None
    for _, data, _ in elsewhere:
        if is_overwriting_history(data):
            forbid_gradient(data, verb)
    if async_op:
        told = [original for original, _, _ in written] if result is None else list(result)
        settle = partial(bring_home, elsewhere) if elsewhere else None
        return channel.group.work(channel, pending, told, settle, verb=verb)
    bring_home(elsewhere)
    return None


def bring_home(written: Sequence[Written]) -> None:
    """Copy what a verb wrote back to the caller's arrays, where they differ."""
    for original, data, buffer in written:
        bring_one_home(original, data, buffer)


def bring_one_home(original: Any, data: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy what a verb wrote into ``buffer`` back to the caller's array, where they differ."""
    if data.data_ptr() != buffer.data_ptr() or data.stride() != buffer.stride():
        with torch.inference_mode():
            data.copy_(buffer)
    if data is not original:
        finish_writes(original)
