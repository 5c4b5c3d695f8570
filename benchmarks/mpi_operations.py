"""Our collectives beside mpi4py's own calls, on the same buffers, in the same processes.

    python -m benchmarks.mpi_operations [REPORT.json] [--mpich] [--backend mpi] [--ranks 2]
    [--rounds 25]
        [--sizes 8,...]

Each round times both sides of each collective and size, one after the other, each first in every
other round. A time is that of rank 0 per call, after a barrier, and of half a send and receive;
"above" and "ratio" are medians over rounds of the difference and of the quotient, "best above" is
the least time of ours less the least of theirs. MPICH runs from an environment of its own
(build/mpich). Over MPI small messages have an absolute target; over shared memory (``--backend
shm``) each collective has a ratio of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._mpi import environment, job_command
from benchmarks._report import parser_of, write_report

SIZES = "8,64,1024,16384,262144,1048576,16777216,67108864"
BYTES_PER_TIMING = 1 << 26
MOST_CALLS = 100  # short enough to fit between two turns of other programs
MIB = 1 << 20
MOST_ABOVE_US, MOST_RATIO = 3.0, 1.03
MOST_RATIO_OF_SHM = {"broadcast": 1.4, "all_to_all_single": 1.4, "send, recv": 1.4}  # others: 1

Call = Callable[[], Any]
Pair = tuple[Call, Call]


def pairs_of(world: Any, MPI: Any, num_bytes: int) -> dict[str, Pair]:
    """For each collective our call and mpi4py's; ``num_bytes`` is the size of the full buffer."""
    import torch

    import meshdist as md

    rank, size = world.Get_rank(), world.Get_size()
    count = max(1, num_bytes // 4 // size)
    one, full = torch.ones(count), torch.ones(count * size)
    whole, other = torch.ones(max(1, num_bytes // 4)), torch.ones(count * size)
    a, b, w, o = one.numpy(), full.numpy(), whole.numpy(), other.numpy()
    is_root = rank == 0
    parts = list(full.chunk(size)) if is_root else None
    mine = (MPI.IN_PLACE, w) if is_root else (w, None)

    def swap(send: Any, recv: Any) -> Call:
        def first() -> None:
            send(1)
            recv(1)

        def second() -> None:
            recv(0)
            send(0)

        return first if is_root else second if rank == 1 else lambda: None

    ours_swap = swap(lambda peer: md.send(whole, peer), lambda peer: md.recv(whole, peer))
    bare_swap = swap(lambda peer: world.Send(w, peer), lambda peer: world.Recv(w, peer))
    return {
        "all_reduce": (lambda: md.all_reduce(whole), lambda: world.Allreduce(MPI.IN_PLACE, w)),
        "all_reduce AVG": (  # which MPI lacks
            lambda: md.all_reduce(whole, md.ReduceOp.AVG),
            lambda: world.Allreduce(MPI.IN_PLACE, w),
        ),
        "all_reduce MAX": (
            lambda: md.all_reduce(whole, md.ReduceOp.MAX),
            lambda: world.Allreduce(MPI.IN_PLACE, w, MPI.MAX),
        ),
        "all_reduce, async": (
            lambda: md.all_reduce(whole, async_op=True).wait(),
            lambda: world.Iallreduce(MPI.IN_PLACE, w).Wait(),
        ),
        "reduce": (lambda: md.reduce(whole, 0), lambda: world.Reduce(*mine)),
        "broadcast": (lambda: md.broadcast(whole, 0), lambda: world.Bcast(w)),
        "all_gather_single": (
            lambda: md.all_gather_single(full, one),
            lambda: world.Allgather(a, b),
        ),
        "gather": (
            lambda: md.gather(one, parts, 0),
            lambda: world.Gather(a, b if is_root else None),
        ),
        "scatter": (
            lambda: md.scatter(one, parts, 0),
            lambda: world.Scatter(b if is_root else None, a),
        ),
        "reduce_scatter_single": (
            lambda: md.reduce_scatter_single(one, full),
            lambda: world.Reduce_scatter_block(b, a),
        ),
        "all_to_all_single": (
            lambda: md.all_to_all_single(other, full),
            lambda: world.Alltoall(b, o),
        ),
        "send, recv": (ours_swap, bare_swap),
        "barrier": (md.barrier, world.Barrier),
    }


def take_part(backend: str, rounds: int, sizes: list[int], path: Path) -> None:
    """What every rank under mpiexec does; rank 0 writes the rows."""
    import torch

    import meshdist as md

    torch.set_num_threads(1)
    if backend == "mpi":
        md.init_process_group(backend)  # starts MPI
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    if backend != "mpi":
        place = f"file://{path}.store?rank={world.Get_rank()}&world_size={world.Get_size()}"
        md.init_process_group(backend, init_method=place)
    rows = []
    for num_bytes in sizes:
        num_calls = max(3, min(MOST_CALLS, BYTES_PER_TIMING // num_bytes))

        def timed(call: Call, num_calls: int = num_calls) -> float:
            world.Barrier()
            begin = time.perf_counter()
            for _ in range(num_calls):
                call()
            return (time.perf_counter() - begin) / num_calls * 1e6

        for operation, pair in pairs_of(world, MPI, num_bytes).items():
            if operation == "barrier" and num_bytes != sizes[0]:
                continue
            num_operations = 2 if operation == "send, recv" else 1
            samples = []
            for turn in range(rounds + 1):
                order = (0, 1) if turn % 2 else (1, 0)
                times = {side: timed(pair[side]) for side in order}
                samples.append((times[0] / num_operations, times[1] / num_operations))
            del samples[0]
            row: dict[str, Any] = {"operation": operation, "bytes": num_bytes}
            row["ours us"], row["bare us"] = (
                statistics.median(column) for column in zip(*samples, strict=True)
            )
            row["best above us"] = min(ours for ours, _ in samples) - min(
                bare for _, bare in samples
            )
            row["above us"] = statistics.median(ours - bare for ours, bare in samples)
            row["ratio"] = statistics.median(ours / bare for ours, bare in samples)
            most = MOST_RATIO if backend == "mpi" else MOST_RATIO_OF_SHM.get(operation, 1.0)
            is_absolute = backend == "mpi" and num_bytes < MIB
            is_met = row["above us"] <= MOST_ABOVE_US if is_absolute else row["ratio"] <= most
            rows.append({**row, "target": "met" if is_met else "MISSED"})
    if world.Get_rank() == 0:
        found = {"library": MPI.Get_library_version().strip("\0").splitlines()[0], "rows": rows}
        path.write_text(json.dumps(found))
    md.destroy_process_group()


def main() -> None:
    parser = parser_of(__doc__, rounds=25)
    parser.add_argument("--mpich", action="store_true")
    parser.add_argument("--backend", choices=("mpi", "shm"), default="mpi")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--take-part", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [int(text) for text in arguments.sizes.split(",")]
    if arguments.take_part:
        take_part(arguments.backend, arguments.rounds, sizes, arguments.take_part)
        return
    is_shm, library = arguments.backend == "shm", "mpich" if arguments.mpich else "openmpi"
    name = f"{'shm_beside_mpi' if is_shm else 'mpi_operations'}_{library}_{arguments.ranks}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        words = ["--take-part", str(path), "--sizes", arguments.sizes]
        command = [*job_command(arguments.ranks, is_mpich=arguments.mpich), __file__, *words]
        command += ["--rounds", str(arguments.rounds), "--backend", arguments.backend]
        subprocess.run(command, env=environment(), check=True)
        found = json.loads(path.read_text())
    notes = f"{found['library']}, {arguments.ranks} ranks, {arguments.rounds} rounds. "
    if is_shm:
        listed = ", ".join(f"{operation} {most:g}" for operation, most in MOST_RATIO_OF_SHM.items())
        notes += f"Ours over shared memory. Target: a ratio of at most {listed}, others 1."
    else:
        notes += f"Target: at most {MOST_ABOVE_US:g} us above, and {MOST_RATIO:g} times from 1 MiB."
    write_report(name, found["rows"], notes, arguments.report)


if __name__ == "__main__":
    main()
