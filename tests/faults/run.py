"""Faults at random points of random programs on real backends, and ranks that leave after any call.

    python -m tests.faults.run --backend shm --faults 1000 --exits 300 --seed 1 --report shm.md
    python -m tests.faults.run "shm fault 1 17"

The second line runs one case again, and shows all of it; there may be several. Ranks are forked
from this process, which has imported torch.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import select
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.cases import EXIT, FAULT, HOSTS, LOOP, Case, case_of
from tests.faults.hosts import Becoming, run_case
from tests.faults.outcomes import Finding, Outcome, judge
from tests.faults.reports import Result, Tally

BACKENDS = ("shm", "gloo", "mpi", HOSTS)


@dataclass
class Runner:
    """Runs cases, some at a time, each in a process of its own."""

    slots: int
    running: dict[int, tuple[Case, int, float, bytearray]] = field(default_factory=dict)

    def run(self, cases: Iterator[Case]) -> Iterator[Result]:
        """The results, as they come."""
        case = next(cases, None)
        while case is not None or self.running:
            while case is not None and len(self.running) < self.slots:
                self._start(case)
                case = next(cases, None)
            ready, _, _ = select.select(list(self.running), [], [], 1.0)
            for inlet in ready:
                data = os.read(inlet, 1 << 20)
                if data:
                    self.running[inlet][3].extend(data)
                else:
                    yield self._end(inlet)

    def _start(self, case: Case) -> None:
        inlet, outlet = os.pipe()
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            for other in (inlet, *self.running):
                os.close(other)
            run_case(case, me, outlet)
        os.close(outlet)
        self.running[inlet] = (case, pid, time.monotonic(), bytearray())

    def _end(self, inlet: int) -> Result:
        case, pid, begin, data = self.running.pop(inlet)
        os.close(inlet)
        os.waitpid(pid, 0)
        seconds = time.monotonic() - begin
        if not data:
            return Result(case, None, [Finding("harness", None, "it has failed")], seconds)
        outcome = Outcome.from_json(json.loads(data))
        return Result(case, outcome, judge(case, outcome), seconds)


def prepare(backends: Iterable[str]) -> None:
    """Import all that a rank needs, once."""
    import torch

    import meshdist as md
    from tests.inner import load_mpi

    for name in (
        "init_process_group",
        "DDP",
        "uneven",
        "send_object_list",
        "shared_empty",
        "new_group",
    ):
        getattr(md, name)
    if "mpi" in backends:
        load_mpi()
    torch.set_num_threads(1)  # as OMP_NUM_THREADS=1, which launchers set
    gc.freeze()


def show(result: Result, *, in_full: bool) -> None:
    """Print what was found in a case."""
    print(result.case)
    for finding in result.findings:
        print(f"  !! {finding.kind}, rank {finding.rank}: {finding.text}")
    if in_full and result.outcome is not None:
        show_notes(result.outcome)
    print(f"  {result.seconds:.1f} s", flush=True)


def show_notes(outcome: Outcome) -> None:
    """Print what every rank has noted and written; times are counted from the fault."""
    notes = sorted(itertools.chain(*outcome.notes.values()), key=lambda note: note["at"])
    for note in notes:
        more = {name: x for name, x in note.items() if name in ("step", "kind", "text")}
        at = note["at"] - (outcome.fault_at or notes[0]["at"])
        print(f"  {at:8.3f} s rank {note['rank']} {note['what']} {more or ''}")
    for rank, (at, exit_code) in sorted(outcome.ends.items()):
        at -= outcome.fault_at or notes[0]["at"]
        print(f"  {at:8.3f} s rank {rank} has ended with {exit_code}")
    for name, text in outcome.said.items():
        print(f"  -- {name} wrote:\n{text}" if text else f"  -- {name} wrote nothing")


def drawn(given: argparse.Namespace, tally: Tally) -> Iterator[Case]:
    """Cases, until as many have struck as are asked for."""
    if given.names:
        yield from map(case_of, given.names)
        return
    for kind, number in ((FAULT, given.faults), (LOOP, given.loops), (EXIT, given.exits)):
        for place in itertools.count(given.first):
            if tally.count(kind) >= number or (given.match and place > 10 * number):
                break
            case = case_of(f"{given.backend} {kind} {given.seed} {place}")
            if given.match in str(case):
                yield case


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="the cases to run, alone")
    parser.add_argument("--backend", choices=BACKENDS, default="shm")
    parser.add_argument("--faults", type=int, default=0, help="how many")
    parser.add_argument("--loops", type=int, default=0, help="how many in join contexts and DDP")
    parser.add_argument("--exits", type=int, default=0, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--match", default="", help="only cases whose text has this")
    parser.add_argument("--slots", type=int, default=2, help="how many cases run at a time")
    parser.add_argument("--report", type=Path, help="where the report goes")
    given = parser.parse_args()
    prepare([name.split()[0] for name in given.names] or [given.backend])
    tally, begin = Tally(), time.monotonic()
    for result in Runner(given.slots).run(drawn(given, tally)):
        tally.add(result)
        if result.findings or given.names:
            show(result, in_full=len(given.names) == 1)
    tally.seconds = time.monotonic() - begin
    print(tally.summary())
    if given.report:
        command = f"python -m tests.faults.run {shlex.join(sys.argv[1:])}"
        given.report.write_text(tally.report(given.backend, command))
    return 1 if tally.broken else 0


if __name__ == "__main__":
    try:
        code = main()
    except Becoming as becoming:
        program = becoming.run
    else:
        sys.exit(code)
    program()
