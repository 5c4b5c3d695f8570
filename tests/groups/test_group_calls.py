"""torch's group calls on simulated ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import meshdist as md
from tests.inner import SimulatedCommunicator


def test_new_group_sorts_unless_told_not_to() -> None:
    def program():
        plain = md.new_group([2, 0])
        kept = md.new_group([2, 0], sort_ranks=False)
        if md.get_rank() == 1:
            assert plain == kept == md.GroupMember.NON_GROUP_MEMBER
            assert md.get_rank(plain) == md.get_world_size(plain) == -1
            return None
        return plain.ranks, kept.ranks, md.get_rank(kept), md.get_world_size(kept)

    results = md.simulate(program, 3)
    assert results == [((0, 2), (2, 0), 1, 2), None, ((0, 2), (2, 0), 0, 2)]


def test_each_new_group_is_another_with_its_own_order_of_operations() -> None:
    def program():
        one, two = md.new_group(), md.new_group()
        assert one is not two
        x, y = torch.ones(1), torch.full((1,), 2.0)
        # Started in different orders on different ranks: right, since each has its own order.
        if md.get_rank() == 0:
            works = [md.all_reduce(x, group=one, async_op=True)]
            works.append(md.all_reduce(y, group=two, async_op=True))
        else:
            works = [md.all_reduce(y, group=two, async_op=True)]
            works.append(md.all_reduce(x, group=one, async_op=True))
        for work in works:
            work.wait()
        md.destroy_process_group(one)
        md.all_reduce(y, group=two)
        with pytest.raises(md.GroupClosedError, match="was closed"):
            md.all_reduce(x, group=one)
        return x.item(), y.item()

    assert md.simulate(program, 2) == [(2.0, 8.0)] * 2


def test_outsiders_need_not_call_and_the_text_names_the_rank() -> None:
    def program():
        if md.get_rank() < 2:
            group = md.new_group([0, 1])
            x = torch.ones(1)
            md.all_reduce(x, group=group)
            return x.item()
        with pytest.raises(
            md.NotInGroupError, match="not a member of the group\n  where:    rank 2"
        ):
            md.all_reduce(torch.ones(1), group=md.GroupMember.NON_GROUP_MEMBER)
        return None

    assert md.simulate(program, 3) == [2.0, 2.0, None]


def test_new_subgroups_divide_in_order() -> None:
    def program():
        mine, all_of_them = md.new_subgroups(2)
        return mine.ranks, len(all_of_them)

    assert md.simulate(program, 4) == [((0, 1), 2), ((0, 1), 2), ((2, 3), 2), ((2, 3), 2)]


def test_new_subgroups_by_enumeration_may_leave_ranks_out() -> None:
    def program():
        mine, groups = md.new_subgroups_by_enumeration([[0, 2], [3]])
        members = [getattr(g, "ranks", None) for g in groups]
        return None if mine is None else mine.ranks, members

    results = md.simulate(program, 4)
    assert [r[0] for r in results] == [(0, 2), None, (0, 2), (3,)]
    assert results[1][1] == [None, None] and results[3][1] == [None, (3,)]


def test_split_group_counts_in_the_parent() -> None:
    def program():
        parent = md.new_group([3, 1, 0], sort_ranks=False)
        if md.get_rank() == 2:
            return None
        part = md.split_group(parent, [[0, 2], [1]])
        return part.ranks, md.get_group_rank(part, md.get_rank())

    assert md.simulate(program, 4) == [((3, 0), 1), ((1,), 0), None, ((3, 0), 0)]


def test_split_group_may_leave_ranks_out() -> None:
    def program():
        part = md.split_group(None, [[2, 0]])
        return None if part is None else part.ranks

    assert md.simulate(program, 3) == [(2, 0), None, (2, 0)]


def test_new_subgroups_of_a_group_keep_its_order() -> None:
    def program():
        parent = md.new_group([3, 1, 0, 2], sort_ranks=False)
        return md.new_subgroups(2, group=parent)[0].ranks

    assert md.simulate(program, 4) == [(0, 2), (3, 1), (0, 2), (3, 1)]


def test_local_synchronization_is_accepted_and_means_nothing_more() -> None:
    def program():
        x = torch.ones(1)
        if md.get_rank() < 2:
            md.all_reduce(x, group=md.new_group([0, 1], use_local_synchronization=True))
        return x.item()

    assert md.simulate(program, 3) == [2.0, 2.0, 1.0]


def test_a_group_has_the_description_it_was_given() -> None:
    def program():
        return md.new_group(group_desc="mine").group_desc, md.new_group().group_desc

    assert md.simulate(program, 1) == [("mine", "undefined")]


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
def test_simulated_ranks_have_one_backend_whatever_a_group_names(backend: str) -> None:
    def program():
        group = md.new_group(backend=backend)
        x = torch.ones(1)
        md.all_reduce(x, group=group)
        return x.item(), md.get_backend(group)

    assert md.simulate(program, 2) == [(2.0, "simulated")] * 2


def test_a_groups_device_is_connected_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = []
    kind = SimulatedCommunicator
    monkeypatch.setattr(kind, "connect", lambda _, device: connected.append(device))
    device = torch.device("cuda", 1)

    def program():
        group = md.new_group(device_id=device)
        assert connected == []  # the backend for CPU tensors
        group.open_device_group("cuda")

    md.simulate(program, 1)
    assert connected == [device]


def test_ranks_in_the_world_are_their_own() -> None:
    def program():
        world = md.group.WORLD
        return [
            (md.get_group_rank(world, rank), md.get_global_rank(world, rank)) for rank in (0, 1)
        ]

    assert md.simulate(program, 2) == [[(0, 0), (1, 1)]] * 2


def test_ranks_in_a_group_and_back() -> None:
    def program():
        group = md.new_group([2, 0], sort_ranks=False)
        if md.get_rank() == 1:
            return None
        assert md.get_process_group_ranks(group) == [2, 0]
        assert md.get_process_group_ranks(None) == [0, 1, 2]
        for error in (ValueError, RuntimeError):  # torch's text and torch's code name both
            with pytest.raises(error, match="global rank 1 is not in"):
                md.get_group_rank(group, 1)
        with pytest.raises(md.NotInGroupError, match="no group rank 2"):
            md.get_global_rank(group, 2)
        return [md.get_global_rank(group, md.get_group_rank(group, r)) for r in (0, 2)]

    assert md.simulate(program, 3) == [[0, 2], None, [0, 2]]


def test_world_group_as_torch_names_it() -> None:
    def program():
        world = md.group.WORLD
        assert world is md.GroupMember.WORLD
        assert world.group_desc == "default_pg"
        assert world.bound_device_id is None
        x = torch.ones(2)
        work = world.allreduce([x])
        assert work.wait() and work.result()[0] is x
        return world.size(), world.rank(), x.tolist()

    assert md.simulate(program, 2) == [(2, 0, [2.0, 2.0]), (2, 1, [2.0, 2.0])]
    assert md.group.WORLD is None


REFUSED = [
    (lambda: md.new_group([0, 0]), "names a rank twice"),
    (lambda: md.new_group([0, 9]), "names rank 9, outside the world"),
    (lambda: md.new_group([]), "is empty"),
    (lambda: md.new_group(5), "sequence of integers"),
    (lambda: md.new_group([0.5]), "sequence of integers, not [0.5]"),
    (lambda: md.new_group("01"), "sequence of integers, not '01'"),
    (lambda: md.new_group(device_id=0), "device_id must be a torch.device"),
    (lambda: md.new_group(device_id=torch.device("cuda")), "device_id=cuda has no index"),
    (lambda: md.new_group(timeout=5), "timeout must be a datetime.timedelta, not 5"),
    (lambda: md.new_group(backend="pigeon"), "'pigeon'"),
    (lambda: md.new_subgroups(3), "subgroups of 3 do not divide a group of 4 ranks"),
    (lambda: md.new_subgroups(2.0), "group_size must be an integer"),
    (lambda: md.new_subgroups(1, md.GroupMember.NON_GROUP_MEMBER), "not a member of the group"),
    (lambda: md.new_subgroups_by_enumeration([[0, 1], [1, 2]]), "rank 1 is in more than one"),
    (lambda: md.new_subgroups_by_enumeration([]), "the list of subgroups is empty"),
    (lambda: md.new_subgroups_by_enumeration([0, 1]), "must be a list of lists of ranks"),
    # Before any subgroup is opened, also on ranks that are in one of the first lists alone.
    (lambda: md.new_subgroups_by_enumeration([[0, 1], [2, 9]]), "names rank 9, outside the world"),
    (lambda: md.new_subgroups_by_enumeration([[0, 1], [2, 2]]), "names a rank twice"),
    (lambda: md.split_group(), "split_ranks is empty"),
    (lambda: md.split_group(None, []), "split_ranks is empty"),
    (lambda: md.split_group(None, [[0], []]), "split_ranks has an empty part"),
    (lambda: md.split_group(None, [0, 1]), "split_ranks must be a list of lists of ranks"),
    (lambda: md.split_group(None, [[0], [0, 1]]), "does not split a group of 4 ranks"),
    (lambda: md.split_group(None, [[7]]), "ranks of the parent group, 0 to 3"),
    (lambda: md.split_group(None, [[0, 1], []]), "split_ranks has an empty part"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_rejected(case: int) -> None:
    call, text = REFUSED[case]

    def program():
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            call()
        assert isinstance(caught.value, md.MeshdistError)
        return str(caught.value)

    assert all(text in result for result in md.simulate(program, 4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts CUDA devices where there are some")
def test_new_subgroups_without_size_or_gpu() -> None:
    with pytest.raises(ValueError, match="needs group_size because there is no CUDA device"):
        md.simulate(lambda: md.new_subgroups(), 2)


def test_members_that_disagree_all_raise() -> None:
    def program():
        with pytest.raises(md.MismatchError) as caught:
            md.new_group([0, 1], sort_ranks=False) if md.get_rank() else md.new_group(
                [1, 0], sort_ranks=False
            )
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert "do not define the same group" in text
        assert "ranks [0, 1]" in text and "ranks [1, 0]" in text


def test_timeout_is_the_backends_default_not_the_parents() -> None:
    def program():
        parent = md.new_group(timeout=timedelta(seconds=5))
        child = md.split_group(parent, [[0, 1]])
        return parent.timeout.total_seconds(), child.timeout.total_seconds()

    assert md.simulate(program, 2)[0] == (5.0, 1800.0)
