"""The environment of a rank: its place in the job, and the port of rank 0's store.

What a started process finds in its environment:

    RANK, WORLD_SIZE               its number in the job, and how many there are
    LOCAL_RANK, LOCAL_WORLD_SIZE   the same on this host
    GROUP_RANK, GROUP_WORLD_SIZE   the number of this host; how many hosts there are
    ROLE_NAME, ROLE_RANK, ...      what torchrun says of a job in which all ranks have one role
    MASTER_ADDR, MASTER_PORT       where rank 0 serves the job's store
    MESHDIST_RUN_ID                one random hexadecimal number for all ranks of a job on one host
    MESHDIST_LISTEN_FD             rank 0 of a job on one host: an inherited TCP socket, bound to
                                   MASTER_ADDR and MASTER_PORT, on which it is to listen
    MESHDIST_DIRECTORY             on one host, where the user names no address: the launch's own
                                   directory, in which the ranks meet
    MESHDIST_QUESTIONS             the launch's own directory, in which it asks where ranks are
    MESHDIST_LAUNCH                the launch's mark, by which its processes are found at the end
    OMP_NUM_THREADS, THP_MEM_ALLOC_ENABLE      unless they are set: what is faster for most programs

And mpiexec, which says all this in its own way: that of this interpreter, and its environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..error_text import ExplainedError
from .launcher_variables import STARTERS, first_value
from .orphan_reaper import MARK, mark_value


class LaunchError(ExplainedError, ValueError):
    """Error of a job that cannot be started as asked, of which nothing runs."""


# -- the environment of a rank ------------------------------------------------------------------

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""With it torch asks the system for pages of 2 MiB for tensors from that size on."""

_AGREED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_OF_ANOTHER_LAUNCH = re.compile(
    r"TORCHELASTIC_.*|ROLE_(NAME|RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|MESHDIST_(LISTEN_FD|RUN_ID|DIRECTORY)"
)


def foreign_rank_variables(
    environment: Mapping[str, str], *, nprocs: int, nnodes: int, node_rank: int
) -> list[str]:
    """Return the names in environment by which a started process would mistake its rank."""
    # What torchrun says always belongs to another job. What Slurm or MPI say holds only where their
    # processes are the ranks of this job: one rank for each of their processes, in their order.
    names = [name for name in environment if _OF_ANOTHER_LAUNCH.fullmatch(name)]
    for row in STARTERS:
        if row.rank not in environment:
            continue
        is_ours = (
            nprocs == 1
            and environment[row.rank] == str(node_rank)
            and first_value(environment, row.size) in ("", str(nnodes))
        )
        if not is_ours:
            names += [name for name in environment if re.fullmatch(row.about_process, name)]
    return sorted(names)


@dataclass(frozen=True)
class JobPlace:
    """A job, as the launcher of one host sees it.

    Args:
        nnodes: how many hosts take part, each with a launcher of its own.
        node_rank: the number of this host, from 0.
        master_addr: where every host reaches host 0; not needed on a single host.
        master_port: the port there; None lets the launcher choose.
        role: the name of what the ranks do, in their ROLE_NAME.
    """

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    role: str = "default"


