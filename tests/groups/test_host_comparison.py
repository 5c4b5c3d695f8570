"""Calls on groups that span hosts, which are compared beside them."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

import meshdist as md
from meshdist.groups.host_comparison import NUM_DIGESTS, HostComparison, HostComparisons
from tests.inner import Grace, MembersDisagree, get_world
from tests.pool import Failure, Pool, places
from tests.two_hosts import TwoHosts

LONG = timedelta(seconds=30)
WIRES = ["gloo", "hierarchical"]

CALLS = {
    "sum": "all_reduce((4,) float32, SUM)",
    "max": "all_reduce((4,) float32, MAX)",
    "int32": "all_reduce((4,) int32, SUM)",
    "float64": "all_reduce((2,) float64, SUM)",
    "size": "all_reduce((6,) float32, SUM)",
    "barrier": "barrier()",
    "broadcast": "broadcast((4,) float32, root rank 0)",
    "other root": "broadcast((4,) float32, root rank 1)",
    "reduce": "reduce((4,) float32, SUM, root rank 0)",
    "all_gather": "all_gather_single((4,) float32)",
    "reduce_scatter": "reduce_scatter_single(",
    "all_to_all": "all_to_all_single(",
    "gather": "gather((4,) float32, root rank 0)",
    "scatter": "scatter((4,) float32, root rank 0)",
    "async": "all_reduce((4,) float32, MIN)",
    "list": "all_reduce_coalesced([(4,) float32], SUM)",
}
"""Calls by name, as messages show them."""

OBJECT_CALLS = {
    "objects": "all_gather_object((2,) int64)",
    "objects at one": "gather_object((2,) int64, root rank 0)",
    "objects from one": "broadcast_object_list((2,) int64, root rank 0)",
    "objects to each": "scatter_object_list((2,) int64, root rank 0)",
    "nothing": "all_gather_single((4,) float32)",
    "nothing from one": "broadcast((4,) float32, root rank 0)",
}
"""Verbs on objects, on two ranks, and calls of tensors whose bytes they take for numbers."""

OF_OTHER_BYTES = {"float64", "size", "sum", "max", "int32", "async", "list"}
"""All-reduces, of which two may send messages of different sizes: Gloo ends a process for that."""


def make(name: str, group: Any) -> None:
    """Make the call of this name."""
    size, is_first = group.size(), group.rank() == 0
    x, many = torch.ones(4), torch.ones(4 * size)
    each = [torch.ones(4) for _ in range(size)] if is_first else None
    calls: dict[str, Callable[[], Any]] = {
        "sum": lambda: md.all_reduce(x, group=group),
        "max": lambda: md.all_reduce(x, md.ReduceOp.MAX, group),
        "int32": lambda: md.all_reduce(x.int(), group=group),
        "float64": lambda: md.all_reduce(torch.ones(2).double(), group=group),
        "size": lambda: md.all_reduce(torch.ones(6), group=group),
        "barrier": lambda: md.barrier(group),
        "broadcast": lambda: md.broadcast(x, 0, group),
        "other root": lambda: md.broadcast(x, 1, group),
        "reduce": lambda: md.reduce(x, 0, group=group),
        "all_gather": lambda: md.all_gather_single(many, x, group=group),
        "reduce_scatter": lambda: md.reduce_scatter_single(x, many, group=group),
        "all_to_all": lambda: md.all_to_all_single(many.clone(), many, group=group),
        "gather": lambda: md.gather(x, each, 0, group),
        "scatter": lambda: md.scatter(x, each, 0, group),
        "async": lambda: md.all_reduce(x, md.ReduceOp.MIN, group, async_op=True).wait(),
        "list": lambda: md.all_reduce_coalesced([x], group=group),
        "objects": lambda: md.all_gather_object([None] * size, "a", group),
        "objects at one": lambda: md.gather_object("a", each, 0, group),
        "objects from one": lambda: md.broadcast_object_list(["a"], 0, group),
        "objects to each": lambda: md.scatter_object_list([None], ["a"] * size, 0, group),
        "nothing": lambda: md.all_gather_single(0 * many, 0 * x, group=group),
        "nothing from one": lambda: md.broadcast(0 * x, 0, group),
    }
    calls[name]()


def met(pairs: list[tuple[str, str]], hosts: str, num_after: int) -> list[tuple[str, str]]:
    """Of each pair, one call on host A and the other elsewhere: how the program learns of it."""
    found = []
    for pair in pairs:
        group = md.new_group(timeout=LONG)
        make("sum", group)
        try:
            make(pair[hosts[md.get_rank()] != "A"], group)
            for _ in range(num_after):
                make("sum", group)
            md.destroy_process_group(group)
            found.append(("silence", ""))
        except md.MeshdistError as error:
            found.append((type(error).__name__, str(error)))
    return found


def common(text: str) -> str:
    """An error's text without the line that tells where this rank has raised it."""
    return "\n".join(line for line in text.splitlines() if "raised on rank" not in line)


