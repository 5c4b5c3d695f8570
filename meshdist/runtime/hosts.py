"""Identify hosts and processes, query system limits, and run functions at process exit.

Imports only the standard library.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import platform
import resource
import socket
import stat
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

MORE_DESCRIPTORS = "raise the hard limit before the program starts: ulimit -n 65536, as root"
"""The fix for ``raise_descriptor_limit``."""


def host_identity() -> str:
    """Return a text that two processes share exactly if they run on the same host."""
    return os.environ.get("MESHDIST_HOST_ID") or _find_host_identity()


@cache
def _find_host_identity() -> str:
    # The same boot and the same network namespace, so that loopback reaches the other process.
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"{platform.node()}/{uuid.getnode():x}"


_PF_EXITING = 0x4  # of Linux, set before the process gives its memory and files back


def process_start(pid: int) -> str | None:
    """Return the start time of process ``pid`` as text, or None after its end."""
    # Process ids are reused, but the id and start time together are unique.
    process = read_process(pid)
    if process is not None:
        _, fields = process
        return None if fields[0] in "ZX" or int(fields[6]) & _PF_EXITING else fields[19]
    if os.path.exists("/proc/self/stat"):
        return None
    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or None


def read_process(pid: int) -> tuple[str, list[str]] | None:
    """Return a process's name and other fields of /proc/PID/stat; None if it ended."""
    # Propagate any other OSError, for example if this process cannot open more files.
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, tail = file.read().rpartition(")")  # the name may hold any character
    except (FileNotFoundError, ProcessLookupError):
        return None
    return head.partition("(")[2], tail.split()


@cache
def num_cores() -> int:
    """Return the number of cores that affinity and cgroup allow this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return min(cores or 1, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores or 1


GROUP_MEMORY = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""The files with a cgroup's memory limit and usage, of version 2 and 1."""
PIDS = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids.current")


def free_bytes() -> float:
    """Return the memory available to processes here in bytes; infinite if unknown."""
    # The minimum of the machine's available memory and the cgroup's remaining limit.
    found = [float("inf")]
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        sizes = dict(line.split(":") for line in file)
        if "MemAvailable" in sizes:
            found.append(1024.0 * int(sizes["MemAvailable"].split()[0]))
    for most, used in GROUP_MEMORY:
        with suppress(OSError, ValueError):
            limit, usage = (Path(path).read_text(encoding="ascii") for path in (most, used))
            found.append(float(int(limit) - int(usage)))
    return max(0.0, min(found))


def raise_descriptor_limit(num_needed: int) -> str:
    """Raise the limit for ``num_needed`` more open files; return the unmet need, or ""."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ""
    try:
        num_open = len(os.listdir("/dev/fd")) - 1  # without the directory's own descriptor
    except OSError:
        num_open = limit
    if limit - num_open < num_needed:
        target = num_open + num_needed if most == resource.RLIM_INFINITY else most
        with suppress(OSError, ValueError):  # macOS shows no hard limit but enforces a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, most))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    left = max(0, limit - num_open)
    if left >= num_needed:
        return ""
    return f"{left} more files can be opened of about {num_needed} needed; the limit is {limit}"


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield each socket's descriptor and a copy, which is closed afterwards; Linux only."""
    names: list[str] = []
    with suppress(OSError):  # no such folder, or no descriptor is left
        names = os.listdir("/proc/self/fd")
    for name in names:
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    yield int(name), copy


def find_thread_lack(num_needed: int, num_processes: int = 1) -> str:
    """Return why ``num_processes`` cannot start ``num_needed`` more threads each, or ""."""
    num_needed *= num_processes  # they share one control group
    with suppress(OSError, ValueError):  # no such group, or no limit
        limit, used = (int(Path(path).read_text()) for path in PIDS)
        if limit - used < num_needed:
            left = max(0, limit - used)
            by = f" by {num_processes} ranks" if num_processes > 1 else ""
            needed = f"{num_needed} needed{by}"
            return f"{left} more threads can be started of {needed}; the limit is {limit}"
    return ""


