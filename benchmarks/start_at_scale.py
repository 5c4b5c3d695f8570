"""Starting at any size: stand-ins of ranks begin a world and make a mesh against one real store.

    python benchmarks/start_at_scale.py [REPORT.json] [--sizes 64,256,1024,4096]

One process holds all stand-ins, each a thread with a world of its own, eight to a host; the store's
server is a process of its own. They join, agree and open as ranks do, on a backend that opens
nothing, and without their signal threads. Counted are the requests to the store, with keys and
bytes, by rank, and the time that the server computes; once with all in time, once with a rank that
comes late to the mesh. What is said of larger worlds is extrapolated by the formula that fits, and
marked so.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._report import parser_of, write_report
from meshdist.backends import registry as backend_registry
from meshdist.backends.communicator import Communicator
from meshdist.backends.registry import BackendType, Needs, Opening, register_backend
from meshdist.bootstrap import timeout_store
from meshdist.bootstrap.rendezvous_rounds import RendezvousRound
from meshdist.bootstrap.timeout_store import TimeoutStore
from meshdist.bootstrap.world import World, world_here
from meshdist.groups import communicators, host_comparison
from meshdist.groups.process_group import world_group
from meshdist.mesh.definition import AxisOptions

SIZES = [64, 256, 1024, 4096]
EXTRAPOLATED = 16384
PER_HOST = 8
LATE_S = 4.0
LONG = timedelta(seconds=600)
SERVER = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore

store = TCPStore(
    "127.0.0.1", 0, None, True, timedelta(seconds=600), wait_for_workers=False
)
print(store.port, flush=True)
sys.stdin.read()
"""


