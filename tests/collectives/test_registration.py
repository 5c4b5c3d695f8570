"""The oracle of torch.compile is the same function run as it is; of profiles, the text we state."""

from __future__ import annotations

import doctest
import inspect
import linecache
import subprocess
import sys
import timeit
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.collectives.registration import collective
from meshdist.errors import WorldError
from tests.load import is_within
from tests.pool import Pool

ROOT = Path(__file__).resolve().parents[2]


# -- the marked function ------------------------------------------------------------------------


def plain(tensor: Any, op: int = 3, group: Any = None, tag: int = 0) -> tuple[Any, ...]:
    """Give back what came.

    >>> plain(1)
    (1, 3, None, 0)
    """
    return tensor, op, group, tag


marked = collective()(plain)


def test_it_is_called_as_before() -> None:
    assert marked(1, 2, group=4, tag=5) == (1, 2, 4, 5)
    with pytest.raises(TypeError, match=r"plain\(\) missing 1 required positional argument"):
        marked()  # type: ignore[call-arg]


def test_it_looks_as_before() -> None:
    assert inspect.signature(marked) == inspect.signature(plain)
    assert (marked.__name__, marked.__doc__, marked.__module__) == (
        plain.__name__,
        plain.__doc__,
        plain.__module__,
    )


def test_a_debugger_shows_it() -> None:
    code = inspect.unwrap(md.all_reduce, stop=lambda _: True).__code__
    shown = linecache.getline(code.co_filename, code.co_firstlineno)
    assert shown == "def all_reduce(tensor, op, group, async_op):\n"
    linecache.checkcache()
    assert (
        linecache.getline(code.co_filename, 3)
        == "        return run(tensor, op, group, async_op)\n"
    )


def test_its_doctests_are_found() -> None:
    module = inspect.getmodule(md.all_reduce)
    tests = {test.name: test for test in doctest.DocTestFinder().find(module)}
    found = tests["meshdist.collectives.tensor_collectives.all_reduce"]
    assert found.examples
    assert found.lineno is not None


def test_it_costs_next_to_nothing() -> None:
    def cost_ns(function: Callable[..., Any]) -> float:
        runs = timeit.repeat(lambda: function(1, group=None), number=2000, repeat=50)
        return min(runs) / 2000 * 1e9

    added = cost_ns(marked) - cost_ns(plain)
    print(f"the mark costs {added:.0f} ns a call")
    assert is_within(added * 1e-9, 1e-6)  # some 100 to 200 ns on a machine at rest


def test_the_compiler_is_not_imported() -> None:
    program = (
        "import sys, meshdist as md\nmd.all_reduce, md.isend\nprint('torch._dynamo' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.strip() == "False", answer.stderr


def test_the_call_is_noted_where_the_program_made_it() -> None:
    def program() -> str:
        md.all_reduce(torch.ones(1))  # the call
        device_group = md.group.WORLD.open_device_group("cpu")
        return device_group.recorder.find_note().where

    line = program.__code__.co_firstlineno + 1
    for where in md.simulate(program, 2):
        assert where == f"{__file__}:{line} in program"


# -- profilers ----------------------------------------------------------------------------------


def names_under(profiler: Any, body: Callable[[], Any]) -> list[str]:
    with profiler as profile:
        body()
    if profile is None:
        return []
    events = profile.events() if hasattr(profile, "events") else profile.function_events
    return [event.name for event in events if event.name.startswith("meshdist::")]


PROFILERS: dict[str, Callable[[], Any]] = {
    "torch.profiler": lambda: torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ),
    "torch.autograd.profiler": lambda: torch.autograd.profiler.profile(),
}


@pytest.mark.parametrize("which", PROFILERS)
def test_a_profile_shows_collective_axis_and_bytes(which: str, pool: Pool) -> None:
    make = PROFILERS[which]

    def operations(profiled: set[int]) -> list[str]:
        mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        me = md.get_rank()

        def body() -> None:
            md.all_reduce(torch.ones(1024), group=mesh["tp"])
            md.barrier()
            md.all_gather_into_tensor(np.zeros(4, np.int16), np.ones(2, np.int16), mesh["tp"])
            if me == 0:
                md.send(torch.ones(3), dst=1)
            else:
                md.recv(torch.ones(3), src=0)
            work = md.all_reduce(torch.ones(2, 2), async_op=True)
            assert isinstance(work, md.Work)
            work.wait()

        names = names_under(make() if me in profiled else nullcontext(), body)
        md.all_reduce(torch.ones(1))  # with the profiler off
        return names

    tp = "axis 'tp' of DeviceMesh(dp=1, tp=2)"
    for rank, names in enumerate(pool.run(operations, 2, {0, 1})):
        assert names == [
            f"meshdist::all_reduce {tp} 4096 bytes",
            "meshdist::barrier the world 0 bytes",
            f"meshdist::all_gather_into_tensor {tp} 12 bytes",
            f"meshdist::{'recv' if rank else 'send'} the world 12 bytes",
            "meshdist::all_reduce the world 16 bytes",
        ]
    names = md.simulate(operations, 2, args=({1},))[1]  # torch has one profiler in a process
    assert names[0] == f"meshdist::all_reduce {tp} 4096 bytes"