def find_version(distribution: str) -> str | None:
    """Return the version of the package ``distribution``, or None if not installed."""
    from importlib import metadata  # slow to import, and rarely needed

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class ProcessInfo:
    """Identity of a process, for checks whether it is alive.

    Args:
        start: its start time from ``process_start``; "" if unknown.
        host: its host from ``host_identity``.
        hostname: the host's name, for messages.
    """

    pid: int
    start: str
    host: str
    hostname: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.hostname}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ProcessInfo:
        """Return the info of ``to_json`` values, ignoring other keys; may raise ValueError."""
        kinds = {"pid": int, "start": str, "host": str, "hostname": str}
        found: dict[str, Any] = {name: values.get(name) for name in kinds}
        if not all(type(found[name]) is kind for name, kind in kinds.items()):
            raise ValueError(f"{found!r} names no process")
        return cls(**found)


def my_process_info() -> ProcessInfo:
    pid, start = os.getpid(), None
    with suppress(OSError):
        start = process_start(pid)
    return ProcessInfo(pid, start or "", host_identity(), socket.gethostname())


def is_alive(process_info: ProcessInfo) -> bool | None:
    """Return whether the process is alive; None if unknown."""
    if process_info.start and process_info.host == host_identity():
        with suppress(OSError):
            return process_start(process_info.pid) == process_info.start
    return None


def is_stopped(process_info: ProcessInfo) -> bool:
    """Return whether the process is known to be stopped by SIGSTOP or a debugger."""
    process = None
    with suppress(OSError):
        process = read_process(process_info.pid) if process_info.host == host_identity() else None
    return process is not None and process[1][0] in "Tt" and process[1][19] == process_info.start


def take_lock(file: int) -> bool:
    """Try to take a shared flock on a file's descriptor; return whether it succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_NB | fcntl.LOCK_SH)
    except BlockingIOError:
        return False
    return True


def name_locker(path: str) -> str:
    """Return "process N" for a process that holds an flock on the file, else "another process"."""
    with suppress(OSError):
        status = os.stat(path)
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE pid device:inode 0 EOF
            if (
                fields[1] == "FLOCK"
                and fields[5] == f"{device}:{status.st_ino}"
                and int(fields[4]) > 0
            ):
                return f"process {fields[4]}"
    return "another process"


forks = [0]
"""The number of forks since the package was imported.

Like the process id, it differs in a forked child, but reading it needs no system call. Collectives
read it here; all other code uses ``num_forks``.
"""


def num_forks() -> int:
    """Return the number of forks since the package was imported."""
    return forks[0]


def _count() -> None:
    forks[0] += 1


os.register_at_fork(after_in_child=_count)


DESTROYED = "destroyed its process group"
_WITHOUT_EXCEPTION = "ended without an exception"
IN_GOOD_ORDER = (DESTROYED, _WITHOUT_EXCEPTION)
"""Endings of ranks that did not fail; a missing rank with another ending may be the cause."""


_PACKAGE = os.path.dirname(os.path.dirname(__file__))


_finalizers: dict[Callable[[], None], Finalize] = {}


def call_at_end(function: Callable[[], None]) -> None:
    """Call ``function`` when this process ends; ``do_not_call_at_end`` cancels."""
    atexit.register(function)
    if parent_process() is not None:  # multiprocessing workers do not run atexit handlers
        _finalizers[function] = Finalize(None, function, exitpriority=0)


def do_not_call_at_end(function: Callable[[], None]) -> None:
    atexit.unregister(function)
    if (finalizer := _finalizers.pop(function, None)) is not None:
        finalizer.cancel()


def is_ending_by_exception() -> bool:
    """Return whether an uncaught exception ends this process."""
    return find_last_exception() is not None


def ending_text(exception: BaseException | None) -> str:
    """Describe an end by ``exception``, for example "ended by ValueError: no data"."""
    if exception is None:
        return _WITHOUT_EXCEPTION
    kind, message = type(exception).__name__, str(exception).partition("\n")[0]
    frames = traceback.extract_tb(exception.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    site = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return f"ended by {kind}{message and ': '}{message}{site}"


def find_last_exception() -> BaseException | None:
    """Return the uncaught exception that ends this process, or None."""
    found = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return found if isinstance(found, BaseException) else None


def handled_here() -> int:
    """Return the id of the exception that this thread is handling, or 0."""
    return id(found) if (found := sys.exc_info()[1]) is not None else 0


def find_failure(handled_before: int) -> BaseException | None:
    """Return the exception being handled; None for an exit or id ``handled_before``."""
    found = sys.exc_info()[1]
    is_exit = isinstance(found, (SystemExit, GeneratorExit))
    return None if is_exit or handled_here() in (0, handled_before) else found
