"""Checkpoints beside torch's DCP: saves, loads, the wait of an asynchronous save, CPU an array.

    python benchmarks/checkpoint.py [REPORT.json] [--rounds 9] [--quick] [--ranks 2,4,1]
        [--parts save,load,cold,async,small] [--mib 256] [--disk FOLDER]

save: float32 matrices of 16 MiB, cut into rows over all ranks; both sides end with fsync, ours sums
each byte besides. DCP: ``FileSystemWriter`` with its defaults, over Gloo; ours over shared memory
and over Gloo. At one rank ``torch.save`` and ``safetensors.torch.save_file`` stand beside them,
each with an fsync.
load: of these files into arrays that are there: as saved; columns; whole arrays on every rank. The
files are in the page cache, for all sides alike.
cold: the last of these from the disk, and what all ranks read from it, over the bytes of the files.
async: the time until an asynchronous save returns. The writing is awaited before the next sample.
small: CPU time of all ranks together, of arrays of 2 KiB: cut into rows, and whole on each rank.

All sides save the same tensors, to one disk, in one run; every round asks each, each time another
first. What was loaded is compared with what was saved before anything is timed. Times are the
slowest rank's; a target is compared with the median over rounds of the quotients of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import distributed as torch_dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._report import interleaved, parser_of, some_of, start_ranks, write_report
from benchmarks._step_times import Sample, quotient, sample_of, verdict

MIB = 1 << 20
PARTS = ("save", "load", "cold", "async", "small")
LAYOUTS = {"rows": "as saved", "columns": "columns from rows", "whole": "replicated"}
LARGE_MIB = 16.0
SMALL_BYTES = 2048

# What is aimed at, as quotients of DCP's that must not be exceeded.
TARGETS = {
    "save": 1.0,
    "load as saved": 0.9,
    "load columns from rows": 0.5,
    "load replicated": 1.0,
    "save_async until it returns": 0.5,
    "small, save": 0.3,
    "small, load": 0.75,
}

Tensors = dict[str, torch.Tensor]
Rows = list[dict[str, Any]]


class Side(ABC):
    """A way to save and load."""

    @abstractmethod
    def state(self, parts: Tensors, layout: str, shape: tuple[int, int]) -> dict[str, Any]:
        """Return a state of this rank's parts, in their memory."""

    @abstractmethod
    def save(self, state: dict[str, Any], path: str) -> None:
        """Write a state to the disk."""

    @abstractmethod
    def load(self, state: dict[str, Any], path: str) -> None:
        """Fill a state."""

    def save_async(self, state: dict[str, Any], path: str) -> Callable[[], Any]:
        """Begin a save, and return its wait."""
        raise NotImplementedError


class Ours(Side):
    """``md.checkpoint`` over a backend."""

    def __init__(self, backend: str) -> None:
        options = {"x": md.AxisOptions(backend=backend)}
        size = md.get_world_size()
        self._mesh = md.init_device_mesh(
            "cpu", (size,), mesh_dim_names=("x",), axis_options=options
        )

    def state(self, parts: Tensors, layout: str, shape: tuple[int, int]) -> dict[str, Any]:
        if layout == "whole":
            return dict(parts)
        spec = md.P("x") if layout == "rows" else md.P(None, "x")
        sharding = md.NamedSharding(self._mesh, spec)
        return {name: md.ShardedArray(part, sharding, shape) for name, part in parts.items()}

    def save(self, state: dict[str, Any], path: str) -> None:
        md.checkpoint.save(state, path, mesh=self._mesh)

    def load(self, state: dict[str, Any], path: str) -> None:
        md.checkpoint.load(state, path, mesh=self._mesh)

    def save_async(self, state: dict[str, Any], path: str) -> Callable[[], Any]:
        return md.checkpoint.save_async(state, path, mesh=self._mesh).wait


