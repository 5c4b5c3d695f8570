"""Gloo's listeners, which are deaf while no group opens.

A device of Gloo accepts every connection to its port as long as the process lives. It keeps the
descriptor of each that is no member's, also when the other side has closed it, and ends the process
when there are no descriptors left (seen on torch 2.13). But when a group is open all of its members
have connected: so until the next one opens, a filter lets the system drop what comes to the port.
Connections that are there are not touched.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["Devices"]

_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # of Linux, in asm-generic/socket.h
_RETURN_CONSTANT = 0x06
# One instruction, which keeps no byte of any packet, and the program that consists of it.
_drop = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN_CONSTANT, 0, 0, 0))
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_drop))


class Devices:
    """Devices of Gloo, and their listeners as far as those can be made deaf.

    Args:
        make: makes the devices.
        are_deaf: whether nothing need be heard while no group opens.
    """

    def __init__(self, make: Callable[[], list[Any]], *, are_deaf: bool) -> None:
        known = _listeners() if are_deaf else {}
        self.made = make()
        found = _listeners() if are_deaf else {}
        new = [found[inode] for inode in found.keys() - known.keys()]
        # Where another thread has opened one meanwhile it is not known which are Gloo's.
        self._listeners = new if len(new) == len(self.made) else []
        self._changing = threading.Lock()
        self._num_opening = 0
        self._change(is_deaf=True)

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Let a group open in the context, whose members connect to these devices."""
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
        for descriptor in self._listeners:
            # Where the system forbids filters there is none to be taken away, either.
            with suppress(OSError), _socket_of(descriptor) as listener:
                if is_deaf:
                    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _DROP_ALL)
                else:
                    listener.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def _listeners() -> dict[int, int]:
    """The descriptors at which this process listens for TCP, by inode; none but on Linux."""
    found = {}
    with suppress(OSError):  # no such folder, or no descriptor is left
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and _listens(int(name)):
                    found[status.st_ino] = int(name)
    return found


def _listens(descriptor: int) -> bool:
    with _socket_of(descriptor) as one:
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0


def _socket_of(descriptor: int) -> socket.socket:
    """A socket that is closed without its descriptor, which is Gloo's."""
    return socket.socket(fileno=os.dup(descriptor))
