"""How members of one process meet: messages, disagreements, deadlocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore

from meshdist import simulate
from meshdist.backends.simulated.matching import find_mismatch
from meshdist.checking.calls import Call, CallRecord, GroupFacts
from meshdist.errors import BackendError, DeadlockError, MismatchError
from meshdist.reduce_ops import ReduceOp
from tests.backends.direct import Direct
from tests.backends.samples import T, open_group
from tests.inner import get_world

# ---- point to point ----------------------------------------------------------------------------


def test_messages_keep_their_order_by_source_and_tag() -> None:
    def program() -> list[float]:
        group = open_group()
        if group.rank == 0:
            for value, tag in ((1.0, 7), (2.0, 8), (3.0, 7), (4.0, 8)):
                x = torch.tensor([value])
                Direct(group).send(x, 1, tag).finish(T)
                x.fill_(-1.0)  # a finished send leaves its tensor free
            return []
        received = []
        for tag in (8, 7, 7, 8):
            x = torch.zeros(1)
            Direct(group).recv(x, 0, tag).finish(T)
            received.append(x.item())
        return received

    assert simulate(program, 2)[1] == [2.0, 1.0, 3.0, 4.0]


def test_receives_that_wait_are_served_in_the_order_they_came() -> None:
    def program() -> list[float]:
        group = open_group()
        if group.rank == 0:
            tensors = [torch.zeros(1) for _ in range(3)]
            pending = [Direct(group).recv(x, 1, 0) for x in tensors]
            for each in reversed(pending):
                each.finish(T)
            return [x.item() for x in tensors]
        for value in (1.0, 2.0, 3.0):
            Direct(group).send(torch.tensor([value]), 0, 0)
        return []

    assert simulate(program, 2)[0] == [1.0, 2.0, 3.0]


def test_receive_from_any_rank_tells_the_source() -> None:
    def program() -> list[tuple[int, float]]:
        group = open_group()
        if group.rank != 2:
            Direct(group).send(torch.tensor([float(group.rank)]), 2, 0).finish(T)
            return []
        received = []
        for _ in range(3):
            x = torch.zeros(1)
            pending = Direct(group).recv(x, None, 0)
            pending.finish(T)
            received.append((pending.source(), x.item()))
        return received

    assert simulate(program, 4)[2] == [(0, 0.0), (1, 1.0), (3, 3.0)]


def test_messages_to_oneself() -> None:
    def program() -> list[float]:
        group = open_group()
        x, y = torch.zeros(1), torch.zeros(1)
        early = Direct(group).recv(x, group.rank, 5)
        Direct(group).send(torch.tensor([1.0 + group.rank]), group.rank, 5)
        Direct(group).send(torch.tensor([9.0]), group.rank, 6)
        Direct(group).recv(y, None, 6).finish(T)
        early.finish(T)
        assert early.source() == group.rank
        return [x.item(), y.item()]

    assert simulate(program, 2) == [[1.0, 9.0], [2.0, 9.0]]


def test_only_a_receive_has_a_source() -> None:
    def program() -> None:
        group = open_group()
        pending = Direct(group).barrier()
        pending.finish(T)
        with pytest.raises(BackendError, match="only a receive has a source"):
            pending.source()

    simulate(program, 2)


def test_a_message_that_does_not_fit_is_told_to_both() -> None:
    def program() -> list[str]:
        group = open_group()
        texts = []

        def fail(start: Callable[[], Any]) -> None:
            with pytest.raises(MismatchError) as caught:
                start().finish(T)
            texts.append(re.sub(r"at \S+:\d+ in \S+", "at LINE", str(caught.value)))

        x = torch.full((2,), -1.0)
        if group.rank == 0:
            Direct(group).send(torch.zeros(3), 1, 4)
            Direct(group).send(torch.ones(2), 1, 4)
            fail(lambda: Direct(group).recv(x, 1, 0))  # waits already when the other one comes
        else:
            fail(lambda: Direct(group).recv(torch.zeros(2, dtype=torch.int64), 0, 4))
            fail(lambda: Direct(group).recv(x, 0, 4))  # though a fitting message was sent
        fail(lambda: Direct(group).send(x, 1 - group.rank, 0))
        fail(lambda: Direct(group).all_reduce(x, ReduceOp.SUM))
        assert x.tolist() == [-1.0, -1.0]
        return texts

    first, second = simulate(program, 2)
    assert (len(first), len(second)) == (3, 4)
    text, *others = {*first, *second}
    assert not others
    assert text == (
        "message mismatch: a send does not match its receive\n"
        "  where:    tag 4 on ranks 0-1\n"
        "  expected: the same dtype and number of elements on both sides, and objects received "
        "as objects\n"
        "  found:    rank 0: send((3,) float32, to rank 1, tag 4) at LINE\n"
        "            rank 1: recv((2,) int64, from rank 0, tag 4) at LINE\n"
        "  fix:      receive into a tensor like the one that is sent, or pass a different tag for "
        "each kind of message"
        "; this group can no longer be used: create a new one with new_group(), or re-initialize"
    )


def test_a_message_of_a_rank_to_itself_breaks_nobody() -> None:
    def program() -> float:
        group = open_group()
        x = torch.ones(2)
        if group.rank == 0:
            Direct(group).send(torch.zeros(3), 0, 4)
            with pytest.raises(MismatchError) as caught:
                Direct(group).recv(x, 0, 4).finish(T)
            assert "broken" not in str(caught.value)
        Direct(group).all_reduce(x, ReduceOp.SUM).finish(T)
        return x.sum().item()

    assert simulate(program, 2) == [4.0, 4.0]


# ---- sizes ----------------------------------------------------------------------------------


def noted(operation: str, *sizes: tuple[int, ...]) -> CallRecord:
    """The record of a call on two elements, by one of two members."""
    group = GroupFacts("", (4, 5), 0)
    return CallRecord(1, group, Call(operation, (torch.Size([2]), torch.float32)), sizes)


def all_to_all(sends: tuple[int, ...], takes: tuple[int, ...]) -> CallRecord:
    return noted("all_to_all", sends, takes)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ([all_to_all((1, 2), (1, 3)), all_to_all((3, 4), (2, 4))], None),
        (
            [all_to_all((1, 2), (1, 3)), all_to_all((3, 4), (5, 4))],
            "rank 4 sends 2 to rank 5, which receives 5",
        ),
        (
            [all_to_all((1, 2), (1, 3)), all_to_all((6, 4), (2, 4))],
            "rank 5 sends 6 to rank 4, which receives 3",
        ),
        (
            [all_to_all((1, 2), (1, 3)), all_to_all((3, 4), (2, 5))],
            "rank 5 sends 4 to itself, and receives 5",
        ),
        (
            [noted("g", (2, 2), (2, 3)), noted("g", (2, 2), (2, 2))],
            "rank 5 sends 2 to rank 4, which receives 3",
        ),
        ([noted("gather", (2, 2), (2, 2)), noted("gather")], None),
        (
            [noted("gather", (2, 2), (2, 1)), noted("gather")],
            "rank 5 sends 2 to rank 4, which receives 1",
        ),
        (
            [noted("scatter", (2, 3), (2, 2)), noted("scatter")],
            "rank 4 sends 3 to rank 5, which receives 2",
        ),
        ([noted("all_reduce"), noted("all_reduce")], None),
        ([CallRecord(1, GroupFacts("", (4, 5), 0), Call("barrier", None))] * 2, None),
    ],
)
def test_pairs_that_disagree_are_named(calls: list[CallRecord], text: str | None) -> None:
    assert find_mismatch(1, dict(enumerate(calls)), (4, 5)) == text


# ---- disagreement and deadlock -------------------------------------------------------------


def ones(*counts: int) -> list[torch.Tensor]:
    return [torch.ones(count) for count in counts]


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def test_members_that_disagree_all_raise_the_same() -> None:
    def program() -> str:
        group = open_group()
        x = torch.ones(4)

        def call() -> None:
            if group.rank == 2:
                Direct(group).broadcast(x, 0).finish(T)
            else:
                Direct(group).all_reduce(x, ReduceOp.SUM).finish(T)

        with pytest.raises(MismatchError) as caught:
            call()
        assert x.tolist() == [1.0] * 4
        with pytest.raises(MismatchError) as again:
            Direct(group).all_reduce(x, ReduceOp.SUM).finish(T)
        assert x.tolist() == [1.0] * 4
        assert str(again.value) == str(caught.value)
        return str(caught.value)

    texts = simulate(program, 4)
    assert texts == [texts[0]] * 4
    assert texts[0] == (
        "collective mismatch: ranks made different calls as call 1\n"
        "  where:    ranks 0-3; no data was moved\n"
        "  expected: the same collective, dtype, number of elements, op and root on every rank\n"
        f"  found:    ranks 0-1: all_reduce((4,) float32, SUM) at {line_of(program, 8)} in call\n"
        "            rank 2: broadcast((4,) float32, root rank 0) at "
        f"{line_of(program, 6)} in call\n"
        "            rank 3: has not reached this call\n"
        "  fix:      call the same collectives in the same order, with matching tensors, "
        "on every rank"
        "; this group can no longer be used: create a new one with new_group(), or re-initialize"
    )


def test_what_waits_when_members_disagree_fails_with_them() -> None:
    def program() -> str:
        group = open_group()
        x = torch.ones(2)
        if group.rank == 2:
            with pytest.raises(MismatchError) as caught:
                Direct(group).recv(x, 0, 0).finish(T)
            return str(caught.value)
        early = Direct(group).barrier()  # rank 2 does not come to it any more
        with pytest.raises(MismatchError) as caught:
            Direct(group).all_reduce(torch.ones(1 + group.rank), ReduceOp.SUM).finish(T)
        with pytest.raises(MismatchError):
            early.finish(T)
        return str(caught.value)

    texts = simulate(program, 3)
    assert texts == [texts[0]] * 3
    assert texts[0].startswith("collective mismatch: ranks made different calls as call 2\n")


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (lambda g: Direct(g).all_reduce(torch.ones(2 + g.rank), ReduceOp.SUM), "(3,) float32"),
        (
            lambda g: Direct(g).all_reduce(torch.ones(2), (ReduceOp.SUM, ReduceOp.MAX)[g.rank]),
            "float32, MAX)",
        ),
        (lambda g: Direct(g).broadcast(torch.ones(2), g.rank), "root rank 1)"),
        (
            lambda g: Direct(g).broadcast(
                torch.ones(2, dtype=(torch.int8, torch.int16)[g.rank]), 0
            ),
            "(2,) int16",
        ),
        (
            lambda g: (
                Direct(g).barrier() if g.rank else Direct(g).all_reduce(torch.ones(2), ReduceOp.SUM)
            ),
            "bar",
        ),
        (lambda g: Direct(g).reduce(torch.ones(2), ReduceOp.SUM, g.rank), "SUM, root rank 1)"),
        (
            lambda g: Direct(g).gather([] if g.rank else ones(2, 2), ones(2 + g.rank)[0], 0),
            "gather((3,) float32, root rank 0)",
        ),
        (
            lambda g: Direct(g).scatter(ones(2 + g.rank)[0], [] if g.rank else ones(2, 2), 0),
            "((3,) float32, root rank 0)",
        ),
        (
            lambda g: Direct(g).all_reduce_list(
                [torch.ones(2), torch.ones(1 + g.rank)], ReduceOp.SUM
            ),
            "all_reduce_list([(2,) float32, (2,) float32], SUM)",
        ),
        (
            lambda g: Direct(g).all_reduce_list(
                [torch.ones(2), torch.ones(1, dtype=(torch.int8, torch.int16)[g.rank])],
                ReduceOp.SUM,
            ),
            "all_reduce_list([(2,) float32, (1,) int16], SUM)",
        ),
        (
            lambda g: Direct(g).all_to_all(
                [torch.ones(1)] * 2, [torch.ones(1, dtype=(torch.int8, torch.int16)[g.rank])] * 2
            ),
            "all_to_all([(1,) int16, (1,) int16], sending [1, 1], receiving [1, 1] elements)",
        ),
    ],
    ids=[
        "count",
        "op",
        "root",
        "dtype",
        "operation",
        "reduce",
        "gather",
        "scatter",
        "list",
        "mixed list",
        "all_to_all",
    ],
)
def test_every_part_of_a_call_is_compared(calls: Callable[[Any], Any], shown: str) -> None:
    def program() -> None:
        group = open_group()
        with pytest.raises(MismatchError) as caught:
            calls(group).finish(T)
        assert shown in (caught.value.found or "").splitlines()[1]

    simulate(program, 2)


@pytest.mark.parametrize(
    ("call", "pair", "shown"),
    [
        (
            lambda g: Direct(g).all_to_all(ones(2, 2, 2), ones(2, 2, 3 if g.rank == 1 else 2)),
            "rank 1 sends 3 to rank 2, which receives 2",
            "(3,) float32], sending [2, 2, 3], receiving [2, 2, 2] elements)",
        ),
        (
            lambda g: Direct(g).all_to_all_single(
                *ones(6, 6), [2, 2, 2], [1, 2, 3] if g.rank == 0 else [2, 2, 2]
            ),
            "rank 0 sends 1 to itself, and receives 2",
            "rank 0: all_to_all_single((6,) float32, sending [1, 2, 3], "
            "receiving [2, 2, 2] elements)",
        ),
        (
            lambda g: Direct(g).all_gather_list(
                ones(1, 2, 4 if g.rank == 0 else 3), ones(g.rank + 1)[0]
            ),
            "rank 2 sends 3 to rank 0, which receives 4",
            "rank 0: all_gather_list((1,) float32, sending [1, 1, 1], "
            "receiving [1, 2, 4] elements)",
        ),
        (
            lambda g: Direct(g).reduce_scatter_list(
                ones(g.rank)[0], ones(0, 1, 5 if g.rank == 1 else 2), ReduceOp.SUM
            ),
            "rank 1 sends 5 to rank 2, which receives 2",
            "((1,) float32, SUM, sending [0, 1, 5], receiving [1, 1, 1] elements)",
        ),
        (
            lambda g: Direct(g).gather(ones(2, 2, 1) if g.rank == 0 else [], ones(2)[0], 0),
            "rank 2 sends 2 to rank 0, which receives 1",
            "((2,) float32, root rank 0, sending [2, 2, 2], receiving [2, 2, 1] elements)",
        ),
        (
            lambda g: Direct(g).scatter(ones(2)[0], ones(2, 3, 2) if g.rank == 0 else [], 0),
            "rank 0 sends 3 to rank 1, which receives 2",
            "((2,) float32, root rank 0, sending [2, 3, 2], receiving [2, 2, 2] elements)",
        ),
    ],
    ids=[
        "all_to_all",
        "all_to_all_single",
        "all_gather_list",
        "reduce_scatter_list",
        "gather",
        "scatter",
    ],
)
def test_a_pair_that_disagrees_about_its_sizes_is_named(
    call: Callable[[Any], Any], pair: str, shown: str
) -> None:
    def program() -> str:
        group = open_group()
        with pytest.raises(MismatchError) as caught:
            call(group).finish(T)
        with pytest.raises(MismatchError):
            Direct(group).barrier().finish(T)
        return str(caught.value)

    texts = simulate(program, 3)
    assert texts == [texts[0]] * 3
    assert f"  found:    {pair}\n" in texts[0]
    assert f"{shown} at {__file__}:" in texts[0]


def test_sizes_that_disagree_as_a_whole() -> None:
    def program() -> tuple[str, list[list[float]]]:
        group = open_group(op_name="axis 'tp'")
        outputs = [torch.full((count,), -1.0) for count in (2, 3)]
        with pytest.raises(MismatchError) as caught:
            Direct(group).all_to_all(outputs, ones(2, 2)).finish(T)
        return str(caught.value), [x.tolist() for x in outputs]

    line = line_of(program, 4)
    (text, kept), (other, _) = simulate(program, 2)
    assert kept == [[-1.0] * 2, [-1.0] * 3]
    assert text == other
    assert text == (
        "collective mismatch: ranks made different calls as call 1\n"
        "  where:    axis 'tp' (ranks 0-1); no data was moved\n"
        "  expected: input sizes that match the output sizes of the receiving rank\n"
        "  found:    rank 1 sends 2 to rank 0, which receives 3\n"
        "            ranks 0-1: all_to_all([(2,) float32, (2,) float32], sending [2, 2], receiving "
        f"[2, 3] elements) at {line} in program\n"
        "  fix:      give each output as many elements as its source sends; if a rank cannot know "
        "the sizes, exchange them first"
        "; this group can no longer be used: create a new one with new_group(), or re-initialize"
    )


def test_a_deadlock_in_each_collective_is_told_in_words() -> None:
    calls: list[tuple[Callable[[Any], Any], str]] = [
        (
            lambda g: Direct(g).gather(ones(4, 4, 4, 4), ones(4)[0], 0),
            "gather((4,) float32, root rank 0)",
        ),
        (lambda g: Direct(g).scatter(ones(2)[0], [], 3), "scatter((2,) float32, root rank 3)"),
        (
            lambda g: Direct(g).reduce(ones(2)[0], ReduceOp.MAX, 0),
            "reduce((2,) float32, MAX, root rank 0)",
        ),
        (
            lambda g: Direct(g).all_to_all(ones(1, 1, 0, 2), ones(1, 1, 3, 4)),
            "sending [1, 1, 3, 4], receiving [1, 1, 0, 2] elements)",
        ),
    ]
    for call, text in calls:

        def program(call: Callable[[Any], Any] = call) -> str:
            group = open_group(op_name="axis 'tp'")
            Direct(group).barrier().finish(T)
            if group.rank > 1:
                return ""
            with pytest.raises(DeadlockError) as caught:
                call(group).finish(T)
            return caught.value.found or ""

        found = simulate(program, 4)[0]
        assert re.search(rf"waits in .*{re.escape(text)} for ranks ", found)
        assert "ranks 2-3, which made 1; call 2 on axis 'tp' (ranks 0-3), called at " in found


def test_a_deadlock_tells_of_messages_that_nobody_received() -> None:
    def program(source: int | None) -> str:
        group = open_group()
        if group.rank == 2:
            with pytest.raises(DeadlockError) as caught:
                Direct(group).recv(torch.zeros(3), source, 2).finish(T)
            return caught.value.found or ""
        Direct(group).send(torch.zeros(3 + group.rank), 2, 1)
        return ""

    for source, senders in ((0, [0]), (1, [1]), (None, [0, 1])):
        told = simulate(program, 3, args=(source,))[2].splitlines()
        line = line_of(program, 6)
        assert told[1].startswith("rank 2: waits in recv((3,) float32, from ")
        assert told[2:] == [
            f"  rank {sender} called send(({3 + sender},) float32, to rank 2, tag 1) at {line} in "
            "program, which no rank has received"
            for sender in senders
        ]


def test_deadlock_tells_what_every_rank_waits_for() -> None:
    def program() -> str:
        group = open_group()
        rank = group.rank
        if rank == 3:
            return ""
        try:
            if rank == 0:
                Direct(group).recv(torch.zeros(2), 3, 7).finish(T)
            elif rank == 1:
                PrefixStore("p", get_world().store).get("never")
            else:
                pending = Direct(group).all_reduce(torch.zeros(2), ReduceOp.MAX)
                pending.finish(T)
        except DeadlockError as error:
            return str(error)
        return "no deadlock"

    texts = simulate(program, 5)
    assert texts == [texts[0]] * 3 + ["", texts[0]]
    assert texts[0] == (
        "deadlock: no simulated rank can continue\n"
        "  where:    5 simulated ranks, one at a time\n"
        "  expected: at least one rank that can run\n"
        "  found:    rank 0: waits in recv((2,) float32, from rank 3, tag 7) on ranks 0-4, "
        f"called at {line_of(program, 7)} in program\n"
        f"            rank 1: waits in store.get('p/never'), called at {line_of(program, 9)}\n"
        "            ranks 2, 4: waits in all_reduce((2,) float32, MAX) for ranks 0-1, 3; "
        f"call 1 on ranks 0-4, called at {line_of(program, 11)} in program\n"
        "            rank 3: returned\n"
        "  fix:      call the same collectives in the same order on every rank, start a send for "
        "every receive, and set every store key that a rank waits for"
    )


def test_asking_in_vain_without_end_is_a_deadlock() -> None:
    def program() -> None:
        group = open_group()
        if group.rank == 0:
            pending = Direct(group).barrier()
            while not pending.poll():
                pass
        else:
            while not get_world().store.check(["never"]):
                pass

    with pytest.raises(DeadlockError) as caught:
        simulate(program, 2)
    rank_0, rank_1 = (caught.value.found or "").splitlines()
    assert rank_0.startswith("rank 0: waits in barrier() for rank 1; call 1 on ranks 0-1")
    assert rank_1.startswith("rank 1: waits in store.check(['never']), called at ")


def test_a_call_site_is_the_line_of_the_program_below_torch() -> None:
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.group = group
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            Direct(ctx.group).recv(grad, 0, 0).finish(T)

    def program() -> None:
        Waits.apply(torch.ones(1, requires_grad=True), open_group()).backward()

    with pytest.raises(DeadlockError) as caught:
        simulate(program, 1)
    assert line_of(Waits.backward, 2) in str(caught.value)