def check_named(told: list[tuple[str, str]], pair: tuple[str, str]) -> None:
    """All ranks have raised one error, which shows both calls and their places."""
    assert {kind for kind, _ in told} == {"AgreementError"}, (pair, told)
    texts = {common(text) for _, text in told}
    assert len(texts) == 1, (pair, texts)
    text = texts.pop()
    assert text.startswith("the members of a group disagree about their call 2\n"), (pair, text)
    for name in pair:
        assert f": {(CALLS | OBJECT_CALLS)[name]}" in text, (pair, text)
    assert text.count("test_host_comparison.py:") == 2, (pair, text)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("hosts", "num_after"),
    [("AABB", 0), ("AAABB", 600), ("AB", 3), ("ABC", 600)],  # the last: two explain, and ask
    ids=["2x2", "3+2", "alone", "three hosts"],
)
def test_what_would_give_wrong_numbers_is_named(
    pool: Pool, wire: str, hosts: str, num_after: int
) -> None:
    """As a group is destroyed, or before it has made another thousand calls."""
    pairs = [("sum", "max"), ("sum", "int32")]
    found = pool.run(met, len(hosts), pairs, hosts, num_after, backend=wire, hosts=hosts)
    for told, pair in zip(zip(*found, strict=True), pairs, strict=True):
        check_named(list(told), pair)


@pytest.mark.parametrize("wire", WIRES)
def test_what_would_hang_is_named_long_before_the_timeout(pool: Pool, wire: str) -> None:
    pairs = [("broadcast", "other root"), ("sum", "barrier")]
    found = pool.run(met, 3, pairs, "AAB", 2, backend=wire, hosts="AAB", timeout_s=25.0)
    for told, pair in zip(zip(*found, strict=True), pairs, strict=True):
        check_named(list(told), pair)


@pytest.mark.parametrize("wire", WIRES)
def test_objects_that_meet_tensors_are_named_on_all_ranks(pool: Pool, wire: str) -> None:
    """The verb on objects sees that what came is none; the other rank's call is done."""
    tensors = ["all_gather", "nothing", "all_gather", "nothing from one"]
    pairs = list(zip(tensors, OBJECT_CALLS, strict=False))
    found = pool.run(met, 2, pairs, "AB", 3, backend=wire, hosts="AB")
    for told, pair in zip(zip(*found, strict=True), pairs, strict=True):
        check_named(list(told), pair)


@pytest.mark.soak
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("hosts", ["AABB", "AAABB", "ABBAB", "AB", "ABC"])
def test_all_pairs_of_calls_are_named(pool: Pool, wire: str, hosts: str) -> None:
    for pair in itertools.combinations(CALLS, 2):
        size = len(hosts)
        told = pool.outcomes(met, size, [pair], hosts, 20, backend=wire, hosts=hosts)
        alive = [one[0] for one in told if not isinstance(one, Failure)]
        assert not any(kind == "silence" for kind, _ in alive), (pair, alive)
        if len(alive) == size:
            check_named(alive, pair)
        else:  # torch's Gloo has ended a process
            assert set(pair) <= OF_OTHER_BYTES, (pair, told)


