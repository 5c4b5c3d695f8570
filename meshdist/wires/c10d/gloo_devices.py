"""The network devices that Gloo uses."""

from __future__ import annotations

import json
import os
import socket
from functools import cache, partial
from typing import Any

from torch.distributed import ProcessGroupGloo

from ...bootstrap.bounded_store import read_json
from ...error_text import grouped_text
from ...runtime.deadlines import Deadline, wait_until
from ..failures import WireRefused
from ..opening import Opening
from .gloo_listeners import Devices

__all__ = ["agreed_devices", "check_interfaces", "connects_late", "gloo_devices", "gloo_interfaces"]

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


def agreed_devices(opening: Opening) -> Devices:
    """The devices for a group whose members all have as many.

    Each member says in the store how many interfaces it uses; those for which GLOO_SOCKET_IFNAME
    is set wait for what the others say. Between two members with ``lo,lo`` and ``lo`` Gloo would
    open two connections on one side and one on the other: the first waits for ever.

    Raises:
        WireRefused: a member has no such interface, or not all have as many.
    """
    names, named = gloo_interfaces(opening.is_one_host), os.environ.get("GLOO_SOCKET_IFNAME")
    said = len(names) or 1, named or "not set"
    try:
        devices = gloo_devices(names)
    except WireRefused as refusal:
        said = 0, str(refusal)
        raise
    finally:
        opening.store.set(f"interfaces/{opening.rank}", json.dumps(said))
    if named:
        wait_until(lambda: opening.store.check(_keys(opening)), Deadline(opening.timeout))
        check_interfaces(opening)
    return devices


def check_interfaces(opening: Opening) -> None:
    """Raise WireRefused where what members have said of their interfaces does not fit."""
    said = {
        rank: read_json(opening.store, key, lambda it: (int(it[0]), str(it[1])))
        for rank, key in zip(opening.ranks, _keys(opening), strict=True)
        if opening.store.check([key])
    }
    if len({count for count, _ in said.values()}) > 1:
        texts = [(rank, text) for rank, (_, text) in said.items()]
        raise _refusal(f"GLOO_SOCKET_IFNAME does not fit between the ranks\n{grouped_text(texts)}")


def _keys(opening: Opening) -> list[str]:
    return [f"interfaces/{member}" for member in range(len(opening.ranks))]


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
        raise _refusal(
            f"GLOO_SOCKET_IFNAME={','.join(interfaces)} names an interface that has no address "
            f"here; this host has {there}"
        ) from error


def _refusal(text: str) -> WireRefused:
    refusal = WireRefused(text)
    refusal.fix = "list interfaces that the host has, as many on every rank, or unset the variable"
    return refusal