class Transfer:
    """One operation of a batch."""

    def __init__(self, tensor: torch.Tensor, group: Any) -> None:
        self.tensor = tensor
        self.group = group


@collective()
def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """A collective on objects."""


@collective()
def all_gather_coalesced(outputs: list[list[Any]], inputs: list[Any], group: Any = None) -> None:
    """A collective on lists of lists."""


@collective()
def batch_isend_irecv(p2p_op_list: list[Any]) -> None:
    """A collective whose operations name the group."""


def test_objects_lists_and_batches_in_a_profile() -> None:
    def program() -> list[str]:
        mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        one = torch.ones(2)

        def body() -> None:
            all_gather_object([one, one], one, group=mesh["tp"])
            all_gather_coalesced([[one, one], [one, one]], [one, np.ones(1)])
            batch_isend_irecv([Transfer(one, mesh), Transfer(one, mesh)])

        return names_under(PROFILERS["torch.profiler"](), body)

    assert md.simulate(program, 1)[0] == [
        "meshdist::all_gather_object axis 'tp' of DeviceMesh(tp=1)",
        "meshdist::all_gather_coalesced the world 48 bytes",
        "meshdist::batch_isend_irecv axis 'tp' of DeviceMesh(tp=1) 16 bytes",
    ]


def test_a_wrong_call_fails_alike_under_a_profiler() -> None:
    def program(is_profiled: bool) -> list[str]:
        texts = []

        def fail(*args: Any, **kwargs: Any) -> None:
            with pytest.raises((TypeError, ValueError)) as failure:
                md.broadcast(*args, **kwargs)
            texts.append(str(failure.value))

        def body() -> None:
            fail()
            fail(torch.ones(1), src=0, root=1)
            fail(torch.ones(1), 0, "tp")
            fail("text", 0)

        if is_profiled:
            names_under(PROFILERS["torch.profiler"](), body)
        else:
            body()
        return texts

    expected = md.simulate(program, 1, args=(False,))
    assert len(expected[0]) == 4
    assert md.simulate(program, 1, args=(True,)) == expected


# -- torch.compile ------------------------------------------------------------------------------


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    md.all_reduce(y)
    z = y.sin() + 1
    md.broadcast(z, src=1)
    return z * 3


