"""The cases of the table: all of them, a sample, and how one is run and judged.

A case that failed is run alone by

    python -m tests.operations.cases gloo "Case(collective='all_reduce', size=2, op='SUM')"
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

import meshdist as md
from tests.mpi_job import job_of
from tests.operations import oracle
from tests.operations.plans import OPERATIONS, Call, Case, plan
from tests.two_hosts import two_hosts_of

SIZES = (1, 2, 3, 4)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3,), (2, 3), (0, 2))
LAYOUTS = ("plain", "strided", "turned")
LIBRARIES = ("torch", "numpy")
LIBRARIES_ON_GPU = ("cuda", "cupy")
SEED = 2026


def every_case(size: int, libraries: Sequence[str] = LIBRARIES) -> Iterator[Case]:
    """Every collective, library, dtype, op and shape, even and uneven; the rest is drawn for
    each."""
    names = list(OPERATIONS)
    for name, library, dtype in product(names, libraries, oracle.DTYPES):
        if dtype == "bfloat16" and library in ("numpy", "cupy"):
            continue
        for op in oracle.OPS if OPERATIONS[name].reduces else (None,):
            for shape, is_uneven in product(SHAPES, (False, True)):
                if is_legal(name, shape, is_uneven):
                    yield completed(name, size, library, dtype, op, shape, is_uneven)


def is_legal(name: str, shape: tuple[int, ...], is_uneven: bool) -> bool:
    """Whether there is such a case: a scalar cannot be uneven or cut."""
    operation = OPERATIONS[name]
    if is_uneven:
        return operation.can_be_uneven and len(shape) > 0
    return len(shape) >= operation.least_dims


def completed(name: str, size: int, library: str, dtype: str, op: Any, *more: Any) -> Case:
    """A case with layout, root and form drawn; the same draw whenever the rest is the same."""
    shape, is_uneven = more
    draw = random.Random(repr((SEED, name, size, library, dtype, op, more)))
    operation = OPERATIONS[name]
    return Case(
        name,
        size,
        library,
        dtype,
        op,
        shape,
        draw.choice(LAYOUTS),
        is_uneven,
        draw.choice(operation.forms),
        draw.randrange(size) if operation.root else None,
        bool(operation.root) and draw.random() < 0.5,
        operation.takes_async and draw.random() < 0.5,
    )


@cache
def cases_by_operation(
    size: int, libraries: tuple[str, ...] = LIBRARIES
) -> Mapping[tuple[str, str | None], Sequence[Case]]:
    """``every_case`` by collective and op."""
    found: dict[tuple[str, str | None], list[Case]] = {}
    for case in every_case(size, libraries):
        found.setdefault((case.operation, case.op), []).append(case)
    return found


def sample(size: int, num_per_operation: int, libraries: tuple[str, ...] = LIBRARIES) -> list[Case]:
    """Some cases of every collective and op, the same at every call; neighbours are of different
    collectives.

    A third of ``num_per_operation``, at least one, for each op of those that reduce.
    """
    draw = random.Random(SEED + size)
    chosen = []
    for (_, op), cases in cases_by_operation(size, libraries).items():
        wanted = num_per_operation if op is None else max(1, num_per_operation // 3)
        chosen += draw.sample(cases, min(wanted, len(cases)))
    draw.shuffle(chosen)
    return chosen


# -- on one rank ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one member saw.

    Args:
        kind: "held" when the collective went through, "rejected", or "failed".
        text: the error's.
        arrays: the arguments afterwards, in NumPy.
        is_rest_untouched: whether memory between the elements of arrays is as before.
    """

    kind: str
    text: str
    arrays: dict[str, Any]
    is_rest_untouched: bool = True


class Arguments:
    """A call's arguments in the library and layout of a case, and back."""

    def __init__(self, case: Case, call: Call) -> None:
        self.case = case
        self._gaps: list[tuple[Any, Any]] = []
        self.values = {name: self._made(value) for name, value in call.arguments.items()}

    def _made(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._placed(value)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            return [self._made(one) for one in value]
        return value

    def _placed(self, array: np.ndarray) -> Any:
        """``array`` in the library, laid out as the case says."""
        layout = self.case.layout
        if layout == "turned":
            dims = tuple(reversed(range(array.ndim)))
            base = in_library(array.T.copy(order="C"), self.case)
            return base.permute(dims) if isinstance(base, torch.Tensor) else base.transpose(dims)
        if layout == "plain" or not array.ndim:
            return in_library(array.copy(), self.case)
        base = in_library(
            np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype), self.case
        )
        base[..., 1::2] = 1
        view = base[..., ::2]
        view[...] = in_library(array, self.case)
        self._gaps.append((base, base[..., 1::2]))
        return view

    def back(self) -> dict[str, Any]:
        return {name: self._unmade(value) for name, value in self.values.items()}

    def _unmade(self, value: Any) -> Any:
        if isinstance(value, list) and value and not isinstance(value[0], int):
            return [self._unmade(one) for one in value]
        return value if value is None or isinstance(value, list) else to_numpy(value)

    def are_gaps_untouched(self) -> bool:
        return all(bool((to_numpy(gap) == 1).all()) for _, gap in self._gaps)


