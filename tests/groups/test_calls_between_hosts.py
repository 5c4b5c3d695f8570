"""Calls on groups that span hosts: compared by rounds at calls 1, 2, 4, 8, ... 256, 512, 768."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
import meshdist.distributed as dist
from tests.pool import Failure, Pool, places
from tests.two_hosts import TwoHosts

LONG = timedelta(seconds=30)
FURTHER = ["ABA", "AAB", "ABABA"]
HOSTS = ["AB", "ABABA", *(pytest.param(hosts, marks=pytest.mark.soak) for hosts in ("ABA", "AAB"))]

CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "sum": (
        "all_reduce((4,) float32, SUM)",
        lambda group: md.all_reduce(torch.ones(4), group=group),
    ),
    "max": (
        "all_reduce((4,) float32, MAX)",
        lambda group: md.all_reduce(torch.ones(4), md.ReduceOp.MAX, group),
    ),
    "int32": (
        "all_reduce((4,) int32, SUM)",
        lambda group: md.all_reduce(torch.ones(4).int(), group=group),
    ),
    "async": (
        "all_reduce((4,) float32, MIN)",
        lambda group: md.all_reduce(torch.ones(4), md.ReduceOp.MIN, group, async_op=True).wait(),
    ),
    "barrier": ("barrier()", lambda group: md.barrier(group)),
    "broadcast": (
        "broadcast((4,) float32, root rank 0)",
        lambda group: md.broadcast(torch.ones(4), 0, group),
    ),
    "other root": (
        "broadcast((4,) float32, root rank 1)",
        lambda group: md.broadcast(torch.ones(4), 1, group),
    ),
    "tensors": (
        "all_gather_single((4,) float32)",
        lambda group: md.all_gather_single(torch.ones(4 * group.size()), torch.ones(4), group),
    ),
    "objects": (
        "all_gather_object((2,) int64)",
        lambda group: md.all_gather_object([None] * group.size(), "a", group),
    ),
}
"""By name: a call as messages show it, and what makes it."""


def next_round(number: int) -> int:
    """The call before which call ``number`` is compared."""
    return 1 << (number - 1).bit_length() if number <= 256 else -(-number // 256) * 256


def differ_at(
    numbers: list[int],
    pair: tuple[str, str],
    host: str,
    usual: str = "sum",
    timeout: timedelta = LONG,
) -> list[tuple[int, str, str]]:
    """For each number, on a new group: the call that raised, and what it raised.

    Args:
        pair: the calls with this number, the second on the ranks of host B.
        host: of this rank, in the order of ranks.
        usual: all other calls.
    """
    found = []
    for number in numbers:
        group = md.new_group(timeout=timeout)
        try:
            for made in range(1, 1025):
                name = pair[host[md.get_rank()] == "B"] if made == number else usual
                CALLS[name][1](group)
        except md.MeshdistError as error:
            found.append((made, type(error).__name__, str(error)))
        with pytest.raises(md.MeshdistError):
            md.barrier(group)
    return found


def common(text: str) -> str:
    """An error's text without the line that names this rank."""
    return "\n".join(line for line in text.splitlines() if "raised on rank" not in line)


@pytest.mark.parametrize("usual", ["sum", "async"])
@pytest.mark.parametrize(
    "hosts", ["AB", *(pytest.param(n, marks=pytest.mark.soak) for n in FURTHER)]
)
def test_wrong_numbers_are_an_error_of_all_ranks_by_the_next_round(
    pool: Pool, hosts: str, usual: str
) -> None:
    check_wrong_numbers(pool, hosts, usual)


@pytest.mark.soak
@pytest.mark.parametrize("hosts", HOSTS)
def test_wrong_numbers_are_an_error_on_two_networks(two_hosts: TwoHosts, hosts: str) -> None:
    check_wrong_numbers(two_hosts, hosts, "sum")


def check_wrong_numbers(pool: Pool, hosts: str, usual: str) -> None:
    numbers = [1, 2, 3, 5, 100, 257]
    for other in ("max", "int32"):
        pair = (usual, other)
        found = pool.run(
            differ_at, len(hosts), numbers, pair, hosts, usual, backend="gloo", hosts=hosts
        )
        for number, *told in zip(numbers, *found, strict=True):
            found_at = [made for made, _, _ in told]
            if usual == "sum":
                assert {*found_at} == {next_round(number)}, (number, told)
            else:  # its round is finished by the next one
                assert max(found_at) <= next_round(next_round(number) + 1), (number, told)
            check_named([(kind, text) for _, kind, text in told], number, pair)


