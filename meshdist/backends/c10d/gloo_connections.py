"""Manage Gloo's devices and listeners, dropped messages, and closing connections.

A Gloo device accepts every connection to its port, never closes other processes' connections, and
ends the process when descriptors run out (torch 2.13). So while no group opens, a socket filter
drops all packets to the port. It does not affect existing connections.

Gloo cancels a message whose Work is destroyed early. If the peer has started its side, no later
message between the two arrives. So such messages are kept until done, which Gloo detects only while
a thread waits.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo

from ...bootstrap.stores import address_towards, find_number, is_loopback, root_of
from ...bootstrap.timeout_store import await_key, read_jsons
from ...error_text import grouped_text
from ...runtime.deadlines import Deadline, wait_until
from ...runtime.hosts import own_sockets
from ...runtime.timeout_calls import begin_elsewhere
from ..registry import Opening
from ..requests import BackendTimeout, BackendUnsupported, is_timeout

_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # of Linux, in asm-generic/socket.h
_RETURN_CONSTANT = 0x06
# One instruction, which keeps no byte of any packet, and the program that consists of it.
_drop = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN_CONSTANT, 0, 0, 0))
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_drop))
_LOOPBACK = ("127.0.0.1",)
_YES = frozenset({"1", "y", "yes", "t", "true"})  # as c10d reads switches
_ABORT_TAG = (1 << 30) + 7  # of no message, as the communicator numbers them
_END_S = 1.0
_MOST_THREADS = 8  # as many messages that never come hold up no other


class Devices:
    """Gloo devices whose sockets drop new connections while no group opens.

    Args:
        make: returns new Gloo devices, a device per interface.
        interfaces: names of network interfaces, or an address; () for the host name's address.
        are_deaf: whether their sockets drop connections; False if groups connect on demand.
    """

    def __init__(
        self, make: Callable[[], list[Any]], interfaces: tuple[str, ...] = (), *, are_deaf: bool
    ) -> None:
        self.interfaces = interfaces
        known = _listeners() if are_deaf else {}
        self.made = make()
        found = _listeners() if are_deaf else {}
        new = [found[inode] for inode in found.keys() - known.keys()]
        # If another thread has opened a listener meanwhile, Gloo's sockets cannot be identified.
        self.listeners = new if len(new) == len(self.made) else []
        self._changing = threading.Lock()
        self._num_opening = 0
        self._change(is_deaf=True)

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Accept connections in the block, in which a group opens."""
        with self._changing:
            self._num_opening += 1
            self._change(is_deaf=False)
        try:
            yield
        finally:
            with self._changing:
                self._num_opening -= 1
                self._change(is_deaf=self._num_opening == 0)

    def _change(self, *, is_deaf: bool) -> None:
        for descriptor in self.listeners:
            # If the system forbids filters, there is no filter to remove.
            # Closing a socket closes its descriptor. This descriptor belongs to Gloo, so copy it.
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
                if is_deaf:
                    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _DROP_ALL)
                else:
                    listener.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def _listeners() -> dict[int, int]:
    """Return the descriptors of this process's listening TCP sockets by inode (Linux)."""
    listeners = {}
    for descriptor, copy in own_sockets():
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listeners[os.fstat(descriptor).st_ino] = descriptor
    return listeners


def connects_late() -> bool:
    """Return whether TORCH_GLOO_LAZY_INIT defers Gloo's connections."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in _YES


def gloo_interfaces(is_one_host: bool) -> tuple[str, ...]:
    """Return GLOO_SOCKET_IFNAME's interfaces, or loopback on a single host, or ()."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    return _LOOPBACK if is_one_host else ()


def agreed_devices(opening: Opening) -> Devices:
    """Return Gloo's devices on this host; store their number for other members.

    Raises:
        BackendUnsupported: a member lacks a listed interface, or the numbers differ.
    """
    # Each member stores its number of interfaces, and members with GLOO_SOCKET_IFNAME wait for the
    # other members' numbers. With ``lo,lo`` on one side and ``lo`` on the other, Gloo would open
    # two connections against a single connection, and the first side would wait forever.
    names, named = gloo_interfaces(opening.is_one_host), os.environ.get("GLOO_SOCKET_IFNAME")
    if not opening.is_one_host and (address := _address_between_hosts(opening)) and not names:
        names = (address,)
    stored = len(names) or 1, named or "not set"
    try:
        devices = gloo_devices(names)
    except BackendUnsupported as refusal:
        stored = 0, str(refusal)
        raise
    finally:
        opening.store.set(f"interfaces/{opening.rank}", json.dumps(stored))
    if named:
        check_interfaces(opening, opening.timeout)
    return devices


def reach_fix(devices: Devices | None) -> str:
    """Return the fix for failed connections between hosts, with Gloo's interfaces."""
    used = ", ".join(devices.interfaces if devices else ()) or socket.gethostname()
    return (
        f"check that all of these ranks make this call, and that the other hosts can reach {used}, "
        "which Gloo uses on this rank; if they cannot, set GLOO_SOCKET_IFNAME to an interface that "
        "they can reach"
    )


