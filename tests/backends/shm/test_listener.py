"""The members come in, and processes of the same user that are no members change nothing."""

from __future__ import annotations

import array
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

import meshdist as md
from meshdist.backends.shm.listener import Listener
from tests.inner import BackendUnsupported
from tests.load import is_within
from tests.pool import Pool

from .circle import Circle, num_files

WORDS = {
    "silent": b"",
    "one byte": b"x",
    "half a message": bytes(10),
    "junk": bytes(range(36)),
    "too much": bytes(100_000),
    "a huge length": struct.pack("!iI", 1, 2**32 - 1),
}
DEEDS = [*WORDS, "no member's place", "open files", "close at once"]


def act(connection: socket.socket, deed: str, secret: bytes = bytes(16)) -> None:
    """Do what a stranger does; the first member may have dropped it by then."""
    with suppress(OSError):
        if deed == "close at once":
            connection.close()
        elif deed == "no member's place":
            connection.sendall(secret + struct.pack("!I", 7))
        elif deed == "open files":
            files = array.array("i", [0, 1, 2])
            connection.sendmsg([bytes(36)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        else:
            connection.sendall(WORDS[deed])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("deed", DEEDS)
def test_strangers_before_the_members_change_nothing(deed: str, size: int) -> None:
    circle = Circle(size)
    before = num_files()
    with ExitStack() as stack:
        late: list[Exception | None] = []

        def intrude() -> None:
            secret = bytes.fromhex(circle.address().split()[1])
            for _ in range(5):
                stranger = stack.enter_context(circle.connect())
                act(stranger, deed, secret)
            late.extend(circle.run(members=list(range(1, size))))

        begin = time.monotonic()
        assert circle.run(members=[0], meanwhile=intrude, timeout_s=60.0) == [None]
        assert late == [None] * (size - 1)
        assert is_within(time.monotonic() - begin, 5.0)
    assert num_files() <= before  # threads of other tests may close some meanwhile


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do ``work`` again and again on a thread until the context ends."""
    is_over = threading.Event()

    def loop() -> None:
        while not is_over.is_set():
            work()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("size", [2, 3])
def test_strangers_during_the_opening_change_nothing(size: int) -> None:
    circles = [Circle(size) for _ in range(20)]
    deeds = itertools.cycle(DEEDS)
    current = [circles[0]]

    def intrude() -> None:
        if not current[0].store.check(["shared/address"]):
            return
        with suppress(OSError), current[0].connect() as stranger:
            act(stranger, next(deeds))

    with beside(intrude):
        for circle in circles:
            current[0] = circle
            assert circle.run(timeout_s=60.0) == [None] * size


@pytest.mark.parametrize("size", [2, 3])
def test_more_silent_strangers_than_have_room_are_dropped_in_time(size: int) -> None:
    circle = Circle(size)
    with ExitStack() as stack:
        late: list[Exception | None] = []
        kept: list[socket.socket] = []

        def intrude() -> None:
            with suppress(BlockingIOError):  # until no more may wait for their turn
                for _ in range(300):
                    kept.append(stack.enter_context(circle.connect()))
            late.extend(circle.run(members=list(range(1, size)), timeout_s=60.0))

        assert circle.run(members=[0], meanwhile=intrude, timeout_s=60.0) == [None]
        assert late == [None] * (size - 1)
        assert len(kept) > 64


def test_a_stranger_does_not_put_off_the_timeout() -> None:
    circle = Circle(2)

    def intrude() -> None:
        with suppress(OSError), circle.connect() as stranger:
            act(stranger, "junk")

    def wait_for_address() -> None:
        circle.store.wait(["shared/address"])

    begin = time.monotonic()
    with ExitStack() as stack:

        def meanwhile() -> None:
            wait_for_address()
            stack.enter_context(beside(intrude))

        (error,) = circle.run(members=[0], timeout_s=0.5, meanwhile=meanwhile)
    assert str(error) == "rank 11 did not connect to set up shared memory"
    assert is_within(time.monotonic() - begin, 3.0)


def test_file_numbers_that_strangers_take_are_given_to_a_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where none is left the oldest stranger goes; without strangers the group is rejected."""
    usual = socket.socket.accept
    refusals = [OSError(24, "Too many open files")]

    def accept(self: socket.socket) -> object:
        if len(listener.watched()) == 3 and refusals:
            raise refusals.pop()
        return usual(self)

    listener = Listener(2)
    try:
        with ExitStack() as stack:
            for _ in range(3):
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect("\0" + listener.address.split()[0])
            monkeypatch.setattr(socket.socket, "accept", accept)
            counts = []
            for _ in range(4):
                assert listener.look(listener.watched()[0]) is None
                counts.append(len(listener.watched()) - 1)
            assert counts == [1, 2, 1, 2]
    finally:
        listener.close()


def test_no_file_number_and_no_stranger_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(self: socket.socket) -> object:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    found = Circle(2).run()
    assert [type(error) for error in found] == [BackendUnsupported] * 2
    assert {str(error) for error in found} == {"rank 10: [Errno 24] Too many open files"}


def listening() -> list[str]:
    """The names of the Unix sockets without a file that this process has open."""
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{number}"))
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table][1:]
    return [row[7][1:] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in own]


@pytest.mark.parametrize("size", [2, 3])
def test_groups_open_on_shared_memory_while_strangers_connect(size: int, pool: Pool) -> None:
    def program() -> list[str]:
        deeds = itertools.cycle(DEEDS)
        kept: list[socket.socket] = []

        def intrude() -> None:
            for name in listening():
                kept.append(socket.socket(socket.AF_UNIX))
                with suppress(OSError):
                    kept[-1].connect(f"\0{name}")
                    act(kept[-1], next(deeds))
                if len(kept) > 20:
                    kept.pop(0).close()

        with beside(intrude if md.get_rank() == 0 else lambda: time.sleep(0.01)):
            groups = [md.new_group(backend="shm") for _ in range(8)]
        for stranger in kept:
            stranger.close()
        return [md.get_backend(group) for group in groups]

    assert pool.run(program, size) == [["shm"] * 8] * size


@pytest.mark.parametrize("files", [[], [0, 1], [0, 1, 2]])
def test_a_greeting_without_the_one_handle_lets_nobody_in(files: list[int]) -> None:
    listener, before = Listener(2), num_files()
    name, secret = listener.address.split()
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(f"\0{name}")
        socket.send_fds(visitor, [bytes.fromhex(secret) + struct.pack("!I", 1)], files)
        with suppress(OSError):  # more files than there is room for, as where no number is left
            for _ in range(2):
                assert listener.look(listener.watched()[-1]) is None
    assert listener.awaited == {1}
    assert num_files() <= before  # threads of other tests may close some meanwhile
    listener.close()


def test_the_secret_is_the_groups_own() -> None:
    first, second = Listener(2), Listener(2)
    try:
        assert len({*first.address.split(), *second.address.split()}) == 4
        assert len(bytes.fromhex(first.address.split()[1])) == 16
    finally:
        first.close()
        second.close()
