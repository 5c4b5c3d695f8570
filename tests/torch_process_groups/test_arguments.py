"""How a collective of torch's groups is asked, and what of its tensors travels."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshdist as md
from meshdist.torch_process_groups.works import tensors_of
from tests.inner import Asked, only, only_list, read_options
from tests.pool import Pool
from tests.torch_process_groups.worlds import (
    all_gather_single_of_torch,
    on_torch,
    reduce_scatter_single_of_torch,
)

X = torch.arange(6.0)


def test_options_are_read_in_both_forms() -> None:
    assert read_options(("op",)) == read_options(("op",), None) == Asked()
    assert read_options(("op",), dist.ReduceOp.MAX).op == dist.ReduceOp.MAX
    assert read_options(("op",), opts=dist.ReduceOp.MAX).op == dist.ReduceOp.MAX
    short = read_options(("root", "timeout"), 1, timedelta(seconds=3), op=None)
    assert short == Asked(timeout=timedelta(seconds=3), root=1)
    with pytest.raises(TypeError, match="2 arguments where there are 1: op"):
        read_options(("op",), dist.ReduceOp.MAX, 3)
    options = dist.ReduceOptions()
    options.reduceOp, options.rootRank, options.asyncOp = dist.ReduceOp.MIN, 1, False
    assert read_options(("root",), options) == Asked(False, None, options.reduceOp, 1)
    options.timeout = timedelta(seconds=7)
    assert read_options(("root",), options).timeout == timedelta(seconds=7)


def test_what_a_backward_needs_may_be_written(pool: Pool) -> None:
    def program() -> Any:
        weight = torch.ones(2, requires_grad=True)
        scale = torch.full((2,), 3.0)
        loss = (weight * scale).sum()
        versions = [loss._version, scale._version]
        for x in (loss, scale, weight, weight[:1]):
            dist.all_reduce(x)
        dist.all_reduce(scale, dist._make_nccl_premul_sum(2.0), async_op=True).wait()
        assert [loss._version, scale._version] == versions
        loss.backward()
        return loss.item(), weight.tolist(), weight.grad.tolist()

    assert on_torch(pool, program, 2) == [(12.0, [4.0, 2.0], [24.0, 24.0])] * 2


def test_what_is_read_does_not_change_while_it_is_written(pool: Pool) -> None:
    def program() -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        group: Any = dist.group.WORLD
        found = []
        for later in (False, True):
            for place in range(size):  # of the output that is its own, and of others'
                whole = torch.arange(6.0) + 10 * rank
                work = all_gather_single_of_torch(
                    whole, whole.view(size, -1)[place], async_op=later
                )
                if work is not None:
                    work.wait()
                summed = torch.arange(6.0) + 10 * rank
                block = summed.view(size, -1)[place]
                work = reduce_scatter_single_of_torch(block, summed, async_op=later)
                if work is not None:
                    work.wait()
                outputs = torch.arange(6.0) + 10 * rank
                group.all_gather_single_coalesced([outputs], [outputs[2 * place :][:2]]).wait()
                found.append([whole.tolist(), block.tolist(), outputs.tolist()])
        return found

    for rank, found in enumerate(on_torch(pool, program, 3)):
        for place, (whole, block, outputs) in enumerate(found):
            start = 2 * (place % 3)
            gathered = [start + i + 10 * r for r in range(3) for i in (0.0, 1.0)]
            assert whole == outputs == gathered
            assert block == [3 * (2 * rank + i) + 30 for i in (0, 1)]


def test_blocks_of_another_shape(pool: Pool) -> None:
    def program() -> Any:
        rank = dist.get_rank()
        whole, block = torch.zeros(3, 2, 2), torch.full((2, 3), float(rank))
        all_gather_single_of_torch(whole, block)
        reduce_scatter_single_of_torch(block, whole)
        return whole.flatten().tolist(), block.tolist()

    whole = [0.0] * 6 + [1.0] * 6
    assert on_torch(pool, program, 2) == [(whole, [[2.0 * rank] * 3] * 2) for rank in range(2)]


def test_all_pairs_are_checked_before_the_first_is_sent(pool: Pool) -> None:
    def program() -> list[str]:
        group: Any = dist.group.WORLD
        whole, block, told = torch.zeros(4), torch.ones(2), []
        if dist.get_rank() == 0:
            for outputs, inputs in (
                ([whole, whole], [block, torch.ones(3)]),
                ([whole, torch.ones(1).expand(4)], [block, block]),
                ([whole, whole], [block, block.int()]),
            ):
                with pytest.raises(md.ArgumentError) as found:
                    group.all_gather_single_coalesced(outputs, inputs)
                told.append(str(found.value).splitlines()[0])
            both = [block, block.bool()], [whole, whole.bool()]
            options = dist.ReduceScatterOptions()
            options.reduceOp = dist.ReduceOp.AVG
            with pytest.raises(md.DtypeError) as found:
                group.reduce_scatter_single_coalesced(*both, options)
            told.append(str(found.value).splitlines()[0])
        group.all_gather_single_coalesced([whole], [block]).wait()
        assert whole.tolist() == [1.0] * 4
        return told

    assert on_torch(pool, program, 2)[0] == [
        "all_gather_into_tensor: output_tensor does not hold one input_tensor per rank",
        "all_gather_into_tensor cannot write into output_tensor because its elements share memory",
        "all_gather_into_tensor has arguments of different dtypes",
        "reduce_scatter_tensor cannot reduce bool with AVG",
    ]


def test_what_is_given_twice_is_rejected() -> None:
    def program() -> None:
        group, x, ops = md.group.WORLD, torch.ones(2), md.ReduceOp
        for call in (
            lambda: group.allreduce([x], tensors=[x]),
            lambda: group.allreduce(tensor=x, tensors=[x]),
            lambda: group._allgather_base(torch.zeros(2), x, output=torch.ones(2)),
            lambda: group.reduce([x], 0, root=0),
            lambda: group.allreduce([x], ops.MAX, op=ops.MIN),
        ):
            with pytest.raises(TypeError, match="is given twice"):
                call()
        for missing in (
            lambda: group.allgather([[x]]),
            lambda: group.all_to_all_single(x, input_split_sizes=[2]),
        ):
            with pytest.raises(TypeError, match="is missing"):
                missing()
        with pytest.raises(TypeError, match="outpu"):
            group.all_gather_single(outpu=x, input=x)

    md.simulate(program, 1)


def test_tensors_among_arguments() -> None:
    assert next(tensors_of([1, [[X]]])) is X
    assert list(tensors_of([[], None, "text"])) == []
    assert only(X, "send") is X and only([X], "send") is X
    assert only_list([[X]], "gather") == [X] and only_list([X], "gather") == [X]
    with pytest.raises(md.ArgumentError, match="send: a list of 2 tensors, one for each device"):
        only([X, X], "send")
    with pytest.raises(md.ArgumentError, match="gather: 2 lists of tensors"):
        only_list([[X], [X]], "gather")
    with pytest.raises(md.ArgumentError, match=r"0 lists(.|\n)*pass \[tensors\]"):
        only_list([], "gather")
