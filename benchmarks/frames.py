"""Through how many frames of Python a call of each collective goes, on each backend.

    python benchmarks/frames.py [REPORT.json] [--backends shm,gloo,nccl] [--list "broadcast"]

Two ranks make the calls of ``_operations`` and ``_mesh_calls`` several times; a call's number is
that of the rank with most, each rank's is the least of its calls. Functions of the package and of
torch's Python count, lambdas and steps of generators too; so does the collective itself, and not
the benchmark's own lambda. "In Python" is the same call where the group's native fast path is not
taken. ``--list`` names a call, whose functions rank 0 prints in the order in which they were
entered. NCCL's class is the tests' stand-in, which takes CPU tensors and moves no data; its own
functions, which are C++ in torch, do not count.

The last rows are of DDP: all frames of a step of four small layers, and how many frames lie one in
the other where the first bucket goes, from a gradient's hook to the last one before the backend. A
frame of torch's Python is none of the package's, and no part of these.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._mesh_calls import MESH_CALLS, calls_on_mesh
from benchmarks._mpi import environment, job_command
from benchmarks._operations import BLOCKING, IN_FLIGHT, calls_of_operations
from benchmarks._report import parser_of, some_of, start_ranks, write_report
from tests.backends.c10d import nccl_stand_in

BACKENDS = ("simulated", "shm", "gloo", "nccl", "mpi")
WARM_UP, CALLS = 5, 30
SAMPLED = 12  # a wrapper takes the times of its first steps
STEP, NESTED = "a step of DDP", "a bucket, from hook to backend"
PACKAGE = str(Path(__file__).resolve().parents[1] / "meshdist")
OWN_FILES = {of.__code__.co_filename for of in (calls_of_operations, calls_on_mesh)} | {__file__}
STAND_IN = nccl_stand_in.__file__

Counts = dict[str, int]


def frames_of(call: Callable[[], Any]) -> list[str]:
    """Make a call; return the functions of Python that it enters, in order, with their lines."""
    entered: list[str] = []
    depth = 0  # below the first function of the stand-in

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth
        code = frame.f_code
        if event in ("call", "return") and (depth or code.co_filename == STAND_IN):
            depth += 1 if event == "call" else -1
        elif event == "call" and code.co_filename not in OWN_FILES:
            entered.append(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def least_frames_of(call: Callable[[], Any]) -> list[str]:
    """The functions that the shortest of several warm calls enters."""
    for _ in range(WARM_UP):
        call()
    return min((frames_of(call) for _ in range(CALLS)), key=len)


def count_frames(listed: str = "", of: Any = None) -> Counts:
    """On this rank of a world of two: the number of each call, by its name and how it is made.

    ``of`` is the group; None takes the world's.
    """
    import meshdist as md

    group: Any = of or md.group.WORLD
    calls = calls_of_operations(group=group)
    counts = {}
    for name, call in calls.items():
        frames = least_frames_of(call)
        counts[name] = len(frames)
        if name == listed and md.get_rank() == 0:
            print(*frames, f"{len(frames)} frames of {name}", sep="\n", flush=True)
    group.fast_path = None
    for name in BLOCKING:
        frames = least_frames_of(calls[name])
        counts[f"{name}, in Python"] = len(frames)
        if f"{name}, in Python" == listed and md.get_rank() == 0:
            print(*frames, f"{len(frames)} frames of {listed}", sep="\n", flush=True)
    return counts


def count_frames_on_mesh(listed: str = "") -> Counts:
    """On this rank of a world of two: the number of each call along an axis, by its name."""
    import meshdist as md

    counts = {}
    for name, (context, call) in calls_on_mesh().items():
        with context:
            frames = least_frames_of(call)
        counts[name] = len(frames)
        if name == listed and md.get_rank() == 0:
            print(*frames, f"{len(frames)} frames of {name}", sep="\n", flush=True)
    return counts


def count_frames_of_ddp() -> Counts:
    """On this rank: the frames of a step of four layers, and those around a bucket of one layer."""
    import torch

    import meshdist as md

    x = torch.ones(2, 8)

    def count_step(**options: Any) -> tuple[int, int]:
        """All frames of the package in a step, and how deep they lie below a gradient's hook."""
        layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        model = md.DistributedDataParallel(torch.nn.Sequential(*layers), **options)
        found = number = depth = 0

        def note(frame: FrameType, event: str, argument: object) -> None:
            nonlocal found, number, depth
            if event not in ("call", "return") or PACKAGE not in frame.f_code.co_filename:
                return
            is_inside = depth > 0 or frame.f_code.co_name == "gradient_came"
            number += event == "call"
            depth += is_inside if event == "call" else -is_inside
            found = max(found, depth)

        for _ in range(SAMPLED):
            model(x).sum().backward()
        sys.setprofile(note)
        model(x).sum().backward()
        sys.setprofile(None)
        return number, found

    return {STEP: count_step()[0], NESTED: count_step(bucket_cap_mb=1e-4)[1]}


def count_here(listed: str) -> Counts:
    """On this simulated rank: the numbers of all calls but those of DDP."""
    return {**count_frames_on_mesh(listed), **count_frames(listed)}


def most_of(ranks: list[Counts]) -> Counts:
    """The largest number that a rank has for each call."""
    return {name: max(counts[name] for counts in ranks) for name in ranks[0]}


def take_part(rank: int, folder: str, backend: str, listed: str, counts_folder: str) -> None:
    """One rank in a process of its own: count, and leave the counts in ``counts_folder``."""
    import meshdist as md

    with ExitStack() as stack:
        if backend == "mpi":
            md.init_process_group(backend)
        else:
            store = md.FileStore(f"{folder}/store", 2)
            spec = backend
            if backend == "nccl":
                stack.enter_context(nccl_stand_in.standing_in())
                spec = "cpu:nccl"
            md.init_process_group(spec, store=store, rank=rank, world_size=2)
        more = {}
        if backend != "nccl":  # whose stand-in moves no data
            more = {**count_frames_on_mesh(listed), **count_frames_of_ddp()}
        counts = {**more, **count_frames(listed)}
        Path(counts_folder, f"{md.get_rank()}.json").write_text(json.dumps(counts))
        md.destroy_process_group()


def measure(backend: str, listed: str) -> Counts:
    """The counts over a backend, of the rank with most."""
    import meshdist as md

    if backend == "simulated":
        return most_of(md.simulate(count_here, 2, args=(listed,)))
    with tempfile.TemporaryDirectory() as folder:
        if backend == "mpi":
            command = [*job_command(2), __file__, "--take-part", folder, "--list", listed]
            subprocess.run(command, env=environment(), check=True)
        else:
            start_ranks(take_part, 2, backend, listed, folder)
        return most_of([json.loads(path.read_text()) for path in Path(folder).glob("*.json")])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--backends", type=some_of(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--list", default="", help="a call of which all frames are printed")
    parser.add_argument("--take-part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take_part:
        take_part(-1, "", "mpi", options.list, options.take_part)
        return
    found = {backend: measure(backend, options.list) for backend in options.backends}
    names = [*BLOCKING, *(f"{name}, in Python" for name in BLOCKING), *IN_FLIGHT, *MESH_CALLS]
    names += [STEP, NESTED]
    rows = [
        {"call": name, **{backend: found[backend].get(name, "") for backend in found}}
        for name in names
    ]
    write_report("frames", rows, (__doc__ or "").split("\n\n")[2], options.report)


if __name__ == "__main__":
    main()
