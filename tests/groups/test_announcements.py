"""What members say in a round arrives as it was said, however long it is."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from hypothesis import given, strategies as st

import meshdist as md
from meshdist.groups.announcements import Announcement, Round, from_bytes, to_bytes
from meshdist.groups.channel import Channel
from tests.pool import Pool

TEXTS = st.text(max_size=5)
SIZES = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)


@given(
    st.builds(
        Announcement,
        verb=TEXTS,
        parts=st.lists(st.tuples(st.integers(0, 1 << 40), TEXTS), max_size=3).map(tuple),
        is_list=st.booleans(),
        op=TEXTS,
        root=st.none() | st.integers(0, 1000),
        sent=SIZES,
        taken=SIZES,
        owner=TEXTS,
        notice=TEXTS,
        has_joined=st.booleans(),
        is_late=st.booleans(),
    )
)
def test_what_is_said_arrives(said: Announcement) -> None:
    assert from_bytes(to_bytes(said)) == said


@pytest.mark.parametrize("num_tensors", [1, 3, 40])
def test_a_round_of_any_length(num_tensors: int) -> None:
    """Members differ in length; those that are short take part in the second step, too."""

    def program() -> list[int]:
        mine = [torch.ones(2)] * (num_tensors if md.get_rank() else 1)
        channel = md.group.WORLD.open_channel("cpu")
        said = Announcement.of_call("all_reduce_coalesced", mine, md.ReduceOp.MAX)
        begun = Round(channel, said, channel.timeout)
        return [len(one.parts) for one in begun.finish(channel.timeout)]

    assert md.simulate(program, 3) == [[1, num_tensors, num_tensors]] * 3


def test_calls_are_one_apart_from_sizes_that_may_differ() -> None:
    x = torch.ones(3)
    same = Announcement.of_call("all_gather", x, sent=[3, 3], taken=[3, 5])
    assert same.is_same_call(
        Announcement.of_call("all_gather", torch.ones(5), sent=[5, 5], taken=[3, 5])
    )
    assert not same.is_same_call(
        Announcement.of_call("all_gather", x.double(), sent=[3, 3], taken=[3, 5])
    )
    call = Announcement.of_call("all_reduce", x, md.ReduceOp.SUM)
    assert not call.is_same_call(
        Announcement.of_call("all_reduce", x, md.ReduceOp.SUM, title="a plan")
    )
    assert not call.is_same_call(Announcement.of_call("all_reduce", x, md.ReduceOp.AVG))
    assert not call.is_same_call(Announcement.of_call("all_reduce", torch.ones(4), md.ReduceOp.SUM))
    assert not call.is_same_call(
        Announcement.of_call("all_reduce", x, md.ReduceOp.SUM, owner="0:backward")
    )
    assert call.is_same_call(
        Announcement.of_call("all_reduce", x, md.ReduceOp.SUM, has_joined=True)
    )
    assert call.text == "all_reduce((3,) float32, SUM)"


def wait_in_vain(channel: Channel) -> None:
    begun = Round(channel, Announcement("barrier"), channel.timeout)
    time.sleep(0.3)
    begun.finish()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_round_that_is_late_tells_how_long_it_was_waited_for(pool: Pool, backend: str) -> None:
    def program() -> str:
        group = md.new_group(timeout=timedelta(seconds=0.3))
        channel = group.open_channel("cpu")
        if md.get_rank() == 1:
            md.barrier()
        with pytest.raises(md.MeshdistError) as caught:
            wait_in_vain(channel)
        if md.get_rank() == 0:
            md.barrier()
        return str(caught.value)

    first, second = pool.run(program, 2, backend=backend)
    assert first.startswith("Join on group of ranks 0-1 was not finished within 0.3 s\n")
    assert ": not finished after 0.3 s\n" in second
