"""The promises of the pages, and what shows on each backend that they are kept: one table.

``python -m tests.promises.table`` writes docs/contributing/conformance.md from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.promises import programs

__all__ = ["COLUMNS", "PAGE", "PROMISES", "Promise", "page"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing" / "conformance.md"

COLUMNS = {
    "shm": "shared memory",
    "gloo": "Gloo",
    "mpi": "MPI",
    "simulated": "simulated",
    "gloo across hosts": "two hosts",
    "namespaces": "namespaces",
    "nccl": "NCCL",
}
"""backend -> the head of its column."""

OF_PROCESSES = tuple(backend for backend in COLUMNS if backend != "nccl")
OWN = "tests/promises/test_promises.py::test_it_is_kept"
OVER_HOSTS = "tests/promises/test_promises.py::test_over_two_hosts"
COLLECTIVES = "../reference/collectives.md"
DIFFERENCES = "../reference/differences_from_torch.md"
CUDA, MPI, SIMULATE = "../how-to/cuda.md", "../how-to/mpi.md", "../how-to/simulate.md"
RULES, REDUCING = f"{COLLECTIVES}#common-rules", f"{COLLECTIVES}#reducing"
BARRIERS, P2P = f"{COLLECTIVES}#barriers", f"{COLLECTIVES}#point-to-point"
OBJECTS, SHARED = f"{COLLECTIVES}#objects", f"{COLLECTIVES}#shared-tensors"
WORK, HANDLERS = f"{COLLECTIVES}#work-and-futures", f"{COLLECTIVES}#signal-handlers"
MISMATCHES = f"{COLLECTIVES}#mismatches-and-unusable-groups"
READ, BETWEEN_HOSTS = "../how-to/debug.md#read-an-error", "../how-to/debug.md#between-hosts"
INITIALIZE = "../how-to/initialize.md"
SHUT_DOWN, STORE = f"{INITIALIZE}#shut-down", f"{INITIALIZE}#the-store"
FORKS = f"{INITIALIZE}#when-to-call-init_process_group"
GPUS = f"{CUDA}#what-has-run-on-a-gpu"
NOT_COMPUTED = f"NCCL's arithmetic [needs GPUs]({GPUS})"
NOT_SEEN = f"not tested: the replacement [has one rank]({GPUS})"
OF_THE_GROUP = (
    f"independent of the backend; not tested, because the replacement [has one rank]({GPUS})"
)


@dataclass(frozen=True)
class Promise:
    """A row.

    Args:
        name: of the program that this folder's tests run for it; else of nothing.
        text: the sentence, which links to the page that makes the promise.
        tests: functions that keep it on the backends of their ``parametrize``.
        others: for a backend, a test that runs only there.
        differs: for a backend, a note on the difference, with a link.
        program: run over each backend that has nothing of that.
        size: its number of ranks.
        judge: whether what the ranks return is right; by default "" from each.
        soak: backends whose program is run by ``make soak`` alone.
    """

    text: str
    tests: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    program: Callable[[], Any] | None = None
    size: int = 3
    judge: Callable[[list[Any]], bool] = lambda found: not any(found)
    soak: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Its name among this folder's tests."""
        return "" if self.program is None else self.program.__name__.replace("_", " ")

    def ways(self, backend: str) -> dict[str, bool]:
        """The tests that keep it on ``backend``, and whether only ``make soak`` runs them."""
        found = {
            test: soaks[backend] for test in self.tests if backend in (soaks := backends_of(test))
        }
        if backend == "namespaces":  # where soak runs what runs on feigned hosts
            found = {f"{OVER_HOSTS}[{test}]": True for test in self.on_feigned_hosts()}
        if backend in self.others:
            found[self.others[backend]] = is_soak(self.others[backend])
        if (
            self.program is not None
            and backend in OF_PROCESSES
            and self.differs_on(backend) is None
        ):
            found[f"{OWN}[{backend}-{self.name}]"] = backend in self.soak
        return found

    def on_feigned_hosts(self) -> list[str]:
        """The tests elsewhere that run on ranks which take themselves to be on two hosts."""
        named = [test for test in self.tests if not is_soak(test)]
        return [test for test in named if "gloo across hosts" in backends_of(test)]

    def differs_on(self, backend: str) -> str | None:
        """What is otherwise there on ``backend``; two hosts differ alike, feigned or not."""
        return self.differs.get("gloo across hosts" if backend == "namespaces" else backend)

    def mark(self, backend: str) -> str:
        """Return whether a test keeps it on ``backend``: "yes", "soak" or ""."""
        ways = self.ways(backend)
        return "" if not ways else "soak" if all(ways.values()) else "yes"


