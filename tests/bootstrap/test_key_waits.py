"""Waits for keys that may be given up, against torch's own server and others."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

import meshdist as md
from meshdist.bootstrap.stores import NamedPrefixStore
from meshdist.bootstrap.timeout_store import TimeoutStore, await_key, find_value, read_number
from tests.inner import Deadline

LONG = timedelta(seconds=30)


def serve() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client_of(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, is_master=False)


def counted(store: Any) -> tuple[TimeoutStore, list[str]]:
    """A handle, and the names of the requests that it makes besides waits."""
    asked: list[str] = []

    class Counted(md.TCPStore):
        def check(self, keys: Any) -> bool:
            asked.append("check")
            return bool(super().check(keys))

    raw = Counted("127.0.0.1", store.port, is_master=False)
    return TimeoutStore(raw, LONG), asked


def test_a_wait_ends_when_the_key_is_set_and_asks_only_once() -> None:
    server = serve()
    handle, asked = counted(server)
    alarm = handle.alarm
    keys = PrefixStore("below", handle)
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 4:  # the wait has gone on over several slices
            server.set("below/key", "value")

    assert await_key(keys, "key", Deadline(30), look)
    assert asked == []
    assert await_key(keys, "key", Deadline(30))
    assert handle.alarm is alarm  # on the same connection
    handle.close()


def test_a_wait_that_is_given_up_reports_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    server = serve()
    handle = TimeoutStore(client_of(server), LONG)
    assert not await_key(handle, "key", Deadline(0.3))
    with pytest.raises(md.StoreError, match="wait timeout"):
        handle.wait(["key"], timedelta(seconds=0.1))
    handle.close()
    assert capfd.readouterr().err == ""


def test_what_looks_meanwhile_may_raise() -> None:
    server = serve()
    handle = TimeoutStore(client_of(server), LONG)

    def look() -> None:
        raise md.CollectiveTimeoutError("enough")  # an OSError, too

    with pytest.raises(md.CollectiveTimeoutError, match="enough"):
        await_key(PrefixStore("below", handle), "key", Deadline(30), look)
    handle.close()


def test_a_key_that_is_set_already_is_found_after_the_deadline() -> None:
    server = serve()
    for raw in (client_of(server), HashStore()):
        handle = TimeoutStore(raw, LONG)
        handle.set("key", "")
        assert await_key(handle, "key", Deadline(0))
        handle.close()


def test_two_threads_wait_at_once_and_others_go_on() -> None:
    server = serve()
    handle = TimeoutStore(client_of(server), LONG)
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda key=key: found.append(await_key(handle, key, Deadline(30))))
        for key in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    assert handle.add("number", 2) == 2
    for key in ("b", "a"):
        server.set(key, "")
    for thread in threads:
        thread.join(30)
    assert found == [True, True]
    handle.close()


def test_waits_know_a_named_prefix_and_look_below_others() -> None:
    server = serve()
    for prefix in (NamedPrefixStore, PrefixStore):
        handle = TimeoutStore(prefix("attempt 0", client_of(server)), LONG)
        alarm = handle.alarm
        assert not await_key(handle, prefix.__name__, Deadline(0.1))
        server.set(f"attempt 0/{prefix.__name__}", "")
        assert await_key(handle, prefix.__name__, Deadline(30))
        assert handle.alarm is alarm
        handle.close()


@pytest.mark.parametrize("answer", [b"\x01", b"junk", b""])
def test_a_server_that_answers_otherwise_is_looked_at_instead(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    handle = TimeoutStore(client_of(server), LONG)
    alarm = handle.alarm
    assert alarm is not None
    connection, alarm.connection = socket.socketpair()

    def reply() -> None:
        connection.recv(100)
        connection.sendall(answer)
        connection.close()
        server.set("key", "")

    def reject(*_: object, **__: object) -> None:
        raise ConnectionRefusedError

    thread = threading.Thread(target=reply)
    thread.start()
    monkeypatch.setattr(socket, "create_connection", reject)
    assert await_key(handle, "key", Deadline(30))
    thread.join(30)
    assert alarm.is_lost
    assert await_key(handle, "key", Deadline(30))  # the server accepts no new connection
    handle.close()


def test_values_and_numbers_are_read_by_one_request_and_nothing_is_written() -> None:
    server = serve()
    handle = TimeoutStore(client_of(server), LONG)
    assert find_value(handle, "key") is None
    assert read_number(handle, "key") == 0
    assert not handle.check(["key"])
    handle.set("key", "7")
    assert (find_value(handle, "key"), read_number(handle, "key")) == (b"7", 7)
    handle.set("key", "seven")
    with pytest.raises(md.StoreError, match="that no rank of this job wrote"):
        read_number(handle, "key")
    handle.close()


def test_an_exception_in_the_middle_of_a_request_spoils_no_later_wait() -> None:
    server = serve()
    handle = TimeoutStore(client_of(server), LONG)
    alarm = handle.alarm
    assert alarm is not None
    sent = alarm.connection

    class Interrupting:
        """A socket; a handler of signals raises before it has sent anything."""

        def sendall(self, text: bytes) -> None:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(sent, name)

    assert alarm.poll("another") is False
    alarm.connection = Interrupting()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        await_key(handle, "key", Deadline(5))
    alarm.connection = sent
    server.set("key", "value")
    asked = handle.ask
    handle.ask = None  # type: ignore[assignment] # the wait must ring
    assert await_key(handle, "key", Deadline(5))
    handle.ask = asked  # type: ignore[method-assign]
    assert not alarm.turn.locked()
    handle.close()


def test_a_key_that_the_server_takes_for_junk_does_not_end_the_watch() -> None:
    handle = TimeoutStore(client_of(server := serve()), LONG)
    with pytest.raises(md.StoreError, match="has closed this process's connection"):
        await_key(handle, "x" * 9000, Deadline(5))
    server.set("key", "value")
    assert handle.is_hosted
    assert await_key(handle, "key", Deadline(5))
    handle.close()
