"""The table of capabilities, compared with what really runs."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import meshdist as md
from meshdist.backends import composed_collectives
from meshdist.backends.capabilities import (
    DTYPE_GROUPS,
    OPS,
    available_backends,
    capabilities,
    dtypes_text,
    overview_grid,
    public_support,
    table_grid,
)
from meshdist.backends.registry import BackendType, backend_names, find_backend
from meshdist.dtypes import DTYPES
from meshdist.operation_table import OPERATIONS
from tests.pool import Pool

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def counted_builds() -> Iterator[list[str]]:
    """The names of the functions of ``composed_collectives`` that carry out a collective, as they
    are called."""
    called: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        return count

    backends = [
        module for name, module in sys.modules.items() if name.startswith("meshdist.backends.")
    ]
    with ExitStack() as stack:
        table = composed_collectives.COMPOSED.values()
        for name, function in inspect.getmembers(composed_collectives, inspect.isfunction):
            if function.__module__ != composed_collectives.__name__ or function in table:
                continue
            if inspect.signature(function).return_annotation == "Request":
                for module in backends:
                    if vars(module).get(name) is function:
                        stack.enter_context(patch.object(module, name, counting(name, function)))
        builds = {
            name: counting(name, build) for name, build in composed_collectives.COMPOSED.items()
        }
        stack.enter_context(patch.dict(composed_collectives.COMPOSED, builds))
        yield called


def call(operation: str, dtype: torch.dtype, op: Any) -> None:
    """One call of ``operation`` on a group of two."""
    me = md.get_rank()

    def some(count: int = 2) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def pair() -> list[torch.Tensor]:
        return [some(), some()]

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: md.all_reduce(some(), op),
        "all_reduce_coalesced": lambda: md.all_reduce_coalesced(pair(), op),
        "reduce": lambda: md.reduce(some(), 1, op),
        "reduce_scatter_tensor": lambda: md.reduce_scatter_tensor(some(), some(4), op),
        "reduce_scatter_single": lambda: md.reduce_scatter_single(some(), some(4), op),
        "reduce_scatter": lambda: md.reduce_scatter(some(), pair(), op),
        "broadcast": lambda: md.broadcast(some(), 1),
        "all_gather_into_tensor": lambda: md.all_gather_into_tensor(some(4), some()),
        "all_gather_single": lambda: md.all_gather_single(some(4), some()),
        "all_gather": lambda: md.all_gather(pair(), some()),
        "gather": lambda: md.gather(some(), pair() if me == 1 else None, 1),
        "scatter": lambda: md.scatter(some(), pair() if me == 1 else None, 1),
        "all_to_all": lambda: md.all_to_all(pair(), pair()),
        "all_to_all_single": lambda: md.all_to_all_single(some(), some()),
        "barrier": lambda: md.barrier(),
        "send": lambda: md.send(some(), 1) if me == 0 else md.recv(some(), 0),
        "recv": lambda: md.recv(some(), 1) if me == 0 else md.send(some(), 0),
        "isend": lambda: (md.isend if me == 0 else md.irecv)(some(), 1 - me).wait(),
        "irecv": lambda: (md.isend if me == 1 else md.irecv)(some(), 1 - me).wait(),
        "batch_isend_irecv": lambda: [
            work.wait()
            for work in md.batch_isend_irecv(
                [md.P2POp(md.isend, some(), 1 - me), md.P2POp(md.irecv, some(), 1 - me)]
            )
        ],
    }
    if operation == "all_gather_coalesced":
        calls[operation] = lambda: md.all_gather_coalesced([pair(), pair()], pair())
    elif operation == "monitored_barrier":
        calls[operation] = lambda: md.monitored_barrier()
    elif operation.endswith("_multigpu"):
        calls |= {
            "all_reduce_multigpu": lambda: md.all_reduce_multigpu(pair(), op),
            "reduce_multigpu": lambda: md.reduce_multigpu(pair(), 1, op),
            "broadcast_multigpu": lambda: md.broadcast_multigpu(pair(), 1),
            "all_gather_multigpu": lambda: md.all_gather_multigpu(
                [pair() + pair(), pair() + pair()], pair()
            ),
        }
    elif "object" in operation:
        objects = ["an object", {1: 2}]
        calls |= {
            "all_gather_object": lambda: md.all_gather_object([None, None], objects),
            "gather_object": lambda: md.gather_object(objects, [0, 0] if me == 1 else None, 1),
            "broadcast_object_list": lambda: md.broadcast_object_list(objects, 1),
            "scatter_object_list": lambda: md.scatter_object_list([None], objects, 1),
            "send_object_list": lambda: (
                md.send_object_list(objects, 1) if me == 0 else md.recv_object_list(objects, 0)
            ),
            "recv_object_list": lambda: (
                md.recv_object_list(objects, 1) if me == 0 else md.send_object_list(objects, 0)
            ),
        }
    calls[operation]()


def found() -> dict[tuple[str, str, str], str]:
    """What every cell really does on this rank: native, built or rejected."""
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    answers = {}
    md.barrier()
    md.group.WORLD.fast_path = (
        None  # which does what is built without the collectives that are counted
    )
    with counted_builds() as called:
        for operation in OPERATIONS:
            for op in OPS if OPERATIONS[operation].reduces else (None,):
                kind = md.ReduceOp.premul_sum(2) if op == md.ReduceOp.PREMUL_SUM else op
                for dtype in DTYPES:
                    called.clear()
                    try:
                        call(operation, dtype, kind)
                        is_above = kind is not op or not OPERATIONS[operation].is_plain
                        state = "built" if called or is_above else "native"
                    except md.DtypeError:
                        state = "" if not called else f"rejected after {called}"
                    answers[operation, "" if op is None else op.name, str(dtype)] = state
    return answers


def expected(backend: str) -> dict[tuple[str, str, str], str]:
    answers = {}
    for operation in OPERATIONS:
        for op in OPS if OPERATIONS[operation].reduces else (None,):
            for dtype in DTYPES:
                told = public_support(find_backend(backend), operation, "cpu", dtype, op)
                answers[operation, "" if op is None else op.name, str(dtype)] = told
    return answers


@pytest.mark.parametrize("backend", ["simulated", "gloo"])
def test_every_cell_is_what_runs(backend: str, pool: Pool) -> None:
    if backend == "simulated":
        results = md.simulate(found, 2)
    else:
        results = pool.run(found, 2)
    told = expected(backend)
    assert {"native", ""} <= set(told.values())
    for answers in results:
        assert {cell: state for cell, state in answers.items() if state != told[cell]} == {}
        assert answers.keys() == told.keys()


def test_every_collective_of_the_front_door_is_in_the_table() -> None:
    def is_marked(thing: Any) -> bool:
        if not inspect.isfunction(thing):
            return False
        return "<call of " in thing.__code__.co_filename or is_marked(
            getattr(thing, "__wrapped__", None)
        )

    marked = {name for name in md.distributed.__all__ if is_marked(getattr(md, name))}
    assert len(marked) > 20
    assert marked == set(OPERATIONS)


def test_what_the_table_is_made_of() -> None:
    assert len(set(DTYPES)) == len(DTYPES)
    assert {torch.float32, torch.bool, torch.uint64, torch.complex32} <= set(DTYPES)
    assert {op.name for op in OPS} == set(md.ReduceOp.RedOpType.__members__) - {"UNUSED"}


def test_premul_sum_is_built_on_every_backend_and_knows_no_bool() -> None:
    for name in backend_names():
        backend = find_backend(name)
        for device_type in backend.device_types:
            states = [
                public_support(backend, "all_reduce", device_type, dtype, md.ReduceOp.PREMUL_SUM)
                for dtype in (torch.float32, torch.int64, torch.bool)
            ]
            assert states == ["built", "built", ""]


def test_a_device_that_a_backend_does_not_serve() -> None:
    assert public_support(find_backend("nccl"), "broadcast", "cpu", torch.float32) == ""
    assert public_support(find_backend("gloo"), "send", "cuda", torch.float32) == "built"
    assert public_support(find_backend("gloo"), "send", "cpu", torch.float32) == "native"


def test_dtypes_in_words() -> None:
    assert dtypes_text([]) == ""
    assert dtypes_text(DTYPES) == "all"
    assert dtypes_text(DTYPE_GROUPS["integers"]) == "integers"
    assert dtypes_text([torch.bool, torch.int8, torch.int64]) == "int64, int8, bool"


def test_the_table_as_plain_values() -> None:
    told = capabilities([find_backend("gloo")])
    assert list(told) == ["gloo"] and list(told["gloo"]) == ["cpu", "cuda"]
    reducing = told["gloo"]["cpu"]["all_reduce"]["MIN"]
    assert "int32" in reducing["native"] and {"float32", "uint64"} <= {*reducing["built"]}
    assert "complex64" not in reducing["native"] + reducing["built"]
    assert len(told["gloo"]["cpu"]["broadcast"][""]["native"]) == len(DTYPES)
    assert set(capabilities()) == {backend.name for backend in available_backends()}


def test_the_overview() -> None:
    head, *rows = overview_grid([find_backend("gloo"), find_backend("simulated")])
    assert head[:3] == ("operation", "gloo: cpu", "gloo: cuda")
    assert head[3].startswith("simulated: cpu, cuda, ")
    by_operation = {operation: cells for names, *cells in rows for operation in names.split(", ")}
    assert by_operation.keys() == OPERATIONS.keys()
    assert by_operation["all_reduce"] == ["native, in part built"] * 2 + ["native"]
    assert by_operation["isend"] == ["native", "built", "native"]
    assert by_operation["reduce_scatter"] == ["built", "built", "native"]
    assert overview_grid([find_backend("gloo")], ["cuda", "xpu"])[0] == ("operation", "gloo: cuda")
    assert {row[1] for row in table_grid([find_backend("gloo")], ["cpu"])[1:]} == {"cpu", ""}


def test_the_whole_table_holds_every_cell() -> None:
    """Read back from its text, the grid says what ``public_support`` says."""
    backend = find_backend("gloo")
    told: dict[tuple[str, str, str, str], str] = {}
    place = ["", "", ""]
    for *here, ops, native, built, rejected in table_grid([backend])[1:]:
        place = here if here[0] else place
        for devices in place[1].split(", "):
            for operation in place[2].split(", "):
                for op in ops.split(", "):
                    for state, text in (("native", native), ("built", built), ("", rejected)):
                        for dtype in dtypes_of(text):
                            told[devices, operation, op, str(dtype)] = state
    wanted = {}
    for device_type in backend.device_types:
        for operation in OPERATIONS:
            for op in OPS if OPERATIONS[operation].reduces else (None,):
                for dtype in DTYPES:
                    name = "" if op is None else op.name
                    state = public_support(backend, operation, device_type, dtype, op)
                    wanted[device_type, operation, name, str(dtype)] = state
    assert told == wanted


def dtypes_of(text: str) -> list[torch.dtype]:
    if text == "all":
        return list(DTYPES)
    dtypes: list[torch.dtype] = []
    for word in text.split(", ") if text != "-" else ():
        dtypes += DTYPE_GROUPS.get(word) or [getattr(torch, word)]
    return dtypes


@pytest.mark.parametrize("name", ["raven of ours", "raven of torch's"])
def test_a_backend_of_a_third_party_appears(name: str, pool: Pool) -> None:
    def program(rank: int) -> tuple[Any, ...]:
        from torch.distributed import Backend, ProcessGroupGloo

        from meshdist.backends.capabilities import available_backends, capabilities, overview_grid

        (md.Backend if "ours" in name else Backend).register_backend(
            name, lambda *given: ProcessGroupGloo(*given), devices=["cpu"]
        )
        backends: list[BackendType] = available_backends()
        served = capabilities(backends)[name]["cpu"]["all_reduce"]["SUM"]["native"]
        return f"{name}: cpu" in overview_grid(backends)[0], "float32" in served

    assert pool.call(program, 1) == [(True, True)]