def function_of(test: str) -> Any:
    """The function of a test's id; raises where there is none."""
    path, _, name = test.partition("::")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    return getattr(module, name.partition("[")[0])


def marks_of(test: str) -> list[Any]:
    return list(getattr(function_of(test), "pytestmark", ()))


def is_soak(test: str) -> bool:
    return any(mark.name == "soak" for mark in marks_of(test))


@cache
def backends_of(test: str) -> dict[str, bool]:
    """The backends on which a test runs by its ``parametrize``, and whether in soak alone."""
    found: dict[str, bool] = {}
    for mark in marks_of(test):
        names = mark.args[0] if mark.name == "parametrize" else ""
        words = [one.strip() for one in names.split(",")] if isinstance(names, str) else names
        place = next((k for k, word in enumerate(words) if word in ("backend", "backend")), None)
        if place is None:
            continue
        for value in mark.args[1]:
            marks = {one.name for one in getattr(value, "marks", ())}
            values = getattr(value, "values", value)
            given = values() if callable(values) else values
            row = list(given) if isinstance(given, (tuple, list)) else [given]
            backend, is_only_soak = row[place], is_soak(test) or "soak" in marks
            if "hosts" in words and row[list(words).index("hosts")]:
                backend = "gloo across hosts"
            found[backend] = found.get(backend, True) and is_only_soak
    return found


def everywhere(text: str, *tests: str, nccl: str = NOT_COMPUTED, **more: Any) -> Promise:
    """A promise that tests elsewhere keep on every backend of processes and on simulated ranks."""
    others = {"nccl": nccl} if nccl.startswith("tests/") else {}
    differs = {} if others else {"nccl": nccl}
    others |= more.pop("others", {})
    differs |= more.pop("differs", {})
    return Promise(text, tests, others=others, differs=differs, **more)


BETWEEN = "tests/groups/test_calls_between_hosts.py::test_wrong_numbers_are_an_error_"
DEATHS = "tests/promises/test_deaths.py::"
OPERATIONS, BACKENDS = "tests/operations/test_promises.py::", "tests/backends/c10d/"
NCCL = f"{BACKENDS}test_nccl.py::"
ENQUEUED = f"{BACKENDS}test_stream_backends.py::"

