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
    "gloo across hosts": "two hosts, feigned",
    "namespaces": "two hosts (network namespaces)",
    "nccl": "NCCL, stand-in",
}
"""backend -> the head of its column."""

OF_PROCESSES = tuple(backend for backend in COLUMNS if backend != "nccl")
OWN = "tests/promises/test_promises.py::test_it_is_kept"
OVER_HOSTS = "tests/promises/test_promises.py::test_over_two_hosts"
NOT_COMPUTED = "what NCCL computes [shows on GPUs alone](cuda.md#what-has-run-where)"
NOT_SEEN = "not tried: the stand-in has one rank ([what has run](cuda.md#what-has-run-where))"
OF_THE_GROUP = "above every backend; the stand-in [has one rank](cuda.md#what-has-run-where)"


@dataclass(frozen=True)
class Promise:
    """A row.

    Args:
        name: of the program that this folder's tests run for it; else of nothing.
        text: the sentence, which links to the page that makes the promise.
        tests: functions that keep it on the backends of their ``parametrize``.
        others: for a backend, a function that keeps it there alone.
        differs: for a backend, what is otherwise there, with a link.
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

    def cell(self, backend: str) -> str:
        """What stands in the column of ``backend``."""
        ways = self.ways(backend)
        if differs := self.differs_on(backend):
            return f"differs{', tested' if ways else ''}: {differs}"
        return "" if not ways else "tested in `make soak`" if all(ways.values()) else "tested"


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
        "[Every collective](collectives.md#what-all-verbs-have-in-common) holds what NumPy "
        "computes, in "
        "every dtype and "
        "op that is served; what is rejected is rejected on all ranks",
        "tests/operations/test_table.py::test_sample",
        "tests/operations/test_table.py::test_all_cases",
        nccl=f"{NCCL}test_every_collective_of_one_rank",
    ),
    everywhere(
        "[MIN and MAX](collectives.md#reducing) of floats are NaN where any rank has one",
        f"{OPERATIONS}test_the_smallest_and_largest_are_nan_whichever_member_has_one",
        nccl=f"{BACKENDS}test_communicator.py::test_what_nccl_does_not_reduce_is_asked_for_otherwise",
    ),
    everywhere(
        "[SUM, AVG, PRODUCT and PREMUL_SUM](collectives.md#reducing) of 16-bit floats are made in "
        "float32 and "
        "rounded once; none overflows on the way",
        f"{OPERATIONS}test_narrow_floats_are_added_in_float32_and_rounded_once",
        nccl="NCCL [rounds at every step](differences.md#meaning), as in torch",
    ),
    everywhere(
        "[Sums](collectives.md#reducing) are the same bits on all ranks",
        program=programs.sums_are_the_same_bits_on_all_ranks,
    ),
    everywhere(
        "[Sums](collectives.md#reducing) are the same bits in each call on the same numbers, "
        "waited for "
        "or not",
        program=programs.sums_are_the_same_bits_in_each_call,
    ),
    everywhere(
        "[MIN and MAX](collectives.md#reducing) that are given up leave floats that are numbers "
        "of the "
        "ranks",
        f"{OPERATIONS}test_floats_of_a_failed_min_are_floats",
    ),
    everywhere(
        "[Arrays](collectives.md#what-all-verbs-have-in-common) may be strided or transposed, "
        "torch's "
        "or NumPy's; "
        "what lies between is not touched",
        f"{OPERATIONS}test_every_collective_takes_non_contiguous_arrays",
        nccl=f"{NCCL}test_dense_tensors_are_reduced_as_they_lie",
    ),
    everywhere(
        "[Layouts](collectives.md#what-all-verbs-have-in-common) may differ between ranks, and "
        "change "
        "no result",
        program=programs.layouts_may_differ,
        nccl="[rejected in reductions](cuda.md#layouts-and-other-wires) on one host",
    ),
    everywhere(
        "[Tensors without elements](collectives.md#what-all-verbs-have-in-common) are served by "
        "every "
        "operation",
        f"{OPERATIONS}test_every_collective_takes_tensors_without_elements",
        nccl=NOT_SEEN,
    ),
    everywhere(
        "[More than 2^31 elements](collectives.md#what-all-verbs-have-in-common) are served",
        program=programs.large,
        size=2,
        soak=frozenset(OF_PROCESSES),
        nccl=NOT_SEEN,
    ),
    everywhere(
        "[Input and output](collectives.md#what-all-verbs-have-in-common) may be one memory where "
        "torch allows it",
        f"{OPERATIONS}test_what_is_sent_may_lie_where_the_result_comes_to",
    ),
    everywhere(
        "[Read-only arrays](collectives.md#what-all-verbs-have-in-common) are read and never "
        "written; "
        "sparse "
        "tensors are rejected",
        f"{OPERATIONS}test_read_only_arrays_are_read_and_never_written",
        f"{OPERATIONS}test_sparse_tensors_are_rejected",
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        "[Collectives](collectives.md#what-all-verbs-have-in-common) serve inference mode and "
        "its tensors",
        f"{OPERATIONS}test_every_collective_in_inference_mode",
        f"{OPERATIONS}test_inference_tensors_are_premultiplied_outside_their_mode",
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        "[shared_empty](collectives.md#memory-that-a-group-shares) gives memory that every "
        "backend takes",
        program=programs.shared_memory_or_none,
        nccl="of CPU tensors [alone](collectives.md#memory-that-a-group-shares)",
    ),
]

ORDER = [
    everywhere(
        "[Async collectives](collectives.md#async) of one group end as they were started, of "
        "several in any "
        "order",
        "tests/operations/test_stress.py::test_eight_of_each_collective_in_flight",
        "tests/operations/test_stress.py::test_collectives_in_flight_over_three_overlapping_groups",
        nccl="[one global order](cuda.md#several-communicators) over several groups",
    ),
    everywhere(
        "[Works](collectives.md#async) have a result, and futures that chain",
        f"{OPERATIONS}test_every_collective_has_a_future_that_chains",
        f"{OPERATIONS}test_rooted_collectives_have_their_tensor_as_result_on_every_rank",
        nccl=f"{ENQUEUED}test_a_future_is_torchs_own_and_complete_at_once",
    ),
    everywhere(
        "[A dropped Work](collectives.md#async) is warned of, and its collective goes on",
        program=programs.dropped_works_are_told,
        nccl=NOT_SEEN,
    ),
    everywhere(
        "[A dropped message](collectives.md#point-to-point) goes on",
        f"{BACKENDS}test_dropped_messages.py::test_a_receive",
        f"{BACKENDS}test_dropped_messages.py::test_a_send",
        nccl=NOT_SEEN,
    ),
    everywhere(
        "[A barrier](collectives.md#waiting-for-each-other) ends behind every earlier "
        "collective of its group",
        f"{OPERATIONS}test_a_barrier_is_behind_every_earlier_collective",
        nccl=f"{NCCL}test_a_barrier_of_both_kinds_of_backends_orders_the_device",
    ),
    everywhere(
        "[monitored_barrier](collectives.md#waiting-for-each-other) names the absent, and "
        "breaks nothing",
        program=programs.monitored_barriers_name,
        differs={
            "simulated": "[a DeadlockError](simulation.md#errors) at once, with the same words",
        },
        nccl="by the store: [no backend takes part](collectives.md#waiting-for-each-other)",
    ),
    everywhere(
        "[Messages](collectives.md#point-to-point) of one tag arrive in order; tags match sends to "
        "receives",
        "tests/operations/test_messages.py::test_tags_match_sends_to_receives",
        "tests/operations/test_messages.py::test_recv_from_any_source_keeps_each_sender_s_order",
        nccl="[no tags, and no receive from any](collectives.md#point-to-point)",
    ),
    everywhere(
        "[isend and irecv](collectives.md#point-to-point) serve a rank and itself; a batch has "
        "no order",
        "tests/operations/test_messages.py::test_isend_and_irecv_between_all_pairs_and_oneself",
        "tests/operations/test_messages.py::test_batch_of_a_ring",
        nccl=f"{BACKENDS}test_communicator.py::test_a_batch_goes_out_as_one_call_on_nccl",
    ),
    everywhere(
        "[Objects](collectives.md#objects) arrive as they were, arrays and tensors among them",
        "tests/operations/test_objects.py::test_all_gather_object",
        "tests/operations/test_objects.py::test_tensors_and_arrays_are_objects_too",
        nccl=NOT_SEEN,
    ),
    everywhere(
        "[An object that cannot be pickled](collectives.md#when-ranks-disagree) is one error on "
        "all "
        "ranks; the "
        "group stays whole",
        program=programs.objects_that_cannot_be_pickled,
        nccl=OF_THE_GROUP,
    ),
]

FAULTS = [
    everywhere(
        "[Calls that differ](collectives.md#when-ranks-disagree) are one error on all ranks, "
        "and the "
        "group is broken; the rank that sees it has sent no data; over shared memory and on "
        "simulated ranks no data move",
        "tests/operations/test_checks.py::test_members_that_call_different_things_all_raise",
        program=programs.mismatches_move_nothing,
        differs={
            "gloo across hosts": "between hosts [by the next round](debugging.md#between-hosts), "
            "at most 256 calls later; at level DETAIL before data move",
            "nccl": "between hosts [at level DETAIL alone](debugging.md#between-hosts)",
        },
        others={
            "gloo across hosts": f"{BETWEEN}of_all_ranks_by_the_next_round",
            "namespaces": f"{BETWEEN}on_two_networks",
        },
        nccl=f"{NCCL}test_members_that_disagree",
    ),
    everywhere(
        "[A message that does not fit](collectives.md#point-to-point) raises where it arrives, "
        "if the "
        "receive names its sender",
        "tests/operations/test_checks.py::test_a_receiver_notices_a_message_of_another_size",
        differs={
            "gloo across hosts": "[left where it is](collectives.md#when-ranks-disagree) until the "
            "timeout",
        },
        nccl=NOT_SEEN,
    ),
    everywhere(
        "[A rejection](collectives.md#when-ranks-disagree) of an argument sends nothing and "
        "breaks nothing",
        program=programs.arguments_that_are_rejected_break_nothing,
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        "[A rank outside of a group](collectives.md#what-all-verbs-have-in-common) gets "
        "NotInGroupError",
        program=programs.outsiders_are_rejected,
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        "[A destroyed group](collectives.md#when-ranks-disagree) rejects every call",
        program=programs.closed_groups_reject,
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        "[A call that a rank does not make](debugging.md#how-to-read-a-report) ends by its "
        "timeout, and "
        "names the rank and its last call",
        program=programs.timeouts_name,
        judge=programs.is_told_of_a_timeout,
        others={"simulated": "tests/worlds/test_simulation.py::test_deadlock_of_collectives"},
        differs={"simulated": "[a DeadlockError](simulation.md#errors) at once, which names it"},
        nccl=f"{NCCL}test_who_is_late_is_named",
    ),
    Promise(
        "[A rank that dies](debugging.md#how-to-read-a-report) is noticed, and named, by those "
        "that wait",
        others={
            "shm": "tests/join/test_uneven_loops.py::test_a_killed_rank_frees_the_others",
            "gloo": "tests/groups/test_failures.py::test_a_killed_rank_frees_the_others",
            "gloo across hosts": f"{DEATHS}test_a_rank_that_dies_on_two_hosts",
            "namespaces": f"{DEATHS}test_a_rank_that_dies_on_two_hosts",
        },
        differs={
            "mpi": "mpiexec [ends all ranks](mpi.md#when-a-rank-fails), which say who died",
            "simulated": "[one process](simulation.md#errors): the first exception ends all ranks",
            "nccl": NOT_SEEN,
        },
    ),
    everywhere(
        "[A rank that has left its group](worlds.md#the-store-and-the-rank-that-serves-it) is "
        "not waited "
        "for, and is named",
        program=programs.left_ranks_are_named,
        judge=programs.is_named_as_left,
        others={
            "simulated": "tests/worlds/test_simulation.py::"
            "test_a_forgotten_call_is_told_with_how_many_each_has_made",
        },
        differs={"simulated": "[a DeadlockError](simulation.md#errors) at once, which names it"},
        nccl=NOT_SEEN,
    ),
    everywhere(
        "[An abort](collectives.md#when-ranks-disagree) frees all that wait, with the reason "
        "and who "
        "gave it",
        program=programs.abort_frees_all,
        nccl=f"{NCCL}test_an_abort_raises_in_waits_and_barriers",
    ),
    everywhere(
        "[A broken group](collectives.md#when-ranks-disagree) rejects every call; a new one is "
        "whole",
        program=programs.new_groups_follow_broken_ones,
        nccl=f"{NCCL}test_a_collective_that_nobody_waits_for_is_raised_by_the_next",
    ),
    everywhere(
        "[A collective in a signal's handler](collectives.md#signal-handlers) inside a "
        "collective is rejected at once",
        "tests/collectives/test_nested_collectives.py::test_a_handler_is_rejected_every_collective",
        differs={"simulated": "handlers run [outside of all ranks](simulation.md#limits)"},
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        "[A collective that a handler's exception leaves](collectives.md#signal-handlers) "
        "breaks its "
        "group for "
        "all, with the reason; nothing is written behind it",
        "tests/groups/test_failures.py::"
        "test_a_collective_that_a_handler_leaves_breaks_its_group_on_every_backend",
        differs={"simulated": "handlers run [outside of all ranks](simulation.md#limits)"},
        nccl="the program [goes on while kernels run](cuda.md#what-a-verbs-return-means)",
    ),
    Promise(
        "[A receive that a handler's exception leaves](collectives.md#signal-handlers) takes no "
        "later "
        "message",
        ("tests/collectives/test_nested_collectives.py::test_a_receive_that_a_handler_leaves",),
        differs={
            "mpi": "it stays, [and may still be written](differences.md#meaning)",
            "simulated": "handlers run [outside of all ranks](simulation.md#limits)",
            "nccl": "the program [goes on while kernels run](cuda.md#what-a-verbs-return-means)",
        },
    ),
    everywhere(
        "[A forked child](worlds.md#what-is-refused) is rejected every collective; its parent "
        "goes on",
        program=programs.forked_children_are_rejected,
        differs={"simulated": "ranks are threads [of one process](simulation.md#limits)"},
        nccl=OF_THE_GROUP,
    ),
    everywhere(
        "[Groups and meshes](worlds.md#one-world-after-another) are made and closed any number "
        "of times",
        program=programs.worlds_come_again,
        nccl=f"{ENQUEUED}test_it_is_shut_down_once",
    ),
]

PROMISES: dict[str, list[Promise]] = {
    "Numbers": NUMBERS,
    "Order, works, messages": ORDER,
    "When something goes wrong": FAULTS,
}

HEAD = """# What holds on which backend