def check_named(told: list[tuple[str, str]], number: int, pair: tuple[str, str]) -> None:
    """All ranks have raised one error, which shows both calls."""
    assert {kind for kind, _ in told} == {"MismatchError"}, told
    texts = {common(text) for _, text in told}
    assert len(texts) == 1, texts
    text = texts.pop()
    summary = f"collective mismatch: ranks made different calls as call {number}\n"
    assert text.startswith(summary), text
    for name in pair:
        assert f": {CALLS[name][0]} at " in text, text


def test_the_text(pool: Pool) -> None:
    found = pool.run(differ_at, 4, [3], ("sum", "max"), "AABB", hosts="AABB")
    lines = found[1][0][2].splitlines()
    assert lines[0] == "collective mismatch: ranks made different calls as call 3"
    head, _, tail = lines[1].partition("; ")
    assert head == "  where:    group of ranks 0-3, ranks 0-3"
    told = "detected it at call 4; results since then may be wrong"
    assert tail in {f"rank {k} {told}" for k in range(4)}
    assert lines[2].strip().startswith("raised on rank 1, call 4 on group of ranks 0-3: all_reduce")
    assert (
        lines[3]
        == "  expected: the same collective, dtype, number of elements, op and root on every rank"
    )
    assert lines[4].startswith("  found:    ranks 0-1: all_reduce((4,) float32, SUM) at ")
    assert lines[5].startswith("            ranks 2-3: all_reduce((4,) float32, MAX) at ")
    assert lines[6].startswith("  fix:      ")


@pytest.mark.parametrize("pair", [("broadcast", "other root"), ("sum", "barrier")])
def test_what_hangs_is_named_before_a_round(pool: Pool, pair: tuple[str, str]) -> None:
    told = pool.run(differ_at, 3, [4], pair, "AAB", backend="gloo", hosts="AAB")
    check_named([(kind, text) for [(_, kind, text)] in told], 4, pair)


@pytest.mark.parametrize("pair", [("broadcast", "other root"), ("sum", "barrier")])
@pytest.mark.parametrize("hosts", ["AB", pytest.param("AAB", marks=pytest.mark.soak)])
def test_what_hangs_between_rounds_is_named_at_the_timeout(
    pool: Pool, hosts: str, pair: tuple[str, str]
) -> None:
    more = [3], pair, hosts, "sum", timedelta(seconds=4)
    found = pool.run(differ_at, len(hosts), *more, backend="gloo", hosts=hosts)
    errors = [text for [(_, _, text)] in found]
    late = [text for text in errors if "timed out after 4 s" in text]
    assert late, errors
    for text in late:  # each that gives up names what others called, or who gave up first
        assert "; last call" in text or "failed first, in call" in text, text
    for name in pair:
        called = f"call 3 on group of ranks 0-{len(hosts) - 1}: {CALLS[name][0]}"
        assert any(called in text for text in errors), errors


def sizes_differ() -> str:
    """Rank 1 passes three numbers to call 6, rank 0 two; the error of the rank that waits."""
    group = md.new_group(timeout=timedelta(seconds=4))
    for _ in range(5):
        md.all_reduce(torch.ones(2), group=group)
    try:
        md.all_reduce(torch.ones(2 + md.get_rank()), group=group)
        md.all_reduce(torch.ones(2), group=group)
    except md.MeshdistError as error:
        return str(error)
    return ""


def test_sizes_that_differ_are_shown_at_the_timeout(pool: Pool) -> None:
    texts = pool.run(sizes_differ, 2, backend="gloo", hosts="AB")
    told = "rank 0: reached this call as all_reduce((2,) float32, SUM) at"
    assert any(told in text for text in texts), texts
    assert any("all_reduce((2,) float32, SUM)" in text for text in texts)
    assert any("all_reduce((3,) float32, SUM)" in text for text in texts)
    assert all(texts)


