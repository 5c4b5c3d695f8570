"""The file of a ``file://`` rendezvous: which processes use it, for which generation, under a lock.

The file that the program names holds a record, never keys: for each generation of a world that
meets there, its members (process, start time, host) and the file beside it that holds the
generation's store. So a file that a crashed job left behind is known for what it is, a new world
never reads keys of an old world, and the last member that leaves removes both files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ..arguments import DEFAULT_TIMEOUT
from ..errors import RendezvousError
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.hosts import ProcessCard, is_alive, my_card, name_locker, take_lock

_MARK = "meshdist rendezvous"
_LEAVE = timedelta(seconds=5)
"""How long a leaving member waits for the lock; then the file stays as it is."""

_Record = list[dict[str, Any]]
"""The generations that the file lists, oldest first."""


@dataclass(frozen=True)
class Entry:
    """Membership of one process in one generation, randomly named, of the file at ``path``."""

    path: str
    generation: str
    rank: int
    member: str

    @property
    def store_path(self) -> str:
        """The path of the file with the generation's store."""
        return f"{self.path}.{self.generation}"


def enter(
    path: str,
    rank: int | None,
    size: int,
    job: str = "",
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Entry:
    """Add this process to the file's open generation, or to a new generation; return its Entry.

    Args:
        rank: None takes the next free rank.
        job: generations of other jobs in the file do not count.
    """
    with _locked(path, timeout) as record:
        generations = [generation for generation in record if generation["job"] == job]
        for generation in generations:
            _refuse_leftover(path, record, generation)
        current = generations[-1] if generations else None
        if current is None or not _is_gathering(current):
            current = {"job": job, "name": secrets.token_hex(4), "size": size, "members": {}}
            record.append(current)
        members = current["members"]
        if rank is None:
            taken = {member["rank"] for member in members.values()}
            rank = next(number for number in range(len(taken) + 1) if number not in taken)
        name = secrets.token_hex(4)
        members[name] = {"rank": rank, "has_left": False, **my_card().to_json()}
        return Entry(path, current["name"], rank, name)


def leave(entry: Entry) -> None:
    """Record that this member left; the last member removes the store, and a file left empty."""
    with (
        suppress(RendezvousError),  # it is not that file any more, or stays locked
        _locked(entry.path, _LEAVE, may_create=False) as record,
    ):
        for generation in record:
            if generation["name"] != entry.generation or entry.member not in generation["members"]:
                continue
            generation["members"][entry.member]["has_left"] = True
            # Members that this host shows to have ended without leaving count as gone.
            if not any(map(_may_live, generation["members"].values())):
                record.remove(generation)
                Path(entry.store_path).unlink(missing_ok=True)
            return


def _may_live(member: dict[str, Any]) -> bool:
    return not member["has_left"] and is_alive(ProcessCard.from_json(member)) is not False


def _is_gathering(generation: dict[str, Any]) -> bool:
    members = generation["members"].values()
    return len(members) < generation["size"] and not any(member["has_left"] for member in members)


def _refuse_leftover(path: str, record: _Record, generation: dict[str, Any]) -> None:
    for member in generation["members"].values():
        card = ProcessCard.from_json(member)
        if member["has_left"] or is_alive(card) is not False:
            continue
        files = [path, *(f"{path}.{other['name']}" for other in record)]
        raise RendezvousError(
            f"{path} was left behind by a job that crashed",
            where=f"file://{path}; {my_card()}",
            expected="a file that is absent, empty, or in use by the ranks of this job",
            found=f"generation {generation['name']} of {generation['size']} ranks, whose rank "
            f"{member['rank']} ({card}) has ended without closing it",
            fix=f"end what still runs of that job, then: rm -f {shlex.join(files)}",
        )


@contextmanager
def _locked(path: str, timeout: timedelta, *, may_create: bool = True) -> Iterator[_Record]:
    """Lock the file and yield its generations; write them back, or remove a file without any.

    Args:
        may_create: without it a missing file has no generations, and stays missing.
    """
    try:
        descriptor = _open_locked(path, may_create, Deadline(timeout))
    except (OSError, ValueError) as error:
        if not may_create and isinstance(error, FileNotFoundError):
            yield []  # a user has removed the file
            return
        more = "make the directory, or " if isinstance(error, FileNotFoundError) else ""
        raise RendezvousError(
            f"the rendezvous file cannot be opened: {getattr(error, 'strerror', None) or error}",
            where=f"file://{path}",
            expected="a path in an existing directory in which this user may write, on a file "
            "system that all ranks share",
            fix=f"{more}name another file",
        ) from None
    try:
        record = _read(path, descriptor)
        yield record
        if record:
            text = json.dumps({_MARK: 1, "generations": record}, indent=1)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
        else:
            Path(path).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _open_locked(path: str, may_create: bool, deadline: Deadline) -> int:
    # What is no file, a pipe for example, must not keep this process waiting.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    while True:
        descriptor = os.open(path, flags | (os.O_CREAT if may_create else 0), 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            if not wait_until(partial(take_lock, descriptor), deadline):
                raise OSError(errno.EWOULDBLOCK, f"{name_locker(path)} keeps it locked")
            try:
                is_current = os.path.samestat(os.fstat(descriptor), os.stat(path))
            except FileNotFoundError:
                is_current = False
        except BaseException:
            os.close(descriptor)
            raise
        if is_current:
            return descriptor
        os.close(descriptor)  # removed by its last user between open and lock


def parse(text: bytes) -> _Record:
    """Return the generations that a file's text lists; raise ValueError if it is malformed."""
    values = json.loads(text)
    if not isinstance(values, dict) or _MARK not in values:
        raise ValueError("it has no mark")
    record = values.get("generations")
    if not isinstance(record, list) or not all(map(_is_generation, record)):
        raise ValueError("it lists no generations")
    return record


def _is_generation(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and type(value.get("job")) is str
        and type(value.get("size")) is int
        and type(value.get("name")) is str
        and re.fullmatch("[0-9a-f]{8}", value["name"]) is not None
        and isinstance(value.get("members"), dict)
        and all(map(_is_member, value["members"].values()))
    )


def _is_member(value: Any) -> bool:
    if not isinstance(value, dict) or type(value.get("has_left")) is not bool:
        return False
    ProcessCard.from_json(value)  # raises ValueError, too
    return type(value.get("rank")) is int


def _read(path: str, descriptor: int) -> _Record:
    size = os.fstat(descriptor).st_size
    if size == 0:
        return []
    try:
        record = parse(os.pread(descriptor, size, 0))
    except (ValueError, RecursionError):
        raise RendezvousError(
            f"{path} is in use for something else",
            where=f"file://{path}",
            expected="a file that is absent or empty",
            found=f"{size} bytes that are not as this package writes them",
            fix="name another file; or, if nobody needs this one (torch.distributed leaves such "
            f"files behind): rm {shlex.quote(path)}",
        ) from None
    return record
