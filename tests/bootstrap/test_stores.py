"""Torch's stores, method by method, as docs/reference/stores.md says; and our servers."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

import meshdist as md
from meshdist.bootstrap import stores
from meshdist.bootstrap.stores import (
    bind_listener,
    connect_store,
    inherited_listener,
    is_loopback,
    open_file,
    serve_store,
)
from tests.load import is_within
from tests.pool import Pool

SHORT = timedelta(seconds=0.1)
KINDS = ("tcp", "file", "hash", "prefix")
QUEUE_KINDS = ("tcp", "hash", "prefix")


def serve() -> md.TCPStore:
    listener = bind_listener("127.0.0.1", 0)
    assert listener is not None
    return serve_store(listener, "127.0.0.1", listener.getsockname()[1], timedelta(seconds=60))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    kind = request.param
    if kind == "tcp":
        yield serve()
    elif kind == "file":
        yield md.FileStore(str(tmp_path / "store"), -1)
    elif kind == "hash":
        yield md.HashStore()
    else:
        under = serve()
        yield md.PrefixStore("prefix", under)


every_kind = pytest.mark.parametrize("store", KINDS, indirect=True)


def kind_of(store: Any) -> str:
    return type(store).__name__.removesuffix("Store").lower()


def test_they_are_torchs_own() -> None:
    for name in ("Store", "TCPStore", "FileStore", "HashStore", "PrefixStore"):
        assert getattr(md, name) is getattr(torch.distributed, name)


# -- every method -------------------------------------------------------------------------------


@every_kind
def test_set_overwrites_and_get_gives_bytes(store: Any) -> None:
    store.set("key", "first")
    store.set("key", b"\x00\xff")
    assert store.get("key") == b"\x00\xff"
    store.set("empty", "")
    assert store.get("empty") == b""


@every_kind
def test_add_counts(store: Any) -> None:
    assert store.add("n", 1) == 1
    assert store.add("n", 6) == 7
    assert store.get("n") == b"7"
    assert store.add("n", -9) == -2
    store.set("text", "40")
    assert store.add("text", 2) == 42


@pytest.mark.parametrize("store", ["file", "hash"], indirect=True)
def test_add_on_a_text_is_an_error(store: Any) -> None:
    store.set("key", "text")
    with pytest.raises(ValueError, match="stoll"):
        store.add("key", 1)


def test_add_on_a_text_ends_the_server_of_a_tcp_store(pool: Pool) -> None:
    # In a process of its own, which may not survive it.
    code = (
        "from tests.bootstrap.test_stores import serve\n"
        "store = serve()\n"
        "store.set('key', 'text')\n"
        "try:\n"
        "    store.add('key', 1)\n"
        "except RuntimeError as error:\n"
        "    print(type(error).__name__)\n"
        "try:\n"
        "    store.check(['key'])\n"
        "except RuntimeError as error:\n"
        "    print(type(error).__name__)\n"
    )
    (done,) = pool.start(code)
    assert done.returncode != 0 or done.stdout.split() == ["DistNetworkError"] * 2, done.stderr


@every_kind
def test_append(store: Any) -> None:
    store.append("key", "po")
    store.append("key", "ta")
    store.append("key", "to")
    assert store.get("key") == b"potato"


@every_kind
def test_check_answers_at_once(store: Any) -> None:
    store.set("here", "1")
    assert store.check(["here"]) is True
    assert store.check(["here", "nowhere"]) is False
    assert store.check([]) is True


@every_kind
def test_compare_set(store: Any) -> None:
    assert store.compare_set("key", "something", "new") == b"something"  # absent: not set
    assert store.check(["key"]) is False
    assert store.compare_set("key", "", "first") == b"first"  # absent, nothing expected: set
    assert store.compare_set("key", "", "second") == b"first"  # present: unchanged
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.get("key") == b"second"


@every_kind
def test_delete_key(store: Any) -> None:
    store.set("key", "1")
    assert store.delete_key("key") is True
    assert store.check(["key"]) is False
    # The documentation says that a FileStore cannot delete; torch deletes and always says True.
    assert store.delete_key("key") is (kind_of(store) == "file")


@every_kind
def test_multi_set_and_multi_get(store: Any) -> None:
    store.multi_set(["a", "b"], ["one", "two"])
    assert store.multi_get(["b", "a"]) == [b"two", b"one"]


@pytest.mark.parametrize("store", ["tcp"], indirect=True)
def test_multi_set_wants_as_many_values_as_keys(store: Any) -> None:
    # Not asked of the others: there torch reads what lies behind the list.
    with pytest.raises(torch.distributed.DistStoreError, match="same size"):
        store.multi_set(["a", "b"], ["one"])


@every_kind
def test_num_keys_counts_bookkeeping_too(store: Any) -> None:
    store.set("a", "1")
    store.set("b", "2")
    own = {"hosted": 0, "prefix": 0, "file": 1, "hash": 0}[kind_of(store)]
    extra = store.num_keys() - 2
    # A TCPStore has a key of its own once a client has come and said so.
    assert extra == own or (kind_of(store) in ("hosted", "prefix") and extra == 1)


@every_kind
def test_list_keys(store: Any) -> None:
    store.set("a", "1")
    store.set("b", "2")
    assert {"a", "b"} <= set(store.list_keys())


@every_kind
def test_wait(store: Any) -> None:
    store.set("a", "1")
    assert store.wait(["a"]) is None
    # A FileStore raises a plain RuntimeError, and looks again only once a second.
    kind = RuntimeError if kind_of(store) == "file" else torch.distributed.DistStoreError
    with pytest.raises(kind, match=r"[Tt]imeout"):
        store.wait(["a", "nowhere"], SHORT)


@every_kind
def test_get_waits_as_long_as_the_timeout(store: Any) -> None:
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        store.get("nowhere")


def test_the_default_timeout_is_five_minutes(tmp_path: Path) -> None:
    stores = [
        md.HashStore(),
        md.FileStore(str(tmp_path / "store"), -1),
        md.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    ]
    assert [store.timeout for store in stores] == [timedelta(minutes=5)] * 3


def test_no_server_is_a_network_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(md.DistNetworkError):
        md.TCPStore("127.0.0.1", port, timeout=SHORT)


@every_kind
def test_has_extended_api(store: Any) -> None:
    assert store.has_extended_api() is (kind_of(store) != "file")


@pytest.mark.parametrize("store", QUEUE_KINDS, indirect=True)
def test_queues(store: Any) -> None:
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert store.queue_len("q") == 2
    assert store.queue_pop("q") == b"1"
    assert store.queue_pop("q", False) == b"2"
    assert store.queue_len("q") == 0
    with pytest.raises(torch.distributed.QueueEmptyError, match="queue is empty"):
        store.queue_pop("q", False)


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_file_store_has_no_queues(store: Any) -> None:
    with pytest.raises(NotImplementedError, match="queue support"):
        store.queue_push("q", "1")


@every_kind
def test_clone_is_another_handle_to_the_same_keys(store: Any) -> None:
    other = store.clone()
    store.set("key", "1")
    assert other.get("key") == b"1"


@pytest.mark.parametrize("store", ["tcp", "hash"], indirect=True)
def test_barrier(store: Any) -> None:
    store.barrier("alone", 1)
    passed = []

    def come(handle: Any) -> None:
        handle.barrier("together", 2, timedelta(seconds=30))
        passed.append(handle)

    first = threading.Thread(target=come, args=(store.clone(),))
    first.start()
    time.sleep(0.05)
    assert passed == []
    come(store)
    first.join()
    assert len(passed) == 2


@pytest.mark.parametrize("store", ["tcp"], indirect=True)
def test_a_waiting_thread_blocks_its_handle_but_not_a_clone(store: Any) -> None:
    clone = store.clone()
    waiter = threading.Thread(target=store.wait, args=(["late"],))
    waiter.start()
    time.sleep(0.05)
    clone.set("late", "1")  # on the same handle this would wait for the waiter
    waiter.join(30)
    assert not waiter.is_alive()


def test_prefix_stores_prefix_their_keys() -> None:
    under = md.HashStore()
    inner = md.PrefixStore("inner", md.PrefixStore("outer", under))
    inner.set("key", "1")
    assert under.get("outer/inner/key") == b"1"
    assert type(inner.underlying_store) is md.PrefixStore
    assert inner.list_keys() == ["key"]
    under.set("another", "1")
    assert inner.num_keys() == under.num_keys() == 2  # of the whole store underneath


def test_attributes(tmp_path: Path) -> None:
    tcp = serve()
    assert (tcp.host, tcp.libuvBackend) == ("127.0.0.1", True)
    assert tcp.port > 0
    assert md.FileStore(str(tmp_path / "store"), -1).path == str(tmp_path / "store")


def test_a_file_store_of_known_size_removes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = md.FileStore(str(path), 1)
    store.set("key", "1")
    del store
    assert not path.exists()
    store = md.FileStore(str(path), -1)
    store.set("key", "1")
    del store
    assert path.exists()


# -- servers of ours ----------------------------------------------------------------------------


def test_names_and_numbers_of_loopback() -> None:
    names = ("localhost", "127.0.0.1", "127.8.9.1", "::1", "10.0.0.1", "example.org", "")
    assert [is_loopback(name) for name in names] == [True] * 4 + [False] * 3


def listening_sockets() -> str:
    # In a process of its own, so that no other test's sockets count.
    return """
