"""Objects between ranks: what arrives, what cannot be sent, lists that do not fit."""

from __future__ import annotations

import fractions
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from tests.pool import Failure, Pool


def samples(rank: int) -> list[Any]:
    """One of each kind: a dataclass, an instance with slots, arrays, nothing, large text."""
    return [
        None,
        md.AxisOptions(private=True),
        fractions.Fraction(rank, 7),
        np.arange(6.0).reshape(2, 3) + rank,
        torch.arange(4, dtype=torch.bfloat16).view(2, 2).t() * rank,
        torch.tensor(1 + 2j) * rank,
        {"rank": rank, "text": "x" * 100_000 * rank},
        [],
    ]


def equal(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y)
    if isinstance(x, np.ndarray):
        return x.dtype == y.dtype and np.array_equal(x, y)
    return type(x) is type(y) and x == y


def all_equal(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(map(equal, found, expected))


def every_kind() -> list[Any]:
    rank, size = md.get_rank(), md.get_world_size()
    mine = samples(rank)
    gathered = [None] * size
    assert md.all_gather_object(gathered, mine) is None
    assert all(all_equal(found, samples(r)) for r, found in enumerate(gathered))
    at_root = ["?"] * size if rank == size - 1 else []
    assert md.gather_object(mine, at_root, dst=size - 1) is None
    assert all(all_equal(found, samples(r)) for r, found in enumerate(at_root))
    told = samples(0) if rank == 0 else ["?"] * 8
    assert md.broadcast_object_list(told) is None
    assert all_equal(told, samples(0))
    given = ["?", "kept"]
    everyones = [samples(r) for r in range(size)] if rank == 0 else "ignored"
    assert md.scatter_object_list(given, everyones) is None  # type: ignore[arg-type]
    assert all_equal(given[0], mine) and given[1:] == ["kept"]
    arrived: list[Any] = ["?"] * 8
    if rank == 0:
        for peer in range(1, size):
            assert md.send_object_list(samples(peer), peer) is None
    else:
        assert md.recv_object_list(arrived, 0) == 0
        assert all_equal(arrived, mine)
    return [len(gathered), len(at_root)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_kind_of_object_by_every_collective(on_ranks, size: int) -> None:
    assert on_ranks(every_kind, size) == [[size, 0]] * (size - 1) + [[size, size]]


def large_and_unequal() -> list[int]:
    rank = md.get_rank()
    big = np.full(50_000_000 // 8, float(rank)) if rank else "small"
    found: list[Any] = [None, None]
    md.all_gather_object(found, big)
    return [len(found[0]), found[1].nbytes, int(found[1].sum())]


def test_fifty_megabytes_beside_a_few_bytes(pool: Pool) -> None:
    assert pool.run(large_and_unequal, 2) == [[5, 50_000_000, 6_250_000]] * 2


def empty_lists() -> list[Any]:
    nothing: list[Any] = []
    md.broadcast_object_list(nothing, src=0)
    if md.get_rank() == 0:
        md.send_object_list(nothing, 1)
    else:
        md.recv_object_list(nothing, 0)
    return nothing


def test_lists_may_be_empty(on_ranks) -> None:
    assert on_ranks(empty_lists, 2) == [[], []]


def on_axes() -> list[Any]:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = md.get_rank()
    row: list[Any] = [None, None]
    md.all_gather_object(row, rank, group=mesh["tp"])
    turned: list[Any] = [None] * 4
    md.all_gather_object(turned, rank, group=mesh["tp", "dp"])
    told = [rank]
    md.broadcast_object_list(told, group=mesh["dp"], group_src=1)
    return [row, turned, told]


def test_on_mesh_axes(on_ranks) -> None:
    for rank, (row, turned, told) in enumerate(on_ranks(on_axes, 4)):
        assert row == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert turned == [0, 2, 1, 3]
        assert told == [2 + rank % 2]


# -- what cannot be pickled or unpickled ----------------------------------------------------------


class Unsendable:
    """An object that pickle does not take."""

    def __reduce__(self) -> Any:
        raise OSError("no\n  pickling")


class Unwelcome:
    """An object that becomes "fine" wherever it arrives, but on rank 1, where it raises."""

    def __reduce__(self) -> Any:
        return eval, ("'fine' if __import__('meshdist').get_rank() != 1 else {}['not here']",)


def still_usable() -> bool:
    found: list[Any] = [None] * md.get_world_size()
    md.all_gather_object(found, md.get_rank())
    return found == list(range(md.get_world_size()))


def unsendable(operation: str) -> str | None:
    """Rank 1 of three gives what cannot be pickled; nobody's list may change."""
    rank = md.get_rank()
    bad: Any = Unsendable() if rank == 1 else "good"
    mine: list[Any] = ["?"] * 3
    calls = {
        "all_gather_object": lambda: md.all_gather_object(mine, bad),
        "gather_object": lambda: md.gather_object(bad, mine if rank == 0 else None),
        "broadcast_object_list": lambda: md.broadcast_object_list(
            ["a", bad, "c"] if rank == 1 else mine, 1
        ),
        "scatter_object_list": lambda: md.scatter_object_list(
            mine, ["a", bad, "c"] if rank == 1 else None, 1
        ),
        "send_object_list": lambda: (
            md.send_object_list(["a", bad, "c"], 0) if rank == 1 else md.recv_object_list(mine, 1)
        ),
    }
    text = None
    if operation != "send_object_list" or rank < 2:
        with pytest.raises(md.KindError) as caught:
            calls[operation]()
        assert isinstance(caught.value.__cause__, OSError) == (rank == 1)
        text = str(caught.value)
    assert still_usable()
    assert mine == ["?"] * 3
    return text


@pytest.mark.parametrize(
    ("operation", "entry"),
    [
        ("all_gather_object", "obj"),
        ("gather_object", "obj"),
        ("broadcast_object_list", "object_list[1]"),
        ("scatter_object_list", "scatter_object_input_list[1]"),
        ("send_object_list", "object_list[1]"),
    ],
)
def test_what_cannot_be_pickled_is_one_error_everywhere(
    on_ranks, operation: str, entry: str
) -> None:
    expected = (
        f"{operation}: an object of rank 1 cannot be pickled\n"
        "  expected: objects that pickle supports; nothing was sent\n"
        f"  found:    rank 1: {entry} of type Unsendable: OSError: no pickling\n"
        "  fix:      send plain data, or classes and functions defined at the top level of a module"
    )
    everyones = on_ranks(unsendable, 3, operation)
    assert everyones == [expected, expected, None if operation == "send_object_list" else expected]


def several_unsendable() -> str:
    found: list[Any] = [None] * 3
    with pytest.raises(TypeError) as caught:
        md.all_gather_object(found, (lambda: 0) if md.get_rank() != 1 else 1)
    return str(caught.value)


def test_all_ranks_that_cannot_pickle_are_named(on_ranks) -> None:
    for text in on_ranks(several_unsendable, 3):
        assert text.startswith("all_gather_object: an object of ranks 0, 2 cannot be pickled\n")
        assert "obj of type function: " in text


def unwelcome(operation: str) -> str | None:
    """What rank 0 sends cannot be unpickled on rank 1, the last of two."""
    rank = md.get_rank()
    bad = Unwelcome()
    mine: list[Any] = ["?", "?"]
    calls = {
        "all_gather_object": lambda: md.all_gather_object(mine, 5 if rank else bad),
        "gather_object": lambda: md.gather_object(5 if rank else bad, mine if rank else None, 1),
        "broadcast_object_list": lambda: md.broadcast_object_list(mine if rank else [7, bad], 0),
        "scatter_object_list": lambda: md.scatter_object_list(mine, None if rank else [7, bad], 0),
        "recv_object_list": lambda: (
            md.recv_object_list(mine, 0) if rank else md.send_object_list([7, bad], 1)
        ),
    }
    text = None
    if rank:
        with pytest.raises(md.BackendError) as caught:
            calls[operation]()
        assert isinstance(caught.value.__cause__, KeyError)
        text = str(caught.value)
        assert mine == ["?", "?"]
    else:
        calls[operation]()
    assert still_usable()
    return text


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        ("all_gather_object", "the object"),
        ("gather_object", "the object"),
        ("broadcast_object_list", "object 1"),
        ("scatter_object_list", "the object"),
        ("recv_object_list", "object 1"),
    ],
)
def test_what_cannot_be_unpickled_raises_where_it_arrives(
    on_ranks, operation: str, what: str
) -> None:
    assert on_ranks(unwelcome, 2, operation) == [
        None,
        f"{operation}: {what} that rank 0 sent cannot be unpickled\n"
        "  where:    rank 1, the world\n"
        "  found:    KeyError: 'not here'\n"
        "  fix:      run the same program on both ranks, with the same modules installed",
    ]


# -- lists that do not fit ------------------------------------------------------------------------


def test_of_a_longer_list_the_first_entries_are_replaced(on_ranks: Any) -> None:
    def program() -> list[Any]:
        rank = md.get_rank()
        everyones, at_root = [None, None, None, "kept"], [None, None, None, "kept"]
        md.all_gather_object(everyones, rank)
        md.gather_object(rank, at_root if rank == 0 else None, 0)
        return [everyones, at_root]

    whole, none = [0, 1, 2, "kept"], [None, None, None, "kept"]
    assert on_ranks(program, 3) == [[whole, whole], [whole, none], [whole, none]]


def other_length(operation: str) -> str | None:
    rank = md.get_rank()
    mine: list[Any] = ["?"] * (3 if rank == 0 else 2)
    calls = {
        "broadcast_object_list": lambda: md.broadcast_object_list(mine, 0),
        "send_object_list": lambda: (
            md.recv_object_list(mine) if rank else md.send_object_list(mine, 1)
        ),
    }
    text = None
    if operation != "send_object_list" or rank < 2:
        with pytest.raises(md.MismatchError) as caught:
            calls[operation]()
        text = str(caught.value)
    assert still_usable()
    assert mine == ["?"] * (3 if rank == 0 else 2)
    return text


@pytest.mark.parametrize(
    ("operation", "lengths"),
    [
        ("broadcast_object_list", "rank 0: 3 entries\n            ranks 1-2: 2 entries"),
        ("send_object_list", "rank 0 sends 3 entries\n            rank 1 receives 2"),
    ],
)
def test_lists_of_other_lengths_are_one_error_on_both_sides(
    on_ranks, operation: str, lengths: str
) -> None:
    expected = (
        f"{operation}: the ranks' lists of objects have different lengths\n"
        "  where:    the world\n"
        "  expected: as many entries on every rank as on the source; nothing was sent\n"
        f"  found:    {lengths}\n"
        "  fix:      pass [None] * n on the receivers; if they do not know n, send the list as "
        "one object: [objects]"
    )
    everyones = on_ranks(other_length, 3, operation)
    assert everyones == [expected, expected, None if operation == "send_object_list" else expected]


def rejected() -> list[str]:
    rank, wrong = md.get_rank(), 1 - md.get_rank()
    calls = [
        (md.KindError, lambda: md.all_gather_object((1, 2), 1)),  # type: ignore[arg-type]
        (md.ArgumentError, lambda: md.all_gather_object([None], 1)),
        (md.ArgumentError, lambda: md.gather_object(1, [None] * 2, dst=wrong)),
        (md.ArgumentError, lambda: md.gather_object(1, None, dst=rank)),
        (md.ArgumentError, lambda: md.gather_object(1, [None], dst=rank)),
        (md.ArgumentError, lambda: md.gather_object(1, None, dst=0, group_dst=0)),
        (md.KindError, lambda: md.broadcast_object_list("ab", src=0)),  # type: ignore[arg-type]
        (md.KindError, lambda: md.broadcast_object_list((1,), src=wrong)),  # type: ignore[arg-type]
        (md.ArgumentError, lambda: md.scatter_object_list([], [1, 2], src=rank)),
        (md.ArgumentError, lambda: md.scatter_object_list([None], [1], src=rank)),
        (md.ArgumentError, lambda: md.scatter_object_list([None], None, src=rank)),
        (md.ArgumentError, lambda: md.send_object_list([1])),
        (md.ArgumentError, lambda: md.send_object_list([1], rank)),
        (md.ArgumentError, lambda: md.recv_object_list([1], rank)),
        (md.KindError, lambda: md.recv_object_list(None, wrong)),  # type: ignore[arg-type]
        (md.NotInGroupError, lambda: md.broadcast_object_list([1], src=2)),
        (md.KindError, lambda: md.broadcast_object_list([1], device="a")),  # type: ignore[arg-type]
        (md.BackendError, lambda: md.broadcast_object_list([1], device=torch.device("meta"))),
    ]
    found = []
    for kind, call in calls:
        with pytest.raises(kind) as caught:
            call()
        found.append(str(caught.value).splitlines()[0])
    assert still_usable()
    return found


def test_wrong_arguments_are_rejected_before_anything_is_sent(pool: Pool) -> None:
    expected = [
        "all_gather_object: object_list must be a list",
        "all_gather_object: object_list has 1 entry",
        "gather_object: object_gather_list is given on a rank that is not the destination",
        "gather_object needs object_gather_list on this rank, the destination",
        "gather_object: object_gather_list has 1 entry",
        "gather_object got both dst and group_dst",
        "broadcast_object_list: object_list must be a list",
        "broadcast_object_list: object_list must be a list",
        "scatter_object_list: scatter_object_output_list has 0 entries",
        "scatter_object_list: scatter_object_input_list has 1 entry",
        "scatter_object_list needs scatter_object_input_list on this rank, the source",
        "send_object_list needs dst or group_dst",
        "send_object_list between a rank and itself would never return",
        "recv_object_list between a rank and itself would never return",
        "recv_object_list: object_list must be a list",
        "broadcast_object_list: src=2 is not a member of the world",
        "broadcast_object_list: 'a' is not a device",
        "the world has no backend for meta tensors",
    ]
    assert pool.run(rejected, 2) == [expected, expected]


def test_another_collective_in_its_place_is_told_by_the_public_name_and_the_callers_line(
    pool: Pool,
) -> None:
    def program() -> None:
        if md.get_rank() == 0:
            md.broadcast_object_list([1, 2], src=0)
        else:
            md.scatter_object_list([None], src=0)

    for outcome in pool.outcomes(program, 2):
        assert isinstance(outcome, Failure)
        assert isinstance(outcome.exception, md.MismatchError)
        text = str(outcome.exception)
        assert "rank 0: broadcast_object_list(" in text
        assert "rank 1: scatter_object_list(" in text
        assert text.count("test_objects.py") >= 2


@pytest.mark.gpu
def test_objects_over_nccl_through_the_current_device() -> None:
    def program() -> list[Any]:
        group = md.new_group(backend="nccl")
        found: list[Any] = [None]
        md.all_gather_object(found, {"x": torch.ones(2, device="cuda:0")}, group=group)
        told = [np.arange(3)]
        md.broadcast_object_list(told, src=0, group=group)
        assert group.first_device_type() == "cuda"
        return [str(found[0]["x"].device), found[0]["x"].tolist(), told[0].tolist()]

    assert md.spawn(program, nprocs=1) == [["cuda:0", [1.0, 1.0], [0, 1, 2]]]
