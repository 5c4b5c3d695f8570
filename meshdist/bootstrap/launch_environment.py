"""Read this process's rank, world size and store address from its launcher's variables.

The functions take a mapping of variables, or raise one error that lists everything missing or
wrong. ``launching.launcher_variables`` has each launcher's variables.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import RendezvousError
from ..launching.launcher_variables import (
    BY_HAND,
    KUBEFLOW,
    NAMES,
    SLURM,
    STARTERS,
    LauncherVariables,
    find_launcher,
    first_value,
)
from ..runtime.integers import find_integer
from .schedulers import find_scheduler

MOST_RANKS = 1 << 20
"""Limit of the world size: a larger one is a mistake, and trying it takes minutes and memory."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """A process's rank and rendezvous address, as its launcher set them; None if unset.

    Args:
        launcher: "meshdist run", "torchrun", a name in the table of launchers, or "env" for
            variables set by hand.
        address: of rank 0's store, with ``port``.
        local_rank: the rank within its host.
        is_one_host: whether all ranks run on one host.
        has_agent_store: whether torchrun's agent hosts the store.
        directory: the launcher's private directory for this job's rendezvous.
        job: a name that only this job's processes share.
        rendezvous_round: a text that differs between restarts of the job with the same store.
    """

    launcher: str
    rank: int
    size: int
    address: str | None = None
    port: int | None = None
    local_rank: int | None = None
    is_one_host: bool = False
    has_agent_store: bool = False
    directory: str | None = None
    job: str | None = None
    rendezvous_round: str = ""


_JOBS = ("PMIX_NAMESPACE", "PMI_KVSNAME", "FLUX_JOB_ID", "SLURM_JOB_ID")
_PER_NODE = "SLURM_NTASKS_PER_NODE"
_PORT_BASE, _NUM_PORTS = 12000, 20000
_MOST_SHOWN = 200  # characters of a variable
_SHOWN = {"MASTER_ADDR", "SLURM_JOB_ID", _PER_NODE, *NAMES}


def read_launch_environment(
    environment: Mapping[str, str],
    *,
    rank: int = -1,
    world_size: int = -1,
    is_mpi_asked: bool = False,
) -> LaunchEnvironment:
    """Return this process's launch environment; raise RendezvousError if it is incomplete.

    Args:
        rank: overrides the environment if given, as does ``world_size``.
        is_mpi_asked: whether to use only mpiexec's variables.
    """
    variables = _find_variables(environment, is_mpi_asked=is_mpi_asked)
    reader = _Reader(environment, variables)
    if is_mpi_asked and not variables.is_mpi:
        reader.missing.append(
            "OMPI_COMM_WORLD_RANK or PMI_RANK (mpiexec did not start the program)"
        )
        raise reader.error(
            "meshdist run --launcher mpi -n 4",
            "mpiexec -n 4 python",
            expected="the variables of mpiexec, from which backend 'mpi' reads its ranks",
        )
    rank = reader.rank() if rank < 0 else rank
    size = reader.size() if world_size < 0 else world_size
    if reader.is_sound and not rank < size:
        reader.wrong.append(f"rank {rank} does not exist in a world of {size}")
    is_one_host = (
        reader.optional_number(variables.local_size) == size
        or first_value(environment, variables.num_hosts) == "1"
    )
    address, port = _store_endpoint(reader, rank, is_one_host)
    if not reader.is_sound:
        raise reader.error()
    launcher = _launcher_name(variables, environment)
    has_agent_store = (
        launcher == "torchrun" and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    if is_one_host and port and not has_agent_store and launcher != "meshdist run":
        address = "127.0.0.1"  # no other host has to reach it, whatever MASTER_ADDR is
    directory = environment.get("MESHDIST_DIRECTORY") if launcher == "meshdist run" else None
    return LaunchEnvironment(
        launcher=launcher,
        rank=rank,
        size=size,
        address=address,
        port=port,
        local_rank=reader.optional_number(variables.local_rank),
        is_one_host=is_one_host,
        has_agent_store=has_agent_store,
        directory=directory if is_one_host and address == "127.0.0.1" else None,
        job=first_value(environment, _JOBS) or None,
        rendezvous_round=_rendezvous_round(launcher, environment),
    )


def find_rank_and_size(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank and size that a launcher has set, or None; raise if wrong.

    Example:
        >>> find_rank_and_size({"RANK": "1", "WORLD_SIZE": "4"}), find_rank_and_size({})
        ((1, 4), None)
    """
    variables = _find_variables(environment)
    if variables is BY_HAND and "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    reader = _Reader(environment, variables)
    rank, size = reader.rank(), reader.size()
    if reader.is_sound and rank >= size:
        reader.wrong.append(f"rank {rank} does not exist in a world of {size}")
    if not reader.is_sound:
        raise reader.error()
    return rank, size