class Dcp(Side):
    """torch's DCP over Gloo."""

    def __init__(self) -> None:
        self._mesh = init_device_mesh("cpu", (md.get_world_size(),))

    def state(self, parts: Tensors, layout: str, shape: tuple[int, int]) -> dict[str, Any]:
        if layout == "whole":
            return dict(parts)
        place = [Shard(0 if layout == "rows" else 1)]
        return {
            name: DTensor.from_local(part, self._mesh, place, run_check=False)
            for name, part in parts.items()
        }

    def save(self, state: dict[str, Any], path: str) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))

    def load(self, state: dict[str, Any], path: str) -> None:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))

    def save_async(self, state: dict[str, Any], path: str) -> Callable[[], Any]:
        writer = dcp.FileSystemWriter(path, sync_files=True)
        return dcp.async_save(state, storage_writer=writer).result


class OneFile(Side):
    """A function that writes a dict of tensors to a file, and one that reads it; at one rank."""

    def __init__(self, write: Callable[..., Any], read: Callable[..., Tensors]) -> None:
        self._write, self._read = write, read

    def state(self, parts: Tensors, layout: str, shape: tuple[int, int]) -> dict[str, Any]:
        return dict(parts)

    def save(self, state: dict[str, Any], path: str) -> None:
        os.mkdir(path)
        self._write(state, f"{path}/file")
        for each in (f"{path}/file", path):
            opened = os.open(each, os.O_RDONLY)
            os.fsync(opened)
            os.close(opened)

    def load(self, state: dict[str, Any], path: str) -> None:
        for name, found in self._read(f"{path}/file").items():
            state[name].copy_(found)


def make_sides() -> dict[str, Side]:
    """The sides that this number of ranks has; collective."""
    sides: dict[str, Side] = {
        "DCP": Dcp(),
        **{backend: Ours(backend) for backend in ("shm", "gloo")},
    }
    if md.get_world_size() == 1:
        sides["torch.save"] = OneFile(torch.save, partial(torch.load, weights_only=True))
        sides["safetensors"] = OneFile(save_file, load_file)
    return sides


