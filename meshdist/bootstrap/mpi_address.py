"""Where the processes of one ``mpiexec`` meet.

On one host they meet in a directory that only this user can enter, named by the user, the launching
process and its start time; MPI is not started for it. Across hosts mpi4py broadcasts where rank 0's
store listens, which starts MPI in every rank.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from datetime import timedelta

from ..errors import RendezvousError
from ..launching.child_processes import remove_after
from ..runtime.hosts import process_start, read_process
from .environments import Surroundings
from .mpi_library import find_mpi_problem, start_mpi
from .stores import TCPStore, bind_listener, connect_store, serve_store

__all__ = ["directory_of_mpiexec", "store_by_mpi"]

_LAUNCHERS = ("prterun", "prted", "orted", "orterun", "mpiexec", "mpirun", "hydra_pmi_proxy")


def directory_of_mpiexec(surroundings: Surroundings) -> str:
    """Return the directory in which the processes meet that one mpiexec has started on this host.

    The first to come makes it; it is removed when mpiexec has ended, however that happens.
    """
    launcher = _launching_process()
    start = (process_start(launcher) or "").replace(" ", "-")
    job = "".join(letter if letter.isalnum() else "-" for letter in surroundings.job or "")
    name = f"meshdist-{os.getuid()}-{launcher}-{start}-{job}"
    folder = os.path.join(tempfile.gettempdir(), name)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        _check_private(folder)
    else:
        remove_after(launcher, folder)
    return folder


def _launching_process() -> int:
    pid = os.getppid()
    # A wrapper script may stand between mpiexec and this process.
    while pid > 1 and (process := read_process(pid)) is not None:
        name, fields = process
        if name.startswith(_LAUNCHERS):
            return pid
        pid = int(fields[1])
    return os.getppid()


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