def in_library(array: np.ndarray, case: Case) -> Any:
    if case.library == "numpy":
        return array
    if case.library == "cupy":
        import cupy

        return cupy.asarray(array)
    tensor = torch.from_numpy(array).to(getattr(torch, case.dtype))
    return tensor.cuda() if case.library == "cuda" else tensor


def to_numpy(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy().copy()
    return np.array(x.get() if hasattr(x, "get") else x)


def perform(case: Case, group: Any = None, ranks: Sequence[int] | None = None) -> Outcome:
    """Run this rank's part of ``case`` on ``group``, whose members are ``ranks``."""
    members = list(range(case.size)) if ranks is None else list(ranks)
    index = members.index(md.get_rank())
    arguments = Arguments(case, plan(case, members)[index])
    kind, text = "held", ""
    try:
        RUNS.get(case.operation, run_operation)(case, arguments.values, group, members)
    except md.DtypeError as error:
        kind, text = "rejected", str(error)
    except Exception:
        kind, text = "failed", traceback.format_exc()
    return Outcome(kind, text, arguments.back(), arguments.are_gaps_untouched())


def perform_all(cases: Sequence[Case], device_index: int | None = None) -> list[Outcome]:
    """Run a batch on this rank, up to the first case that fails."""
    if device_index is not None:
        torch.cuda.set_device(device_index)
    outcomes = []
    for case in cases:
        outcomes.append(perform(case))
        if outcomes[-1].kind == "failed":
            break
    return outcomes


def reduce_op(name: str, index: int, dtype: str) -> Any:
    if name == "PREMUL_SUM":
        return md.ReduceOp.premul_sum(oracle.factor(index, dtype))  # type: ignore[attr-defined]
    return getattr(md.ReduceOp, name)


def run_operation(case: Case, values: dict[str, Any], group: Any, members: list[int]) -> None:
    result = start_operation(case, values, group, members)
    if case.is_async:
        finish_operation(case, result)
    else:
        assert result is None, f"{case.operation} gave {result!r}"


def start_operation(case: Case, values: dict[str, Any], group: Any, members: list[int]) -> Any:
    more: dict[str, Any] = {}
    operation = OPERATIONS[case.operation]
    if case.op is not None:
        more["op"] = reduce_op(case.op, members.index(md.get_rank()), case.dtype)
    if operation.root is not None:
        assert case.root is not None
        if case.is_root_global:
            more[operation.root] = members[case.root]
        else:
            more[f"group_{operation.root}"] = case.root
    return getattr(md, case.operation)(**values, **more, group=group, async_op=case.is_async)


def finish_operation(case: Case, work: Any) -> None:
    assert isinstance(work, md.Work), f"{case.operation} gave {work!r}, not a Work"
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()


def run_send_recv(case: Case, values: dict[str, Any], group: Any, members: list[int]) -> None:
    index, last = members.index(md.get_rank()), len(members) - 1
    if last == 0:
        return run_isend_irecv(case, values, group, members)
    if index:
        source = members[index - 1]
        assert md.recv(values["received"], src=source, group=group) == source
    md.send(values["sent"], group=group, group_dst=(index + 1) % len(members))
    if index == 0:
        assert md.recv(values["received"], group=group, group_src=last) == members[last]


def run_recv_from_anyone(
    case: Case, values: dict[str, Any], group: Any, members: list[int]
) -> None:
    index = members.index(md.get_rank())
    work = md.isend(values["sent"], members[(index + 1) % len(members)], group, tag=7)
    assert md.recv(values["received"], group=group, tag=7) == members[index - 1]
    work.wait()


def run_isend_irecv(case: Case, values: dict[str, Any], group: Any, members: list[int]) -> None:
    index = members.index(md.get_rank())
    receive = md.irecv(values["received"], members[index - 1], group, tag=3)
    send = md.isend(values["sent"], group=group, group_dst=(index + 1) % len(members), tag=3)
    assert receive.wait() is True
    assert send.wait() is True
    assert receive.source_rank() == (index - 1) % len(members)


def run_batch(case: Case, values: dict[str, Any], group: Any, members: list[int]) -> None:
    index = members.index(md.get_rank())
    operations = [
        md.P2POp(md.isend, values["sent"], members[(index + 1) % len(members)], group),
        md.P2POp(md.irecv, values["received"], group=group, group_peer=(index - 1) % len(members)),
    ]
    if index % 2:
        operations.reverse()
    for work in md.batch_isend_irecv(operations):
        assert work.wait() is True


RUNS: dict[str, Callable[[Case, dict[str, Any], Any, list[int]], None]] = {
    "send and recv": run_send_recv,
    "recv from anyone": run_recv_from_anyone,
    "isend and irecv": run_isend_irecv,
    "batch_isend_irecv": run_batch,
}


# -- judging --------------------------------------------------------------------------------------


def complaint(case: Case, outcomes: Sequence[Outcome], ranks: Sequence[int] | None = None) -> str:
    """What is wrong with the members' outcomes of ``case``; empty when nothing is."""
    wrong = []
    must_reject = case.op is not None and not oracle.has_meaning(case.op, case.dtype)
    for member, (call, outcome) in enumerate(zip(plan(case, ranks), outcomes, strict=True)):
        wanted = {**call.arguments, **({} if must_reject else call.expected)}
        tell = []
        if outcome.kind != ("rejected" if must_reject else "held"):
            tell.append(f"{outcome.kind}: {outcome.text}")
        for name, array in wanted.items():
            if not is_equal(outcome.arrays[name], array, case):
                tell.append(f"{name} is {outcome.arrays[name]!r}, not {array!r}")
        if not outcome.is_rest_untouched:
            tell.append("memory between the elements was written")
        wrong += [f"  member {member}: {text}" for text in tell]
    return "\n".join(wrong)


def is_equal(found: Any, wanted: Any, case: Case) -> bool:
    if wanted is None or (isinstance(wanted, list) and (not wanted or isinstance(wanted[0], int))):
        return bool(found == wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(
            is_equal(one, other, case) for one, other in zip(found, wanted, strict=True)
        )
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    tolerance = oracle.tolerance(case.dtype, case.op, case.size)
    return bool(np.allclose(found, wanted, rtol=tolerance, atol=0.0, equal_nan=True))


def judge(backend: str, cases: Sequence[Case], by_rank: Sequence[Sequence[Outcome]]) -> None:
    """Raise AssertionError with the first cases that went wrong, each ready to be pasted."""
    told = []
    num_done = min(len(outcomes) for outcomes in by_rank)
    for number, case in enumerate(cases[:num_done]):
        text = complaint(case, [outcomes[number] for outcomes in by_rank])
        if text:
            told.append(f'python -m tests.operations.cases {backend} "{case!r}"\n{text}')
    if num_done < len(cases):
        told.append(f"only {num_done} of {len(cases)} cases were run")
    assert not told, f"{len(told)} cases went wrong\n" + "\n".join(told[:5])


# -- backends --------------------------------------------------------------------------------------

OnRanks = Callable[..., list[Any]]


def on_simulated_ranks(pool: Any, fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    return md.simulate(fn, size, args=args)


def on_gloo_processes(pool: Any, fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    return pool.run(fn, size, *args, timeout_s=120.0)  # type: ignore[no-any-return]


def on_shm_processes(pool: Any, fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    return pool.run(fn, size, *args, timeout_s=120.0, backend="shm")  # type: ignore[no-any-return]


def on_several_hosts(pool: Any, fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    hosts = "ABBAABBA"[:size]
    return pool.run(  # type: ignore[no-any-return]
        fn, size, *args, timeout_s=120.0, backend="gloo", hosts=hosts
    )


def on_mpi_processes(pool: Any, fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    return job_of(pool, size).run_in_world(fn, *args)


def on_two_hosts(pool: Any, fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    return two_hosts_of(pool).run(fn, size, *args, timeout_s=120.0)


def on_two_hosts_by_gloo(pool: Any, fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    hosts = "ABBAABBA"[:size]
    return two_hosts_of(pool).run(fn, size, *args, timeout_s=120.0, backend="gloo", hosts=hosts)


BACKENDS: dict[str, OnRanks] = {
    "simulated": on_simulated_ranks,
    "gloo": on_gloo_processes,
    "shm": on_shm_processes,
    "gloo across hosts": on_several_hosts,
    "mpi": on_mpi_processes,
    "two hosts": on_two_hosts,
    "gloo on two hosts": on_two_hosts_by_gloo,
}
"""backend -> runs ``fn(*args)`` on ``size`` ranks over it; a new backend is one more line.

Tests over two hosts are marked ``soak``; tests/test_over_two_hosts.py has a sample of them.
"""


def run_cases(backend: str, cases: Sequence[Case], pool: Any) -> None:
    """Run and judge cases of one world size, as one batch."""
    judge(backend, cases, BACKENDS[backend](pool, perform_all, cases[0].size, list(cases)))


def main(backend: str, text: str) -> None:
    from tests.pool import Pool

    case = eval(text, {"Case": Case})
    with Pool() as pool:
        run_cases(backend, [case], pool)
    print("as it should be")


if __name__ == "__main__":
    main(*sys.argv[1:])