NUMBERS = [
    everywhere(
        f"[Every collective]({RULES}) matches NumPy in every supported dtype and "
        "op; unsupported ones raise on all ranks",
        "tests/operations/test_table.py::test_sample",
        "tests/operations/test_table.py::test_all_cases",
        nccl=f"{NCCL}test_every_collective_of_one_rank",
    ),
    everywhere(
        f"[MIN and MAX]({REDUCING}) of floats return NaN if any rank has NaN",
        f"{OPERATIONS}test_the_smallest_and_largest_are_nan_whichever_member_has_one",
        nccl=f"{BACKENDS}test_communicator.py::test_what_nccl_does_not_reduce_is_asked_for_otherwise",
    ),
    everywhere(
        f"[SUM, AVG, PRODUCT, PREMUL_SUM]({REDUCING}) of 16-bit floats are "
        "computed in float32 and rounded once, without overflow",
        f"{OPERATIONS}test_narrow_floats_are_added_in_float32_and_rounded_once",
        nccl=f"NCCL [rounds at every step]({DIFFERENCES}#collectives), as in torch",
    ),
    everywhere(
        f"[Sums]({REDUCING}) are bitwise equal on all ranks",
        program=programs.sums_are_the_same_bits_on_all_ranks,
    ),
    everywhere(
        f"[Sums]({REDUCING}) are bitwise equal in repeated calls, blocking or async",
        program=programs.sums_are_the_same_bits_in_each_call,
    ),
    everywhere(
        f"[MIN and MAX]({REDUCING}) of floats that are interrupted leave values of some rank",
        f"{OPERATIONS}test_floats_of_a_failed_min_are_floats",
    ),
    everywhere(
        f"[Strided and transposed arrays]({RULES}) work, torch or NumPy; gaps are not modified",
        f"{OPERATIONS}test_every_collective_takes_non_contiguous_arrays",
        nccl=f"{NCCL}test_dense_tensors_are_reduced_as_they_lie",
    ),
    everywhere(
        f"[Layouts]({RULES}) may differ between ranks",
        program=programs.layouts_may_differ,
        nccl=f"[raises in reductions]({CUDA}#layouts-gloo-and-mpi) on one host",
    ),
    everywhere(
        f"[Empty tensors]({RULES}) work in every operation",
        f"{OPERATIONS}test_every_collective_takes_tensors_without_elements",
        nccl=NOT_SEEN,
    ),
    everywhere(
        f"[More than 2^31 elements]({RULES}) work",
        program=programs.large,
        size=2,
        soak=frozenset(OF_PROCESSES),
        nccl=NOT_SEEN,
    ),
    everywhere(
        f"[Input and output]({RULES}) may share memory if torch allows it",
        f"{OPERATIONS}test_what_is_sent_may_lie_where_the_result_comes_to",
    ),
    everywhere(
        f"[Read-only arrays]({RULES}) are never written; sparse tensors raise",
        f"{OPERATIONS}test_read_only_arrays_are_read_and_never_written",
        f"{OPERATIONS}test_sparse_tensors_are_rejected",
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        f"[Inference mode]({RULES}) and its tensors work",
        f"{OPERATIONS}test_every_collective_in_inference_mode",
        f"{OPERATIONS}test_inference_tensors_are_premultiplied_outside_their_mode",
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        f"[shared_empty]({SHARED}) returns memory that every backend accepts",
        program=programs.shared_memory_or_none,
        nccl=f"for CPU tensors [only]({SHARED})",
    ),
]

ORDER = [
    everywhere(
        f"[Async collectives]({WORK}) of one group finish in order, of several groups in any order",
        "tests/operations/test_stress.py::test_eight_of_each_collective_in_flight",
        "tests/operations/test_stress.py::test_collectives_in_flight_over_three_overlapping_groups",
        nccl=f"[one global order]({CUDA}#several-communicators) over several groups",
    ),
    everywhere(
        f"[Works]({WORK}) have results and chainable futures",
        f"{OPERATIONS}test_every_collective_has_a_future_that_chains",
        f"{OPERATIONS}test_rooted_collectives_have_their_tensor_as_result_on_every_rank",
        nccl=f"{ENQUEUED}test_a_future_is_torchs_own_and_complete_at_once",
    ),
    everywhere(
        f"[A dropped Work]({WORK}) logs a warning and its collective continues",
        program=programs.dropped_works_are_told,
        nccl=NOT_SEEN,
    ),
    everywhere(
        f"[A dropped send or receive]({P2P}) continues",
        f"{BACKENDS}test_dropped_messages.py::test_a_receive",
        f"{BACKENDS}test_dropped_messages.py::test_a_send",
        nccl=NOT_SEEN,
    ),
    everywhere(
        f"[A barrier]({BARRIERS}) waits for every earlier collective of its group",
        f"{OPERATIONS}test_a_barrier_is_behind_every_earlier_collective",
        nccl=f"{NCCL}test_a_barrier_of_both_kinds_of_backends_orders_the_device",
    ),
    everywhere(
        f"[monitored_barrier]({BARRIERS}) lists missing ranks; the group stays usable",
        program=programs.monitored_barriers_name,
        differs={
            "simulated": f"[DeadlockError]({SIMULATE}#errors) immediately",
        },
        nccl=f"uses the store, [no backend]({BARRIERS})",
    ),
    everywhere(
        f"[Messages]({P2P}) with one tag arrive in order; tags match sends to receives",
        "tests/operations/test_messages.py::test_tags_match_sends_to_receives",
        "tests/operations/test_messages.py::test_recv_from_any_source_keeps_each_sender_s_order",
        nccl=f"[no tags, no receive from any rank]({P2P})",
    ),
    everywhere(
        f"[isend and irecv]({P2P}) work within one rank; batches have no order",
        "tests/operations/test_messages.py::test_isend_and_irecv_between_all_pairs_and_oneself",
        "tests/operations/test_messages.py::test_batch_of_a_ring",
        nccl=f"{BACKENDS}test_communicator.py::test_a_batch_goes_out_as_one_call_on_nccl",
    ),
    everywhere(
        f"[Objects]({OBJECTS}), arrays and tensors arrive unchanged",
        "tests/operations/test_objects.py::test_all_gather_object",
        "tests/operations/test_objects.py::test_tensors_and_arrays_are_objects_too",
        nccl=NOT_SEEN,
    ),
    everywhere(
        f"[An object that cannot be pickled]({OBJECTS}) raises on all ranks; the "
        "group stays usable",
        program=programs.objects_that_cannot_be_pickled,
        nccl=OF_THE_GROUP,
    ),
]