def one_call_short(timeout_s: float) -> tuple[str, float]:
    """The last rank makes no call 8; all others come to the round before it."""
    group, x = md.new_group(timeout=timedelta(seconds=timeout_s)), torch.ones(2)
    for _ in range(7):
        md.all_reduce(x, md.ReduceOp.AVG, group)
    if md.get_rank() == md.get_world_size() - 1:
        time.sleep(timeout_s + 1)
        return "", float(x[0])
    with pytest.raises(md.CollectiveTimeoutError) as caught:
        md.all_reduce(x, md.ReduceOp.AVG, group)
    return str(caught.value), float(x[0])


@pytest.mark.parametrize("hosts", [pytest.param("AB", marks=pytest.mark.soak), "AAB"])
def test_who_does_not_come_to_a_round_is_named(pool: Pool, hosts: str) -> None:
    last = len(hosts) - 1
    *told, (_, of_last) = pool.run(one_call_short, len(hosts), 3.0, backend="gloo", hosts=hosts)
    assert of_last == 1.0
    for text, value in told:
        assert value == 1.0
        assert "call 8 on group of ranks" in text
        told = f"rank {last}: did not reach this call; last call 7 on group of ranks 0-{last}"
        assert told in text


def test_objects_that_meet_tensors_are_named_at_a_round(pool: Pool) -> None:
    pair = ("tensors", "objects")
    told = pool.run(differ_at, 2, [2], pair, "AB", backend="gloo", hosts="AB")
    check_named([(kind, text) for [(_, kind, text)] in told], 2, pair)


def at_detail(hosts: str) -> tuple[str, float]:
    """What call 3 raises, which differs, and what its tensor holds behind it."""
    md.set_debug_level(md.DebugLevel.DETAIL)
    group, x = md.new_group(), torch.ones(2)
    for _ in range(2):
        md.all_reduce(x, md.ReduceOp.AVG, group)
    op = md.ReduceOp.MAX if hosts[md.get_rank()] == "B" else md.ReduceOp.SUM
    try:
        with pytest.raises(md.MismatchError) as caught:
            md.all_reduce(x, op, group)
    finally:
        md.set_debug_level(md.DebugLevel.OFF)
    return str(caught.value), float(x.sum())


@pytest.mark.parametrize("hosts", HOSTS)
def test_at_detail_each_call_is_compared_before_data_move(pool: Pool, hosts: str) -> None:
    for text, total in pool.run(at_detail, len(hosts), hosts, hosts=hosts):
        assert total == 2.0
        assert "made different calls as call 3" in text and "before it sent any data" in text


# -- as a group or the world is destroyed ---------------------------------------------------------


def last_call_differs(host: str, others: int) -> str:
    group = md.new_group()
    CALLS["sum"][1](group)
    CALLS["sum"][1](group)
    CALLS["max" if host[md.get_rank()] == "B" else "sum"][1](group)
    for _ in range(others):  # each to be closed, though another raises
        md.new_group()
    try:
        md.destroy_process_group(group)
    except md.MismatchError as error:
        with pytest.raises(md.GroupClosedError):
            md.barrier(group)
        return str(error)
    return ""


@pytest.mark.parametrize("hosts", HOSTS)
def test_last_calls_are_compared_as_a_group_is_destroyed(pool: Pool, hosts: str) -> None:
    texts = pool.run(last_call_differs, len(hosts), hosts, 1, backend="gloo", hosts=hosts)
    check_named([("MismatchError", text) for text in texts], 3, ("sum", "max"))


SHORT_PROGRAM = """
import torch, meshdist as md
md.init_process_group("gloo")
x = torch.ones(4)
for _ in range(2):
    md.all_reduce(x)
md.all_reduce(x, md.ReduceOp.MAX if md.get_rank() else md.ReduceOp.SUM)
md.destroy_process_group()
"""


def test_last_calls_are_compared_as_the_world_is_destroyed(pool: Pool) -> None:
    environments = [
        {**place, "MESHDIST_HOST_ID": host, "GLOO_SOCKET_IFNAME": "lo"}
        for place, host in zip(places(2), "AB", strict=True)
    ]
    for ended in pool.start(SHORT_PROGRAM, environments, has_teardown=False):
        assert ended.returncode == 1
        summary = "collective mismatch: ranks made different calls as call 3"
        assert f"MismatchError: {summary}" in ended.stderr
        assert "rank 0: all_reduce((4,) float32, SUM) at " in ended.stderr
        assert "rank 1: all_reduce((4,) float32, MAX) at " in ended.stderr


