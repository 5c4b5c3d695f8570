"""What every collective rejects before anything is sent, and what members notice about each other.

A rejection leaves the group as it was: each is followed by an all_reduce of the same group.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

import meshdist as md
from tests.operations.cases import BACKENDS
from tests.pool import Pool

F, I = torch.float32, torch.int64  # noqa: E741
OUTSIDE = md.GroupMember.NON_GROUP_MEMBER


def ones(*shape: int, dtype: torch.dtype = F) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def on_root(value: Any, elsewhere: Any = None) -> Any:
    """``value`` on rank 0: what only one rank does wrong, the other must do wrong as well."""
    return value if md.get_rank() == 0 else elsewhere


Refusal = tuple[str, type[Exception], Callable[[], Any]]


def about_roots(
    operation: str, role: str, call: Callable[..., Any], is_required: bool
) -> list[Refusal]:
    missing: list[Refusal] = [(f"{operation} without {role}", ValueError, call)]
    return [
        *(missing if is_required else []),
        (f"{operation} with both", ValueError, lambda: call(**{role: 0, f"group_{role}": 0})),
        (f"{operation} outside", md.NotInGroupError, lambda: call(**{role: 5})),
        (
            f"{operation} outside the group",
            md.NotInGroupError,
            lambda: call(**{f"group_{role}": 2}),
        ),
        (f"{operation} below zero", md.NotInGroupError, lambda: call(**{f"group_{role}": -1})),
        (f"{operation} with a word", TypeError, lambda: call(**{f"group_{role}": "0"})),
        (f"{operation} with a float", TypeError, lambda: call(**{role: 0.0})),
        (f"{operation} with a truth", TypeError, lambda: call(**{role: False})),
    ]


def about_ops(operation: str, call: Callable[[Any, torch.dtype], Any]) -> list[Refusal]:
    return [
        (f"{operation} with a word", TypeError, lambda: call("sum", F)),
        (f"{operation} with a class", TypeError, lambda: call(torch.distributed.ReduceOp, F)),
        (f"{operation} of bits of floats", md.DtypeError, lambda: call(md.ReduceOp.BXOR, F)),
        (f"{operation} AVG of bool", md.DtypeError, lambda: call(md.ReduceOp.AVG, torch.bool)),
        (
            f"{operation} MAX of complex",
            md.DtypeError,
            lambda: call(md.ReduceOp.MAX, torch.complex64),
        ),
    ]


REFUSALS: list[Refusal] = [
    # all_reduce and its like
    ("all_reduce of a list", TypeError, lambda: md.all_reduce([1.0])),
    *about_ops("all_reduce", lambda op, dtype: md.all_reduce(ones(2, dtype=dtype), op)),
    (
        "all_reduce_coalesced of a number",
        TypeError,
        lambda: md.all_reduce_coalesced(2),
    ),
    (
        "all_reduce_coalesced of numbers",
        TypeError,
        lambda: md.all_reduce_coalesced([1.0, 2.0]),
    ),
    *about_ops(
        "all_reduce_coalesced",
        lambda op, dtype: md.all_reduce_coalesced([ones(2, dtype=dtype)], op),
    ),
    *about_roots("reduce", "dst", lambda **root: md.reduce(ones(2), **root), True),
    *about_ops("reduce", lambda op, dtype: md.reduce(ones(2, dtype=dtype), 0, op)),
    *about_roots("broadcast", "src", lambda **root: md.broadcast(ones(2), **root), True),
    # gathering
    (
        "gather without a list on the root, with one elsewhere",
        ValueError,
        lambda: md.gather(ones(2), on_root(None, [ones(2)] * 2), dst=0),
    ),
    (
        "scatter without a list on the root, with one elsewhere",
        ValueError,
        lambda: md.scatter(ones(2), on_root(None, [ones(2)] * 2), src=0),
    ),
    ("all_gather of one too few", ValueError, lambda: md.all_gather([ones(2)], ones(2))),
    ("all_gather of one too many", ValueError, lambda: md.all_gather([ones(2)] * 3, ones(2))),
    ("all_gather into a tensor", TypeError, lambda: md.all_gather(ones(2, 2), ones(2))),
    (
        "all_gather of two dtypes",
        ValueError,
        lambda: md.all_gather([ones(2), ones(2, dtype=I)], ones(2)),
    ),
    (
        "all_gather into an own part of another size",
        ValueError,
        lambda: md.all_gather([ones(3), ones(3)], ones(2)),
    ),
    (
        "all_gather_into_tensor of another size",
        ValueError,
        lambda: md.all_gather_into_tensor(ones(5), ones(2)),
    ),
    (
        "all_gather_into_tensor of two dtypes",
        ValueError,
        lambda: md.all_gather_into_tensor(ones(4, dtype=I), ones(2)),
    ),
    (
        "all_gather_coalesced of one list too few",
        ValueError,
        lambda: md.all_gather_coalesced([[ones(2)]], [ones(2)]),
    ),
    (
        "all_gather_coalesced of lists of another length",
        ValueError,
        lambda: md.all_gather_coalesced([[ones(2)], [ones(2)]], [ones(2), ones(2)]),
    ),
    *about_roots("gather", "dst", lambda **root: md.gather(ones(2), **root), False),
    (
        "gather into a list of another length, with one elsewhere",
        ValueError,
        lambda: md.gather(ones(2), on_root([ones(2)], [ones(2)] * 2), dst=0),
    ),
    (
        "gather of two sizes, with a list elsewhere",
        ValueError,
        lambda: md.gather(ones(2), [ones(3), ones(3)], dst=0),
    ),
    (
        "gather of two dtypes, with a list elsewhere",
        ValueError,
        lambda: md.gather(ones(2), [ones(2), ones(2, dtype=I)], dst=0),
    ),
    # scattering
    *about_roots("scatter", "src", lambda **root: md.scatter(ones(2), **root), False),
    (
        "scatter of a list of another length, with one elsewhere",
        ValueError,
        lambda: md.scatter(ones(2), on_root([ones(2)], [ones(2)] * 2), src=0),
    ),
    (
        "scatter of two sizes, with a list elsewhere",
        ValueError,
        lambda: md.scatter(ones(2), [ones(3), ones(3)], src=0),
    ),
    (
        "scatter of two dtypes, with a list elsewhere",
        ValueError,
        lambda: md.scatter(ones(2), [ones(2), ones(2, dtype=I)], src=0),
    ),
    ("reduce_scatter of one too few", ValueError, lambda: md.reduce_scatter(ones(2), [ones(2)])),
    ("reduce_scatter of a tensor", TypeError, lambda: md.reduce_scatter(ones(2), ones(2, 2))),
    (
        "reduce_scatter of two dtypes",
        ValueError,
        lambda: md.reduce_scatter(ones(2), [ones(2, dtype=I)] * 2),
    ),
    (
        "reduce_scatter into another size",
        ValueError,
        lambda: md.reduce_scatter(ones(3), [ones(2), ones(2)]),
    ),
    *about_ops(
        "reduce_scatter",
        lambda op, dtype: md.reduce_scatter(ones(2, dtype=dtype), [ones(2, dtype=dtype)] * 2, op),
    ),
    (
        "reduce_scatter_tensor of another size",
        ValueError,
        lambda: md.reduce_scatter_tensor(ones(2), ones(5)),
    ),
    (
        "reduce_scatter_tensor of two dtypes",
        ValueError,
        lambda: md.reduce_scatter_tensor(ones(2), ones(4, dtype=I)),
    ),
    *about_ops(
        "reduce_scatter_tensor",
        lambda op, dtype: md.reduce_scatter_tensor(ones(2, dtype=dtype), ones(4, dtype=dtype), op),
    ),
    # all to all
    ("all_to_all of one too few", ValueError, lambda: md.all_to_all([ones(2)] * 2, [ones(2)])),
    ("all_to_all into one too few", ValueError, lambda: md.all_to_all([ones(2)], [ones(2)] * 2)),
    (
        "all_to_all of two dtypes",
        ValueError,
        lambda: md.all_to_all([ones(2), ones(2)], [ones(2), ones(2, dtype=I)]),
    ),
    (
        "all_to_all with an own part of two sizes",
        ValueError,
        lambda: md.all_to_all([ones(3), ones(3)], [ones(2), ones(2)]),
    ),
    (
        "all_to_all_single that does not divide",
        ValueError,
        lambda: md.all_to_all_single(ones(3), ones(3)),
    ),
    (
        "all_to_all_single of two sizes",
        ValueError,
        lambda: md.all_to_all_single(ones(4), ones(2)),
    ),
    (
        "all_to_all_single of two dtypes",
        ValueError,
        lambda: md.all_to_all_single(ones(4), ones(4, dtype=I)),
    ),
    (
        "all_to_all_single with splits of another sum",
        ValueError,
        lambda: md.all_to_all_single(ones(4), ones(4), [2, 2], [2, 3]),
    ),
    (
        "all_to_all_single into splits of another sum",
        ValueError,
        lambda: md.all_to_all_single(ones(4), ones(4), [1, 2], [2, 2]),
    ),
    (
        "all_to_all_single with one split too few",
        ValueError,
        lambda: md.all_to_all_single(ones(4), ones(4), [4], [4]),
    ),
    *(
        (
            f"all_to_all_single with splits of {type(splits).__name__} {i}",
            TypeError,
            lambda splits=splits: md.all_to_all_single(ones(2), ones(2), splits),
        )
        for i, splits in enumerate(
            (2, "11", [1.0, 1.0], [True, True], {1: 0, 2: 0}, [[1], [1]], iter([1, 1]))
        )
    ),
    (
        "all_to_all_single with a negative split",
        ValueError,
        lambda: md.all_to_all_single(ones(4), ones(4), [2, 2], [5, -1]),
    ),
    (
        "all_to_all_single of a scalar",
        ValueError,
        lambda: md.all_to_all_single(ones(), ones()),
    ),
    # messages
    *about_roots("send", "dst", lambda **peer: md.send(ones(2), **peer), True),
    *about_roots("isend", "dst", lambda **peer: md.isend(ones(2), **peer), True),
    *about_roots("recv", "src", lambda **peer: md.recv(ones(2), **peer), False),
    *about_roots("irecv", "src", lambda **peer: md.irecv(ones(2), **peer), False),
    ("send to oneself", ValueError, lambda: md.send(ones(2), md.get_rank())),
    ("recv from oneself", ValueError, lambda: md.recv(ones(2), md.get_rank())),
    ("send with a tag below zero", ValueError, lambda: md.send(ones(2), 0, tag=-1)),
    ("isend with a tag that is no number", TypeError, lambda: md.isend(ones(2), 0, tag="a")),
    ("P2POp of another function", ValueError, lambda: md.P2POp(md.broadcast, ones(2), 0)),
    ("P2POp of a blocking function", ValueError, lambda: md.P2POp(md.send, ones(2), 0)),
    ("batch_isend_irecv of nothing", ValueError, lambda: md.batch_isend_irecv([])),
    ("batch_isend_irecv of numbers", (TypeError, ValueError), lambda: md.batch_isend_irecv([1])),
]

OF_OUTSIDERS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: md.all_reduce(ones(2), group=OUTSIDE),
    "all_reduce_coalesced": lambda: md.all_reduce_coalesced([ones(2)], group=OUTSIDE),
    "reduce": lambda: md.reduce(ones(2), 0, group=OUTSIDE),
    "broadcast": lambda: md.broadcast(ones(2), 0, group=OUTSIDE),
    "all_gather": lambda: md.all_gather([ones(2)] * 2, ones(2), group=OUTSIDE),
    "all_gather_into_tensor": lambda: md.all_gather_into_tensor(ones(4), ones(2), group=OUTSIDE),
    "all_gather_coalesced": lambda: md.all_gather_coalesced(
        [[ones(2)]] * 2, [ones(2)], group=OUTSIDE
    ),
    "gather": lambda: md.gather(ones(2), None, 0, group=OUTSIDE),
    "scatter": lambda: md.scatter(ones(2), None, 0, group=OUTSIDE),
    "reduce_scatter": lambda: md.reduce_scatter(ones(2), [ones(2)] * 2, group=OUTSIDE),
    "reduce_scatter_tensor": lambda: md.reduce_scatter_tensor(ones(2), ones(4), group=OUTSIDE),
    "all_to_all": lambda: md.all_to_all([ones(2)] * 2, [ones(2)] * 2, group=OUTSIDE),
    "all_to_all_single": lambda: md.all_to_all_single(ones(4), ones(4), group=OUTSIDE),
    "barrier": lambda: md.barrier(OUTSIDE),
    "monitored_barrier": lambda: md.monitored_barrier(OUTSIDE),
    "send": lambda: md.send(ones(2), 0, group=OUTSIDE),
    "recv": lambda: md.recv(ones(2), 0, group=OUTSIDE),
    "isend": lambda: md.isend(ones(2), 0, group=OUTSIDE),
    "irecv": lambda: md.irecv(ones(2), 0, group=OUTSIDE),
    "all_gather_object": lambda: md.all_gather_object([None] * 2, 1, group=OUTSIDE),
    "gather_object": lambda: md.gather_object(1, None, 0, group=OUTSIDE),
    "broadcast_object_list": lambda: md.broadcast_object_list([1], 0, group=OUTSIDE),
    "scatter_object_list": lambda: md.scatter_object_list([None], None, 0, group=OUTSIDE),
    "send_object_list": lambda: md.send_object_list([1], 0, group=OUTSIDE),
    "recv_object_list": lambda: md.recv_object_list([None], 0, group=OUTSIDE),
}
REFUSALS += [
    (f"{operation} of an outsider", md.NotInGroupError, call)
    for operation, call in OF_OUTSIDERS.items()
]


def is_named(name: str, text: str) -> bool:
    """Whether a rejection tells which collective it is about, or what it is about is no
    collective."""
    return any(word in text for word in (name.split()[0], "is not a reduction", "tag"))


def rejected_one_after_the_other(cases: list[Refusal]) -> list[str]:
    """Make each call, and an all_reduce behind it; return what was wrong."""
    wrong = []
    for name, kind, call in cases:
        try:
            result = call()
        except md.MeshdistError as error:
            if not isinstance(error, kind):
                wrong.append(f"{name}: {error!r}")
            elif kind is not md.NotInGroupError and not is_named(name, str(error)):
                wrong.append(f"{name}: the text does not name it: {error}")
        except Exception as error:
            wrong.append(f"{name}: a foreign {error!r}")
        else:
            wrong.append(f"{name}: returned {result!r}")
        x = ones(1)
        md.all_reduce(x)
        if x.item() != md.get_world_size():
            wrong.append(f"{name}: the next all_reduce gave {x.item()}")
    return wrong


@pytest.mark.parametrize("case", REFUSALS, ids=[name for name, _, _ in REFUSALS])
def test_rejected_before_anything_is_sent(case: Refusal) -> None:
    assert md.simulate(rejected_one_after_the_other, 2, args=([case],)) == [[], []]


def test_rejected_before_anything_is_sent_by_processes(pool: Pool) -> None:
    assert pool.run(rejected_one_after_the_other, 2, REFUSALS) == [[], []]


# -- what members notice about each other ---------------------------------------------------------

DISAGREEMENTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sizes": (lambda: md.all_reduce(ones(6)), lambda: md.all_reduce(ones(4))),
    "dtypes": (lambda: md.all_reduce(ones(4)), lambda: md.all_reduce(ones(4, dtype=I))),
    "ops": (
        lambda: md.all_reduce(ones(4)),
        lambda: md.all_reduce(ones(4), op=md.ReduceOp.MAX),
    ),
    "operations": (lambda: md.all_reduce(ones(4)), lambda: md.broadcast(ones(4), 0)),
    "roots": (lambda: md.broadcast(ones(4), 0), lambda: md.broadcast(ones(4), 1)),
    "roots of reduce": (lambda: md.reduce(ones(4), 0), lambda: md.reduce(ones(4), 1)),
    "sizes of gather": (
        lambda: md.gather(ones(4), [ones(4), ones(4)], 0),
        lambda: md.gather(ones(3), None, 0),
    ),
    "sizes of scatter": (
        lambda: md.scatter(ones(4), [ones(4), ones(4)], 0),
        lambda: md.scatter(ones(3), None, 0),
    ),
    "sizes of all_gather": (
        lambda: md.all_gather([ones(4), ones(4)], ones(4)),
        lambda: md.all_gather([ones(4), ones(3)], ones(3)),
    ),
    "sizes of reduce_scatter": (
        lambda: md.reduce_scatter(ones(4), [ones(4), ones(4)]),
        lambda: md.reduce_scatter(ones(3), [ones(4), ones(3)]),
    ),
    "splits": (
        lambda: md.all_to_all_single(ones(4), ones(4), [2, 2], [2, 2]),
        lambda: md.all_to_all_single(ones(4), ones(4), [1, 3], [1, 3]),
    ),
    "sizes of all_to_all": (
        lambda: md.all_to_all([ones(1), ones(2)], [ones(1), ones(5)]),
        lambda: md.all_to_all([ones(4), ones(1)], [ones(2), ones(1)]),
    ),
    "a barrier": (lambda: md.barrier(), lambda: md.all_reduce(ones(4))),
    "lengths of coalesced lists": (
        lambda: md.all_reduce_coalesced([ones(2), ones(2)]),
        lambda: md.all_reduce_coalesced([ones(2)]),
    ),
}


def disagreeing(name: str, backend: str) -> str:
    call = DISAGREEMENTS[name][md.get_rank()]
    if backend == "gloo across hosts" or backend.endswith(
        "two hosts"
    ):  # across hosts calls are compared at this level alone
        md.set_debug_level(md.DebugLevel.DETAIL)
    try:
        with pytest.raises(md.MismatchError) as caught:
            call()
    finally:
        md.set_debug_level(md.DebugLevel.OFF)
    return str(caught.value)


@pytest.mark.parametrize("name", DISAGREEMENTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_members_that_call_different_things_all_raise(backend: str, name: str, pool: Pool) -> None:
    texts = BACKENDS[backend](pool, disagreeing, 2, name, backend)
    for text in texts:
        assert "rank 0" in text and "rank 1" in text, text


def sizes_of_a_message() -> str:
    group = md.new_group()
    told = ""
    if md.get_rank() == 0:
        with suppress(md.MismatchError):  # where the receiver came first
            md.isend(ones(3), 1, group)
    else:
        with pytest.raises(md.MeshdistError) as caught:
            md.recv(ones(2), 0, group)
        told = str(caught.value)
    md.barrier()  # no rank leaves while it may be asked
    return told


@pytest.mark.parametrize(
    "backend", [backend for backend in BACKENDS if backend != "gloo across hosts"]
)
def test_a_receiver_notices_a_message_of_another_size(backend: str, pool: Pool) -> None:
    text = BACKENDS[backend](pool, sizes_of_a_message, 2)[1]
    assert "(3,)" in text and "(2,)" in text
