"""Mesh creation: ours against torch's init_device_mesh, over processes; and its arithmetic alone.

    python benchmarks/mesh_creation.py [REPORT.json] [--sizes 4,8,16,64]

Processes are forked after import. In each, torch's world comes first and meshdist adopts it; then
both make a mesh in turn, and close it, for several rounds. A round's time is the slowest rank's. A
second world of ours meets in a file, as under `meshdist run` on one host.

Where more ranks stand in a row than processes can be started, one process computes what its rank's
groups are, and opens nothing: that is arithmetic of layouts, and says nothing about starting.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._report import parser_of, write_report
from meshdist.bootstrap.world import World, world_here

SHAPES = {
    4: [(4,), (2, 2), (2, 1, 2)],
    8: [(8,), (2, 4), (2, 2, 2)],
    16: [(16,), (4, 4), (2, 2, 4)],
    64: [(64,), (8, 8), (2, 4, 8)],
}
ROUNDS = 7
ROUNDS_OF_MANY = 3  # of more than 16 processes, which wait for the machine's cores most of the time
PATIENCE = timedelta(seconds=300)
PLANNED = {
    64: [(64,), (8, 8), (2, 4, 8)],
    1024: [(1024,), (128, 8), (32, 4, 8)],
    4096: [(4096,), (512, 8), (128, 4, 8)],
    16384: [(16384,), (2048, 8), (512, 4, 8)],
}


def names_of(shape: tuple[int, ...]) -> tuple[str, ...]:
    return ("pp", "dp", "tp")[3 - len(shape) :]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


def num_rounds(size: int) -> int:
    return ROUNDS if size <= 16 else ROUNDS_OF_MANY


def worker(rank: int, size: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, False, PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    dist.barrier()
    times: dict[str, list[float]] = {}
    file = md.FileStore(str(Path(folder, "store")), size)
    for side, of_file in (("ours", None), ("ours, file", file)):
        if of_file is None:
            md.init_process_group(timeout=PATIENCE)
        else:
            md.init_process_group("gloo", None, PATIENCE, size, rank, of_file)
        for number in range(num_rounds(size) + 1):
            for shape in SHAPES[size]:
                took, theirs = timed(
                    lambda shape=shape: torch_init_device_mesh(
                        "cpu", shape, mesh_dim_names=names_of(shape)
                    )
                )
                for group in theirs.get_all_groups():
                    if group is not dist.group.WORLD:
                        dist.destroy_process_group(group)
                ours, mesh = timed(
                    lambda shape=shape: md.init_device_mesh(
                        "cpu", shape, mesh_dim_names=names_of(shape)
                    )
                )
                mesh.close()
                if number:
                    times.setdefault(f"torch {shape}", []).append(took)
                    times.setdefault(f"{side} {shape}", []).append(ours)
        dist.barrier()
        md.destroy_process_group()
    Path(folder, str(rank)).write_text(json.dumps(times))
    dist.barrier()


def over_processes(size: int) -> list[dict[str, Any]]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    port = listener.getsockname()[1]
    server = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=worker, args=(rank, size, port, folder), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a worker ended with {process.exitcode}")
        per_rank = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(size)]
    del server
    rows = []
    for shape in SHAPES[size]:
        row: dict[str, Any] = {"ranks": size, "shape": str(shape), "what": "gloo, ms"}
        row["rounds"] = num_rounds(size)
        for side in ("torch", "ours", "ours, file"):
            slowest = [
                max(times) for times in zip(*(r[f"{side} {shape}"] for r in per_rank), strict=True)
            ]
            row[side] = statistics.median(slowest)
        row["torch/ours"] = row["torch"] / row["ours"]
        rows.append(row)
    return rows


def planned(size: int) -> list[dict[str, Any]]:
    """The arithmetic of layouts, in one process, on the rank in the middle of the world."""
    rows = []
    world = World(size // 2 + 1, size, dist.HashStore(), {"cpu": "gloo"})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("fake", store=dist.HashStore(), rank=size // 2 + 1, world_size=size)
    for shape in PLANNED[size]:
        ours, theirs, ours_slice, theirs_slice = [], [], [], []
        for _ in range(ROUNDS):
            with world_here(world):
                start = time.perf_counter()
                mesh = md.init_device_mesh(
                    "cpu", shape, mesh_dim_names=names_of(shape), open_groups=False
                )
                ours.append((time.perf_counter() - start) * 1e3)
                ours_slice.append(slice_us(mesh, 2000))
            start = time.perf_counter()
            torch_mesh = torch_init_device_mesh("cpu", shape, mesh_dim_names=names_of(shape))
            theirs.append((time.perf_counter() - start) * 1e3)
            theirs_slice.append(slice_us(torch_mesh, 20))
            dist.destroy_process_group()
            dist.init_process_group(
                "fake", store=dist.HashStore(), rank=size // 2 + 1, world_size=size
            )
        for what, mine, other in (
            ("arithmetic of layouts, ms", ours, theirs),
            ("slice, us", ours_slice, theirs_slice),
        ):
            row = {"ranks": math.prod(shape), "shape": str(shape), "what": what}
            row["torch"], row["ours"] = statistics.median(other), statistics.median(mine)
            row["torch/ours"] = row["torch"] / row["ours"]
            rows.append(row)
    dist.destroy_process_group()
    return rows


def slice_us(mesh: Any, count: int) -> float:
    name = mesh.mesh_dim_names[-1] if mesh.ndim == 1 else mesh.mesh_dim_names[0]
    mesh[name]
    start = time.perf_counter()
    for _ in range(count):
        mesh[name]
    return (time.perf_counter() - start) / count * 1e6


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SHAPES)), help="how many processes")
    options = parser.parse_args()
    rows = [row for size in map(int, options.sizes.split(",")) for row in over_processes(size)]
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  registers it

    rows += [row for size in PLANNED for row in planned(size)]
    write_report(
        "mesh_creation",
        rows,
        "Medians over interleaved rounds. gloo: the slowest rank of processes that share the "
        "machine's cores: 64 on two cores wait for a core most of the time. arithmetic of layouts: "
        "one process computes its groups, which opens nothing; torch on its fake backend.",
        options.report,
    )


if __name__ == "__main__":
    main()