def shape_of(num_bytes: float) -> tuple[int, int]:
    """The shape of a float32 matrix of about so many bytes, which four ranks can cut both ways."""
    rows = max(4, int((num_bytes / 4) ** 0.5) // 4 * 4)
    return rows, max(4, int(num_bytes / 4) // rows // 4 * 4)


def parts_of(count: int, shape: tuple[int, int], layout: str) -> Tensors:
    """This rank's parts of ``count`` matrices; the first numbers of each are its own."""
    rank, size = md.get_rank(), md.get_world_size()
    whole = torch.arange(shape[0] * shape[1], dtype=torch.int32).remainder_(1021).view(shape)
    if layout != "whole":
        whole = whole.chunk(size, dim=0 if layout == "rows" else 1)[rank]
    return {f"layer.{number}.weight": whole + float(number) for number in range(count)}


def drop_from_page_cache(path: str) -> None:
    """Let the next reader of a folder's files wait for the disk; collective."""
    md.barrier()
    for entry in os.scandir(path):
        opened = os.open(entry.path, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)
    md.barrier()


def bytes_read() -> int:
    """The bytes that this process has read from disks, as Linux counts them."""
    told = Path("/proc/self/io").read_text(encoding="ascii")
    return int(dict(line.split(": ") for line in told.splitlines())["read_bytes"])


def bytes_in(path: str) -> int:
    """The bytes of a folder's files."""
    return sum(entry.stat().st_size for entry in os.scandir(path))


@contextmanager
def removed_at_the_end(path: str) -> Any:
    """A path that all ranks write to, and that the first removes, also from the disk's journal."""
    yield path
    md.barrier()
    if md.get_rank() == 0:
        shutil.rmtree(path)
        os.sync()  # else the next save on this disk waits for the removal
    md.barrier()


class Measurement:
    """All sides on one number of ranks: rows of a report, and what was found of its targets."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        self.folder, self.rounds = folder, options.rounds
        self.sides = make_sides()
        self.num_ranks = md.get_world_size()
        self.rows: Rows = []
        self.targets: Rows = []

    def save(self, what: str, parts: Tensors, layout: str, shape: tuple[int, int]) -> None:
        """Saves of one layout."""

        def sample(name: str, state: dict[str, Any]) -> Sample:
            with removed_at_the_end(f"{self.folder}/saved") as path:
                return sample_of(partial(self.sides[name].save, state, path), 1)

        self._measure(what, sample, parts, layout, shape)

    def save_async(self, what: str, parts: Tensors, shape: tuple[int, int]) -> None:
        """Asynchronous saves of rows, until they return."""

        def sample(name: str, state: dict[str, Any]) -> Sample:
            waits: list[Callable[[], Any]] = []
            save = self.sides[name].save_async
            with removed_at_the_end(f"{self.folder}/saved") as path:
                taken = sample_of(lambda: waits.append(save(state, path)), 1)
                waits[0]()
                return taken

        self._measure(what, sample, parts, "rows", shape)

    def keep(self, parts: Tensors, layout: str, shape: tuple[int, int]) -> None:
        """Save by each side what loads read."""
        for name, side in self.sides.items():
            md.barrier()
            if md.get_rank() == 0:
                shutil.rmtree(self._kept(name), ignore_errors=True)
            md.barrier()
            side.save(side.state(parts, layout, shape), self._kept(name))

    def load(
        self,
        what: str,
        wanted: Tensors,
        layout: str,
        shape: tuple[int, int],
        *,
        is_cold: bool = False,
    ) -> None:
        """Loads of what was kept, in some layout; the values must become those of ``wanted``."""

        def sample(name: str, state: dict[str, Any]) -> Sample:
            if is_cold:
                drop_from_page_cache(self._kept(name))
            return sample_of(partial(self.sides[name].load, state, self._kept(name)), 1)

        parts = {name: torch.zeros_like(part) for name, part in wanted.items()}
        read = {}
        for side_name, side in self.sides.items():
            before = bytes_read()
            sample(side_name, side.state(parts, layout, shape))
            told = torch.tensor(bytes_read() - before)
            md.all_reduce(told)
            read[side_name] = told.item() / bytes_in(self._kept(side_name))
            for name, part in parts.items():
                if not torch.equal(part, wanted[name]):
                    raise AssertionError(f"{what} by {side_name}: {name} is wrong")
                part.zero_()
        self._measure(what, sample, parts, layout, shape, read if is_cold else None)

    def _kept(self, side: str) -> str:
        return f"{self.folder}/kept-{side}"

    def _measure(
        self,
        what: str,
        sample: Callable[[str, dict[str, Any]], Sample],
        parts: Tensors,
        layout: str,
        shape: tuple[int, int],
        read: Mapping[str, float] | None = None,
    ) -> None:
        calls = {}
        for name, side in self.sides.items():
            if what.startswith("save_async") and isinstance(side, OneFile):
                continue
            calls[name] = partial(sample, name, side.state(parts, layout, shape))
        samples = interleaved(calls, self.rounds)
        is_small = what.startswith("small")
        for side, taken in samples.items():
            wall = [each.wall for each in taken]
            row = {"what": what, "ranks": self.num_ranks, "side": side}
            row |= {"ms": statistics.median(wall), "min ms": min(wall), "max ms": max(wall)}
            cpu = statistics.median(each.cpu for each in taken) * self.num_ranks
            row["CPU ms"] = cpu
            if is_small:
                row["CPU us an array"] = cpu * 1e3 / len(parts)
            if read is not None:
                row["read"] = read[side]
            self.rows.append(row)
        for backend in ("shm", "gloo"):
            name = f"{what}, {self.num_ranks} ranks: {backend} / DCP"
            self.targets.append(
                compared(name, what, samples[backend], samples["DCP"], by_cpu=is_small)
            )


def compared(
    name: str, what: str, ours: Sequence[Sample], dcps: Sequence[Sample], *, by_cpu: bool
) -> dict[str, Any]:
    """A row of what was aimed at; its quotients are of CPU time, or of wall time."""
    pair = [[each.cpu if by_cpu else each.wall for each in side] for side in (ours, dcps)]
    ratios = [a / b for a, b in zip(*pair, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    found = quotient(*pair)
    most = TARGETS.get(what.split(" of")[0])
    return {
        "what": name,
        "quotient": found,
        "quartiles": f"{low:.2f}-{high:.2f}",
        "verdict": verdict(most, [found]),
    }


def measure_ranks(
    rank: int, folder: str, options: argparse.Namespace, found: Path, num_ranks: int
) -> None:
    """One rank's part of all that is measured on so many ranks."""
    torch.set_num_threads(1)
    md.init_process_group("shm", f"file://{folder}/ours", world_size=num_ranks, rank=rank)
    torch_dist.init_process_group(
        "gloo", f"file://{folder}/theirs", world_size=num_ranks, rank=rank
    )
    disk = [tempfile.mkdtemp(dir=options.disk) if rank == 0 else None]
    md.broadcast_object_list(disk, src=0)
    try:
        measurement = Measurement(disk[0], options)
        measure_large(measurement, options)
        if "small" in options.parts:
            measure_small(measurement, options)
    finally:
        if rank == 0:
            shutil.rmtree(disk[0])
    if rank == 0:
        told = json.loads(found.read_text())
        found.write_text(json.dumps([told[0] + measurement.rows, told[1] + measurement.targets]))
    md.barrier()
    torch_dist.destroy_process_group()
    md.destroy_process_group()


def measure_large(measurement: Measurement, options: argparse.Namespace) -> None:
    """Saves and loads of large matrices."""
    count = max(2, round(options.mib / LARGE_MIB))
    shape = shape_of(options.mib / count * MIB)
    rows = parts_of(count, shape, "rows")
    if "save" in options.parts:
        measurement.save("save", rows, "rows", shape)
    if "async" in options.parts:
        measurement.save_async("save_async until it returns", rows, shape)
    if {"load", "cold"} & {*options.parts}:
        measurement.keep(rows, "rows", shape)
        del rows
    if "load" in options.parts:
        for layout, text in LAYOUTS.items():
            measurement.load(f"load {text}", parts_of(count, shape, layout), layout, shape)
    if "cold" in options.parts:
        wanted = parts_of(count, shape, "whole")
        measurement.load("cold load replicated", wanted, "whole", shape, is_cold=True)


def measure_small(measurement: Measurement, options: argparse.Namespace) -> None:
    """Saves and loads of many small arrays."""
    shape = shape_of(SMALL_BYTES)
    for layout in ("rows", "whole"):
        parts = parts_of(options.arrays, shape, layout)
        measurement.save(f"small, save of {layout}", parts, layout, shape)
        measurement.keep(parts, layout, shape)
        measurement.load(f"small, load of {layout}", parts, layout, shape)


def main() -> None:
    """Read the command line, measure and report."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--parts", type=some_of(PARTS), default=[*PARTS])
    parser.add_argument("--ranks", type=some_of("124"), default=["2", "4", "1"])
    parser.add_argument("--mib", type=float, default=256.0, help="of all large arrays")
    parser.add_argument("--arrays", type=int, default=2000, help="how many small ones")
    parser.add_argument("--disk", help="a folder on the disk to measure; default: for temporaries")
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.mib, options.arrays = 2, 2.0, 20
    load = f"{os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        found.write_text("[[], []]")
        for num_ranks in map(int, options.ranks):
            start_ranks(measure_ranks, num_ranks, options, found, num_ranks)
        rows, targets = json.loads(found.read_text())
    notes = (
        f"one thread a rank, {options.rounds} interleaved rounds, {options.mib:g} MiB in large "
        f"arrays, {options.arrays} arrays of 2 KiB; "
        f"load average before {load}, at the end {os.getloadavg()[0]:.1f}"
    )
    write_report("checkpoint", rows, notes, options.report, targets=targets)


if __name__ == "__main__":
    main()