import os, sys
def addresses():
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for kind in ("tcp", "tcp6"):
        with open(f"/proc/net/{kind}") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.append(fields[1].rpartition(":")[0])
    return found
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_our_server_listens_on_loopback_alone_and_torchs_does_not(pool: Pool) -> None:
    code = listening_sockets() + (
        "from datetime import timedelta\n"
        "from tests.bootstrap.test_stores import serve\n"
        "import torch.distributed as dist\n"
        "ours = serve()\n"
        "print(addresses())\n"
        "theirs = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(addresses())\n"
    )
    (done,) = pool.start(code)
    assert done.returncode == 0, done.stderr
    ours, both = done.stdout.splitlines()
    assert ours == "['0100007F']"
    assert "0" * 32 in both  # every interface: the reason for handing over a socket


def test_a_taken_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(md.RendezvousError) as caught:
            bind_listener("127.0.0.1", port)
    assert f"rank 0 cannot listen on 127.0.0.1, port {port}: Address already in use" in str(
        caught.value
    )
    assert "fix:      use another port" in str(caught.value)


def test_an_address_of_another_host_gives_no_listener() -> None:
    assert bind_listener("192.0.2.1", 0) is None  # reserved for documentation


def test_an_address_that_leads_elsewhere_is_rejected_in_time() -> None:
    begin = time.monotonic()
    with pytest.raises(md.RendezvousError) as caught:
        serve_store(None, "192.0.2.1", free_port(), timedelta(seconds=2))
    assert time.monotonic() - begin < 20
    assert "rank 0 cannot be reached at 192.0.2.1, port " in str(caught.value)
    assert "expected: an address of rank 0's host" in str(caught.value)
    assert "found:    no process listens on 192.0.2.1, port " in str(caught.value)
    with pytest.raises(md.RendezvousError, match="cannot resolve the host name 'no such host'"):
        serve_store(None, "no such host", free_port(), timedelta(seconds=2))


