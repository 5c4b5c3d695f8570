"""Tensors that say that they lie on a GPU, on machines without: which backends does a program ask
for?

All tensors say so but those that the program makes without a device, or on the CPU, and those made
of them. Nothing is enqueued: what a tensor holds is there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from meshdist.ddp import divergence_checks, status_flags
from meshdist.ddp.device_streams import StatusReader
from tests.backends.c10d.nccl_stand_in import standing_in
from tests.inner import matching, simulated_communicator as communicator

__all__ = ["HostTensor", "pretended_gpu"]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MAKERS = ("arange", "as_tensor", "empty", "eye", "frombuffer", "full", "from_numpy", "tensor")
MAKERS += ("ones", "rand", "randn", "zeros")
LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "zeros_like")
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")


class HostTensor(torch.Tensor):
    """A tensor that says that it lies on the CPU, as it does."""

    device = property(lambda self: CPU)  # type: ignore[assignment]
    is_cpu = property(lambda self: True)  # type: ignore[assignment]
    is_cuda = property(lambda self: False)  # type: ignore[assignment]


class Stream:
    """The one stream, on which all is done at once."""

    device = GPU

    def record_event(self) -> None:
        """Nothing need be waited for."""


def read_at_once(*_: object) -> StatusReader:
    """In place of ``reader_for``."""
    return StatusReader()


def placed(make: Callable[..., Any], *, is_host: bool | None) -> Callable[..., Any]:
    """``make``, on the CPU; its result says where it should lie. None: where its input lies."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        asked: list[torch.device] = []

        def here(value: Any) -> Any:
            if isinstance(value, torch.device) or value in ("cpu", "cuda", "cuda:0"):
                asked.append(torch.device(value))
                return CPU
            return value

        args = tuple(one if isinstance(one, (torch.Tensor, list)) else here(one) for one in args)
        kwargs = {name: here(one) if name == "device" else one for name, one in kwargs.items()}
        made = make(*args, **kwargs)
        if not asked and is_host is None:
            return made
        kind = HostTensor if (asked[0].type == "cpu" if asked else is_host) else torch.Tensor
        if isinstance(made, HostTensor) == (kind is HostTensor):
            return made
        return (made.clone() if any(made is one for one in args) else made).as_subclass(kind)

    return call


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """In this context tensors are on a GPU, as far as the program sees, on simulated ranks too."""
    event, stream = (
        mock.Mock(**{"query.return_value": True, "elapsed_time.return_value": 1.0}),
        Stream(),
    )
    module = SimpleNamespace(Event=lambda **_: event, current_stream=lambda _=None: stream)
    where = {"device": GPU, "is_cpu": False, "is_cuda": True}
    with ExitStack() as stack:
        stack.enter_context(standing_in())
        for room in (status_flags, divergence_checks):
            stack.enter_context(mock.patch.object(room, "reader_for", new=read_at_once))
        for room in (communicator, matching):
            stack.enter_context(mock.patch.object(room, "synchronize"))
        stack.enter_context(mock.patch.object(torch, "get_device_module", return_value=module))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", module.current_stream))
        for name in (*MAKERS, *LIKE):
            made = placed(getattr(torch, name), is_host=None if name in LIKE else True)
            stack.enter_context(mock.patch.object(torch, name, made))
        for name in METHODS:
            method = placed(getattr(torch.Tensor, name), is_host=None)
            stack.enter_context(mock.patch.object(torch.Tensor, name, method))
        cpu = placed(lambda one: one, is_host=True)
        stack.enter_context(mock.patch.object(torch.Tensor, "cpu", cpu))
        for name, value in where.items():
            lies = property(lambda self, value=value: value)
            stack.enter_context(mock.patch.object(torch.Tensor, name, lies, create=True))
        yield
