"""How members come to share memory: what each gets, and that one member's trouble is everyone's."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from torch.distributed import PrefixStore

import meshdist as md
from meshdist.backends.shm import listener
from meshdist.backends.shm.attach import Shared, share
from tests.inner import BackendFailure, BackendTimeout, BackendUnsupported, Deadline, get_world
from tests.load import is_within
from tests.pool import Failure, Pool

from .circle import Circle, close_shared, make_memory, num_files

Attach = Callable[[Shared], None]


def all_tell(found: list[Exception | None], kind: type[Exception], text: str) -> None:
    assert [type(error) for error in found] == [kind] * len(found)
    assert {str(error) for error in found} == {text}


def only_on(member: int, usual: Callable[..., Any], other: Callable[..., Any]) -> Any:
    """What does ``other`` on one member's thread."""

    def choose(*args: Any, **settings: Any) -> Any:
        is_it = threading.current_thread().name == str(member)
        return (other if is_it else usual)(*args, **settings)

    return choose


def process_of(handle: int) -> int:
    with open(f"/proc/self/fdinfo/{handle}") as file:
        return int(next(line.split()[1] for line in file if line.startswith("Pid:")))


def raise_it(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_member_gets_one_memory_and_a_handle_to_every_other(size: int) -> None:
    before = num_files()
    seen: dict[int, Any] = {}

    def attach(member: int, shared: Shared) -> None:
        handles = shared.processes
        assert not any(os.get_inheritable(file) for file in handles if file >= 0)
        assert not os.get_inheritable(shared.memory)
        processes = [process_of(file) if file >= 0 else None for file in handles]
        seen[member] = (os.fstat(shared.memory).st_ino, processes)
        close_shared(shared)

    assert Circle(size).run(attach) == [None] * size
    assert len({inode for inode, _ in seen.values()}) == 1
    for member, (_, processes) in seen.items():
        assert processes == [None if one == member else os.getpid() for one in range(size)]
    assert num_files() <= before  # threads of other tests may close some meanwhile


@pytest.mark.parametrize("member", [0, 1, 3])
@pytest.mark.parametrize("error", [OSError(12, "no room"), MemoryError(), RuntimeError("too old")])
def test_a_member_that_cannot_attach_is_a_refusal_for_all(member: int, error: Exception) -> None:
    before = num_files()

    def attach(place: int, shared: Shared) -> None:
        close_shared(shared)
        if place == member:
            raise error

    told = str(error) or "MemoryError"
    all_tell(Circle(4).run(attach), BackendUnsupported, f"rank {10 + member}: {told}")
    assert num_files() <= before  # threads of other tests may close some meanwhile


def test_memory_that_cannot_be_made_is_a_refusal_for_all() -> None:
    found = Circle(3).run(make=lambda: raise_it(OSError(errno.ENOMEM, "Cannot allocate memory")))
    all_tell(found, BackendUnsupported, "rank 10: [Errno 12] Cannot allocate memory")


@pytest.mark.parametrize("member", [0, 2])
def test_a_system_without_process_handles_is_a_refusal_for_all(
    member: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.ENOSYS, "Function not implemented")
    other = lambda pid: raise_it(error)  # noqa: E731
    monkeypatch.setattr(os, "pidfd_open", only_on(member, os.pidfd_open, other))
    found = Circle(3).run()
    all_tell(found, BackendUnsupported, f"rank {10 + member}: [Errno 38] Function not implemented")


def test_a_python_without_process_handles_is_a_refusal_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    all_tell(Circle(2).run(), BackendUnsupported, "rank 10: this system has no pidfd_open")


@pytest.mark.parametrize(("member", "teller"), [(0, 11), (1, 11)])
def test_a_member_of_another_user_is_a_refusal_for_all(
    member: int, teller: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", only_on(member, os.getuid, lambda: 12345))
    all_tell(Circle(2).run(), BackendUnsupported, f"rank {teller}: rank 10 runs as another user")


def test_a_member_that_is_turned_away_before_it_speaks_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = listener.send_part

    def send_late(*args: Any) -> None:
        time.sleep(0.2)
        usual(*args)

    monkeypatch.setattr(os, "getuid", only_on(0, os.getuid, lambda: 12345))
    monkeypatch.setattr(listener, "send_part", only_on(1, usual, send_late))
    all_tell(Circle(2).run(), BackendUnsupported, "rank 11: rank 10 runs as another user")


def test_a_stranger_is_turned_away_and_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    circle = Circle(2)
    peers: list[int] = []
    usual = socket.socket.getsockopt

    def ask(connection: socket.socket, level: int, name: int, *size: int) -> Any:
        if name != socket.SO_PEERCRED:
            return usual(connection, level, name, *size)
        peers.append(1)
        found = usual(connection, level, name, *size)
        return struct.pack("3i", 1, 12345, 1) if len(peers) == 1 else found

    monkeypatch.setattr(socket.socket, "getsockopt", ask)
    got: list[bytes] = []

    def intrude() -> None:
        with circle.connect() as connection:
            connection.settimeout(5)
            got.append(connection.recv(100))
            got.append(connection.recv(100))
        late = threading.Thread(target=lambda: others.extend(circle.run(members=[1])))
        late.start()
        late.join()

    others: list[Exception | None] = []
    assert circle.run(members=[0], meanwhile=intrude) == [None]
    assert others == [None]
    assert got == [(-1).to_bytes(4, "big", signed=True) + bytes(4), b""]


def test_a_member_that_cannot_connect_is_a_refusal_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def connect(self, address: Any) -> None:
            if threading.current_thread().name == "2":
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection rejected")
            super().connect(address)

    monkeypatch.setattr(socket, "socket", Refusing)
    text = "rank 12 cannot reach rank 10: [Errno 111] Connection rejected"
    all_tell(Circle(4).run(), BackendUnsupported, text)


@pytest.mark.parametrize("missing", [[0], [1], [1, 2, 4]])
def test_members_that_never_come_are_named_by_all_others(missing: list[int]) -> None:
    before = num_files()
    members = [member for member in range(5) if member not in missing]
    found = Circle(5).run(members=members, timeout_s=0.2)
    named = {1: "rank 11", 0: "rank 10", 3: "ranks 11-12, 14"}[
        len(missing) if len(missing) > 1 else missing[0]
    ]
    all_tell(found, BackendTimeout, f"{named} did not connect to set up shared memory")
    assert num_files() <= before  # threads of other tests may close some meanwhile


def test_a_member_that_stops_in_the_middle_is_a_timeout_for_all() -> None:
    circle = Circle(3)
    with socket.socket(socket.AF_UNIX) as held:

        def stop() -> None:
            handle = os.pidfd_open(os.getpid())
            assert listener.enter(held, circle.address(), 1, handle, Deadline(5.0))
            os.close(handle)

        found = circle.run(members=[0, 2], timeout_s=0.4, meanwhile=stop)
    all_tell(found, BackendTimeout, "rank 11 did not connect to set up shared memory")


def test_a_member_that_leaves_before_all_have_come() -> None:
    circle = Circle(3)

    def leave() -> None:
        handle = os.pidfd_open(os.getpid())
        with socket.socket(socket.AF_UNIX) as held:
            assert listener.enter(held, circle.address(), 1, handle, Deadline(5.0))
        os.close(handle)

    found = circle.run(members=[0], meanwhile=leave)
    all_tell(found, BackendFailure, "rank 11 disconnected while setting up shared memory")


@pytest.mark.parametrize("junk", [b"x", b"name", b"name not-hex", bytes(range(200, 256))])
def test_an_address_that_no_member_wrote_is_named(junk: bytes) -> None:
    circle = Circle(2)
    circle.store.set("shared/address", junk)
    (found,) = circle.run(members=[1])
    assert isinstance(found, BackendUnsupported)
    assert "rank 11: the store holds" in str(found)
    assert "instead of the socket's address" in str(found)


@pytest.mark.parametrize(
    "junk", [b"x", b"[]", b'["late"]', b'["no kind", "text"]', b"[[], 3]", b"[" * 5000]
)
def test_a_trouble_that_no_member_wrote_is_named(junk: bytes) -> None:
    circle = Circle(2)
    circle.store.set("shared/trouble", junk)
    (found,) = circle.run(members=[0])
    text = "a store key of this group holds a value that no rank has written"
    all_tell([found], BackendFailure, text)


def answered_by(first: Callable[[socket.socket], None], timeout_s: float) -> Exception | None:
    """What a member raises for what ``first`` sends in the place of the first member."""
    circle = Circle(2)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("")  # the system gives it a name
        server.listen()
        name = server.getsockname()[1:].decode()
        circle.store.set("shared/address", f"{name} {'00' * 16}")

        def answer() -> None:
            with server.accept()[0] as connection, suppress(OSError):
                first(connection)

        return circle.run(members=[1], meanwhile=answer, timeout_s=timeout_s)[0]


@pytest.mark.parametrize(
    ("num_files", "told"),
    [
        (0, "rank 11: rank 10 sent 0 file descriptors"),
        (2, "rank 11: rank 10 sent 2 file descriptors"),
        (4, "rank 11: 4 file descriptors are announced, at most 3 may follow"),
    ],
)
def test_an_answer_with_other_files_than_a_group_has_is_a_refusal(
    num_files: int, told: str
) -> None:
    head = struct.pack("!iI", 0, num_files)
    files = [0] * num_files

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        if files:
            socket.send_fds(connection, [b"f"], files)

    all_tell([answered_by(answer, 5.0)], BackendUnsupported, told)


def test_an_answer_that_comes_in_drops_does_not_put_off_the_timeout() -> None:
    def drip(connection: socket.socket) -> None:
        for _ in range(8):
            time.sleep(0.9)
            connection.sendall(b"\0")

    begin = time.monotonic()
    found = answered_by(drip, 0.5)
    all_tell([found], BackendTimeout, "rank 10 did not respond while setting up shared memory")
    assert is_within(time.monotonic() - begin, 4.0)


def sharing(attach: Attach, num_spare_files: int | None = None) -> tuple[str, str, int]:
    """Share among processes of a world; the kind of the error, its text, files gained."""
    world = get_world()
    attach_here = attach
    store = PrefixStore(f"shared {num_spare_files}", world.store)
    before = num_files()
    told = ("", "")
    if num_spare_files is not None and world.rank == 1:
        import resource

        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        # listdir has had one open of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest_file() + 1 + num_spare_files, usual[1]))
    try:
        share(store, world.rank, range(world.size), make_memory, attach_here, 10.0)
    except Exception as error:
        told = (type(error).__name__, str(error))
    finally:
        if num_spare_files is not None and world.rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    return (*told, num_files() - before)


def highest_file() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("dying", [0, 2])
def test_a_process_that_ends_in_the_middle_is_noticed_at_once(dying: int, pool: Pool) -> None:
    def program() -> Any:
        def attach(shared: Shared) -> None:
            if md.get_rank() == dying:
                os._exit(3)
            close_shared(shared)

        begin = time.monotonic()
        return sharing(attach), time.monotonic() - begin

    outcomes = pool.outcomes(program, 3)
    assert isinstance(outcomes.pop(dying), Failure)
    for told, seconds in outcomes:
        assert told[:2] == (
            "BackendFailure",
            f"rank {dying} disconnected while setting up shared memory",
        )
        assert told[2] <= 0  # the Gloo connection to it may have ended too
        assert is_within(seconds, 2.0)


def test_too_few_file_numbers_are_a_refusal_for_all_and_leave_none_behind(pool: Pool) -> None:
    def program() -> Any:
        gaps = fill_gaps()
        try:
            return [sharing(close_shared, spare) for spare in range(9)]
        finally:
            for file in gaps:
                os.close(file)

    by_rank = pool.run(program, 4)
    rejected = ("BackendUnsupported", "rank 1: [Errno 24] Too many open files", 0)
    outcomes = by_rank[1]
    for found in by_rank:
        assert [told for *told, _ in found] == [told for *told, _ in outcomes]
        # The signal thread of a host's first rank may open its connection meanwhile.
        assert sum(gained for *_, gained in found) <= 1
    assert set(outcomes) == {rejected, ("", "", 0)}
    assert outcomes == sorted(outcomes, reverse=True)  # rejected until there are enough
    assert outcomes[0] == rejected
    assert outcomes[-1] == ("", "", 0)


def fill_gaps() -> list[int]:
    """Open files until the next number is the highest, so that a limit counts from there."""
    files = []
    top = highest_file()
    while True:
        files.append(os.open("/dev/null", os.O_RDONLY))
        if files[-1] > top:
            return files
