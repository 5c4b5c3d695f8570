"""Members of a group that share memory, as threads of one process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore

from meshdist.backends.shm.attach import Shared, share

BYTES = 8192


def make_memory() -> int:
    file = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(file, BYTES)
    return file


def close_shared(shared: Shared) -> None:
    os.close(shared.memory)
    for file in shared.processes:
        if file >= 0:
            os.close(file)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Circle:
    """Members as threads of this process, in ranks 10, 11, ...; thread names are their places."""

    def __init__(self, size: int) -> None:
        self.store = HashStore()
        self.ranks = [10 + member for member in range(size)]

    def run(
        self,
        attach: Callable[[int, Shared], None] = lambda member, shared: close_shared(shared),
        make: Callable[[], int] = make_memory,
        *,
        members: list[int] | None = None,
        timeout_s: float = 10.0,
        meanwhile: Callable[[], Any] = lambda: None,
    ) -> list[Exception | None]:
        """The exception of each of ``members``, None where it came to share."""
        found: dict[int, Exception | None] = {}

        def be(member: int) -> None:
            found[member] = None
            try:
                share(
                    self.store,
                    member,
                    self.ranks,
                    make,
                    lambda shared: attach(member, shared),
                    timeout_s,
                )
            except Exception as error:
                found[member] = error

        places = range(len(self.ranks)) if members is None else members
        threads = [threading.Thread(target=be, args=(p,), name=str(p)) for p in places]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return [found[place] for place in places]

    def connect(self) -> socket.socket:
        """A connection to the first member, which has said nothing yet."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        try:
            connection.connect("\0" + self.address().split()[0])
        except OSError:
            connection.close()
            raise
        return connection

    def address(self) -> str:
        """Where the first member listens, and the secret."""
        return self.store.get("shared/address").decode()
