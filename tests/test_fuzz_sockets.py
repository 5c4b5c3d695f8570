"""Junk in sockets, in files, and in words that processes share: errors of ours, or nothing.

It is what members send or write there, with some of it changed, left out or added (``test_fuzz``).
No reader keeps a file open for it.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import struct
import tempfile
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from tests.backends.shm.circle import close_shared, make_memory, num_files
from tests.inner import (
    BackendFailure,
    FingerprintTable,
    FingerprintTables,
    Listener,
    PickledObject,
    Regions,
    SharedFlags,
    SharedFlagsView,
    World,
    attach,
    core,
    find_readable,
    open_file,
    rank_of,
    unpack,
)
from tests.test_fuzz import changed, records, texts
from tests.test_fuzz_store import SHORT, Memory, Readers, as_bytes, check

pytestmark = pytest.mark.skipif(core is None, reason="no native core here")

NUMBERS = (0, 1, 2, 3, 4, 7, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1)
GREETING = struct.Struct("!16sI")
HEAD = struct.Struct("!iI")

Part = tuple[bytes, int]
"""Bytes that are sent at once, and how many open files with them."""


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    return changed(data.decode("latin-1"), rng).encode("utf-8", "surrogateescape")[:5000]


def changed_parts(parts: Sequence[Part], rng: random.Random) -> list[Part]:
    """Parts of which one, in two of three cases, is changed, left out or repeated."""
    found = list(parts)
    at = rng.randrange(len(found))
    data, files = found[at]
    kind = rng.randrange(6)
    if kind == 0:
        del found[at]
    elif kind == 1:
        found.insert(at, (data, rng.randrange(5)))
    elif kind == 2:
        found[at] = changed_bytes(data, rng), files
    elif kind == 3:
        found[at] = data, rng.randrange(5)
    return found


def send_parts(connection: socket.socket, parts: Sequence[Part]) -> None:
    """Send what the other side takes at once."""
    connection.setblocking(False)
    with suppress(OSError):
        for data, files in parts:
            handles = array("i", [connection.fileno()] * files)
            more = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)] if files else []
            connection.sendmsg([data or b"x"], more)


def connected(stack: ExitStack, name: Any) -> socket.socket:
    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
    connection.connect(name)
    return connection


def listening(stack: ExitStack) -> socket.socket:
    """A socket that has a name of the system's."""
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind("")
    listener.listen(16)
    return listener


# -- shared memory's opening ----------------------------------------------------------------------


def visits(rng: random.Random) -> list[list[Part]]:
    """What each of some connections sends; X's are for the secret."""
    return [
        changed_parts([(GREETING.pack(b"X" * 16, rng.choice((0, 1, 2, 3, 1 << 31))), 1)], rng)
        for _ in range(rng.randrange(1, 5))
    ]


def listener(given: list[list[Part]]) -> None:
    before, places = num_files(), []
    with ExitStack() as stack:
        listener = Listener(3)
        stack.callback(listener.close)
        name, secret = listener.address.split()
        for parts in given:
            visitor = connected(stack, f"\0{name}")
            true = bytes.fromhex(secret)
            send_parts(visitor, [(data.replace(b"X" * 16, true), files) for data, files in parts])
            for _ in range(2):
                ready = find_readable(listener.watched(), 0.0)
                for one in [one for one in listener.watched() if one.fileno() in ready]:
                    with suppress(OSError):
                        came = listener.look(one)
                        if came is not None:
                            places.append(came[0])
                            stack.enter_context(came[1])
                            os.close(came[2])
    assert {*places, *listener.awaited} == {1, 2} and len(places) + len(listener.awaited) == 2
    assert num_files() <= before  # threads of other tests may close some meanwhile


def sharing(store: Memory) -> None:
    """As the second of two members."""
    before = num_files()
    with suppress(BackendFailure):
        attach.share(store, 1, (0, 1), make_memory, close_shared, 0.0)
    assert num_files() <= before  # threads of other tests may close some meanwhile


def address_of_listener(junk: bytes) -> None:
    store = Memory()
    store.values["shared/address"] = junk
    sharing(store)


def trouble(junk: bytes) -> None:
    store = Memory()
    store.values.update({"shared/address": b"", "shared/trouble": junk})
    sharing(store)


def answer_parts(rng: random.Random) -> list[Part]:
    head = HEAD.pack(rng.choice((-1, 0, 0, 1)), rng.choice((0, 1, 3, 3, 3, 4, (1 << 32) - 1)))
    return changed_parts([(head, 0), (b"f", 3), (HEAD.pack(0, 0), 0)], rng)


def answer_of_listener(parts: list[Part]) -> None:
    with ExitStack() as stack:
        listener = listening(stack)

        def enter(connection: socket.socket, *_: object) -> bool:
            connection.connect(listener.getsockname())
            with listener.accept()[0] as first:
                send_parts(first, parts)
            return True

        store = Memory()
        store.values["shared/address"] = b"there"
        stack.enter_context(mock.patch.object(attach, "enter", enter))
        sharing(store)


# -- other sockets --------------------------------------------------------------------------------


