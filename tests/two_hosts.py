"""Workers on two hosts, made of namespaces: a pool as that of ``tests/pool``, with a real network.

    two_hosts_of(pool).run(fn, 4, x)             # ranks 0 and 1 on host-a, 2 and 3 on host-b
    two_hosts_of(pool).run(fn, 3, x, hosts="ABA", backend="gloo")
    two_hosts_of(pool).start(text, places_on("AABB"), hosts="AABB")  # a program as processes

The fixture ``two_hosts`` gives this pool. Where the system allows no namespaces, the test is
skipped, and says why. The hosts, and all that runs there, end with the pool, however it ends.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.namespaces import ADDRESSES, FILES, NAMES
from tests.pool import Pool, Program, Worker, WorkerLost

__all__ = ["TwoHosts", "places_on", "two_hosts_of"]


def blocks(size: int) -> str:
    """The hosts of ``size`` ranks, as launchers place them: "AAABB" of five."""
    return "A" * (size - size // 2) + "B" * (size // 2)


def places_on(hosts: str, port: int = 29500) -> list[dict[str, str]]:
    """The environment that tells each of several processes its place, as launchers do."""
    world = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": NAMES["A"], "MASTER_PORT": str(port)}
    return [
        {
            **world,
            "RANK": str(rank),
            "LOCAL_RANK": str(hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(hosts.count(host)),
        }
        for rank, host in enumerate(hosts)
    ]


class TwoHosts(Pool):
    """A pool of workers on two hosts; without ``hosts`` ranks lie there in blocks.

    Args:
        pool: whose warm parent is forked, and with which the hosts end.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        folder = self._folder.name
        self._for_programs = {"TMPDIR": f"{folder}/{FILES}"}
        self._control, theirs = socket.socketpair()
        pool._ask_parent(f"hosts:{folder}", theirs)
        answer = self._control.recv(4096).decode()
        self.refusal = "" if answer.isdecimal() else answer or "the maker of the hosts has ended"
        """Why the system lets nobody make hosts; "" where it does."""
        self._port = int(answer) if not self.refusal else 0

    def run(self, fn: Callable[..., Any], nprocs: int, *args: Any, **settings: Any) -> list[Any]:
        """As ``Pool.run``, over the backend that a program has there if it names none."""
        return super().run(fn, nprocs, *args, **{"backend": None, **settings})

    def start(self, *given: Any, **named: Any) -> list[subprocess.CompletedProcess[str]]:
        """As ``Pool.start``; a late program ends with its hosts, and all that it has started."""
        try:
            return super().start(*given, **named)
        except WorkerLost:
            self.close()
            raise

    def close(self) -> None:
        """End the hosts, with all that runs there."""
        if self._control is not None:
            self._control.close()  # at which their parent ends
            self._control = None
        super().close()

    def _start_parent(self) -> None:
        """It was started with the hosts."""

    def _store_address(self) -> tuple[str, int]:
        return ADDRESSES["A"], self._port

    def _environment_on(self, hosts: str, rank: int) -> dict[str, str]:
        return {}

    def _team(self, nprocs: int, hosts: str) -> list[Worker]:
        team: list[Worker] = []
        for host in hosts or blocks(nprocs):
            idle = (one for one in self.workers if one.host == host and one not in team)
            worker = next(idle, None)
            if worker is None:
                worker = self._fork(host)
                self.workers.append(worker)
            team.append(worker)
        return team

    def _run_programs(
        self, programs: Sequence[Program], hosts: str, limit_s: float
    ) -> list[int | None]:
        return super()._run_programs(programs, hosts or blocks(len(programs)), limit_s)


def two_hosts_of(pool: Pool) -> TwoHosts:
    """The hosts that end with ``pool``; skips the test where the system rejects them."""
    hosts = pool.jobs.get("hosts")
    if hosts is None or hosts._control is None:
        hosts = pool.jobs["hosts"] = TwoHosts(pool)
    assert isinstance(hosts, TwoHosts)
    if hosts.refusal:
        pytest.skip(f"two hosts need namespaces, which this system rejects: {hosts.refusal}")
    return hosts
