"""Strangers at Gloo's ports: on one host none comes from outside, and none is heard at all."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

import meshdist as md
from meshdist.backends.c10d.gloo_connections import Devices, gloo_devices, gloo_interfaces
from tests.pool import Pool

linux = pytest.mark.skipif(sys.platform != "linux", reason="sockets have no filters here")
STRANGER_S = 0.2


def listening() -> list[tuple[str, int]]:
    """The addresses at which this process listens for TCP."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:
            continue
        try:
            one = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            continue
        with closing(one):
            is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(one.getsockname()[:2])
    return found


def address_of(devices: Devices) -> tuple[str, int]:
    """Where the one device listens."""
    (descriptor,) = devices.listeners
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        address: tuple[str, int] = listener.getsockname()
        return address


def is_heard(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=STRANGER_S).close()
    except TimeoutError:
        return False
    return True


def after_opening() -> tuple[set[str], bool, float]:
    """Where this process listens when the world is open, whether Gloo hears, what groups give."""
    address = address_of(gloo_devices(gloo_interfaces(is_one_host=True)))
    md.all_reduce(torch.ones(1))
    md.barrier()
    heard = is_heard(address)
    md.barrier()
    x = torch.ones(1)
    for _ in range(3):  # it hears the members of other groups
        md.all_reduce(x, group=md.new_group([0, 1]))
    return {host for host, _ in listening()}, heard or is_heard(address), x.item()


@linux
def test_a_group_of_one_host_listens_at_loopback_and_hears_nothing_once_it_is_open(
    pool: Pool,
) -> None:
    for hosts, is_heard_then, total in pool.run(after_opening, 2):
        assert hosts <= {"127.0.0.1", "::1"}
        assert not is_heard_then
        assert total == 8.0


def with_few_descriptors() -> float:
    """What a group gives after more strangers than the process has descriptors."""
    address = address_of(gloo_devices(gloo_interfaces(is_one_host=True)))
    md.all_reduce(torch.ones(1))
    md.barrier()
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 20, most))
    try:
        for _ in range(60):
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(address)
            stranger.close()
        md.barrier()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    x = torch.ones(1)
    md.all_reduce(x, group=md.new_group([0, 1]))
    return x.item()


@linux
def test_strangers_take_no_descriptors(pool: Pool) -> None:
    assert pool.run(with_few_descriptors, 2) == [2.0, 2.0]


def in_two_threads() -> list[float]:
    """Groups that open at the same time hear each their members."""
    found = []

    def open_some(place: int) -> None:
        for number in range(5):
            store = torch.distributed.PrefixStore(f"{place} {number}", md.group.WORLD.world.store)
            devices = gloo_devices(gloo_interfaces(is_one_host=True))
            options: Any = ProcessGroupGloo._Options()
            options._devices, options._timeout = devices.made, timedelta(seconds=30)
            with devices.hearing():
                group = ProcessGroupGloo(store, md.get_rank(), 2, options)
            x = torch.ones(1)
            group.allreduce([x]).wait()
            found.append(x.item())

    threads = [threading.Thread(target=open_some, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_groups_that_open_at_once(pool: Pool) -> None:
    assert pool.run(in_two_threads, 2) == [[2.0] * 10] * 2


def loopback_device() -> list[Any]:
    return [ProcessGroupGloo.create_device(hostname="127.0.0.1")]


@linux
def test_it_hears_while_the_last_of_several_groups_opens() -> None:
    devices = Devices(loopback_device, are_deaf=True)
    address = address_of(devices)
    with devices.hearing():
        with devices.hearing():
            assert is_heard(address)
        assert is_heard(address)
    assert not is_heard(address)


@linux
def test_a_listener_of_the_program_is_left_alone() -> None:
    """Also where another thread opens one while Gloo's is made."""
    opened: list[socket.socket] = []

    def make() -> list[Any]:
        opened.append(socket.create_server(("127.0.0.1", 0)))
        return loopback_device()

    with socket.create_server(("127.0.0.1", 0)) as before:
        devices = Devices(make, are_deaf=True)
        assert devices.listeners == []
        with devices.hearing():
            pass
        (during,) = opened
        with during:
            assert is_heard(during.getsockname())
            assert is_heard(before.getsockname())


@linux
def test_where_filters_are_forbidden_it_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(socket.socket, "setsockopt", reject)
    devices = Devices(loopback_device, are_deaf=True)
    with devices.hearing():
        pass
    assert is_heard(address_of(devices))


@linux
def test_no_descriptor_is_lost() -> None:
    before = len(os.listdir("/proc/self/fd"))
    devices = Devices(list, are_deaf=True)
    with devices.hearing():
        pass
    assert len(os.listdir("/proc/self/fd")) == before
