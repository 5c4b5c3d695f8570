"""Settings of the whole suite: signals, the order of the tests, and what a marker means."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from meshdist.launching.orphan_reaper import end_with_parent

# Each simulated rank is a thread, and with OpenMP's default each has a team of its own that spins:
# three steps of a small model on one rank took 1.4 s of processor time instead of 0.1 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONGEST = {
    "test_any_mesh_loads_what_any_mesh_saved",
    "test_each_takes_few_files",
    "test_every_promise_is_kept",
    "test_launched",
    "test_ranks_of_the_launcher",
    "test_steps_are_those_of_one_device",
    "test_the_ranks_of_kubeflow_s_variables",
    "test_torchrun_starts_again_what_has_lost_a_rank",
    "test_values_and_gradients_are_those_of_one_device",
    "test_backends_that_are_well",
}
"""Tests that take five seconds of a quiet core, or more."""


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C interrupt, and let a worker of pytest-xdist end with the process that started it.

    (A shell that starts tests in the background has Ctrl-C ignored.)
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        end_with_parent(os.getppid())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests over MPI first: one worker takes them all, and starts their jobs once.

    The longest stand half-way, where another worker begins: at the end they would leave it at work
    alone. Tests of every backend over two hosts are soaked: a file of its own samples them.
    """
    for item in items:
        parameters = getattr(item, "callspec", None)
        backend = parameters.params.get("backend") if parameters is not None else None
        if backend == "mpi":
            item.add_marker("mpi")
        elif isinstance(backend, str) and backend.endswith("two hosts"):
            item.add_marker("soak")
    items.sort(key=lambda item: item.get_closest_marker("mpi") is None)
    longest = [item for item in items if getattr(item, "originalname", "") in LONGEST]
    others = [item for item in items if getattr(item, "originalname", "") not in LONGEST]
    run_now = [number for number, item in enumerate(others) if not item.get_closest_marker("soak")]
    half = run_now[len(run_now) // 2] if run_now else 0
    items[:] = others[:half] + longest + others[half:]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what is there before the first test out of every search for cycles.

    Else a test's ``gc.collect()`` looks through all tests, modules and what torch has imported.
    """
    gc.disable()  # all of it is there to stay
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``gpu`` where there is no NVIDIA GPU."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _handlers_of_preempted() -> Iterator[None]:
    """Take the handlers of ``preempted()`` back behind a test, so that SIGTERM ends its process."""
    numbers = signal.SIGTERM, signal.SIGUSR1
    former = {number: signal.getsignal(number) for number in numbers}
    yield
    module = sys.modules.get("meshdist.checkpoint.preemption")
    if module is not None and module._former:
        module._former.clear()
        module._received.clear()
        for number, handler in former.items():
            signal.signal(number, handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say so where tests over two hosts did not run, since the system allows no namespaces."""
    reasons = [report.longrepr[2] for report in terminalreporter.getreports("skipped")]
    rejected = [reason for reason in reasons if "two hosts need namespaces" in reason]
    if rejected:
        text = f"{len(rejected)} tests over two hosts did not run: {rejected[0]}"
        terminalreporter.write_line(text)
