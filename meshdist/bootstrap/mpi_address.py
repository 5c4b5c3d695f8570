"""How the processes of one ``mpiexec`` learn where rank 0's store listens.

On one host the address goes through a directory that only this user can enter, named by the user,
the launching process and its start time. Across hosts mpi4py broadcasts it, which starts MPI in
every rank; on one host MPI is not started.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import stat
import tempfile
from datetime import timedelta
from typing import Any

from ..errors import RendezvousError
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.hosts import ProcessCard, is_alive, my_card, process_start, read_process
from .environments import Surroundings
from .mpi_library import find_mpi_problem, start_mpi
from .stores import TCPStore, bind_listener, connect_store, serve_store

__all__ = ["remove_directory", "store_by_directory", "store_by_mpi"]

_LAUNCHERS = ("prterun", "prted", "orted", "orterun", "mpiexec", "mpirun", "hydra_pmi_proxy")
_FILE = "address"


def store_by_directory(surroundings: Surroundings, timeout: timedelta) -> TCPStore:
    """Return the store of the processes that one mpiexec has started on this host."""
    folder = _folder(surroundings)
    if surroundings.rank == 0:
        return _serve_in(folder, surroundings, timeout)
    port = wait_until(lambda: _find_port(folder), Deadline(timeout))
    if port is None:
        raise RendezvousError(
            f"rank 0 has not joined: it wrote no address within {timeout.total_seconds():g} s",
            where=f"rank {surroundings.rank} of {surroundings.size}, started by "
            f"{surroundings.launcher}; directory {folder}",
            expected="all ranks on this host, started by one mpiexec with the same TMPDIR",
            fix="look at the output of rank 0; for ranks on several hosts install mpi4py, or "
            "set MASTER_ADDR and MASTER_PORT",
        )
    return connect_store("127.0.0.1", port, timeout)


def remove_directory(surroundings: Surroundings) -> None:
    """Remove what ``store_by_directory`` made; rank 0 calls it once all ranks have joined."""
    shutil.rmtree(_folder(surroundings), ignore_errors=True)


def _folder(surroundings: Surroundings) -> str:
    pid = os.getppid()
    ancestor = pid
    # A wrapper script may stand between mpiexec and this process.
    while ancestor > 1 and (process := read_process(ancestor)) is not None:
        name, fields = process
        if name.startswith(_LAUNCHERS):
            pid = ancestor
            break
        ancestor = int(fields[1])
    start = (process_start(pid) or "").replace(" ", "-")
    job = "".join(letter if letter.isalnum() else "-" for letter in surroundings.job or "")
    return os.path.join(tempfile.gettempdir(), f"meshdist-{os.getuid()}-{pid}-{start}-{job}")


def _serve_in(folder: str, surroundings: Surroundings, timeout: timedelta) -> TCPStore:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        _check_private(folder)
    listener = bind_listener("127.0.0.1", 0)
    assert listener is not None  # loopback is an address of every host
    port = listener.getsockname()[1]
    store = serve_store(listener, "127.0.0.1", port, timeout)
    draft = os.path.join(folder, f".{_FILE}.{os.getpid()}")
    with open(draft, "w", encoding="utf-8") as file:
        json.dump({"port": port, **my_card().to_json()}, file)
    os.replace(draft, os.path.join(folder, _FILE))
    pid = os.getpid()
    # In a forked child it does nothing.
    atexit.register(lambda: remove_directory(surroundings) if pid == os.getpid() else None)
    return store


def _find_port(folder: str) -> int | None:
    try:
        _check_private(folder)
        with open(os.path.join(folder, _FILE), encoding="utf-8") as file:
            values: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    # A crashed program of the same mpiexec may have left files: they do not count.
    return int(values["port"]) if is_alive(ProcessCard.from_json(values)) else None


def _check_private(folder: str) -> None:
    status = os.lstat(folder)
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not is_private or status.st_uid != os.getuid():
        raise RendezvousError(
            f"{folder} is not this user's own directory",
            where=f"process {os.getpid()}",
            expected=f"a directory of user {os.getuid()} with mode 0700",
            found=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}",
            fix="remove it, or set TMPDIR to a directory of your own",
        )


def store_by_mpi(surroundings: Surroundings, timeout: timedelta) -> TCPStore:
    """Return the store of all processes of one mpiexec; collective, by mpi4py."""
    problem = find_mpi_problem()
    if problem is not None:
        raise RendezvousError(
            "the ranks of this job run on several hosts, and mpi4py cannot be used",
            where=f"rank {surroundings.rank} of {surroundings.size}, started by "
            f"{surroundings.launcher}",
            expected="mpi4py, to tell every rank where rank 0 listens",
            found=problem[0],
            fix=f"{problem[1]}; or set MASTER_ADDR and MASTER_PORT for all ranks: "
            "mpiexec -x MASTER_ADDR=host0 -x MASTER_PORT=29500 ...",
        )
    everyone = start_mpi().COMM_WORLD
    if surroundings.rank > 0:
        host, port = everyone.bcast(None, root=0)
        return connect_store(host, port, timeout)
    listener = bind_listener("0.0.0.0", 0)
    assert listener is not None
    host, port = _reachable_address(), listener.getsockname()[1]
    store = serve_store(listener, host, port, timeout)
    everyone.bcast((host, port), root=0)
    return store


def _reachable_address() -> str:
    """Return the address of this host's interface that leads to other hosts."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
