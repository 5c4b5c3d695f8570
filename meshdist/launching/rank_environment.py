"""Build the environment of a rank, reserve the port of rank 0's store, and find mpiexec.

The launcher sets these variables:

    RANK, WORLD_SIZE               the process's rank, and the number of ranks
    LOCAL_RANK, LOCAL_WORLD_SIZE   the same within this host
    GROUP_RANK, GROUP_WORLD_SIZE   this host's number, and the number of hosts
    ROLE_NAME, ROLE_RANK, ...      torchrun's variables, with one role for all ranks
    MASTER_ADDR, MASTER_PORT       the address of rank 0's store
    MESHDIST_RUN_ID                on one host: a random hexadecimal number of the job
    MESHDIST_LISTEN_FD             rank 0 on one host: an inherited TCP socket, bound to
                                   MASTER_ADDR and MASTER_PORT, for its listener
    MESHDIST_DIRECTORY             on one host without a given address: the private directory
                                   for the rendezvous
    MESHDIST_QUESTIONS             the private directory in which ranks are asked for stacks
    MESHDIST_LAUNCH                the launch's mark, which identifies its processes
    OMP_NUM_THREADS, THP_MEM_ALLOC_ENABLE      defaults that are faster for most programs
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
    """A job cannot be started with these arguments; no process has been started."""


_DEBUG_LEVEL = "TORCH_DISTRIBUTED_DEBUG"


def find_bad_debug_level(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return the fields of an error if torch would reject its debug level, else None."""
    value = environment.get(_DEBUG_LEVEL)
    if value is None or value.upper() in ("OFF", "INFO", "DETAIL"):
        return None
    return {
        "summary": f"{value!r} is not a debug level",
        "where": f"the environment variable {_DEBUG_LEVEL}",
        "expected": "OFF, INFO or DETAIL",
        "fix": "set it to one of these values, or unset it, which means OFF",
    }


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if ``import torch`` would fail on every rank."""
    if (fields := find_bad_debug_level(environment)) is not None:
        raise LaunchError(**fields)


# -- the environment of a rank ------------------------------------------------------------------

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""With this variable, torch requests 2 MiB pages for tensors of at least that size."""

_AGREED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_OF_ANOTHER_LAUNCH = re.compile(
    r"TORCHELASTIC_.*|ROLE_(NAME|RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|MESHDIST_(LISTEN_FD|RUN_ID|DIRECTORY)"
)


def foreign_rank_variables(
    environment: Mapping[str, str], *, nprocs: int, nnodes: int, node_rank: int
) -> list[str]:
    """Return the variables from which a started process would read a wrong rank."""
    # torchrun's variables always belong to another job. Slurm's and MPI's are valid only if their
    # processes are the ranks of this job, one rank per process in the same order.
    names = [name for name in environment if _OF_ANOTHER_LAUNCH.fullmatch(name)]
    for variables in STARTERS:
        if variables.rank not in environment:
            continue
        is_ours = (
            nprocs == 1
            and environment[variables.rank] == str(node_rank)
            and first_value(environment, variables.size) in ("", str(nnodes))
        )
        if not is_ours:
            names += [name for name in environment if re.fullmatch(variables.about_process, name)]
    return sorted(names)


@dataclass(frozen=True)
class JobNode:
    """Part of a job on this host.

    Args:
        nnodes: the number of hosts, each with its own launcher.
        node_rank: this host's number, from 0.
        master_addr: host 0's address; optional on a single host.
        master_port: the port of rank 0's store; None lets the launcher choose.
        role: the ranks' ROLE_NAME.
    """

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    role: str = "default"


def rank_environment(
    base: Mapping[str, str],
    node: JobNode,
    *,
    local_rank: int,
    nprocs: int,
    mark: str,
    listen_fd: int | None = None,
    directory: str | None = None,
) -> dict[str, str]:
    """Return a rank's environment: ``base`` with the launcher's variables.

    Args:
        mark: the launch's mark.
        listen_fd: the socket's descriptor on which rank 0 hosts the store.
        directory: the directory for the rendezvous if all ranks run on this host.
    """
    nnodes, node_rank = node.nnodes, node.node_rank
    foreign = foreign_rank_variables(base, nprocs=nprocs, nnodes=nnodes, node_rank=node_rank)
    environment = {name: value for name, value in base.items() if name not in foreign}
    numbers = (node_rank * nprocs + local_rank, nnodes * nprocs, local_rank, nprocs, node_rank)
    environment.update(zip(_AGREED, map(str, numbers), strict=True))
    environment["GROUP_WORLD_SIZE"] = str(nnodes)
    environment["ROLE_NAME"] = node.role
    environment["ROLE_RANK"], environment["ROLE_WORLD_SIZE"] = map(str, numbers[:2])
    environment["MASTER_ADDR"] = str(node.master_addr)
    environment["MASTER_PORT"] = str(node.master_port)
    environment[MARK] = mark_value(base.get(MARK), mark)
    if nnodes == 1:
        # Launchers on several hosts cannot agree on a random number.
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

# By default, Open MPI starts at most one rank per core, binds each rank to a core, and does not run
# as root (often the user in a container). The first two variables are torch's.
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
    """Return the mpiexec next to this interpreter or on the PATH, or None."""
    neighbor = Path(sys.executable).with_name("mpiexec")
    return str(neighbor) if os.access(neighbor, os.X_OK) else shutil.which("mpiexec")


def mpiexec_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for mpiexec: our defaults, no rank's variables."""
    mine = {name: value for name, value in environment.items() if name not in _AGREED}
    return {**_UNDER_MPIEXEC, **mine}


# -- the port -----------------------------------------------------------------------------------


@dataclass
class Reservation:
    """A port reserved for rank 0 of this job: bound, but not listening yet."""

    # The system never assigns a bound port to others. The socket must not listen before rank 0
    # does, because a torch.distributed program binds the port again, which Linux permits
    # (SO_REUSEADDR on both sides) only while no socket listens.

    address: str  # for MASTER_ADDR
    port: int  # for MASTER_PORT
    # Inherited by rank 0; close it after that, so that the port rejects connections when rank 0 has
    # ended.
    listener: socket.socket
    _sockets: contextlib.ExitStack

    def close(self) -> None:
        self._sockets.close()


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
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
    """Bind a port for rank 0's store; the system chooses it if ``port`` is None."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as sockets:
            if port is None:
                # The port must be free on all interfaces, since torch's store listens on all.
                everywhere = sockets.enter_context(_bound_everywhere())
                port = int(everywhere.getsockname()[1])
                if sys.platform != "linux":
                    # Other systems reject the second socket even if none listens.
                    everywhere.close()
            bound = sockets.enter_context(_bound(family, (target[0], port, *target[2:])))
            return Reservation(address, port, bound, sockets.pop_all())
    except (OSError, OverflowError, ValueError) as error:  # ValueError: no host name
        reason = getattr(error, "strerror", None) or str(error)
        endpoint = address if port is None else f"{address}, port {port}"
        raise LaunchError(
            f"rank 0 cannot listen on {endpoint}: {reason}",
            where=f"host {socket.gethostname()}",
            expected="an address of this host and a free port",
            fix="omit --master-port and --master-addr on a single host, or pass others",
        ) from None
