"""Run a function on simulated ranks: threads of this process, of which exactly one runs."""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.autograd.profiler as profiler

from ..arguments import get_integer
from ..backends.simulated.communicator import DEVICE_TYPES
from ..backends.simulated.scheduler import Scheduler, find_rank_here
from ..backends.simulated.store import SimulatedStore
from ..bootstrap.world import World, find_world, world_here
from ..checking.call_sites import end_here, enter_program
from ..errors import ArgumentError, KindError, WorldError
from ..groups.communicators import get_registry
from ..launching.failed_ranks import places_text
from ..launching.output import show
from ..runtime.torch_worlds import callers_torch_world, end_torch_world

__all__ = ["simulate"]

T = TypeVar("T")


def simulate(
    fn: Callable[..., T],
    ranks: int | tuple[int, ...],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on every rank of a world that lies in this process.

    A rank keeps the turn until it waits in a collective or on the store; then the next rank that
    can go on, in rank order, has it. The random generators (torch's, NumPy's global, ``random``'s)
    and torch's default dtype are each rank's own, so runs repeat exactly and seeds mean what they
    mean in processes. When no rank can go on, each raises DeadlockError, which says what every rank
    waits for. There is no clock: no time-out ever expires.

    Args:
        fn: the program of one rank. What it closes over (globals, attributes of a bound method)
            is shared by all ranks.
        ranks: how many ranks, or the shape of the mesh they fill.
        args: positional arguments; each rank gets a deep copy, tensors included.
        kwargs: keyword arguments, copied likewise.

    Returns:  what ``fn`` returned, by rank; None of a rank that called ``sys.exit()`` or
        ``sys.exit(0)``.

    On rank r the generators start as after ``torch.manual_seed(r)``, ``numpy.random.seed(r)``
    and ``random.seed(r)``, and the default dtype is the caller's. The caller's own generators
    and default dtype are as before when this returns.

    Raises:
        ArgumentError, KindError: bad arguments, before any rank starts.
        GradientError: a gradient that reaches a collective of ``lax`` whose result is equal on
            every rank
            differs between ranks: a cast (``lax.pvary``) is forgotten.
        WorldError: another thread simulates ranks.
        The first exception of a rank itself, with the rank in its attribute ``rank``; the other
        ranks are ended before. So is the SystemExit of ``sys.exit`` with another code, which ends
        the program with that code.

    Example:
        >>> import meshdist as md, torch
        >>> def program(offset):
        ...     x = torch.tensor([md.get_rank() + offset])
        ...     md.all_reduce(x)
        ...     return x.item()
        >>> md.simulate(program, 4, args=(10,))
        [46, 46, 46, 46]
    """
    size = _count_ranks(ranks)
    if not callable(fn):
        raise KindError(
            "simulate needs a function",
            found=f"{fn!r}",
            fix="pass the function itself, its arguments as args: simulate(fn, 4, args=(x,))",
        )
    if not isinstance(args, (tuple, list)):
        raise KindError(
            "args must be a tuple", found=f"{args!r}", fix="for one argument write args=(x,)"
        )
    copies = [_copy_arguments(args, kwargs or {}, rank, size) for rank in range(size)]
    scheduler: Scheduler[T] = Scheduler(size)
    store = SimulatedStore()
    compared: dict[str, str] = {}
    running: dict[int, World] = {}

    def program_of_rank(rank: int) -> T:
        world = World(
            rank=rank,
            size=size,
            store=store,
            backends=dict.fromkeys(DEVICE_TYPES, "simulated"),
            local_rank=rank,
            local_size=size,
            origin="simulated",
            compared=compared,
        )
        running[rank] = world
        own_args, own_kwargs = copies[rank]
        copies[rank] = ((), {})  # the rank alone holds its arguments now
        with world_here(world):
            try:
                result = fn(*own_args, **own_kwargs)
                scheduler.ranks[rank].complete_watched()  # futures that nothing waited for
            except BaseException:
                with suppress(Exception):  # the rank's own exception is the one to raise
                    _close(world)
                raise
            finally:
                del running[rank]
            _close(world)
            return result

    def show_places() -> None:
        places = {
            rank: get_registry(world).where().encode() for rank, world in dict(running).items()
        }
        show(sys.stderr, places_text(places))

    try:
        with _one_at_a_time(), callers_torch_world(), _one_profiler():
            return scheduler.run(program_of_rank, show_places)
    except BaseException as error:
        __tracebackhide__ = True
        (end_here if isinstance(error, KeyboardInterrupt) else enter_program)(error)
        raise


_simulating = threading.Lock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Raise WorldError if another thread simulates ranks; a rank may do so inside its own run."""
    if find_rank_here() is not None:
        yield
        return
    if not _simulating.acquire(blocking=False):
        raise WorldError(
            "another thread simulates ranks in this process",
            where=f"thread {threading.current_thread().name!r}",
            expected="one call of simulate at a time: its ranks take the process's generators",
            fix="call simulate when the other has returned, inside one of its ranks, or in a "
            "process of its own",
        )
    try:
        yield
    finally:
        _simulating.release()


_BEGINS_PROFILER = ("_prepare_profiler", "_run_on_profiler_start")


@contextmanager
def _one_profiler() -> Iterator[None]:
    """Raise WorldError in a rank that begins a second profiler: two would crash torch."""

    def alone(begin: Callable[..., None]) -> Callable[..., None]:
        def begin_alone(*given: Any, **named: Any) -> None:
            rank, is_mine = find_rank_here(), torch.autograd._profiler_enabled()
            if rank is not None and profiler._is_profiler_enabled and not is_mine:
                raise WorldError(
                    f"simulated rank {rank.index} begins a profiler while another one is on",
                    expected="one at a time for all simulated ranks: torch has one in a process",
                    fix="profile one rank, `with profile() if md.get_rank() == 0 else "
                    "nullcontext():`; or all of them, by one profiler around simulate; or run "
                    "processes: md.spawn",
                )
            begin(*given, **named)

        return begin_alone

    # The second profiler takes from the first its records as torch prepares it, before it starts;
    # ``emit_nvtx`` is not prepared.
    before = {name: getattr(profiler, name) for name in _BEGINS_PROFILER}
    try:
        for name, begin in before.items():
            setattr(profiler, name, alone(begin))
        yield
    finally:
        for name, begin in before.items():
            setattr(profiler, name, begin)


def _close(world: World) -> None:
    """Close the world of a simulated rank, or the world that the program has made in its place."""
    try:
        end_torch_world()
    finally:
        (find_world() or world).close()


def _count_ranks(ranks: int | tuple[int, ...]) -> int:
    shape = ranks if isinstance(ranks, tuple) else (ranks,)
    fix = "call for example simulate(fn, 4) or simulate(fn, (2, 2))"
    return math.prod(
        get_integer(size, "the number of ranks of simulate", 1, fix=fix) for size in shape
    )


def _copy_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], rank: int, size: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        return copy.deepcopy((tuple(args), dict(kwargs)))
    except Exception as failure:
        raise ArgumentError(
            f"the arguments of simulate cannot be copied for rank {rank} of {size}",
            expected="arguments that copy.deepcopy can copy, one copy for each rank",
            found=f"{type(failure).__name__}: {failure}",
            fix="make the object inside fn, pass tensors detached, or close over what all ranks "
            "may share",
        ) from failure
