"""Calls on groups that span hosts: compared by a round at every 256th call, and at level DETAIL."""

from __future__ import annotations

import pytest
import torch

import meshdist as md
import meshdist.distributed as dist
from tests.pool import Pool


def other_op() -> str:
    """One rank's call 100 reduces otherwise: by the 256th call all raise."""
    group, x = md.new_group(), torch.ones(4)
    with pytest.raises(md.AgreementError) as caught:
        for number in range(300):
            op = md.ReduceOp.MAX if number == 99 and md.get_rank() == 1 else md.ReduceOp.SUM
            md.all_reduce(x, op, group=group)
    with pytest.raises(md.AgreementError):
        md.barrier(group)
    return str(caught.value)


def test_what_would_give_wrong_numbers_is_found_by_the_256th_call(pool: Pool) -> None:
    texts = pool.run(other_op, 2, backend="gloo", hosts="AB")
    assert all("disagree" in text and "256" in text for text in texts), texts[0]


def equal() -> float:
    x = torch.ones(4)
    for _ in range(600):
        md.all_reduce(x, md.ReduceOp.AVG)
        dist.all_gather_object([None] * md.get_world_size(), 1)
    return float(x.sum())


def test_equal_calls_raise_no_alarm(pool: Pool) -> None:
    assert pool.run(equal, 3, backend="gloo", hosts="ABA") == [4.0] * 3