def test_another_store_at_the_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    other = serve()
    monkeypatch.setattr(stores, "connect_store", lambda *_: other)
    with pytest.raises(md.RendezvousError) as caught:
        serve_store(None, "192.0.2.1", free_port(), timedelta(seconds=20))
    assert "found:    another store answers there" in str(caught.value)


def test_a_host_is_reached_at_its_own_name() -> None:
    name, port = socket.gethostname(), free_port()
    store = serve_store(None, name, port, timedelta(seconds=20))
    store.set("key", "1")
    assert connect_store(name, port, timedelta(seconds=20)).get("key") == b"1"


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(md.RendezvousError, match="cannot resolve the host name 'no such host'"):
        bind_listener("no such host", 0)


def test_connecting_where_nobody_listens_names_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(
        md.RendezvousError, match="cannot reach rank 0: no process listens"
    ) as caught:
        connect_store("127.0.0.1", port, timedelta(seconds=0.2))
    assert f"127.0.0.1, port {port} after 0.2 s" in str(caught.value)


def test_connecting_to_something_else_is_an_error(pool: Pool) -> None:
    """In a process that ends, since torch waits for the first answer without end."""
    code = (
        "import socket\n"
        "from datetime import timedelta\n"
        "from meshdist.bootstrap.stores import connect_store\n"
        "with socket.create_server(('127.0.0.1', 0)) as other:\n"
        "    connect_store('127.0.0.1', other.getsockname()[1], timedelta(seconds=0.5))\n"
    )
    (done,) = pool.start(code)
    assert "RendezvousError: the service at 127.0.0.1, port " in done.stderr
    assert "does not respond as a store\n" in done.stderr