FAULTS = [
    everywhere(
        f"[Mismatched calls]({MISMATCHES}) raise on all ranks and make the group "
        "unusable; no data moves over shared memory and simulated ranks",
        "tests/operations/test_checks.py::test_members_that_call_different_things_all_raise",
        program=programs.mismatches_move_nothing,
        differs={
            "gloo across hosts": (
                f"[detected later]({BETWEEN_HOSTS}), after at most 256 calls; at level "
                "DETAIL before data moves"
            ),
            "nccl": f"between hosts [at level DETAIL only]({BETWEEN_HOSTS})",
        },
        others={
            "gloo across hosts": f"{BETWEEN}of_all_ranks_by_the_next_round",
            "namespaces": f"{BETWEEN}on_two_networks",
        },
        nccl=f"{NCCL}test_members_that_disagree",
    ),
    everywhere(
        f"[A message of the wrong size]({P2P}) raises on the receiver, if the "
        "receive names its sender",
        "tests/operations/test_checks.py::test_a_receiver_notices_a_message_of_another_size",
        differs={
            "gloo across hosts": f"the receive waits [until its timeout]({MISMATCHES})",
        },
        nccl=NOT_SEEN,
    ),
    everywhere(
        f"[Invalid arguments]({MISMATCHES}) send nothing; the group stays usable",
        program=programs.arguments_that_are_rejected_break_nothing,
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        f"[A rank outside a group]({RULES}) gets NotInGroupError",
        program=programs.outsiders_are_rejected,
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        f"[A destroyed group]({MISMATCHES}) raises in every call",
        program=programs.closed_groups_reject,
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        f"[A missing call]({READ}) times out; the error lists the rank and its last call",
        program=programs.timeouts_name,
        judge=programs.is_told_of_a_timeout,
        others={"simulated": "tests/worlds/test_simulation.py::test_deadlock_of_collectives"},
        differs={"simulated": f"[DeadlockError]({SIMULATE}#errors) immediately"},
        nccl=f"{NCCL}test_who_is_late_is_named",
    ),
    Promise(
        f"[A dead rank]({READ}) is detected and listed by waiting ranks",
        others={
            "shm": "tests/join/test_uneven_loops.py::test_a_killed_rank_frees_the_others",
            "gloo": "tests/groups/test_failures.py::test_a_killed_rank_frees_the_others",
            "gloo across hosts": f"{DEATHS}test_a_rank_that_dies_on_two_hosts",
            "namespaces": f"{DEATHS}test_a_rank_that_dies_on_two_hosts",
        },
        differs={
            "mpi": f"mpiexec [ends all ranks]({MPI}#failures), which print the dead rank",
            "simulated": f"[one process]({SIMULATE}#errors): the first exception ends all ranks",
            "nccl": NOT_SEEN,
        },
    ),
    everywhere(
        f"[A rank that left its group]({STORE}) is listed; no rank waits for it",
        program=programs.left_ranks_are_named,
        judge=programs.is_named_as_left,
        others={
            "simulated": "tests/worlds/test_simulation.py::"
            "test_a_forgotten_call_is_told_with_how_many_each_has_made",
        },
        differs={"simulated": f"[DeadlockError]({SIMULATE}#errors) immediately"},
        nccl=NOT_SEEN,
    ),
    everywhere(
        f"[An abort]({MISMATCHES}) ends all waits, with its reason and rank",
        program=programs.abort_frees_all,
        nccl=f"{NCCL}test_an_abort_raises_in_waits_and_barriers",
    ),
    everywhere(
        f"[An unusable group]({MISMATCHES}) raises in every call; a new group works",
        program=programs.new_groups_follow_broken_ones,
        nccl=f"{NCCL}test_a_collective_that_nobody_waits_for_is_raised_by_the_next",
    ),
    everywhere(
        f"[A collective in a signal handler]({HANDLERS}) inside a collective raises immediately",
        "tests/collectives/test_nested_collectives.py::test_a_handler_is_rejected_every_collective",
        differs={"simulated": f"handlers run [outside all ranks]({SIMULATE}#limits)"},
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        f"[A signal handler's exception]({HANDLERS}) in a collective makes the "
        "group unusable on all ranks, with the reason; nothing is written later",
        "tests/groups/test_failures.py::"
        "test_a_collective_that_a_handler_leaves_breaks_its_group_on_every_backend",
        differs={"simulated": f"handlers run [outside all ranks]({SIMULATE}#limits)"},
        nccl=f"the call returns [while kernels run]({CUDA}#when-results-are-available)",
    ),
    Promise(
        f"[A signal handler's exception]({HANDLERS}) in a receive: no later message is taken",
        ("tests/collectives/test_nested_collectives.py::test_a_receive_that_a_handler_leaves",),
        differs={
            "mpi": f"the receive [stays posted]({DIFFERENCES}#work-failures-and-nccl)",
            "simulated": f"handlers run [outside all ranks]({SIMULATE}#limits)",
            "nccl": f"the call returns [while kernels run]({CUDA}#when-results-are-available)",
        },
    ),
    everywhere(
        f"[A forked child]({FORKS}) cannot call collectives; its parent can",
        program=programs.forked_children_are_rejected,
        differs={
            "simulated": f"ranks are threads [of one process]({SIMULATE}#separate-and-shared-state)"
        },
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        f"[Groups and meshes]({SHUT_DOWN}) can be created and closed any number of times",
        program=programs.worlds_come_again,
        nccl=f"{ENQUEUED}test_it_is_shut_down_once",
    ),
]

