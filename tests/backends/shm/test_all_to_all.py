"""All-to-alls of parts of any sizes through shared memory: values, paths, rejections, failures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.backends.shm.communicator import ShmBackend
from meshdist.errors import CollectiveTimeoutError, MeshdistError, MismatchError, ShapeError
from tests.backends.fast_paths import opened, seconds_until_interrupted
from tests.load import is_within
from tests.pool import Pool

pytestmark = pytest.mark.skipif(not ShmBackend().is_available(), reason="no native core here")

LARGE = 1_000_000
Amounts = list[list[int]]
"""How many numbers each member gives each."""


def drawn(size: int, seed: int) -> Amounts:
    """Of each pair a size from nothing to several slots; mostly nothing where seeds are odd."""
    chosen = random.Random(seed)
    counts = [0, 1, 15, 16, 17, 1000, 20_000, 70_001, 300_000]
    weights = [8 if seed % 2 else 1, *[1] * 8]
    return [chosen.choices(counts, weights, k=size) for _ in range(size)]


def held(rank: int, other: int, count: int) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.int32) * 7 + 1000 * rank + other) % 10_007


def exchanged(
    amounts: Amounts, *, is_list: bool = False, async_op: bool = False, group: Any = None
) -> bool:
    """Whether one exchange gives this rank what the others hold for it."""
    rank, size = md.get_rank(), md.get_world_size()
    gives, takes = amounts[rank], [row[rank] for row in amounts]
    inputs = [held(rank, other, gives[other]) for other in range(size)]
    whole = torch.full((sum(takes),), -1, dtype=torch.int32)
    how = {"async_op": async_op, "group": group}
    if is_list:
        work = md.all_to_all(list(whole.split(takes)), inputs, **how)
    else:
        work = md.all_to_all_single(whole, torch.cat(inputs), takes, gives, **how)
    if work is not None:
        work.wait()
    expected = [held(other, rank, takes[other]) for other in range(size)]
    return torch.equal(whole, torch.cat(expected))


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_random_amounts_arrive(size: int, pool: Pool) -> None:
    def program() -> list[bool]:
        right = []
        for seed in range(12):
            how = {"is_list": seed % 3 == 0, "async_op": seed % 4 == 1}
            right.append(exchanged(drawn(size, seed), **how))
            if seed % 2:  # what follows uses the same slots and lines
                x = torch.full((500 * (seed % 5),), 1.0)
                md.all_reduce(x)
                right.append(bool((x == size).all()))
        return right

    for right in pool.run(program, size, backend="shm"):
        assert all(right), right


def test_the_first_large_parts_of_a_group_let_its_slots_grow(pool: Pool) -> None:
    def program() -> list[bool]:
        group = md.new_group()
        counts = (1, 100, LARGE, 3)
        return [exchanged([[0, n, 0], [0] * 3, [0] * 3], group=group) for n in counts]

    assert pool.run(program, 3, backend="shm") == [[True] * 4] * 3


def test_members_with_nothing_left_close_the_group_while_others_exchange(pool: Pool) -> None:
    def program() -> bool:
        rank = md.get_rank()
        amounts = [[0] * 4, [0, 0, 3 * LARGE, 0], [0, 2 * LARGE, 0, 0], [0] * 4]
        group = md.new_group()
        right = all(exchanged(amounts, group=group, is_list=bool(k % 2)) for k in range(4))
        if rank in (0, 3):
            group.close()
        return right

    assert pool.run(program, 4, backend="shm") == [True] * 4


PATHS = [
    ("sizes", lambda x, y: md.all_to_all_single(y, x, [2, 1], [2, 1])),
    ("a tuple of sizes", lambda x, y: md.all_to_all_single(y, x, (2, 1), (2, 1))),
    ("sizes on one side", lambda x, y: md.all_to_all_single(y[:2], x[:2], [1, 1], None)),
    ("no sizes, as a list", lambda x, y: md.all_to_all_single(y[:2], x[:2], [], [])),
    ("lists", lambda x, y: md.all_to_all(list(y.split([2, 1])), list(x.split([2, 1])))),
    (
        "rows",
        lambda x, y: md.all_to_all_single(
            y[:, None].repeat(1, 2), x[:, None].repeat(1, 2), [2, 1], [2, 1]
        ),
    ),
    ("nothing", lambda x, y: md.all_to_all_single(y[:0], x[:0], [0, 0], [0, 0])),
]
"""Of two members, each as if it gave its own part to itself and one number to the other."""


def taken_by_the_fast_path() -> list[str]:
    group, spy = opened()
    # Member 0 keeps two numbers, member 1 gives one, then keeps two.
    x = torch.arange(3.0) + 10 * group.rank()
    y = torch.zeros(3)
    missed = []
    for name, call in PATHS if group.rank() == 0 else _turned():
        spy.answers.clear()
        call(x, y)
        if spy.answers != [True]:
            missed.append(name)
    return missed


def _turned() -> list[tuple[str, Callable[[torch.Tensor, torch.Tensor], Any]]]:
    turned = dict(PATHS)
    turned["sizes"] = lambda x, y: md.all_to_all_single(y, x, [1, 2], [1, 2])
    turned["a tuple of sizes"] = lambda x, y: md.all_to_all_single(y, x, (1, 2), (1, 2))
    turned["lists"] = lambda x, y: md.all_to_all(list(y.split([1, 2])), list(x.split([1, 2])))
    turned["rows"] = lambda x, y: md.all_to_all_single(
        y[:, None].repeat(1, 2), x[:, None].repeat(1, 2), [1, 2], [1, 2]
    )
    return list(turned.items())


def test_parts_of_several_sizes_take_the_fast_path(pool: Pool) -> None:
    assert pool.run(taken_by_the_fast_path, 2, backend="shm") == [[]] * 2


def left_alone() -> tuple[list[str], int]:
    group, spy = opened()
    me = group.rank()
    x, y = torch.ones(3), torch.zeros(3)
    split = list(x.split([2, 1]))
    cases = {
        "sizes of too few rows": lambda: spy.all_to_all_single(y, x, [1, 1], [2, 1]),
        "sizes of too many rows": lambda: spy.all_to_all_single(y, x, [2, 2], [2, 1]),
        "a negative size": lambda: spy.all_to_all_single(y, x, [4, -1], [4, -1]),
        "a huge size": lambda: spy.all_to_all_single(y, x, [1 << 70, 1], [2, 1]),
        "a bool": lambda: spy.all_to_all_single(y, x, [2, True], [2, True]),
        "a tensor of sizes": lambda: spy.all_to_all_single(y, x, torch.tensor([2, 1]), [2, 1]),
        "too many sizes": lambda: spy.all_to_all_single(y, x, [1, 1, 1], [1, 1, 1]),
        "sizes of what has no dim": lambda: spy.all_to_all_single(
            torch.tensor(1.0), torch.tensor(1.0), [1, 0], [1, 0]
        ),
        "another part for itself": lambda: spy.all_to_all_single(
            y, x, *([2, 1], [1, 2]) if me == 0 else ([1, 2], [2, 1])
        ),
        "rows of two sizes": lambda: spy.all_to_all_single(
            torch.zeros(3, 1), torch.zeros(3, 2), [2, 1], [2, 1]
        ),
        "no equal parts": lambda: spy.all_to_all_single(y, x, None, [2, 1]),
        "overlapping": lambda: spy.all_to_all_single(x, x, [2, 1], [2, 1]),
        "lists that overlap": lambda: spy.all_to_all(split, list(x.split([2, 1]))),
        "lists of two dtypes": lambda: spy.all_to_all([y[:2].double(), y[2:].double()], split),
        "a short list": lambda: spy.all_to_all([y], [x]),
    }
    before = group.open_device_group("cpu").recorder.num_notes
    taken = [name for name, call in cases.items() if call() is not False]
    return taken, group.open_device_group("cpu").recorder.num_notes - before


def test_the_fast_path_leaves_alone_what_is_not_plain(pool: Pool) -> None:
    assert pool.run(left_alone, 2, backend="shm") == [([], 0)] * 2


@pytest.mark.parametrize("is_fast", [True, False])
def test_what_a_member_takes_otherwise_than_it_is_sent_raises_on_all(
    is_fast: bool, pool: Pool
) -> None:
    def program() -> str:
        group, _ = opened()
        if not is_fast and group.rank() == 1:
            group.fast_path = None
        sizes = [[0, 2, 0], [2, 0, 1], [0, 2, 0]][group.rank()]
        x = torch.ones(sum(sizes))
        with pytest.raises(MismatchError) as caught:
            md.all_to_all_single(torch.zeros_like(x), x, sizes, sizes)
        return str(caught.value)

    for text in pool.run(program, 3, backend="shm"):
        assert "sending [2, 0, 1], receiving [2, 0, 1] elements" in text
        assert "sending [0, 2, 0], receiving [0, 2, 0] elements" in text
        assert "the same sizes on both sides" in text


def test_another_part_for_itself_is_rejected_before_anything_is_sent(pool: Pool) -> None:
    def program() -> str:
        opened()
        x = torch.ones(3)
        with pytest.raises(ShapeError) as caught:
            md.all_to_all([x[:2].clone(), x[2:].clone()], [x[2:], x[:2]])
        md.barrier()
        return str(caught.value)

    assert "my output and my input for myself" in pool.run(program, 2, backend="shm")[0]


def test_a_member_that_does_not_come_is_named(pool: Pool) -> None:
    def program() -> str:
        group = md.new_group(timeout=timedelta(seconds=0.5))
        md.all_reduce(torch.ones(1), group=group)
        rank, text = group.rank(), ""
        if rank != 2:
            sizes = [0, 1 - rank, rank]
            x = torch.ones(sum(sizes))
            with pytest.raises(MeshdistError) as caught:
                md.all_to_all_single(torch.zeros_like(x), x, sizes, sizes, group=group)
            assert isinstance(caught.value, CollectiveTimeoutError) or rank
            text = str(caught.value)
        md.barrier()
        return text

    text = pool.run(program, 3, backend="shm")[0]
    assert "all_to_all_single on " in text
    assert "rank 2" in text


def test_an_interrupt_ends_the_wait(pool: Pool) -> None:
    def program() -> float:
        group, _ = opened()
        if group.rank() == 0:
            x, y = torch.ones(3), torch.zeros(3)
            return seconds_until_interrupted(lambda: md.all_to_all_single(y, x, [2, 1], [2, 1]))
        time.sleep(1.0)
        return 0.0

    assert is_within(pool.run(program, 2, backend="shm")[0], 5.0)