class NoCommunicator(Communicator):
    """A communicator that carries nothing."""

    ways: ClassVar[dict[str, str]] = {}

    def abort(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


class NoBackend(BackendType):
    """A backend that opens nothing."""

    name = "stand-in"
    device_types = frozenset({"cpu"})
    communicator_kind = NoCommunicator
    compares_calls = True

    def is_available(self) -> bool:
        return True

    def needs(self, opening: Opening) -> Needs:
        return Needs(0, 0)

    def open(self, opening: Opening) -> Communicator:
        return NoCommunicator(self.name, opening.rank, len(opening.ranks))


class CountedStore(md.Store):
    """A client of the store, ``raw``, that counts its requests by name, and their bytes."""

    def __init__(self, raw: md.Store) -> None:
        super().__init__()
        self.raw = raw
        self.counts: Counter[str] = Counter()

    def note(self, name: str, keys: Sequence[str], *values: Any) -> None:
        self.counts[name] += 1
        self.counts["keys"] += len(keys)
        self.counts["bytes"] += sum(map(len, keys)) + sum(map(len, values))


def _counted(name: str) -> Callable[..., Any]:
    def request(self: CountedStore, keys: Any, *values: Any) -> Any:
        sent = [one if isinstance(one, (str, bytes)) else "12345678" for one in values]
        self.note(name, [keys] if isinstance(keys, str) else keys, *sent)
        got = getattr(self.raw, name)(keys, *values)
        answers = got if isinstance(got, list) else [got]
        self.counts["bytes"] += sum(len(one) for one in answers if isinstance(one, bytes))
        return got

    return request


for _name in ("set", "get", "add", "append", "check", "compare_set", "multi_get", "delete_key"):
    setattr(CountedStore, _name, _counted(_name))


class StandInStore(TimeoutStore):
    """A stand-in's handle, which counts waits among its requests."""

    def _await_alarm(self, key: str, slice_s: Callable[[], float]) -> bool | None:
        store: Any = self._raw
        store.note("wait", [key])
        if isinstance(store.raw, md.TCPStore):
            self._address = store.raw.host, store.raw.port  # where its alarm connects
            self._knows_prefix = True
            return super()._await_alarm(key, slice_s)
        while (seconds := slice_s()) > 0:
            with suppress(RuntimeError):  # of this process's memory, which reports nothing
                store.raw.wait([key], timedelta(seconds=seconds))
                return True
        return False


class NoControlThread:
    """In place of a rank's signal thread."""

    def __init__(self, *_: Any) -> None:
        """Look for nothing."""

    def stop(self) -> None:
        """Nothing runs."""


Clients = tuple[Callable[[], md.Store], Callable[[], float]]


@contextmanager
def server() -> Iterator[Clients]:
    """A store's server in a process of its own: how to connect; how long it has computed so far."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())

        def cpu_s() -> float:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        def connect() -> md.Store:
            return md.TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False)

        try:
            yield connect, cpu_s
        finally:
            process.kill()


@contextmanager
def memory() -> Iterator[Clients]:
    """A store in the memory of this process, in place of ``server``."""
    store = md.HashStore()
    yield lambda: store, time.process_time


def shape_of(size: int, num_axes: int = 3) -> tuple[int, ...]:
    """A mesh of ``size`` ranks: all axes of two but the first."""
    least = 2 ** (num_axes - 1)
    return (size // least, *(2,) * (num_axes - 1))


@dataclasses.dataclass
class Phase:
    """What all stand-ins asked the store between two moments, and what it took."""

    name: str
    requests: list[Counter[str]]
    seconds: float
    cpu_s: float


def run(
    size: int,
    late_s: float = 0.0,
    num_axes: int = 3,
    *,
    is_private: Sequence[bool] = (True,),
    serve: Callable[[], Any] = server,
) -> list[Phase]:
    """Let stand-ins begin a world and make meshes; one comes ``late_s`` late to each mesh.

    Args:
        size: how many there are.
        late_s: how many seconds late the last of them is.
        num_axes: of each mesh.
        is_private: for each mesh whether it shares no communicators with others.
        serve: gives the store.
    """
    register_backend(NoBackend())
    phases: list[Phase] = []
    failures: list[BaseException] = []
    names = ["the world", *(f"mesh {number + 1}" for number in range(len(is_private)))]
    stores: list[CountedStore] = []
    before = [Counter[str]() for _ in range(size)]
    marks = [0.0, 0.0]

    def note() -> None:
        now, cpu = time.perf_counter(), cpu_s()
        counts = [Counter(store.counts) for store in stores]
        requests = [new - old for new, old in zip(counts, before, strict=True)]
        before[:] = counts
        if marks[0]:
            name = names[len(phases)]
            phases.append(Phase(name, requests, now - marks[0], cpu - marks[1]))
        marks[:] = time.perf_counter(), cpu

    meeting = threading.Barrier(size, note)

    def stand_in(rank: int) -> None:
        handle = StandInStore(stores[rank], LONG, is_hosted_here=True)  # asks without a thread
        attempt = RendezvousRound(
            handle, rank, size, LONG, "stand-ins", ("stand-in",), rank % PER_HOST
        )
        host = f"host {rank // PER_HOST}"
        attempt.process_info = dataclasses.replace(attempt.process_info, host=host, hostname=host)
        stores[rank].set("warm", "")
        handle.wait(["warm"])  # its connection is there
        meeting.wait()
        stores[rank].append("meshdist/clients", "192.168.100.100 12345\n")  # as each client does
        joined = attempt.join()
        world = World(
            rank,
            size,
            joined.store,
            {"cpu": "stand-in"},
            timeout=LONG,
            local_rank=joined.local_rank,
            local_size=joined.local_size,
            hosts=joined.hosts,
            handle=handle,
        )
        with world_here(world):
            world_group(world).open_all()
            meeting.wait()
            meshes = []
            for private in is_private:
                options = {axis: AxisOptions(private=private) for axis in range(num_axes)}
                if late_s and rank == size - 1:
                    time.sleep(late_s)
                shape = shape_of(size, num_axes)
                names_of_axes = tuple("abcde"[:num_axes])
                mesh = md.init_device_mesh(
                    "cpu", shape, mesh_dim_names=names_of_axes, axis_options=options
                )
                meshes.append(mesh)
                meeting.wait()

            for mesh in meshes:
                mesh.close()
            world.close()

    def guarded(rank: int) -> None:
        try:
            stand_in(rank)
        except BaseException as failure:
            failures.append(failure)
            meeting.abort()

    patches = (
        # One process wakes for all of them: a thousand times a second at most.
        mock.patch.object(timeout_store, "POLL_S", max(1.0, size / 1000)),
        mock.patch.object(communicators, "ControlThread", NoControlThread),
        # Which counts the files of the process that they share.
        mock.patch.object(backend_registry, "raise_descriptor_limit", return_value=""),
        mock.patch.object(host_comparison, "make_shared_words", return_value=None),
    )
    with serve() as (connect, cpu_s), ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stores += [CountedStore(connect()) for _ in range(size)]
        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return phases


def columns(phase: Phase) -> dict[str, Any]:
    """The columns of a row for ``phase``, by rank."""
    totals = [sum(c.values()) - c["keys"] - c["bytes"] for c in phase.requests]
    return {
        "requests a rank": sum(totals) / len(totals),
        "most": max(totals),
        "keys a rank": sum(c["keys"] for c in phase.requests) / len(totals),
        "bytes a rank": sum(c["bytes"] for c in phase.requests) / len(totals),
        "seconds": phase.seconds,
        "server's CPU, s": phase.cpu_s,
    }


def extrapolated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a larger world: the server's time grows with n or its square, by what fits best."""
    more = []
    for what in dict.fromkeys(row["what"] for row in rows):
        mine = [row for row in rows if row["what"] == what]
        sizes = np.array([row["ranks"] for row in mine], dtype=float)
        cpu = np.array([row["server's CPU, s"] for row in mine])
        fits = []
        for power, name in enumerate(("a rank", "a pair of ranks"), 1):
            terms = np.stack([np.ones_like(sizes), sizes**power], axis=1)
            weights = 1 / np.maximum(cpu, 0.1)[:, None]  # by relative error; clocks tick in 10 ms
            (start, slope), *_ = np.linalg.lstsq(terms * weights, cpu * weights[:, 0], rcond=None)
            off = np.abs(terms @ (start, slope) - cpu).max() / cpu.max()
            formula = f"{start:.2g} s + {slope * 1e6:.3g} us {name}"
            at = float(start + slope * EXTRAPOLATED**power)
            fits.append((off, at, f"{formula}, off by {off:.0%} at most: {at:.3g} s"))
        fits.sort()
        row = {"ranks": EXTRAPOLATED, "what": f"{what}; on paper"}
        row |= {k: mine[-1][k] for k in ("requests a rank", "keys a rank", "bytes a rank")}
        row["server's CPU, s"] = fits[0][1]
        row["formula"] = "; else ".join(text for _, _, text in fits)
        more.append(row)
    return more


def enter_namespace() -> None:
    """Go on in a network of this process's own, where there is one: no name server is slow there.

    A store's server asks it for the name of every client.
    """
    if shutil.which("unshare") is None or "MESHDIST_ALONE" in os.environ:
        return
    command = 'ip link set lo up && exec "$0" "$@"'
    environment = {**os.environ, "MESHDIST_ALONE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    arguments = ["unshare", "-rn", "sh", "-c", command, sys.executable, *sys.argv]
    os.execvpe(arguments[0], arguments, environment)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    options = parser.parse_args()
    enter_namespace()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(256 << 10)
    # A thread that waits for Python's lock asks for it each switch interval, 5 ms as a rule: a
    # thousand that have just been woken do nothing else, and a mesh took 150 s of the system's time
    # in place of 5. Here each runs until it waits for the store.
    sys.setswitchinterval(5.0)
    torch.set_num_threads(1)
    rows = []
    for size in map(int, options.sizes.split(",")):
        for when, late_s in (("all in time", 0.0), ("one late", LATE_S)):
            gc.collect()  # the connections of the run before
            for phase in run(size, late_s):
                if phase.name != "the world" or not late_s:
                    what = phase.name.replace("mesh 1", f"a mesh of 3 axes, {when}")
                    rows.append({"ranks": size, "what": what, **columns(phase)})
                    print(json.dumps(rows[-1]), flush=True)
    write_report(
        "start_at_scale",
        rows + extrapolated(rows),
        "Stand-ins are threads of one process and share its time: their seconds say little; "
        "requests, bytes and the server's CPU are what ranks cost. Eight to a host. On paper: the "
        "formula that fits.",
        options.report,
    )


if __name__ == "__main__":
    main()
