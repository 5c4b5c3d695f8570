"""The network devices that Gloo uses."""

from __future__ import annotations

import os
import socket
from functools import cache, partial
from typing import Any

from torch.distributed import ProcessGroupGloo

from ..failures import WireFailure
from .gloo_listeners import Devices

__all__ = ["connects_late", "gloo_devices", "gloo_interfaces"]

_LOOPBACK = ("127.0.0.1",)
_YES = frozenset({"1", "y", "yes", "t", "true"})  # as c10d reads switches


def connects_late() -> bool:
    """Whether TORCH_GLOO_LAZY_INIT makes groups connect on demand."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in _YES


def gloo_interfaces(is_one_host: bool) -> tuple[str, ...]:
    """The network interfaces to use: those that GLOO_SOCKET_IFNAME lists, or loopback, or ()."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    return _LOOPBACK if is_one_host else ()


def gloo_devices(interfaces: tuple[str, ...]) -> Devices:
    """One Gloo device per interface, shared by all groups of the process.

    Where TORCH_GLOO_LAZY_INIT makes groups connect on demand, each has its own: groups that share
    one then take each other's connections for theirs, and wait for ever (seen on torch 2.13).
    """
    if connects_late():
        return Devices(partial(_make_devices, interfaces), are_deaf=False)
    return _shared_devices(interfaces, os.getpid())


@cache
def _shared_devices(interfaces: tuple[str, ...], process_id: int) -> Devices:
    return Devices(partial(_make_devices, interfaces), are_deaf=True)


def _make_devices(interfaces: tuple[str, ...]) -> list[Any]:
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    if interfaces == _LOOPBACK:
        return [ProcessGroupGloo.create_device(hostname=_LOOPBACK[0])]
    try:
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    except RuntimeError as error:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise WireFailure(
            f"GLOO_SOCKET_IFNAME={','.join(interfaces)} names an interface that has no address "
            f"here; this host has {there}"
        ) from error