def a_mesh_is_closed() -> tuple[str, bool]:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
    op = md.ReduceOp.MAX if md.get_rank() == 2 else md.ReduceOp.SUM
    for made in range(3):
        md.all_reduce(torch.ones(2), op if made == 2 else md.ReduceOp.SUM, mesh["across"])
    groups = [mesh[name].get_group() for name in ("across", "inside")]
    text = ""
    try:
        mesh.close()
    except md.MismatchError as error:
        text = str(error)
    return text, all(group.is_closed for group in groups)


def test_a_mesh_closes_all_its_groups_though_calls_of_one_differ(pool: Pool) -> None:
    found = pool.run(a_mesh_is_closed, 4, backend=None, hosts="AABB")
    for rank, (text, are_closed) in enumerate(found):
        assert are_closed
        assert ("different calls as call 3\n  where:    axis 'across'" in text) == (rank % 2 == 0)


def destroyed_by_some(how_others_end: str) -> float:
    """How long a rank takes to destroy a group that the last rank does not destroy."""
    group = md.new_group()
    for _ in range(3):
        md.all_reduce(torch.ones(2), group=group)
    if md.get_rank() == md.get_world_size() - 1:
        if how_others_end == "stays":
            time.sleep(6)
            return 0.0
        raise ValueError(how_others_end)
    begin = time.monotonic()
    md.destroy_process_group(group)
    return time.monotonic() - begin


def test_a_rank_that_keeps_its_group_holds_up_the_others_for_seconds(pool: Pool) -> None:
    *took, _ = pool.run(destroyed_by_some, 3, "stays", backend="gloo", hosts="ABB")
    assert max(took) < 5.5


def test_a_rank_that_fails_holds_up_the_others_for_seconds(pool: Pool) -> None:
    *took, failure = pool.outcomes(destroyed_by_some, 3, "fails", backend="gloo", hosts="ABB")
    assert isinstance(failure, Failure)
    assert all(isinstance(each, float) and each < 5.5 for each in took), took


# -- calls that are equal -------------------------------------------------------------------------


def equal_calls_in_unequal_times() -> None:
    """Calls that are alike, though members are far ahead of each other, or join, or send."""
    rank, size = md.get_rank(), md.get_world_size()
    groups = [md.new_group() for _ in range(2)]
    x = torch.ones(2)
    for number in range(700):
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
        dist.all_reduce_coalesced([x, x.clone()], group=groups[1])
    sizes = [rank + peer for peer in range(size)]
    md.all_to_all_single(torch.empty(sum(sizes)), torch.ones(sum(sizes)), sizes, sizes)
    model = md.DistributedDataParallel(torch.nn.Linear(2, 1))
    for _ in range(10):
        model(torch.ones(1, 2)).sum().backward()
    md.destroy_process_group(groups[0])
    for _ in range(300):
        md.all_reduce(x)


@pytest.mark.parametrize("hosts", ["AAB", "AB"])
def test_equal_calls_raise_no_alarm(pool: Pool, hosts: str) -> None:
    pool.run(equal_calls_in_unequal_times, len(hosts), backend="gloo", hosts=hosts)


def started_before_a_message() -> list[float]:
    """Rank 0 starts calls, among them such that rounds precede, which rank 1 makes later."""
    x, message = [torch.ones(2) for _ in range(9)], torch.zeros(1)

    def start() -> list[Any]:
        return [md.all_reduce(each, async_op=True) for each in x]

    works = start() if md.get_rank() == 0 else []
    if md.get_rank() == 0:
        md.send(message, 1)
    else:
        md.recv(message, 0)
        works = start()
    for work in works:
        work.wait()
    return [float(each.sum()) for each in x]


def test_a_started_call_waits_for_no_rank(pool: Pool) -> None:
    """A round that it waited for would keep rank 0 from the message that rank 1 waits for."""
    assert pool.run(started_before_a_message, 2, hosts="AB") == [[4.0] * 9] * 2