def test_the_text(pool: Pool) -> None:
    hosts, pair = "AABB", ("sum", "max")
    found = pool.run(met, 4, [pair], hosts, 1, hosts=hosts)
    lines = found[1][0][1].splitlines()
    assert lines[0] == "the members of a group disagree about their call 2"
    head, _, tail = lines[1].partition("; ")
    assert head == "  where:    group of ranks 0-3, ranks 0-3"
    assert tail in {f"rank {k} saw it at call 3; results since may be wrong" for k in (0, 2)}
    assert (
        "raised on rank 1, call 3 on group of ranks 0-3: all_reduce((4,) float32, SUM)" in lines[2]
    )
    assert lines[4].startswith(f"  found:    ranks 0-1: {CALLS['sum']} at ")
    assert lines[5].startswith(f"            ranks 2-3: {CALLS['max']} at ")
    assert lines[6].endswith("on fitting tensors; the group is broken now")


def test_axes_across_hosts_are_compared_and_those_inside_work_on(pool: Pool) -> None:
    def program() -> tuple[str, float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
        x = torch.ones(2)
        md.all_reduce(x, group=mesh["inside"])
        op = md.ReduceOp.SUM if md.get_rank() != 2 else md.ReduceOp.MAX
        md.all_reduce(torch.ones(2), op, mesh["across"])
        text = ""
        try:
            mesh["across"].get_group().close()
        except md.AgreementError as error:
            text = str(error)
        md.all_reduce(x, group=mesh["inside"])
        md.barrier()
        return text, x[0].item()

    for rank, (text, total) in enumerate(pool.run(program, 4, backend=None, hosts="AABB")):
        assert total == 4.0
        assert bool(text) == (rank % 2 == 0)
        if text:
            assert "about their call 1\n  where:    axis 'across'" in text
            assert "rank 0: all_reduce((2,) float32, SUM) at" in text
            assert "rank 2: all_reduce((2,) float32, MAX) at" in text


def equal_calls_in_unequal_times() -> None:
    """Calls that are alike, though members are far ahead of each other, or join, or send."""
    rank, size = md.get_rank(), md.get_world_size()
    groups = [md.new_group() for _ in range(2)]
    x = torch.ones(2)
    for number in range(700):  # the root may be far ahead
        md.broadcast(x, 0, groups[0])
        if number % 100 == 0:
            md.barrier(groups[1])
    works = [md.all_reduce(torch.ones(3), group=group, async_op=True) for group in groups * 20]
    for work in reversed(works):
        work.wait()
    for _ in range(2):
        if rank == 0:
            md.send(x, size - 1)
        if rank == size - 1:
            md.recv(x, 0)
        md.all_gather_object([None] * size, {"rank": rank}, groups[1])
    sizes = [rank + peer for peer in range(size)]
    md.all_to_all_single(torch.empty(sum(sizes)), torch.ones(sum(sizes)), sizes, sizes)
    model = md.DistributedDataParallel(torch.nn.Linear(2, 1))
    with md.Join([model]):
        for _ in range(2 + rank):
            model(torch.ones(1, 2)).sum().backward()
    md.destroy_process_group(groups[0])
    for _ in range(300):
        md.all_reduce(x)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("hosts", ["AAB", "AB"])
def test_equal_calls_raise_no_alarm(pool: Pool, wire: str, hosts: str) -> None:
    pool.run(equal_calls_in_unequal_times, len(hosts), backend=wire, hosts=hosts)


@pytest.mark.parametrize("wire", WIRES)
def test_no_thread_is_there_for_it(two_hosts: TwoHosts, wire: str) -> None:
    def program() -> set[str]:
        before = {thread.name for thread in threading.enumerate()}
        group = md.new_group()
        for _ in range(300):
            md.all_reduce(torch.ones(2), group=group)
        label, store = group.open_channel("cpu").opened.label, get_world().store
        store.wait([f"{label}/calls"], LONG)  # its first member has looked
        md.barrier(group)
        return {thread.name for thread in threading.enumerate()} - before

    for names in two_hosts.run(program, 4, backend=wire):
        assert names <= {"meshdist-signals"}


SHORT_PROGRAM = """
import torch, meshdist as md
md.init_process_group("gloo")
x = torch.ones(2)
md.all_reduce(x, md.ReduceOp.MAX if md.get_rank() else md.ReduceOp.SUM)
"""


def test_a_program_that_ends_without_a_word_is_told(pool: Pool) -> None:
    """By the traceback of the call at the interpreter's end."""
    environments = [
        {**place, "MESHDIST_HOST_ID": host, "GLOO_SOCKET_IFNAME": "lo"}
        for place, host in zip(places(2), "AB", strict=True)
    ]
    for ended in pool.start(SHORT_PROGRAM, environments, has_teardown=False):
        assert "AgreementError: the members of a group disagree about their call 1" in ended.stderr
        assert "rank 0: all_reduce((2,) float32, SUM) at " in ended.stderr
        assert "rank 1: all_reduce((2,) float32, MAX) at " in ended.stderr


# -- one comparison, without processes ------------------------------------------------------------


class Counting(HashStore):
    """A store that notes the requests to it."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    def set(self, key: str, value: Any) -> None:
        self.requests.append("set")
        super().set(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.requests.append("compare_set")
        return super().compare_set(key, expected, desired)


@pytest.fixture
def store() -> Counting:
    return Counting()


@pytest.fixture
def pair(store: Counting) -> list[HostComparison]:
    """The comparisons of the leaders of two hosts."""
    return [
        HostComparison(
            SimpleNamespace(rank=rank, hosts=(0, 1), store=store),  # type: ignore[arg-type]
            "label",
            (0, 1),
            True,
            lambda: None,
        )
        for rank in range(2)
    ]


def enter(one: HostComparison, first: int, last: int, fingerprint: int = 7) -> None:
    for number in range(first, last + 1):
        one.enter(number, fingerprint)


def test_a_look_makes_one_request_and_none_without_calls(
    pair: list[HostComparison], store: Counting
) -> None:
    for one in pair:
        one.look()
    assert store.requests == []
    for last in (1, 300):
        for one in pair:
            enter(one, one.last + 1, last)
            one.look()
            one.look()
    assert store.requests == ["set", "compare_set"] * 2
    assert [one.wake_at for one in pair] == [512, 512]


def test_what_is_written_is_bounded(pair: list[HostComparison], store: Counting) -> None:
    enter(pair[0], 1, 5000)
    pair[0].look()
    assert len(json.loads(store.get("label/calls"))) <= NUM_DIGESTS
    assert len(store.get("label/calls")) < 10_000


def test_it_is_found_at_its_number(pair: list[HostComparison]) -> None:
    for one, fingerprint in zip(pair, (8, 9), strict=True):
        enter(one, 1, 41)
        enter(one, 42, 42, fingerprint)
        enter(one, 43, 60)
    pair[0].look()
    with pytest.raises(MembersDisagree) as caught:
        pair[1].look()
    assert caught.value.number == 42 and caught.value.late == (42, 60)


def test_a_member_that_is_behind_compares_when_it_has_come(
    pair: list[HostComparison], store: Counting
) -> None:
    enter(pair[0], 1, 2000)
    pair[0].look()
    enter(pair[1], 1, 10)
    for _ in range(3):
        pair[1].look()
    assert store.requests == ["set", "compare_set"]
    enter(pair[1], 11, 1799)
    enter(pair[1], 1800, 1800, 9)
    with pytest.raises(MembersDisagree) as caught:
        pair[1].look()
    assert caught.value.number == 1800


def test_a_member_that_is_ahead_compares_when_the_other_has_come(
    pair: list[HostComparison],
) -> None:
    enter(pair[1], 1, 500)
    pair[1].look()
    enter(pair[0], 1, 20)
    enter(pair[0], 21, 21, 9)
    pair[0].look()
    with pytest.raises(MembersDisagree) as caught:
        pair[1].look()
    assert caught.value.number == 21


def test_of_calls_that_are_kept_no_more_a_range_is_told(pair: list[HostComparison]) -> None:
    for one, fingerprint in zip(pair, (8, 9), strict=True):
        enter(one, 1, 1, fingerprint)
        enter(one, 2, 3000)
    pair[0].look()
    with pytest.raises(MembersDisagree) as caught:
        pair[1].look()
    assert caught.value.late == (1, 3000) and 1 < caught.value.number < 3000


def test_who_leaves_first_is_compared_with(pair: list[HostComparison]) -> None:
    for one in pair:
        enter(one, 1, 5)
    enter(pair[0], 6, 6)
    enter(pair[1], 6, 6, 9)
    enter(pair[1], 7, 7)
    pair[1].compare_last()
    with pytest.raises(MembersDisagree) as caught:
        pair[0].compare_last()
    assert caught.value.number == 6


def test_members_that_leave_alike_send_their_last_digest_alone(
    pair: list[HostComparison], store: Counting
) -> None:
    for one in pair:
        enter(one, 1, 900)
        one.compare_last()
    assert store.requests == ["compare_set", "set", "compare_set"]
    assert len(store.get("label/last")) < 50


@pytest.mark.parametrize("num_more", [0, 3, -3])
def test_where_the_list_does_not_come_a_range_is_told(
    pair: list[HostComparison], store: Counting, num_more: int
) -> None:
    enter(pair[0], 1, 5)
    enter(pair[0], 6, 10, 9)
    pair[0].compare_last()
    store.delete_key("label/last/list")
    enter(pair[1], 1, 10 + num_more)
    if num_more < 0:  # nothing tells what the other had at call 7
        pair[1].compare_last()
        return
    with pytest.raises(MembersDisagree) as caught:
        pair[1].compare_last()
    assert caught.value.number == 10 and caught.value.late == (1, 10 + num_more)


def test_calls_wait_once_a_difference_is_found(pair: list[HostComparison]) -> None:
    enter(pair[0], 1, 1)
    enter(pair[1], 1, 1, 9)
    pair[0].look()
    with pytest.raises(MembersDisagree):
        pair[1].look()
    pair[1].is_explained.set()
    pair[1].enter(2, 7)  # it would wait otherwise
    assert pair[1].wake_at == sys.maxsize


def test_what_the_first_member_has_only_written_it_still_compares(
    pair: list[HostComparison],
) -> None:
    for one, fingerprint in zip(pair, (8, 9), strict=True):
        enter(one, 1, 1)
        enter(one, 2, 2, fingerprint)
        enter(one, 3, 600)
    pair[0].look()
    pair[1].compare_last()
    with pytest.raises(MembersDisagree) as caught:
        pair[0].compare_last()
    assert caught.value.number == 2 and caught.value.late == (2, 600)


# -- the comparisons of one rank -------------------------------------------------------------------


@pytest.fixture
def looking(store: Counting) -> list[tuple[HostComparisons, HostComparison, list[str]]]:
    """Of two ranks on two hosts: their comparisons, that of one communicator, and their wakes."""
    made = []
    for rank in range(2):
        world = SimpleNamespace(
            rank=rank, size=2, hosts=(0, 1), store=store, has_processes=True, spans_hosts=bool
        )
        wakes: list[str] = []
        comparisons = HostComparisons(world, partial(wakes.append, "woken"))  # type: ignore[arg-type]
        one = comparisons.make("label", (0, 1), True)
        assert one is not None
        made.append((comparisons, one, wakes))
    return made


def test_between_looks_lies_an_interval_or_are_256_calls(looking: Any, store: Counting) -> None:
    (comparisons, one, wakes), _ = looking
    enter(one, 1, 1)
    comparisons.look([one])
    assert store.requests == ["set"]
    enter(one, 2, 255)
    comparisons.look([one])
    assert store.requests == ["set"] and wakes == []
    enter(one, 256, 300)
    assert wakes == ["woken"]
    comparisons.look([one])
    assert store.requests == ["set", "set"]
    comparisons._next = Grace(0.0)
    enter(one, 301, 301)
    comparisons.look([one])
    assert store.requests == ["set", "set", "set"] and wakes == ["woken"]


@pytest.mark.parametrize(("size", "most"), [(2, 40), (800, 40), (16384, 1)])
def test_fast_calls_of_large_worlds_do_not_flood_the_store(
    store: Counting, size: int, most: int
) -> None:
    world = SimpleNamespace(
        rank=0, size=size, hosts=range(size), store=store, has_processes=True, spans_hosts=bool
    )
    wakes: list[str] = []
    comparisons = HostComparisons(world, partial(wakes.append, "woken"))  # type: ignore[arg-type]
    one = comparisons.make("label", tuple(range(size)), False)
    assert one is not None
    comparisons.look([one])  # both intervals begin
    for number in range(40):
        enter(one, one.last + 1, 256 * (number + 1))
        comparisons.look([one])
    assert most - 1 <= len(store.requests) <= most and len(wakes) <= most
    comparisons._next_woken = Grace(0.0)
    comparisons.look([one])
    assert one.wake_at == 256 * 41  # it has looked, and will wake again


def test_a_look_does_not_wait_until_a_difference_is_explained(looking: Any) -> None:
    """Explaining asks the other ranks, of which one may ask this one."""
    (first, one, _), (second, other, _) = looking
    asked, answered = threading.Event(), threading.Event()

    def explain(failure: MembersDisagree, note: None) -> None:
        assert failure.number == 1
        asked.set()
        assert answered.wait(20)

    other.explain = explain
    enter(one, 1, 1)
    enter(other, 1, 1, 9)
    first.look([one])
    second.look([other])
    assert asked.wait(20)
    second._next = Grace(0.0)
    second.look([other])
    assert not other.is_explained.is_set()
    answered.set()
    second.stop()
    assert other.is_explained.is_set()


def test_junk_and_a_lost_store_do_not_end_the_thread_that_looks(
    looking: Any, store: Counting
) -> None:
    _, (comparisons, one, _) = looking
    for junk in ("[]", "{}", "7", "x", '["a"]', '[1, "z"]', "[1e400, null]"):
        store.set("label/calls", junk)
        enter(one, one.last + 1, one.last + 1)
        comparisons._next = Grace(0.0)
        comparisons.look([one])
    assert not one.differs
    one.world.store = None
    enter(one, one.last + 1, one.last + 300)
    comparisons.look([one])


@pytest.mark.parametrize("junk", ["[]", "[5]", "{}", "7", "x", '[5, "z", 0]'])
def test_junk_among_last_digests_spoils_no_leaving(junk: str, pool: Pool) -> None:
    def program(junk: str) -> float:
        group = md.new_group()
        x = torch.ones(1)
        md.all_reduce(x, group=group)
        (channel,) = group.channels
        label = channel.opened.label
        get_world().store.set(f"{label}/last", junk)
        md.barrier()
        group.close()
        return x.item()

    assert pool.run(program, 2, junk, backend="gloo", hosts="AB") == [2.0, 2.0]


def test_calls_that_a_lost_store_leaves_uncompared_are_told(pool: Pool) -> None:
    def program() -> str:
        group = md.new_group()
        for _ in range(3):
            md.all_reduce(torch.ones(1), group=group)
        md.barrier()

        def lose(*_: object) -> bytes:
            raise md.StoreError("the store is lost")

        if md.get_rank() == 0:
            group.close()
            return ""
        with (
            mock.patch.object(type(get_world().store), "compare_set", lose),
            pytest.raises(md.BackendError) as caught,
        ):
            group.close()
        return str(caught.value)

    of_first, of_second = pool.run(program, 2, backend="gloo", hosts="AB")
    assert of_first == ""
    assert of_second.startswith("calls are not known to equal those of other hosts")
    assert "calls 1 to 3 of ranks 0-1: the store is lost" in of_second