PROMISES: dict[str, list[Promise]] = {
    "Numbers": NUMBERS,
    "Order and messages": ORDER,
    "Failures": FAULTS,
}

HEAD = """# Conformance

This page lists what meshdist guarantees on each backend. Ranks are processes of one host, except
simulated ranks.

* *yes*: the test suite checks it on this backend.
* *soak*: only `make soak` checks it.
* *n1*, *n2*, ...: a [note](#notes) describes a difference.
* *two hosts*: ranks of one host that act as two hosts over Gloo (`MESHDIST_HOST_ID`).
* *namespaces*: ranks in separate network namespaces without shared memory, over Gloo.
* *NCCL*: a replacement for torch's NCCL class, without a GPU.

`tests/promises/table.py` lists the tests of each row. `python -m tests.promises.table` writes this
page.
"""


def page() -> str:
    """Return the page."""
    return "".join(lines())


def lines() -> Iterator[str]:
    """Yield the page's parts."""
    yield HEAD
    numbers: dict[str, int] = {}  # note -> its number, in the order of the page
    for title, promises in PROMISES.items():
        yield f"\n## {title}\n\n| guarantee | {' | '.join(COLUMNS.values())} |\n"
        yield f"|{'---|' * (len(COLUMNS) + 1)}\n"
        for promise in promises:
            cells = []
            for backend in COLUMNS:
                cell, note = promise.mark(backend), promise.differs_on(backend)
                if note:
                    cell = f"{cell} n{numbers.setdefault(note, len(numbers) + 1)}".strip()
                cells.append(cell)
            yield f"| {promise.text} | {' | '.join(cells)} |\n"
    yield "\n## Notes\n\n"
    yield from (f"* **n{number}**: {note}\n" for note, number in numbers.items())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
