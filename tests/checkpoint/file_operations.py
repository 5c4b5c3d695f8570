"""Every operation that ``meshdist/checkpoint/files.py`` asks of the disk, watched by a test.

    with watched(act):
        md.checkpoint.save(state, path)

``act(operation)`` is called in place of each operation that changes the disk or locks, and does it
by ``operation.do()``; before that it may raise, wait, or end the process. A file that is written
may be left torn by ``operation.tear()``. The removal of a folder is one operation per name.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from safetensors.torch import save_file

import meshdist as md
from meshdist.checkpoint import files


@dataclass(frozen=True)
class Operation:
    """What is done next, and where: write, fsync, mkdir, rename, unlink, rmdir or lock."""

    name: str
    paths: tuple[str, ...]
    do: Callable[[], Any]
    rank: int

    @property
    def path(self) -> str:
        return self.paths[-1]

    def tear(self) -> None:
        """Leave of a file that is written its first half; do every other operation whole."""
        self.do()
        if self.name == "write":
            os.truncate(self.path, os.stat(self.path).st_size // 2)


Act = Callable[[Operation], Any]


@contextlib.contextmanager
def watched(act: Act) -> Iterator[None]:
    """Let ``act`` do all operations of this process on files of checkpoints."""
    watch = _Watch(act)
    before = {name: files.__dict__.get(name) for name in watch.stand_ins}
    files.__dict__.update(watch.stand_ins)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del files.__dict__[name]
            else:
                files.__dict__[name] = value


class _Watch:
    """The stand-ins for what the module takes from others."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self._paths: dict[int, str] = {}  # of descriptors that are open
        stand_in = types.SimpleNamespace(
            **{name: getattr(os, name) for name in dir(os) if not name.startswith("__")}
        )
        stand_in.open, stand_in.fsync = self.open_descriptor, self.fsync
        for name in ("mkdir", "rename", "unlink", "rmdir"):
            setattr(stand_in, name, self.watching(name))
        self.stand_ins = {
            "os": stand_in,
            "fcntl": types.SimpleNamespace(
                flock=self.lock,
                LOCK_EX=fcntl.LOCK_EX,
                LOCK_NB=fcntl.LOCK_NB,
                LOCK_SH=fcntl.LOCK_SH,
            ),
            "shutil": types.SimpleNamespace(rmtree=self.rmtree),
            "save_file": self.save_file,
            "open": self.open_file,
        }

    def act(self, name: str, paths: tuple[str, ...], do: Callable[[], Any]) -> Any:
        rank = md.get_rank() if md.is_initialized() else 0
        return self._act(Operation(name, tuple(map(os.fspath, paths)), do, rank))

    def watching(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)
        return lambda *paths: self.act(name, paths, lambda: real(*paths))

    def open_descriptor(self, path: str, flags: int, mode: int = 0o777) -> int:
        def do() -> int:
            return os.open(path, flags, mode)

        opened: int = self.act("write", (path,), do) if flags & os.O_CREAT else do()
        self._paths[opened] = path
        return opened

    def fsync(self, descriptor: int) -> None:
        self.act("fsync", (self._paths[descriptor],), lambda: os.fsync(descriptor))

    def lock(self, descriptor: int, how: int) -> None:
        self.act("lock", (self._paths[descriptor],), lambda: fcntl.flock(descriptor, how))

    def save_file(self, arrays: Any, path: str, metadata: Any) -> None:
        self.act("write", (path,), lambda: save_file(arrays, path, metadata))

    def open_file(self, path: str, mode: str = "r", **more: Any) -> Any:
        return _Opened(self, path, more) if mode == "w" else builtins.open(path, mode, **more)

    def rmtree(self, path: str, ignore_errors: bool = False) -> None:
        with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
            for entry in sorted(os.listdir(path)):
                self.watching("unlink")(os.path.join(path, entry))
            self.watching("rmdir")(path)


class _Opened:
    """A file that is written as a whole, in one operation."""

    def __init__(self, watch: _Watch, path: str, more: dict[str, Any]) -> None:
        self._watch, self._path, self._more = watch, path, more

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, text: str) -> None:
        def do() -> None:
            with builtins.open(self._path, "w", **self._more) as file:
                file.write(text)

        self._watch.act("write", (self._path,), do)
