"""The place of this process in its job, as its launcher wrote it into the environment.

Pure: a mapping of variables goes in, a ``Surroundings`` or one error that lists everything comes
out. The launchers: ``meshdist run``, torchrun (both by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
``mpiexec`` of Open MPI and of MPICH's family, and Slurm's ``srun``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import RendezvousError
from ..runtime.whole_numbers import find_whole_number

MOST_RANKS = 1 << 20
"""In one world: a greater size is a mistake, and would take minutes and memory to try."""


@dataclass(frozen=True)
class Surroundings:
    """A process's place in its job, as its launcher set it.

    Args:
        launcher: what started it: "meshdist run", "torchrun", "Open MPI", "Hydra", "Slurm", or
            "env" where variables were set by hand.
        address: where rank 0 serves the store; None where the launcher does not say.
        port: its port there; None where the launcher does not say.
        local_rank: its number among the ranks of its host, where the launcher numbers them.
        is_one_host: whether the launcher says that all ranks run on one host.
        has_agent_store: whether torchrun's agent serves the store.
        directory: where the ranks of this job meet, which its launcher made for it alone.
        job: a name that only processes of this job share; None where the launcher gives no name.
        attempt: distinguishes this start of the job from an earlier start with the same store.
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
    attempt: str = ""


# Rank, size, local rank, local size, by launcher. The first that shows in the environment counts.
_VARIABLES = {
    "env": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
}
_MPI = ("Open MPI", "Hydra")
_PORT_BASE, _NUM_PORTS = 12000, 20000
_MOST_SHOWN = 200  # characters of a variable


