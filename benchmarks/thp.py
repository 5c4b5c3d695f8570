"""Tensors on pages of 2 MiB and of 4 KiB: time and memory of two ranks, ours and torch's.

    python benchmarks/thp.py [REPORT.json] [--rounds 7]

THP_MEM_ALLOC_ENABLE is 1, as meshdist's launcher sets it, or 0. Each round starts two ranks anew
for each library and size of pages, in turn, with one thread each. A time is the slowest rank's per
call or step. Memory is rank 0's after the steps: resident, its peak, what of it lies on huge pages;
"sparse" is what a tensor of 256 MiB takes of which one number in every MiB is written. A row holds
medians over rounds, and the median of the quotients of the same round.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._models import MODELS, step_of
from benchmarks._report import ms_per_step, parser_of, write_report
from meshdist.cli.diagnostics import find_huge_pages

NUM_RANKS = 2
MIB = 1 << 20
LIBRARIES = {"meshdist, shm": ("meshdist", "shm"), "torch, gloo": ("torch.distributed", "gloo")}
PAGES = {"4 KiB": "0", "2 MiB": "1"}

Sample = dict[str, float]


def round_trip_of(library: Any, x: torch.Tensor) -> Callable[[], None]:
    """Return what sends ``x`` from rank 0 to rank 1 and back."""
    first, second = (library.send, library.recv), (library.recv, library.send)
    calls = first if library.get_rank() == 0 else second

    def call() -> None:
        for one in calls:
            one(x, 1 - library.get_rank())

    return call


def under_ddp(library: Any) -> nn.Module:
    """Return the MLP under the library's own DDP."""
    model = MODELS["mlp"].make()
    if library is not md:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    return md.DDP(model, device_mesh=md.init_device_mesh("cpu", (NUM_RANKS,)))


def memory() -> Sample:
    """MiB of this process."""
    text = "".join(Path(f"/proc/self/{name}").read_text() for name in ("status", "smaps_rollup"))
    names = {"VmRSS": "resident", "VmHWM": "peak", "AnonHugePages": "on huge pages"}
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    return {f"{text}, MiB": int(found[name]) / 1024 for name, text in names.items()}


def findings_on(library: Any) -> Sample:
    """Milliseconds of each call, the first ones not counted; the memory of all of them together."""
    steps: dict[str, tuple[int, Callable[[], Any]]] = {}
    for size, calls in ((4, 40), (64, 5)):
        x = torch.ones(size * MIB // 4)
        steps[f"all_reduce {size} MiB, ms"] = calls, lambda x=x: library.all_reduce(x)
        steps[f"round trip {size} MiB, ms"] = calls, round_trip_of(library, x)
    step = step_of(under_ddp(library), MODELS["mlp"].make_input())
    steps["DDP step, MLP, ms"] = 5, step
    taken = {}
    for what, (calls, call) in steps.items():
        ms_per_step(call, 3, library)
        taken[what] = ms_per_step(call, calls, library)
    return {**taken, **memory()}


def sparse_mib() -> float:
    """MiB that become resident with a tensor of 256 MiB of which little is written."""
    before = memory()["resident, MiB"]
    x = torch.empty(256 * MIB, dtype=torch.uint8)
    x[::MIB] = 1
    return memory()["resident, MiB"] - before


def measure(name: str, backend: str) -> Sample:
    """One rank's part."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    library = import_module(name)
    library.init_process_group(backend)
    found = {**findings_on(library), "sparse, MiB": sparse_mib()}
    library.destroy_process_group()
    return found


def sample(library: str, pages: str) -> Sample:
    """What a pair of new ranks finds."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = PAGES[pages]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    first: Sample = md.spawn(measure, LIBRARIES[library], nprocs=NUM_RANKS)[0]
    return first


def main() -> None:
    """Read the command line, measure, and write the report."""
    options = parser_of(__doc__, rounds=7).parse_args()
    sides = [(library, pages) for library in LIBRARIES for pages in PAGES]
    samples: dict[tuple[str, str], list[Sample]] = {side: [] for side in sides}
    for number in range(options.rounds):
        for side in sides if number % 2 else sides[::-1]:
            samples[side].append(sample(*side))
    rows = []
    for library in LIBRARIES:
        small, large = (samples[library, pages] for pages in PAGES)
        for what in small[0]:
            pairs = [(one[what], other[what]) for one, other in zip(small, large, strict=True)]
            medians = [statistics.median(taken) for taken in zip(*pairs, strict=True)]
            quotients = [after / before if before else 1.0 for before, after in pairs]
            rows.append(
                {
                    "what": what,
                    "library": library,
                    **dict(zip(PAGES, medians, strict=True)),
                    "2 MiB / 4 KiB": statistics.median(quotients),
                    "min": min(quotients),
                    "max": max(quotients),
                }
            )
    state = find_huge_pages()
    notes = f"{NUM_RANKS} new ranks a sample, one thread each, {options.rounds} rounds; {state=}"
    write_report("thp", rows, notes, options.report)


if __name__ == "__main__":
    main()