def later(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    work = md.all_reduce(y, async_op=True)
    z = x + 1
    assert work is not None
    work.wait()
    return y + z if work.is_completed() else z


def with_a_limit(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(2 * x.numel())
    work = md.all_gather_into_tensor(out, x + 1, async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=30))
    return out.cos()


def on_an_axis(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    md.all_reduce(y, md.ReduceOp.MAX, group=md.get_current_mesh()["tp"])
    return y - x + md.get_rank()


def messages(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    if md.get_rank() == 0:
        md.send(x * 2, dst=1)
        return x + 1
    sender = md.recv(y, src=0)
    return y + sender


def rejected(x: torch.Tensor) -> torch.Tensor:
    try:
        md.broadcast(x, src=0, group_src=0)
    except ValueError:
        return x + 1
    return x


FUNCTIONS = [in_place, later, with_a_limit, on_an_axis, messages, rejected]


def once(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Call it twice, as a training loop would, and return the second answer."""
    x = torch.arange(4.0) + md.get_rank()
    with md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)):
        function(x.clone())
        return function(x.clone())


@pytest.fixture
def frames() -> Iterator[Callable[[], list[str]]]:
    """What torch.compile traced, as file names."""
    import torch._dynamo

    traced: list[str] = []

    def note(code: Any, *_: Any) -> None:
        traced.append(code.co_filename)

    torch._dynamo.reset()
    handle = torch._dynamo.convert_frame.register_bytecode_hook(note)
    try:
        yield lambda: traced
    finally:
        handle.remove()
        torch._dynamo.reset()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_on_simulated_ranks(
    function: Callable[..., Any], frames: Callable[[], list[str]]
) -> None:
    expected = md.simulate(once, 2, args=(function,))
    compiled = torch.compile(function, backend="eager")
    assert all(map(torch.equal, md.simulate(once, 2, args=(compiled,)), expected))
    if function is not rejected:  # dynamo runs what stands in a try block as it is
        assert frames().count(__file__) >= 2, (
            "a graph ends before the collective, another begins behind"
        )
    internals = str(ROOT / "meshdist")
    assert [name for name in frames() if name.startswith(internals)] == []


def test_compiled_on_processes(pool: Pool) -> None:
    def program() -> list[torch.Tensor]:
        answers = [once(function) for function in FUNCTIONS]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = [torch.compile(function, backend="eager") for function in FUNCTIONS]
            return [torch.stack(pair) for pair in zip(answers, map(once, compiled), strict=True)]

    for answers in pool.run(program, 2, timeout_s=120):
        for expected, found in answers:
            assert torch.equal(expected, found)


@pytest.mark.usefixtures("frames")
def test_a_full_graph_is_rejected_with_the_reason() -> None:
    import torch._dynamo

    compiled = torch.compile(in_place, backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="a collective waits for other ranks"
    ) as failure:
        md.simulate(once, 2, args=(compiled,))
    assert "md.all_reduce(y)" in str(failure.value)


def test_a_profiler_around_simulate_shows_the_collectives_of_all_ranks() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        md.all_reduce(torch.ones(8))
        md.lax.psum(torch.ones(2), "dp", mesh=mesh)
        md.barrier()

    with torch.profiler.profile() as profile:
        md.simulate(program, 3)
    names = [event.name for event in profile.events() if "meshdist::" in event.name]
    for rank in range(3):
        mine = [name for name in names if name.startswith(f"rank {rank}: ")]
        assert mine[0] == f"rank {rank}: meshdist::all_reduce the world 32 bytes"
        assert mine[-1] == f"rank {rank}: meshdist::barrier the world 0 bytes"
        assert "meshdist::all_reduce" in mine[1] and "axis 'dp'" in mine[1]
        names = [name for name in names if name not in mine]
    assert names == []


def test_an_error_and_an_interruption_leave_a_profiled_simulation() -> None:
    def fails(kind: type[BaseException]) -> None:
        if md.get_rank() == 1:
            raise kind("no data")
        md.barrier()

    for kind in (ValueError, KeyboardInterrupt):
        with torch.profiler.profile(), pytest.raises(kind, match="no data"):
            md.simulate(fails, 3, args=(kind,))


@pytest.mark.parametrize("which", PROFILERS)
@pytest.mark.parametrize("is_around", [False, True])
def test_a_second_profiler_of_simulated_ranks_is_rejected(which: str, is_around: bool) -> None:
    def program() -> str:
        if md.get_rank() == 1 or is_around:
            md.barrier()  # the first one is on
            with pytest.raises(WorldError) as error, PROFILERS[which]():
                pass
            md.barrier()
            return str(error.value)
        with PROFILERS[which]() as profile:
            md.barrier()
            md.barrier()
        return ", ".join(event.key for event in profile.key_averages() if "mesh" in event.key)

    with PROFILERS[which]() if is_around else nullcontext():
        first, second = md.simulate(program, 2)
    assert second == (
        "simulated rank 1 cannot start a profiler because another one runs\n"
        "  expected: one profiler at a time for all simulated ranks, as torch has one a process\n"
        "  fix:      profile one rank, `with profile() if md.get_rank() == 0 else nullcontext():`; "
        "or put one profiler around simulate(); or run processes with md.spawn"
    )
    expected = second.replace("rank 1", "rank 0", 1)
    assert first == (expected if is_around else "meshdist::barrier the world 0 bytes")
    with PROFILERS[which]():  # the next one, outside, is torch's own again
        pass


def profiled_in_turn() -> int:
    """How many collectives this rank's own profiler has shown."""
    found = 0
    for rank in range(2):
        with PROFILERS["torch.profiler"]() if rank == md.get_rank() else nullcontext() as mine:
            md.barrier()
            md.barrier()
        md.barrier()
        if mine is not None:
            found = len([event for event in mine.events() if "meshdist" in event.name])
    return found


def test_simulated_ranks_profile_one_after_the_other() -> None:
    assert md.simulate(profiled_in_turn, 2) == [2, 2]