def _address_between_hosts(opening: Opening) -> str:
    """Return this host's address for members on other hosts; "" if unknown."""
    # A host's name may resolve to loopback, as on Debian, or to nothing. Use the local address of
    # the connection to the store. A process that reaches the store by loopback uses the address
    # from which it reaches a member on another host.
    store = opening.store
    server = getattr(root_of(store), "address", None)
    if server is None or not opening.hosts:
        return ""
    address, here = address_towards(*server), opening.hosts[opening.rank]
    store.set(f"address/{opening.rank}", address)
    if not is_loopback(address):
        return address
    other = next(member for member, host in enumerate(opening.hosts) if host != here)
    key = f"address/{other}"
    if not await_key(store, key, Deadline(opening.timeout), opening.check_present):
        raise BackendTimeout.after(opening.timeout)
    theirs = store.get(key).decode()
    return "" if is_loopback(theirs) else address_towards(theirs, server[1])


def check_interfaces(opening: Opening, patience: timedelta) -> None:
    """Raise BackendUnsupported if members store unequal interface counts in time."""
    keys = [f"interfaces/{member}" for member in range(len(opening.ranks))]
    if not wait_until(lambda: opening.store.check(keys), Deadline(patience)):
        return
    of_all = read_jsons(opening.store, keys, lambda it: (int(it[0]), str(it[1])))
    if len({count for count, _ in of_all}) > 1:
        found = grouped_text(
            (rank, text) for rank, (_, text) in zip(opening.ranks, of_all, strict=True)
        )
        raise _refusal(f"GLOO_SOCKET_IFNAME lists different numbers of interfaces\n{found}")


def gloo_devices(interfaces: tuple[str, ...]) -> Devices:
    """Return a Gloo device per interface, shared by the process's groups."""
    # If TORCH_GLOO_LAZY_INIT makes groups connect on demand, each group needs its own device:
    # groups that share a device would mix up their connections and hang (torch 2.13).
    if connects_late():
        return Devices(partial(_make_devices, interfaces), interfaces, are_deaf=False)
    return _shared_devices(interfaces, os.getpid())


@cache
def _shared_devices(interfaces: tuple[str, ...], process_id: int) -> Devices:
    return Devices(partial(_make_devices, interfaces), interfaces, are_deaf=True)


def _make_devices(interfaces: tuple[str, ...]) -> list[Any]:
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    if find_number(interfaces[0].partition("%")[0]):  # an address
        return [ProcessGroupGloo.create_device(hostname=interfaces[0])]
    try:
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    except RuntimeError as error:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise _refusal(
            f"GLOO_SOCKET_IFNAME={','.join(interfaces)} names an interface without an address; "
            f"this host has {there}"
        ) from error


def _refusal(text: str) -> BackendUnsupported:
    refusal = BackendUnsupported(text)
    refusal.fix = (
        "set GLOO_SOCKET_IFNAME to interfaces of the host, the same number on every rank, or "
        "unset it"
    )
    return refusal


class DroppedMessages:
    """Messages whose Work was dropped; threads wait up to ``patience`` for each."""

    def __init__(self, patience: timedelta) -> None:
        self._patience = patience
        self._unfinished: deque[Any] = deque()
        self._from_anyone: list[Any] = []
        self._num_waiting = 0
        self._counting = threading.Lock()

    def add(self, work: Any, *, is_from_anyone: bool) -> None:
        """Keep a dropped message's ``work``; wait in a thread unless it is from anyone."""
        # No thread waits for a receive from any member, since closing the group cannot release it.
        (self._from_anyone if is_from_anyone else self._unfinished).append(work)

    def look(self) -> None:
        """Start a thread that waits for dropped messages, if any remain and few threads wait."""
        with self._counting:
            if not self._unfinished or self._num_waiting >= _MOST_THREADS:
                return
            self._num_waiting += 1
        try:
            begin_elsewhere(self._finish)
        except RuntimeError:  # no more threads
            self._has_finished()
            raise

    def close(self) -> bool:
        """Drop all messages; return whether threads still wait."""
        self._unfinished.clear()
        self._from_anyone.clear()
        return self._num_waiting > 0

    def _finish(self) -> None:
        try:
            with suppress(IndexError):  # none is left
                while True:
                    work = self._unfinished.popleft()
                    with suppress(RuntimeError):  # its other side, or the group, has ended
                        work.wait(self._patience)
                    del work
        finally:
            self._has_finished()

    def _has_finished(self) -> None:
        with self._counting:
            self._num_waiting -= 1


def start_expiring(group: Any, peer: int) -> Any:
    """Start a receive from ``peer`` that never arrives; return None if ``peer`` is lost."""
    try:
        return group.recv([torch.zeros(1, device="cpu")], peer, _ABORT_TAG)
    except RuntimeError:
        return None


def expire(messages: Iterable[Any]) -> None:
    """Wait until a message times out, so that Gloo closes all connections."""
    for message in messages:
        if message is None:
            continue
        try:
            message.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if is_timeout(str(error)):
                return
            # That connection was lost already, and with it nothing expires: try the next.


def drop_within(limit: timedelta, last_references: list[Any]) -> None:
    """Destroy a group in a thread by clearing ``last_references``; wait up to ``limit``."""
    # On torch 2.13, a Gloo send may stay in flight forever if its connection is lost.
    has_ended = threading.Event()

    def end() -> None:
        last_references.clear()
        has_ended.set()

    try:
        if sys.is_finalizing():  # no other thread runs any more
            end()
        else:
            begin_elsewhere(end)
    except RuntimeError:  # no thread can be started
        end()
    has_ended.wait(limit.total_seconds() + _END_S)
