"""A rank that dies on a host of its own is named by those that wait for it."""

from __future__ import annotations

import os

import pytest
import torch

import meshdist as md
from tests.pool import Pool
from tests.two_hosts import two_hosts_of


def dying() -> str:
    md.barrier()
    if md.get_rank() == 1:
        os._exit(3)
    with pytest.raises(md.BackendError) as caught:
        md.all_reduce(torch.ones(3))
    return str(caught.value)


def test_a_rank_that_dies_on_two_hosts(pool: Pool) -> None:
    told = two_hosts_of(pool).outcomes(dying, 3, backend="gloo", hosts="ABA")
    for rank in (0, 2):
        assert isinstance(told[rank], str) and "rank 1" in told[rank], told