def read_surroundings(
    environment: Mapping[str, str],
    *,
    rank: int = -1,
    world_size: int = -1,
    is_mpi_asked: bool = False,
) -> Surroundings:
    """Return this process's place; raise RendezvousError with all that is missing or wrong.

    Args:
        rank: wins over the environment where it is given; ``world_size`` likewise.
    """
    reader = _Reader(environment)
    kind = _launcher(environment, is_mpi_asked)
    if is_mpi_asked and kind not in _MPI:
        reader.missing.append("OMPI_COMM_WORLD_RANK or PMI_RANK (the program runs without mpiexec)")
        raise reader.error(
            "meshdist run --launcher mpi -n 4",
            "mpiexec -n 4 python",
            expected="the variables of mpiexec: backend 'mpi' takes ranks from nobody else",
        )
    rank_name, size_name, local_name, local_size_name = _VARIABLES[kind]
    if rank < 0:
        rank = reader.number(rank_name)
    if world_size < 0:
        world_size = reader.number(size_name, least=1, most=MOST_RANKS)
    if reader.is_sound and not rank < world_size:
        reader.wrong.append(f"rank {rank} does not exist in a world of {world_size}")
    is_one_host = reader.optional_number(local_size_name) == world_size or (
        kind == "Slurm" and _first_of(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") == "1"
    )
    address, port = _place_of_store(reader, environment, kind, rank, is_one_host)
    if not reader.is_sound:
        raise reader.error()
    launcher = _launcher_name(kind, environment)
    has_agent_store = (
        launcher == "torchrun" and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    if is_one_host and port and not has_agent_store and launcher != "meshdist run":
        address = "127.0.0.1"  # whatever name MASTER_ADDR gives it: no other host has to reach it
    directory = environment.get("MESHDIST_DIRECTORY") if launcher == "meshdist run" else None
    return Surroundings(
        launcher=launcher,
        rank=rank,
        size=world_size,
        address=address,
        port=port,
        local_rank=reader.optional_number(local_name),
        is_one_host=is_one_host,
        has_agent_store=has_agent_store,
        directory=directory if is_one_host and address == "127.0.0.1" else None,
        job=_first_of(environment, "PMIX_NAMESPACE", "PMI_KVSNAME", "SLURM_JOB_ID") or None,
        attempt=_attempt(kind, launcher, environment),
    )


def find_place(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank and the size that a launcher has set, None where none has.

    Example:
        >>> find_place({"RANK": "1", "WORLD_SIZE": "4"}), find_place({})
        ((1, 4), None)
    """
    rank_name, size_name, *_ = _VARIABLES[_launcher(environment, is_mpi_asked=False)]
    if rank_name not in environment and size_name not in environment:
        return None
    reader = _Reader(environment)
    rank, size = reader.number(rank_name), reader.number(size_name, least=1, most=MOST_RANKS)
    if reader.is_sound and rank >= size:
        reader.wrong.append(f"rank {rank} does not exist in a world of {size}")
    if not reader.is_sound:
        raise reader.error()
    return rank, size


def _place_of_store(
    reader: _Reader, environment: Mapping[str, str], kind: str, rank: int, is_one_host: bool
) -> tuple[str | None, int | None]:
    """Return the address and the port of rank 0's store, as far as the launcher names them."""
    address = environment.get("MASTER_ADDR") or None
    port = reader.port("MASTER_PORT") if environment.get("MASTER_PORT") else None
    if kind == "env":
        if not environment.get("MASTER_PORT"):
            reader.missing.append("MASTER_PORT")
        if address is None and rank > 0:
            reader.missing.append("MASTER_ADDR")
    elif kind == "Slurm":
        nodes = _first_of(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
        if address is None and not is_one_host:
            if not nodes:
                reader.missing.append("SLURM_JOB_NODELIST")
            else:
                try:
                    address = first_host(nodes)
                except ValueError:
                    reader.wrong.append(f"SLURM_JOB_NODELIST={nodes!r} is no list of hosts")
        if port is None and reader.is_sound:
            job, step = reader.number("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID", "0")
            port = _PORT_BASE + (7 * job + (find_whole_number(step) or 0)) % _NUM_PORTS
    return address, port


def _attempt(kind: str, launcher: str, environment: Mapping[str, str]) -> str:
    """Return a text that distinguishes this start of the job from an earlier start, or ""."""
    if launcher == "torchrun" and environment.get("GROUP_WORLD_SIZE", "1") == "1":
        # Agents of several hosts count their restarts each for itself.
        return environment.get("TORCHELASTIC_RESTART_COUNT", "")
    return environment.get("MESHDIST_RUN_ID", "") if kind == "env" else ""


def read_local_rank(environment: Mapping[str, str]) -> int:
    """Return LOCAL_RANK, this process's number on its host; raise where it is missing or wrong."""
    reader = _Reader(environment)
    number = reader.number("LOCAL_RANK")
    if not reader.is_sound:
        raise reader.error(expected="LOCAL_RANK from 0, as a launcher sets it")
    return number


def find_local_size(environment: Mapping[str, str]) -> int | None:
    """Return how many ranks of the job run on this host, where a launcher says so.

    Example:
        >>> find_local_size({"LOCAL_WORLD_SIZE": "4"})
        4
    """
    reader = _Reader(environment)
    found = (reader.optional_number(names[3]) for names in _VARIABLES.values())
    return next(filter(None, found), None)


def _launcher(environment: Mapping[str, str], is_mpi_asked: bool) -> str:
    if not is_mpi_asked and ("RANK" in environment or "WORLD_SIZE" in environment):
        return "env"
    if "OMPI_COMM_WORLD_RANK" in environment:
        return "Open MPI"
    is_slurm = "SLURM_PROCID" in environment
    if "PMI_RANK" in environment:
        # srun --mpi=pmi2 sets PMI_RANK too, equal to its own; mpiexec inside a Slurm job does not.
        by_srun = (
            is_slurm
            and not is_mpi_asked
            and "SLURM_STEP_ID" in environment
            and environment["PMI_RANK"] == environment["SLURM_PROCID"]
            and environment.get("PMI_SIZE") == environment.get("SLURM_NTASKS")
        )
        return "Slurm" if by_srun else "Hydra"
    return "Slurm" if is_slurm else "env"


def _launcher_name(kind: str, environment: Mapping[str, str]) -> str:
    if kind != "env":
        return kind
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "meshdist run" if "MESHDIST_LAUNCH" in environment else "env"


def _first_of(environment: Mapping[str, str], *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list; raise ValueError if there is none.

    Example:
        >>> first_host("gpu[007-010,12],login1")
        'gpu007'
    """
    found = re.match(r"(?:[A-Za-z0-9._-]|\[[0-9][^\]]*\])+(?=,|\Z)", nodes)
    if found is None:
        raise ValueError(f"{nodes!r} is no list of hosts")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found.group())


class _Reader:
    """Reader of variables that gathers all that is missing or wrong for one error."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self._environment = environment

    @property
    def is_sound(self) -> bool:
        return not self.missing and not self.wrong

    def number(self, name: str, least: int = 0, most: int | None = None) -> int:
        value = self._environment.get(name, "")
        number = find_whole_number(value)
        if not value:
            self.missing.append(name)
        elif number is None or number < least:
            self.wrong.append(f"{name}={_shown(value)} is no whole number from {least}")
        elif most is not None and number > most:
            self.wrong.append(f"{name}={_shown(value)} is more than {most}")
        else:
            return number
        return least

    def optional_number(self, name: str) -> int | None:
        return find_whole_number(self._environment.get(name, ""))

    def port(self, name: str) -> int | None:
        value = self._environment[name]
        number = find_whole_number(value, most=65535)
        if not number:
            self.wrong.append(f"{name}={_shown(value)} is no port: 1 to 65535")
        return number

    def error(
        self,
        *commands: str,
        expected: str = "RANK, WORLD_SIZE, MASTER_PORT, and MASTER_ADDR on every rank but 0; "
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
                "\nor name the place where the ranks meet in the program, before its first verb or "
                "mesh: init_process_group(init_method='tcp://HOST_OF_RANK_0:PORT', "
                "rank=..., world_size=...)"
            )
        ways = ways_to_start(commands)
        if not self.wrong and not commands and ways[0].startswith("meshdist.simulate"):
            return RendezvousError(
                "a notebook or console is one process: no launcher has started others beside it",
                where=f"process {os.getpid()}, init_method env://",
                expected="what ranks do in a function, which simulated ranks of this process call, "
                "or processes of their own",
                found=self._found(),
                fix="def program():\n"
                "    ...  # make the mesh here, and use it\n"
                "meshdist.simulate(program, 4)\n"
                "or, as processes: meshdist.spawn(program, nprocs=4)",
            )
        return RendezvousError(
            "the environment does not say where this process belongs: " + "; ".join(parts),
            where=f"process {os.getpid()}, init_method env://",
            expected=expected,
            found=self._found(),
            fix="start the program with one of:\n" + "\n".join(ways) + own,
        )

    def _found(self) -> str:
        pattern = re.compile(
            r"(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|OMPI_COMM_WORLD_(LOCAL_)?"
            r"(RANK|SIZE)|PMI_(RANK|SIZE)|SLURM_(PROCID|NTASKS|LOCALID|JOB_NODELIST|JOB_ID)"
        )
        names = sorted(name for name in self._environment if pattern.fullmatch(name))
        if not names:
            return "none of them: the program was started without a launcher"
        return ", ".join(f"{name}={_shown(self._environment[name], plain=True)}" for name in names)


def _shown(value: str, *, plain: bool = False) -> str:
    """Return a variable's value for a message: quoted where it is not plain, and cut where it is
    long."""
    text = value if plain and value.isascii() and value.isprintable() else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def ways_to_start(commands: Sequence[str] = ()) -> list[str]:
    """Return the commands to type: ``commands`` of a launcher half recognised, or those that work
    here."""
    name = sys.argv[0] if sys.argv else ""
    name = os.path.basename(name) if os.path.isabs(name) else name  # -m makes it absolute
    is_script = name.endswith(".py") and not name.endswith("__main__.py")
    script = name if is_script else "script.py"
    if commands:
        return [f"{command} {script}" for command in commands]
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:  # no launcher can start these
        return ["meshdist.simulate(fn, 4)", "meshdist.spawn(fn, nprocs=4)"]
    return [
        f"meshdist run -n 4 {script}",
        f"torchrun --nproc-per-node 4 {script}",
        f"mpiexec -n 4 python {script}",
        f"srun -n 4 python {script}",
    ]