def rank_environment(
    base: Mapping[str, str],
    place_in_job: JobPlace,
    *,
    local_rank: int,
    nprocs: int,
    mark: str,
    listen_fd: int | None = None,
    directory: str | None = None,
) -> dict[str, str]:
    """Return the environment of a rank: ``base``, with the rank's place in the job.

    Args:
        mark: the name of the launch, which marks its processes.
        listen_fd: the socket on which rank 0 serves the store.
        directory: where the ranks meet if all run on this host.
    """
    nnodes, node_rank = place_in_job.nnodes, place_in_job.node_rank
    foreign = foreign_rank_variables(base, nprocs=nprocs, nnodes=nnodes, node_rank=node_rank)
    environment = {name: value for name, value in base.items() if name not in foreign}
    place = (node_rank * nprocs + local_rank, nnodes * nprocs, local_rank, nprocs, node_rank)
    environment.update(zip(_AGREED, map(str, place), strict=True))
    environment["GROUP_WORLD_SIZE"] = str(nnodes)
    environment["ROLE_NAME"] = place_in_job.role
    environment["ROLE_RANK"], environment["ROLE_WORLD_SIZE"] = map(str, place[:2])
    environment["MASTER_ADDR"] = str(place_in_job.master_addr)
    environment["MASTER_PORT"] = str(place_in_job.master_port)
    environment[MARK] = mark_value(base.get(MARK), mark)
    if nnodes == 1:
        # Launchers on several hosts have nothing by which to agree on a random number.
        environment["MESHDIST_RUN_ID"] = mark
    if listen_fd is not None:
        environment["MESHDIST_LISTEN_FD"] = str(listen_fd)
    if directory is not None:
        environment["MESHDIST_DIRECTORY"] = directory
    environment.setdefault(HUGE_PAGES, "1")
    if nprocs > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


# -- mpiexec -----------------------------------------------------------------------------------

# Open MPI starts no more ranks than cores, binds each rank to one core, and does not run as root
# (a container's user), unless variables say otherwise. By the first two torch takes one core and
# large pages.
_UNDER_MPIEXEC = {
    "OMP_NUM_THREADS": "1",
    HUGE_PAGES: "1",
    # of Open MPI, release 5
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # of release 4, which Debian and Ubuntu have
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def find_mpiexec() -> str | None:
    """Return the path of mpiexec beside this interpreter, else on the PATH; None without any."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def mpiexec_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for mpiexec: without a rank's variables, our defaults where unset."""
    mine = {name: value for name, value in environment.items() if name not in _AGREED}
    return {**_UNDER_MPIEXEC, **mine}


# -- the port -----------------------------------------------------------------------------------


@dataclass
class Reservation:
    """A port that only rank 0 of this job will get: it is bound, and nothing listens on it yet."""

    # The system gives a bound port to no process that asks for a free one. It must not listen
    # before rank 0 does, because a plain torch.distributed program binds it again, which Linux
    # permits (SO_REUSEADDR on both sides) as long as no socket listens.

    address: str  # for MASTER_ADDR
    port: int  # for MASTER_PORT
    # For rank 0 to inherit; close it once rank 0 has it, so that the port rejects connections when
    # rank 0 has ended.
    listener: socket.socket
    _sockets: contextlib.ExitStack

    def close(self) -> None:
        """Close the sockets that hold the port."""
        self._sockets.close()


def _bound(process_tree: int, address: tuple[Any, ...]) -> socket.socket:
    bound = socket.socket(process_tree, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if process_tree == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _bound_everywhere() -> socket.socket:
    with contextlib.suppress(OSError):
        return _bound(socket.AF_INET6, ("::", 0))
    return _bound(socket.AF_INET, ("0.0.0.0", 0))


def reserve_port(address: str = "127.0.0.1", port: int | None = None) -> Reservation:
    """Bind a port of this host for rank 0's store; the system chooses it unless port is given."""
    try:
        process_tree, _, _, _, target = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[
            0
        ]
        with contextlib.ExitStack() as sockets:
            if port is None:
                # A port that is free on every interface: torch's own store listens on all of them.
                everywhere = sockets.enter_context(_bound_everywhere())
                port = int(everywhere.getsockname()[1])
                if sys.platform != "linux":
                    # Elsewhere the second socket is rejected even when none listens.
                    everywhere.close()
            bound = sockets.enter_context(_bound(process_tree, (target[0], port, *target[2:])))
            return Reservation(address, port, bound, sockets.pop_all())
    except (OSError, OverflowError, ValueError) as error:  # ValueError: no host name
        reason = getattr(error, "strerror", None) or str(error)
        place = address if port is None else f"{address}, port {port}"
        raise LaunchError(
            f"rank 0 cannot listen on {place}: {reason}",
            where=f"host {socket.gethostname()}",
            expected="an address of this host and a free port",
            fix="omit --master-port and --master-addr on a single host, or pass others",
        ) from None