Each promise of the pages on [collectives](collectives.md), [debugging](debugging.md) and
[worlds](worlds.md), and what shows on each backend that it is kept. *tested*: the suite runs it
over that backend on each change; *tested in `make soak`*: the long run does. *differs* says what is
otherwise there. Ranks are processes of one host. *Two hosts, feigned* are ranks of one host that
take themselves to be on two (`MESHDIST_HOST_ID`); *network namespaces* have networks of their own,
and no memory in common, where the system allows them. Both talk by Gloo. *NCCL, stand-in* is a
class that does what torch's does, without a GPU; [what has run on
GPUs](cuda.md#what-has-run-where).

Written by `python -m tests.promises.table`; the tests of each row stand at the end.
"""


def page() -> str:
    """The page, whole."""
    return "".join(lines())


def lines() -> Iterator[str]:
    yield HEAD
    number = 0
    notes = []
    for title, promises in PROMISES.items():
        yield f"\n## {title}\n\n| | promise | {' | '.join(COLUMNS.values())} |\n"
        yield f"|{' --- |' * (len(COLUMNS) + 2)}\n"
        for promise in promises:
            number += 1
            cells = [promise.cell(backend) for backend in COLUMNS]
            yield f"| {number} | {promise.text} | {' | '.join(cells)} |\n"
            ways = dict.fromkeys(way for backend in COLUMNS for way in promise.ways(backend))
            notes.append(f"| {number} | {', '.join(f'`{name}`' for name in folded(ways))} |\n")
    yield "\n## The tests\n\n| promise | tests |\n| --- | --- |\n"
    yield from notes


def folded(ways: Mapping[str, Any]) -> list[str]:
    """Ids without the backend in brackets, each once."""
    return list(dict.fromkeys(way.partition("[")[0] + _program_of(way) for way in ways))


def _program_of(way: str) -> str:
    _, _, inside = way.partition("[")
    return f"[...-{inside.partition('-')[2]}" if inside else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
