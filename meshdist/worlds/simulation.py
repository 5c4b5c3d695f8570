"""Run a function on simulated ranks: threads of this process that take turns."""

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
from ..launching.failed_ranks import stacks_text
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
    """Call ``fn(*args, **kwargs)`` on simulated ranks in this process; return the results by rank.

    A rank runs until it waits in a collective or on the store; then the next runnable rank, in rank
    order, continues. Each rank has its own random generators (torch's, NumPy's global and
    ``random``'s), seeded with its rank, and its own default dtype, initially the caller's. Runs
    repeat exactly, and do not change the caller's generators and default dtype. Timeouts never
    expire; if no rank can continue, every rank raises DeadlockError, which lists the call that each
    rank waits for.

    Args:
        fn: The program of one rank. All ranks share its globals and closure.
        ranks: The number of ranks, or the shape of the mesh that they fill.
        args: Positional arguments. Each rank gets a deep copy, tensors included.
        kwargs: Keyword arguments, also copied.

    Returns:
        The results of ``fn`` by rank; None after ``sys.exit()`` or ``sys.exit(0)``.

    Raises:
        ArgumentError, KindError: An argument is invalid; no rank has started.
        GradientError: A gradient differs between ranks where it reaches a ``lax`` collective with
            an invariant result; a cast (``lax.pvary``) is missing.
        WorldError: Another thread simulates ranks.
        Exception: The first exception of a rank, with the rank in its attribute ``rank``, after all
            other ranks have stopped. ``sys.exit`` with another code raises its SystemExit.

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
            fix="pass the function and its arguments: simulate(fn, 4, args=(x,))",
        )
    if not isinstance(args, (tuple, list)):
        raise KindError(
            "args must be a tuple", found=f"{args!r}", fix="pass args=(x,) for one argument"
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
                with suppress(Exception):  # raise the rank's own exception instead
                    _close(world)
                raise
            finally:
                del running[rank]
            _close(world)
            return result

    def show_stacks() -> None:
        stacks = {
            rank: get_registry(world).where().encode() for rank, world in dict(running).items()
        }
        show(sys.stderr, stacks_text(stacks))

    try:
        with _one_at_a_time(), callers_torch_world(), _one_profiler():
            return scheduler.run(program_of_rank, show_stacks)
    except BaseException as error:
        __tracebackhide__ = True
        (end_here if isinstance(error, KeyboardInterrupt) else enter_program)(error)
        raise


_simulating = threading.Lock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Raise WorldError if another thread simulates ranks; a simulated rank may nest a run."""
    if find_rank_here() is not None:
        yield
        return
    if not _simulating.acquire(blocking=False):
        raise WorldError(
            "another thread simulates ranks in this process",
            where=f"thread {threading.current_thread().name!r}",
            expected="one simulate() call at a time, because its ranks use the process's random "
            "generators",
            fix="call simulate() after the other call has returned, inside one of its ranks, or "
            "in another process",
        )
    try:
        yield
    finally:
        _simulating.release()


_BEGINS_PROFILER = ("_prepare_profiler", "_run_on_profiler_start")


@contextmanager
def _one_profiler() -> Iterator[None]:
    """Raise WorldError if a rank starts a second profiler, because two would crash torch."""

    def alone(begin: Callable[..., None]) -> Callable[..., None]:
        def begin_alone(*given: Any, **named: Any) -> None:
            rank, is_own = find_rank_here(), torch.autograd._profiler_enabled()
            if rank is not None and profiler._is_profiler_enabled and not is_own:
                raise WorldError(
                    f"simulated rank {rank.index} cannot start a profiler because another one runs",
                    expected="one profiler at a time for all simulated ranks, "
                    "as torch has one a process",
                    fix="profile one rank, `with profile() if md.get_rank() == 0 else "
                    "nullcontext():`; or put one profiler around simulate(); or run processes "
                    "with md.spawn",
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
    """Close a simulated rank's world, or the program's own world instead."""
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
            f"simulate() cannot copy its arguments for rank {rank} of {size}",
            expected="arguments that copy.deepcopy can copy, one copy for each rank",
            found=f"{type(failure).__name__}: {failure}",
            fix="create the object inside fn, detach tensors, or use a closure for objects that "
            "all ranks may share",
        ) from failure