def _find_variables(
    environment: Mapping[str, str], *, is_mpi_asked: bool = False
) -> LauncherVariables:
    """Return the variables of this process's launcher, or of MPI's launcher."""
    scheduler = None if is_mpi_asked else find_scheduler(environment)
    if scheduler is not None and scheduler.is_service:
        return BY_HAND
    return find_launcher(environment, is_mpi_asked=is_mpi_asked)


def _store_endpoint(reader: _Reader, rank: int, is_one_host: bool) -> tuple[str | None, int | None]:
    """Return address and port of rank 0's store, or None; add missing names to ``reader``."""
    variables, environment = reader.variables, reader.environment
    addresses = tuple(filter(None, ("MASTER_ADDR", variables.address)))
    ports = tuple(filter(None, ("MASTER_PORT", variables.port)))
    address = first_value(environment, addresses) or None
    port = reader.port(*ports) if first_value(environment, ports) else None
    if variables.port:  # this launcher sets address and port itself
        if not first_value(environment, ports):
            reader.missing.append(ports[-1])
        if address is None and rank > 0:
            reader.missing.append(addresses[-1])
    elif variables.hosts:
        nodes = first_value(environment, variables.hosts)
        if address is None and not is_one_host:
            if not nodes:
                reader.missing.append(variables.hosts[-1])
            else:
                try:
                    address = first_host(nodes)
                except ValueError:
                    reader.wrong.append(f"{variables.hosts[-1]}={nodes!r} is not a list of hosts")
        if port is None and reader.is_sound:
            job, step = reader.number("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID", "0")
            port = _PORT_BASE + (7 * job + (find_integer(step) or 0)) % _NUM_PORTS
    return address, port


def _rendezvous_round(launcher: str, environment: Mapping[str, str]) -> str:
    """Return a text that differs between restarts of the job, or ""."""
    if launcher == "torchrun" and environment.get("GROUP_WORLD_SIZE", "1") == "1":
        # Each agent counts restarts for its own host, so the counts can differ between hosts.
        return environment.get("TORCHELASTIC_RESTART_COUNT", "")
    return environment.get("MESHDIST_RUN_ID", "") if launcher == "meshdist run" else ""


def read_local_rank(environment: Mapping[str, str]) -> int:
    """Return LOCAL_RANK; raise if it is missing or wrong."""
    reader = _Reader(environment)
    number = reader.number("LOCAL_RANK")
    if not reader.is_sound:
        raise reader.error(expected="LOCAL_RANK=0 or more, set by the launcher")
    return number


def find_local_size(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks on this host, or None if no launcher sets it.

    Example:
        >>> find_local_size({"LOCAL_WORLD_SIZE": "4"})
        4
    """
    reader = _Reader(environment)
    found = (reader.optional_number(variables.local_size) for variables in (BY_HAND, *STARTERS))
    return next(filter(None, found), None)


def find_stray(environment: Mapping[str, str]) -> str:
    """Describe Slurm variables that do not define a rank; "" if none."""
    if SLURM.rank not in environment or SLURM.has_started(environment):
        return ""
    shown = f"{SLURM.rank}={_shown(environment[SLURM.rank], plain=True)}"
    return f"{shown} without an srun step: a batch shell, or a process with its variables"


def _launcher_name(variables: LauncherVariables, environment: Mapping[str, str]) -> str:
    if variables is not BY_HAND:
        return variables.name
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "meshdist run" if "MESHDIST_LAUNCH" in environment else variables.name


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list; raise ValueError if none.

    Example:
        >>> first_host("gpu[007-010,12],login1")
        'gpu007'
    """
    found = re.match(r"(?:[A-Za-z0-9._-]|\[[0-9][^\]]*\])+(?=,|\Z)", nodes)
    if found is None:
        raise ValueError(f"{nodes!r} is not a list of hosts")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found.group())