def greeting_of_bench(junk: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        theirs.sendall(junk[:5000] + b"\n")
        theirs.close()
        assert isinstance(rank_of(ours, "secret"), int | None)


# -- parcels, files -------------------------------------------------------------------------------


def pickled(rng: random.Random) -> bytes:
    data = bytes(PickledObject({str(n): [n] * n for n in range(rng.randrange(4))}).data)
    at = 8 * rng.randrange(len(data) // 8)
    number = rng.choice((*NUMBERS, -1, -(1 << 63)))
    data = data[:at] + struct.pack("<q", number) + data[at + 8 :]
    return data[: rng.choice((len(data), len(data), rng.randrange(len(data))))]


def unpacked(data: bytes) -> None:
    target: Any = SimpleNamespace(name="a group", world=SimpleNamespace(rank=0))
    array = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    assert isinstance(unpack(array.to(torch.uint8), 1, "a collective", target), list)


def file_of_store(rng: random.Random) -> bytes:
    def text(valid: bytes) -> bytes:
        data = changed_bytes(valid, rng) if rng.randrange(4) == 0 else valid
        size = rng.choice(NUMBERS) & 0xFFFFFFFF if rng.randrange(8) == 0 else len(data)
        return struct.pack("=I", size) + data

    valid = [(b"refcount/", b"1"), (b"/key", b"value"), (b"/number", b"3"), (b"-/key", b"")]
    data = b"".join(map(text, sum(rng.choices(valid, k=rng.randrange(5)), ())))
    return data[: rng.choice((len(data), rng.randrange(len(data) + 1)))]


def read_file_of_store(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(data)
    try:
        open_file(file.name, SHORT).check(["key"])
    finally:
        with suppress(FileNotFoundError):  # which torch removes with its last user
            os.unlink(file.name)


# -- shared words ---------------------------------------------------------------------------------


def address_of_words(junk: bytes) -> None:
    store = Memory()
    store.values["process/1"] = b'{"words": %s}' % junk
    tables = FingerprintTables(cast(World, SimpleNamespace(store=store, hosts=(0, 0), rank=0)))
    assert not tables.reaches((0, 1))


Deed = tuple[str, tuple[int, ...]]
NUM_WORDS = FingerprintTable.num_words(2)


def deeds(rng: random.Random) -> list[Deed]:
    """What two members do in turn, and junk that is written to the second one's words."""

    def deed() -> Deed:
        kind = rng.choice(("directory", "region", "region", "calls", "uneven", "messages", "both"))
        number = rng.choice((*NUMBERS, rng.getrandbits(64), (1 << 64) - rng.randrange(1, 300)))
        if kind == "directory":  # the random number at its beginning is read once
            return kind, (rng.randrange(1, 5), number)
        places = (rng.randrange(NUM_WORDS), rng.randrange(8), 1344 + rng.randrange(6))
        return kind, (rng.choice(places), number)

    return [deed() for _ in range(rng.randrange(2, 10))]


def shared_words(given: list[Deed]) -> None:
    with ExitStack() as stack:
        words = [SharedFlags() for _ in range(2)]
        for one in words:
            stack.callback(one.close)
        views = [SharedFlagsView(one.address) for one in words]
        tables = [
            FingerprintTable(
                words[me], 7, (0, 0), me, Regions(lambda k: (views[k], 7)), core.MessageLog
            )
            for me in range(2)
        ]
        for table in tables:
            stack.callback(table.close)
        own, calls = memoryview(mmap.mmap(words[1].address.file, 0)).cast("Q"), [0, 0]
        region = int(own[3])
        for kind, (place, number) in given:
            if kind == "directory":
                own[place] = number
            elif kind == "region":
                own[region + place] = number
            else:
                for me in range(2 if kind == "both" else 1):
                    calls[me] += 1
                    use(tables[me], calls[me], kind, number, place)


def use(table: FingerprintTable, call: int, kind: str, number: int, place: int) -> None:
    """Look at the other member's words in one of the ways that calls do."""
    if kind == "messages":
        table.note(1, number & 0xFF, place, is_send=bool(place % 2))
        if place % 8 == 0:
            table.recv_any(number & 0xFF)
    elif kind == "uneven":
        table.enter(call, 1, [place, place], [place, place])
    else:
        table.enter(call, 1)
    table.look_again(call)
    table.find_lagging(call + 2000, place % 2 == 0)


READERS: Readers = {
    "the listener of shared memory": (visits, listener),
    "the address of the listener": (
        texts(f"meshdist-{'0a' * 16} {'1b' * 16}"),
        lambda text: address_of_listener(as_bytes(text)),
    ),
    "the trouble of an opening": (records(["rejected", "rank 0: none"], ["late", ""]), trouble),
    "the listener's answer": (answer_parts, answer_of_listener),
    "the greeting of a benchmark's rank": (
        records({"secret": "secret", "rank": 1, "side": "a", "size": 2}),
        greeting_of_bench,
    ),
    "parcels of objects": (pickled, unpacked),
    "the file of a store": (file_of_store, read_file_of_store),
    "the address of shared words": (records([os.getpid(), 3, 1 << 62], None), address_of_words),
    "shared words": (deeds, shared_words),
}
"""How the inputs are drawn, and what reads them."""


@pytest.mark.parametrize("name", READERS)
def test_junk_in_sockets_and_words_ends_in_an_error_of_ours(name: str) -> None:
    check(name, 200, READERS)


@pytest.mark.soak
@pytest.mark.parametrize("name", READERS)
def test_much_junk_in_sockets_and_words_ends_in_errors_of_ours(name: str) -> None:
    check(name, 100_000, READERS)
