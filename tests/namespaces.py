"""Two hosts made of namespaces, with a cable between them, for as long as this process lives.

Each has what a host of its own has: a network (10.77.0.1 and 10.77.0.2 on its ``eth0``), a name
(``host-a``, ``host-b``, which both know), process ids, System V's and POSIX's shared memory, and a
folder for temporary files. Files elsewhere lie on both, as on a shared file system. Nobody need be
root; where the system rejects, ``NoNamespaces`` says why.

    hosts = Hosts.make(folder)
    hosts.enter()                  # this process may now start others on the hosts
    pid = hosts.fork("B")          # as os.fork(), but the child is on host-b
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ADDRESSES", "FILES", "NAMES", "Hosts", "NoNamespaces", "end_with", "wait_for_ever"]

ADDRESSES = {"A": "10.77.0.1", "B": "10.77.0.2"}
NAMES = {"A": "host-a", "B": "host-b"}
FILES = "tmp-of-a-host"
"""The folder for a host's temporary files, in that which ``Hosts.make`` is given."""
_KINDS = {
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "mnt": 0x00020000,
    "pid": 0x20000000,
}
"""A host's namespaces, by their flags of ``unshare``."""
_OF_A_USER = 0x10000000
_PRIVATE, _BIND, _NO_SUID_DEV_EXEC = (1 << 14) | (1 << 18), 1 << 12, 2 | 4 | 8
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class NoNamespaces(Exception):
    """The system lets this user make no hosts."""


def end_with() -> None:
    """Let this process be killed when its parent ends, which may be in other namespaces."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _checked(name: str, *given: object) -> None:
    if getattr(_libc, name)(*given) != 0:
        raise NoNamespaces(f"{name}: {os.strerror(ctypes.get_errno())}")


@dataclass
class Hosts:
    """Two hosts, by letter.

    Args:
        pid: the process that made them, with which they end.
        inits: the process that is number 1 on each.
        files: the folder for temporary files, by the same name on both.
    """

    pid: int
    inits: dict[str, int]
    files: str

    @classmethod
    def make(cls, folder: str) -> Hosts:
        """Make them; what they need to know lies in ``folder``. They end with this process.

        Raises:
            NoNamespaces: this user may not, or ``ip`` is missing.
        """
        if shutil.which("ip") is None:
            raise NoNamespaces("there is no command ip")
        files = os.path.join(folder, FILES)
        os.makedirs(files, exist_ok=True)
        inlet, outlet = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(inlet)
            try:
                answer: dict[str, int] | str = _make_all(folder, files)
            except (NoNamespaces, OSError) as error:
                answer = str(error)
            os.write(outlet, json.dumps(answer).encode() + b"\n")
            if isinstance(answer, str):
                os._exit(1)
            wait_for_ever()
        os.close(outlet)
        with open(inlet) as file:
            said = json.loads(file.readline() or '"their process has ended"')
        if isinstance(said, str):
            os.waitpid(pid, 0)
            raise NoNamespaces(said)
        return cls(pid, said, files)

    def enter(self) -> None:
        """Let this process, which has one thread, start others on them; once."""
        with open(f"/proc/{self.pid}/ns/user") as file:
            _checked("setns", file.fileno(), 0)
        self._namespaces = {
            host: {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in _KINDS}
            for host, pid in self.inits.items()
        }

    def fork(self, host: str) -> int:
        """Fork onto a host; the child ends with this process."""
        folder, namespaces = os.getcwd(), self._namespaces[host]
        _checked("setns", namespaces["pid"], 0)  # of those that are forked, alone
        pid = os.fork()
        if pid:
            return pid
        end_with()
        for kind in ("net", "ipc", "uts", "mnt"):
            _checked("setns", namespaces[kind], 0)
        os.chdir(folder)
        os.environ["TMPDIR"] = self.files
        tempfile.tempdir = None
        return 0

    def close(self) -> None:
        """End them, and every process on them."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def wait_for_ever() -> None:
    """Wait until a signal ends this process."""
    while True:
        signal.pause()


def _make_all(folder: str, files: str) -> dict[str, int]:
    """Make the hosts as children of this process; the process that is number 1 on each."""
    user, group = os.getuid(), os.getgid()
    _checked("unshare", _OF_A_USER | _KINDS["net"])
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    end_with()  # only now, since new rights undo it
    known = "".join(f"{ADDRESSES[host]} {NAMES[host]}\n" for host in NAMES)
    Path(folder, "hosts").write_text(f"127.0.0.1 localhost\n{known}")
    inits = {host: _make(host, folder, files) for host in NAMES}
    ends = [["eth0", "netns", str(inits[host])] for host in NAMES]
    _ip(["link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]])
    for host, init in inits.items():
        with open(f"/proc/{init}/ns/net") as file:
            _checked("setns", file.fileno(), 0)
        for words in ("link set lo up", f"addr add {ADDRESSES[host]}/24 dev eth0"):
            _ip(words.split())
        _ip(["link", "set", "eth0", "up"])
    return inits


def _ip(words: list[str]) -> None:
    done = subprocess.run(["ip", *words], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _make(host: str, folder: str, files: str) -> int:
    """Make one host; its process number 1, which is ready once all ends of the pipe are closed."""
    inlet, outlet = os.pipe()
    if os.fork() == 0:
        end_with()
        try:
            _checked("unshare", sum(_KINDS.values()))
            init = os.fork()
            if init == 0:
                end_with()
                _furnish(host, folder, files)
        except (NoNamespaces, OSError) as error:
            os.write(outlet, str(error).encode())
            os._exit(1)
        if init == 0:
            os.close(outlet)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans that end are forgotten
            wait_for_ever()
        os.write(outlet, str(init).encode())
        os.close(outlet)
        os.waitpid(init, 0)
        os._exit(0)
    os.close(outlet)
    with open(inlet) as file:
        said = file.read()
    if not said.isdecimal():
        raise NoNamespaces(said.lstrip("0123456789") or "its process has ended")
    return int(said)


def _furnish(host: str, folder: str, files: str) -> None:
    """Give this host its own files and name."""
    _checked("mount", None, b"/", None, _PRIVATE, None)
    for kind, place in (("proc", "/proc"), ("tmpfs", "/dev/shm"), ("tmpfs", files)):
        _checked("mount", kind.encode(), place.encode(), kind.encode(), _NO_SUID_DEV_EXEC, None)
    _checked("mount", f"{folder}/hosts".encode(), b"/etc/hosts", None, _BIND, None)
    _checked("sethostname", NAMES[host].encode(), len(NAMES[host]))