class _Reader:
    """Reader of variables that collects everything missing or wrong for one error."""

    def __init__(
        self, environment: Mapping[str, str], variables: LauncherVariables = BY_HAND
    ) -> None:
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.environment = environment
        self.variables = variables

    @property
    def is_sound(self) -> bool:
        return not self.missing and not self.wrong

    def rank(self) -> int:
        variables = self.variables
        if variables.rank:
            return self.number(variables.rank)
        if (
            variables is KUBEFLOW
            and (local_size := self.environment.get(variables.local_size, "1")) != "1"
        ):
            self.wrong.append(
                f"{variables.local_size}={_shown(local_size)} asks for more than 1 process"
            )
        host, local_rank = (
            self.number(variables.host),
            self.optional_number(variables.local_rank) or 0,
        )
        return (
            host * self.number(variables.local_size, least=1) + local_rank if host else local_rank
        )

    def size(self) -> int:
        variables, names = self.variables, self.variables.size
        is_set = any(self.environment.get(name) for name in names)
        if variables is SLURM and not is_set and self.environment.get(_PER_NODE):
            hosts = next(filter(self.environment.get, variables.num_hosts), variables.num_hosts[-1])
            return self.number(_PER_NODE, least=1) * self.number(hosts, least=1)
        name = next(filter(self.environment.get, names), names[-1])
        return self.number(name, least=1, most=MOST_RANKS)

    def number(self, name: str, least: int = 0, most: int | None = None) -> int:
        value = self.environment.get(name, "")
        number = find_integer(value)
        if not value:
            self.missing.append(name)
        elif number is None or number < least:
            self.wrong.append(f"{name}={_shown(value)} is not an integer of at least {least}")
        elif most is not None and number > most:
            self.wrong.append(f"{name}={_shown(value)} is more than {most}")
        else:
            return number
        return least

    def optional_number(self, name: str) -> int | None:
        return find_integer(self.environment.get(name, ""))

    def port(self, *names: str) -> int | None:
        name = next(filter(self.environment.get, names))
        value = self.environment[name]
        number = find_integer(value, most=65535)
        if not number:
            self.wrong.append(f"{name}={_shown(value)} is not a port (1 to 65535)")
        return number

    def error(
        self,
        *commands: str,
        expected: str = "RANK, WORLD_SIZE, MASTER_PORT, and MASTER_ADDR on every rank except 0; "
        "or the variables of mpiexec or srun",
    ) -> RendezvousError:
        parts = []
        if self.missing:
            verb = "is" if len(self.missing) == 1 else "are"
            parts.append(f"{', '.join(self.missing)} {verb} missing")
        parts += self.wrong
        own = ""
        if self.missing and {*self.missing} <= {"MASTER_ADDR", "MASTER_PORT"}:
            own = (
                "\nor pass the address in the program, before its first collective or mesh: "
                "init_process_group(init_method='tcp://HOST_OF_RANK_0:PORT', "
                "rank=..., world_size=...)"
            )
        lines = start_commands(commands)
        if not self.wrong and not commands and lines[0].startswith("meshdist.simulate"):
            return RendezvousError(
                "a notebook or console is a single process: no launcher started other ranks",
                where=f"process {os.getpid()}, init_method env://",
                expected="a rank's code in a function, run on simulated ranks or in new processes",
                found=self._found(),
                fix="def program():\n"
                "    ...  # create the mesh here and use it\n"
                "meshdist.simulate(program, 4)\n"
                "or, in new processes: meshdist.spawn(program, nprocs=4)",
            )
        scheduler = find_scheduler(self.environment) if not self.wrong and not commands else None
        if scheduler is not None and self.variables is BY_HAND:
            return RendezvousError(
                f"{scheduler.name} does not assign ranks to its workers: {'; '.join(parts)}",
                where=f"process {os.getpid()}, a worker of {scheduler.name}, init_method env://",
                expected="a rank, a world size and a store, passed by the program",
                found=self._found(),
                fix=scheduler.fix,
            )
        starter = "" if self.variables is BY_HAND else f", started by {self.variables.name}"
        begin = f"{self.variables.remedy}; or " if self.variables.remedy else ""
        return RendezvousError(
            "cannot initialize from the environment: " + "; ".join(parts),
            where=f"process {os.getpid()}, init_method env://{starter}",
            expected=expected,
            found=self._found(),
            fix=begin + "start the program with one of:\n" + "\n".join(lines) + own,
        )

    def _found(self) -> str:
        names = [name for name in _SHOWN if name in self.environment]
        if not names:
            return "none of them: the program was started without a launcher"
        values = (f"{it}={_shown(self.environment[it], plain=True)}" for it in sorted(names))
        stray = find_stray(self.environment) if self.variables is BY_HAND else ""
        return ", ".join(values) + (f"; {stray}" if stray else "")


def _shown(value: str, *, plain: bool = False) -> str:
    """Return a value for a message: truncated, and quoted unless ``plain`` and ASCII."""
    text = value if plain and value.isascii() and value.isprintable() else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def start_commands(commands: Sequence[str] = ()) -> list[str]:
    """Return commands that start this program, or ``commands`` with the script's name."""
    name = sys.argv[0] if sys.argv else ""
    name = os.path.basename(name) if os.path.isabs(name) else name  # -m makes it absolute
    is_script = name.endswith(".py") and not name.endswith("__main__.py")
    script = name if is_script else "script.py"
    if commands:
        return [f"{command} {script}" for command in commands]
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:  # no launcher can start it
        return ["meshdist.simulate(fn, 4)", "meshdist.spawn(fn, nprocs=4)"]
    return [
        f"meshdist run -n 4 {script}",
        f"torchrun --nproc-per-node 4 {script}",
        f"mpiexec -n 4 python {script}",
        f"srun -n 4 python {script}",
    ]


def find_restart_count(environment: Mapping[str, str]) -> int:
    """Return how often torchrun has restarted, or Slurm has requeued, this job.

    Example:
        >>> find_restart_count({"TORCHELASTIC_RESTART_COUNT": "2"}), find_restart_count({})
        (2, 0)
    """
    names = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"
    return max(find_integer(environment.get(name, "")) or 0 for name in names)
