"""torch's own suite of process-group tests on our backends and on Gloo; a report of how it went.

    python tests/conformance/run.py [--backends shm,gloo] [--only test_all_reduce] [REPORT.json]

The suite decides by a backend's name which of its tests run; here it takes ours for Gloo and for
MPI, so that what it keeps for these runs too. Each test has its own processes, four of them, and a
time limit. Exits with 1 where a test fails that Gloo passes, unless it is torch's front end that
rejects the call to everyone but Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.inner import (
    capabilities as capabilities,  # all backends register themselves
    find_backend,
    machine,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NUM_RANKS = 4
LIMIT_S = 120
MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
LATE = "test_barrier_timeout"
"""These would wait for half an hour: torch does not tell MPI the timeout that they name."""
REFUSED = "is only implemented for GLOO backend"
"""In the errors that torch's front end raises before any backend is asked."""

Outcomes = dict[str, dict[str, Any]]


class Runner:
    """Runs the suite on one backend, and begins again after a test that ended its process.

    Args:
        backend: its name.
        folder: where the tests leave files for each other.
    """

    def __init__(self, backend: str, folder: str) -> None:
        self.backend = backend
        for name in ("barrier", "test_dir", "init_dir"):
            Path(folder, name).mkdir()
        self.log = ROOT / "build" / f"conformance-{backend}.log"
        self.log.parent.mkdir(exist_ok=True)
        self.log.write_text("")
        self.environment = {
            **os.environ,
            "BACKEND": backend,
            "WORLD_SIZE": str(NUM_RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TEMP_DIR": folder,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT_S),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            # Open MPI, as root and on fewer cores than ranks.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        self.suite = [sys.executable, str(HERE / "torch_suite.py")]
        # For each test one line, or under mpiexec one from each rank.
        self.num_lines = NUM_RANKS if backend == "mpi" else 1

    def names(self) -> list[str]:
        """The names of all tests."""
        command = [*self.suite, "--names"]
        return subprocess.check_output(
            command, env=self.environment, text=True, stderr=subprocess.DEVNULL
        ).split()

    def run(self, names: list[str]) -> Outcomes:
        """How each test ended, by its name."""
        found: Outcomes = {}
        while len(found) < len(names):
            self._run_some(names[len(found) :], found)
        print(file=sys.stderr)
        return found

    def _run_some(self, names: list[str], found: Outcomes) -> None:
        """Run these in order, until one ends the process or says nothing: it has failed then."""
        launcher = [MPIEXEC, "-n", str(NUM_RANKS)] if self.num_lines > 1 else []
        command = [*launcher, *self.suite, *names]
        with (
            self.log.open("a") as told,
            subprocess.Popen(
                command, env=self.environment, stdout=subprocess.PIPE, stderr=told
            ) as suite,
        ):
            assert suite.stdout is not None
            told_lines = lines(suite.stdout.fileno())
            ends_of: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for name, ends in ends_of.items():
                while len(ends) < self.num_lines:  # some ranks may be ahead of others
                    line = next(told_lines, None)
                    if line is None:
                        break
                    ends_of[line.pop("test")].append(line)
                ended_early = len(ends) < self.num_lines
                if ended_early and not any(end["outcome"] == "failed" for end in ends):
                    reason = f"the process ended, or said nothing for {LIMIT_S} s"
                    ends.append({"outcome": "failed", "reason": reason, "seconds": float(LIMIT_S)})
                found[name] = max(ends, key=lambda end: _FROM_BEST.index(end["outcome"]))
                print(f"\r{self.backend}: {len(found)} tests", end="", file=sys.stderr, flush=True)
                if ended_early or (launcher and found[name]["outcome"] == "failed"):
                    break
            suite.terminate()


_FROM_BEST = ("passed", "skipped", "failed")


def lines(descriptor: int) -> Iterator[dict[str, Any]]:
    """What is told there, line by line, until it ends or nothing comes for too long."""
    rest = b""
    while select.select([descriptor], [], [], LIMIT_S)[0]:
        more = os.read(descriptor, 1 << 16)
        if not more:
            return
        *whole, rest = (rest + more).split(b"\n")
        yield from map(json.loads, whole)


def verdict(test: str, outcome: dict[str, Any], gloo: Outcomes) -> str:
    """One word for how a test ended on a backend of ours."""
    if outcome["outcome"] != "failed":
        return str(outcome["outcome"])
    if REFUSED in outcome["reason"]:
        return "rejected by torch's front end"
    is_ours = gloo.get(test, {}).get("outcome", "passed") == "passed"
    return "failed" if is_ours else "failed on gloo too"


def summary(backend: str, outcomes: Outcomes, gloo: Outcomes) -> dict[str, Any]:
    """Counts, and by reason what did not pass."""
    ends = {test: verdict(test, outcome, gloo) for test, outcome in outcomes.items()}
    skipped = [outcomes[test]["reason"] for test, end in ends.items() if end == "skipped"]
    rest = set(ends.values()) - {"passed", "skipped"}
    return {
        "backend": backend,
        "counts": dict(Counter(ends.values()).most_common()),
        **{end: _by_reason(ends, end, outcomes) for end in sorted(rest)},
        "skipped, by torch's reason": dict(Counter(skipped).most_common()),
        "passed": [test for test, end in ends.items() if end == "passed"],
        "seconds": round(sum(outcome["seconds"] for outcome in outcomes.values())),
    }


def _by_reason(ends: dict[str, str], end: str, outcomes: Outcomes) -> dict[str, str]:
    return {test: _error_in(outcomes[test]["reason"]) for test in ends if ends[test] == end}


def _error_in(reason: str) -> str:
    """The line of a traceback that tells the error."""
    lines = [line for line in reason.splitlines() if line and not line.startswith(" ")]
    told: Iterable[str] = (line for line in lines if "Error" in line.partition(":")[0])
    return next(told, reason[:200])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", nargs="?", type=Path, default=HERE / "report.json")
    parser.add_argument("--backends", default=",".join(offered()), help="compared with Gloo, if in")
    parser.add_argument("--only", default="test_", help="what names of tests begin with")
    options = parser.parse_args()
    found = {}
    for backend in options.backends.split(","):
        with tempfile.TemporaryDirectory() as folder:
            runner = Runner(backend, folder)
            names = [name for name in runner.names() if name.startswith(options.only)]
            if backend == "mpi":
                names = [name for name in names if not name.startswith(LATE)]
            found[backend] = runner.run(names)
    gloo = found.get("gloo", {})
    report = {
        "suite": "torch.testing._internal.distributed.distributed_test",
        "machine": machine(),
        "ranks": NUM_RANKS,
        "backends": [summary(name, outcomes, gloo) for name, outcomes in found.items()],
    }
    options.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for one in report["backends"]:
        print(one["backend"], *(f"{count} {end}" for end, count in one["counts"].items()), sep="; ")
    print(f"written: {options.report}")
    return int(any("failed" in one["counts"] for one in report["backends"]))


def offered() -> list[str]:
    """Ours that work on this machine, and Gloo."""
    backends = [find_backend(name) for name in ("shm", "mpi", "simulated")]
    return [
        backend.name for backend in backends if backend is not None and backend.is_available()
    ] + ["gloo"]


if __name__ == "__main__":
    sys.exit(main())