def test_a_client_waits_while_the_server_closes(pool: Pool) -> None:
    """The server may need long to close: its process may not get the CPU."""
    code = (
        "import threading, time\n"
        "from datetime import timedelta\n"
        "from meshdist.bootstrap.stores import CLOSING, bind_listener, connect_store, serve_store\n"
        "limit, host = timedelta(seconds=60), '127.0.0.1'\n"
        "listener = bind_listener(host, 0)\n"
        "port = listener.getsockname()[1]\n"
        "servers = [serve_store(listener, host, port, limit)]\n"
        "servers[0].set(CLOSING, '')\n"
        "def serve_again():\n"
        "    time.sleep(0.5)\n"
        "    del servers[0]\n"
        "    servers.append(serve_store(bind_listener(host, port), host, port, limit))\n"
        "    servers[0].set('is new', '1')\n"
        "thread = threading.Thread(target=serve_again)\n"
        "thread.start()\n"
        "client = connect_store(host, port, limit)\n"
        "print(client.get('is new'))\n"
        "thread.join()\n"
    )
    (done,) = pool.start(code)
    assert done.stdout == "b'1'\n", done.stderr


def test_a_client_waits_until_the_server_is_there() -> None:
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    servers = []

    def serve_late() -> None:
        time.sleep(0.2)
        reserved.listen()
        servers.append(serve_store(reserved, "127.0.0.1", port, timedelta(seconds=60)))

    thread = threading.Thread(target=serve_late)
    thread.start()
    client = connect_store("127.0.0.1", port, timedelta(seconds=60))
    thread.join()
    client.set("key", "1")
    assert servers[0].get("key") == b"1"


@pytest.fixture
def bound() -> Iterator[Callable[[], socket.socket]]:
    made: list[socket.socket] = []

    def make() -> socket.socket:
        one = socket.socket()
        one.bind(("127.0.0.1", 0))
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def test_the_launchers_socket_is_taken_over(bound: Callable[[], socket.socket]) -> None:
    reserved = bound()
    port = reserved.getsockname()[1]
    number = os.dup(reserved.fileno())
    listener = inherited_listener(str(number), port)
    assert listener is not None
    with listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        assert not listener.get_inheritable()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


def test_other_descriptors_are_left_alone(
    bound: Callable[[], socket.socket], tmp_path: Path
) -> None:
    reserved = bound()
    port = reserved.getsockname()[1]
    assert inherited_listener(None, port) is None
    assert inherited_listener("", port) is None
    assert inherited_listener("x", port) is None
    assert inherited_listener("999999", port) is None
    assert inherited_listener(str(reserved.fileno()), port + 1) is None
    with open(tmp_path / "file", "w") as file:
        before = os.listdir("/proc/self/fd")
        assert inherited_listener(str(file.fileno()), port) is None
        assert not file.closed
        assert len(os.listdir("/proc/self/fd")) <= len(before)  # other tests' threads close some
    reserved.listen()  # somebody else uses it already
    assert inherited_listener(str(reserved.fileno()), port) is None
    assert reserved.getsockname()[1] == port


# -- the file of a store ------------------------------------------------------------------------


def test_a_file_is_made_for_this_user_alone_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    open_file(str(path), SHORT).set("key", "value")
    assert open_file(str(path), SHORT).get("key") == b"value"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_file_is_told_in_time(tmp_path: Path) -> None:
    # Torch reads some of these for ever, with the GIL.
    path = tmp_path / "store"
    store = open_file(str(path), SHORT)
    store.set("key", "value")
    store.add("number", 3)
    del store
    sound = path.read_bytes()
    num_rejected = 0
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        start = time.monotonic()
        try:
            open_file(str(path), SHORT)
        except md.RendezvousError:
            num_rejected += 1
        assert is_within(time.monotonic() - start, 5.0)
    assert num_rejected > len(sound) / 4


def test_a_count_too_large_for_torch_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "store"
    texts = (b"refcount/", b"9" * 30)
    path.write_bytes(b"".join(struct.pack("=I", len(text)) + text for text in texts))
    with pytest.raises(md.RendezvousError, match="cannot use the store's file: it is damaged"):
        open_file(str(path), SHORT)


def test_a_file_whose_keys_were_deleted_is_sound(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    store = open_file(path, SHORT)
    store.set("first", "1")
    store.set("second", "2")
    store.delete_key("first")
    assert open_file(path, SHORT).get("second") == b"2"


def test_a_file_that_stays_locked_is_told_in_time(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(md.RendezvousError, match=r"process \d+ keeps it locked"):
            open_file(str(path), SHORT)
    open_file(str(path), SHORT)
