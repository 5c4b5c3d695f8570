"""What members say in a round arrives as it was said, however long it is."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import meshdist as md
from meshdist.checking.calls import Call, get_call
from meshdist.joining.statements import JoinedCommunicator, Statement, from_bytes, to_bytes
from tests.inner import Channel, PreparedCall
from tests.pool import Pool

TEXTS = st.text(max_size=5)
SIZES = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
PARTS = st.tuples(
    st.lists(st.integers(0, 1 << 10), max_size=3).map(torch.Size),
    st.sampled_from((torch.float32, torch.bool, torch.bfloat16)),
)
CALLS = st.builds(
    Call,
    verb=TEXTS,
    data=st.none() | PARTS | st.lists(PARTS, max_size=3).map(tuple),
    op_number=st.none() | st.integers(0, 7),
    root=st.none() | st.integers(0, 1000),
    title=TEXTS,
    is_uneven=st.booleans(),
    owner=TEXTS,
)


@given(
    st.builds(
        Statement,
        call=CALLS,
        sizes=st.just(()) | st.tuples(SIZES, SIZES),
        has_joined=st.booleans(),
        is_late=st.booleans(),
        sees_all=st.booleans(),
    )
)
def test_what_is_said_arrives(said: Statement) -> None:
    assert from_bytes(to_bytes(said)) == said


def said_of(
    verb: str, tensor: Any, op: Any = None, sizes: Any = None, *, title: str = "", owner: str = ""
) -> Statement:
    prepared = PreparedCall(verb, "", (), (), tensor, sizes=sizes)
    prepared.noted_op, prepared.title = op, title
    return Statement.of(prepared, owner)


@pytest.mark.parametrize("num_tensors", [1, 3, 40])
def test_a_round_of_any_length(num_tensors: int) -> None:
    """Members differ in length; those that are short take part in the second step, too."""

    def program() -> list[int]:
        mine = [torch.ones(2)] * (num_tensors if md.get_rank() else 1)
        channel = md.group.WORLD.open_channel("cpu")
        said = said_of("all_reduce_coalesced", mine, md.ReduceOp.MAX)
        place = JoinedCommunicator(md.group.WORLD, channel)
        place.say(said)
        return [len(one.call.parts) for one in place.read()]

    assert md.simulate(program, 3) == [[1, num_tensors, num_tensors]] * 3


def test_calls_are_one_apart_from_sizes_that_may_differ() -> None:
    x, summed = torch.ones(2, 3), md.ReduceOp.SUM
    uneven, longer, wider = (
        said_of("all_gather", one, sizes=([6, 6], [6, 5])) for one in (x, torch.ones(5), x.double())
    )
    assert uneven.call.header == longer.call.header != wider.call.header
    said = said_of("all_reduce", x, summed, owner="0:backward").call
    assert said.header == get_call("all_reduce", x.view(6), summed, owner="0:backward").header
    assert said.text == "all_reduce((2, 3) float32, SUM)"
    others = [
        said_of("all_reduce", x, summed, title="a plan", owner="0:backward"),
        said_of("all_reduce", x, summed),
        said_of("all_reduce", x, md.ReduceOp.AVG, owner="0:backward"),
        said_of("all_reduce", torch.ones(4), summed, owner="0:backward"),
        Statement(),
    ]
    assert said.header not in [other.call.header for other in others]


def wait_in_vain(group: md.ProcessGroup, channel: Channel) -> None:
    place = JoinedCommunicator(group, channel)
    place.say(Statement(get_call("barrier", None)))
    time.sleep(0.3)
    place.read()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_round_that_is_late_tells_how_long_it_was_waited_for(pool: Pool, backend: str) -> None:
    def program() -> str:
        group = md.new_group(timeout=timedelta(seconds=0.3))
        channel = group.open_channel("cpu")
        if md.get_rank() == 1:
            md.barrier()
        with pytest.raises(md.MeshdistError) as caught:
            wait_in_vain(group, channel)
        if md.get_rank() == 0:
            md.barrier()
        return str(caught.value)

    first, second = pool.run(program, 2, backend=backend)
    assert first.startswith("Join on group of ranks 0-1 was not finished within 0.3 s\n")
    assert ": not finished after 0.3 s\n" in second


@pytest.mark.parametrize("data", [b"\xff" * 256, (b"\x08\0\0\0no json!" * 30)[:256]])
@pytest.mark.parametrize("hosts", ["AA", "AB"])
def test_data_of_another_call_are_no_statement(pool: Pool, hosts: str, data: bytes) -> None:
    """Between hosts calls are compared after they ran: what a member reads may be anything."""

    def meet() -> None:
        if md.get_rank() == 0:
            mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            md.all_gather_into_tensor(mine.new_empty(512), mine)
            md.barrier()
        else:
            place = JoinedCommunicator(md.group.WORLD, md.group.WORLD.open_channel("cpu"))
            place.say(Statement(get_call("barrier", None)))
            place.read()

    def program() -> str:
        with pytest.raises(md.AgreementError) as caught:
            meet()
        return str(caught.value)

    first, second = pool.run(program, 2, hosts=hosts)
    for text in (first, second):
        assert "all_gather_into_tensor((256,) uint8)" in text
        assert "Join((256,) uint8)" in text
