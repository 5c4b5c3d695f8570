"""Torch's own suite of process-group tests, which its wheel carries, on one backend.

Run by ``run.py``, with BACKEND and WORLD_SIZE set and the names of tests as arguments; no test
of ours by itself. Writes a line of JSON for each test: name, outcome, reason and seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.common_distributed import TEST_SKIPS, DistTestCases
from torch.testing._internal.common_utils import TestCase, set_rng_seed

import meshdist as md
import meshdist.torch_backends
import meshdist.torch_process_groups.construction

OURS = ("shm", "mpi", "simulated")
SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
for feature in ("ddp", "subgroup", "plugin"):  # "gpu" and "cuda" ask for one GPU per rank
    DistTestCases.backend_feature[feature].update(OURS)


class Name(str):
    """A backend's name that the suite takes for Gloo's and MPI's too.

    It compares names to decide which backend a test is for; of those that are meant for either by
    name, torch's own code still rejects some.
    """

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", "mpi") or str.__eq__(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # where the suite looks into a set of names
        return hash("gloo")


BACKEND = os.environ["BACKEND"]
UNDER_MPIEXEC = BACKEND == "mpi"
if BACKEND in OURS:
    BACKEND = Name(BACKEND)
with mock.patch.object(os, "environ", {**os.environ, "BACKEND": BACKEND}):
    from torch.testing._internal.distributed.distributed_test import (
        DistributedTest,
        TestDistBackend,
    )
# What is meant for MPI or for eight ranks runs on four as well, and asks this alone.
os.environ["BACKEND"] = "mpi"


class OnProcesses(TestDistBackend, DistributedTest._DistTestBase):
    """Every test of the suite, each on processes of its own."""

    def setUp(self) -> None:
        super().setUp()
        # Forked, since a new interpreter that imports torch would take longer than most tests.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class UnderMpiexec(TestCase, DistributedTest._DistTestBase):
    """Every test of the suite, one after the other in the ranks that mpiexec has started."""

    init_method = None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("mpi")

    def tearDown(self) -> None:
        dist.barrier()  # nobody leaves while others still look at the group
        dist.destroy_process_group()
        super().tearDown()

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()


PROFILED = "a process has one profiler, and each rank begins its own here"
LIMITS = {
    "test_get_rank": "it tells ranks apart by their process ids",
    "test_barrier_timeout_full_group": "a rank that stays away is a deadlock, told at once",
    "test_barrier_timeout_group": "a rank that stays away is a deadlock, told at once",
    "test_isend_autograd_profiler": PROFILED,
    "test_isend_torch_profiler": PROFILED,
    "test_send_recv_any_source_autograd_profiler": PROFILED,
    "test_send_recv_any_source_torch_profiler": PROFILED,
    "test_send_recv_autograd_profiler": PROFILED,
    "test_send_recv_torch_profiler": PROFILED,
    "test_send_recv_with_tag_autograd_profiler": PROFILED,
    "test_send_recv_with_tag_torch_profiler": PROFILED,
}
"""What simulated ranks, by their page, do otherwise."""


class OnSimulatedRanks(TestCase, DistributedTest._DistTestBase):
    """Every test of the suite, on simulated ranks inside this process."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def _callTestMethod(self, method: Any) -> None:  # unittest's
        name = method.__name__
        if name in LIMITS:
            self.skipTest(LIMITS[name])
        md.simulate(self._run_rank, int(os.environ["WORLD_SIZE"]), args=(name,))

    @classmethod
    def _run_rank(cls, name: str) -> None:
        set_rng_seed()  # as in the suite's processes
        dist.init_process_group(BACKEND, init_method="simulated://")
        getattr(cls(name), name)()
        dist.barrier()
        dist.destroy_process_group()

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()  # the suite's own waits for files

    def call_dist_op(
        self,
        title: str,
        is_async: bool,
        op: Any,
        *args: Any,
        expect_event: bool = True,
        secondary_op_call: Any = None,
        profile_cuda: bool = False,
        tensor_shapes: Any = None,
        **kwargs: Any,
    ) -> None:
        """Run a collective without the suite's profiler, of which a process has one for all
        ranks."""
        works = [op(*args, **kwargs), *([secondary_op_call()] if secondary_op_call else [])]
        for work in works if is_async else ():
            work.wait()


class Lines(unittest.TestResult):
    """Tells each test's end as it comes."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.started = time.monotonic()

    def _tell(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        name = test.id().rpartition(".")[2]
        seconds = round(time.monotonic() - self.started, 1)
        line = {"test": name, "outcome": outcome, "reason": reason, "seconds": seconds}
        os.write(REPORT, (json.dumps(line) + "\n").encode())  # at once, so that lines stay whole

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._tell(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._tell(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        if err[0] is SystemExit and err[1].code in SKIPS:  # how a rank skips a test
            self.addSkip(test, SKIPS[err[1].code])
            return
        self._tell(test, "failed", f"{err[0].__name__}: {err[1]}")
        if UNDER_MPIEXEC:
            os._exit(1)  # the ranks are out of step: all of them end, and begin again

    addError = addFailure


if __name__ == "__main__":
    REPORT = os.dup(1)
    os.dup2(2, 1)  # what the tests print is no part of the report
    suites = {"mpi": UnderMpiexec, "simulated": OnSimulatedRanks}
    suite = suites.get(str(BACKEND), OnProcesses)
    known = unittest.TestLoader().getTestCaseNames(suite)
    if sys.argv[1:] == ["--names"]:
        os.write(REPORT, "\n".join(known).encode())
        sys.exit()
    for name in sys.argv[1:]:
        suite(name).run(Lines())
