"""The fast path of a group over MPI: what the native core needs to make MPI's calls itself."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ...bootstrap.mpi_library import find_functions
from ..communicator import Explain
from ..core import core
from ..failures import WireFailure
from .arrivals import Arrivals, milliseconds
from .connection import MpiConnection, MpiOperation
from .datatypes import plain_reductions

if TYPE_CHECKING:
    from ..native import FastPath

__all__ = ["make_fast_path"]


def make_fast_path(
    link: MpiConnection,
    arrivals: Arrivals,
    entry: Any,
    explain: Explain,
    timeout: timedelta,
    *,
    largest_tag: int,
    most_bytes: int,
) -> FastPath | None:
    """The fast path of a group; None where MPI's functions are not found. Tags count up to
    ``largest_tag``, and bytes of a call to ``most_bytes``.
    """
    MPI, failing = link.MPI, link.MPI.Exception
    functions = _find_functions(MPI, link.comm)
    if functions is None:
        return None

    def explained(error: BaseException, note: int | None, num_bytes: int | None) -> BaseException:
        known = link.failure(error, num_bytes) if isinstance(error, failing) else error
        return explain(known, note) if isinstance(known, WireFailure) else known

    runner = core.MpiRunner(
        functions,
        arrivals.for_core(),
        arrivals=arrivals,
        timeout=timeout,
        link=link,
        finish_collective=partial(_finish_collective, link, timeout),
        finish_message=partial(_finish, link, timeout),
        explain=explained,
        error=failing,
        rank=link.comm.rank,
        largest_tag=largest_tag,
        most_bytes=most_bytes,
        limit_ms=milliseconds(timeout),
        spin_s=link.spin_s,
    )
    return core.FastPath(entry, runner, plain_reductions(MPI, link.comm.size))  # type: ignore[no-any-return]


def _find_functions(MPI: Any, comm: Any) -> Any:
    """MPI's own functions, for the native core; None where one is not found."""
    addresses = find_functions(MPI, *core.MPI_FUNCTIONS)
    if not addresses or not hasattr(MPI.Request, "fromhandle"):  # mpi4py has it from version 4 on
        return None
    return core.MpiFunctions(
        addresses,
        comm=comm.handle,
        byte=MPI.BYTE.handle,
        in_place=int(MPI.IN_PLACE) % (1 << 64),
        handle_bytes=MPI._sizeof(MPI.Request),
        status_bytes=MPI._sizeof(MPI.Status),
    )


def _finish_collective(link: MpiConnection, timeout: timedelta, request: int, kept: Any) -> None:
    """Wait for a collective that had to be started."""
    started = link.MPI.Request.fromhandle(request)
    link.finish_at_once(link.start(MpiOperation(link, started, kept)), timeout)


def _finish(
    link: MpiConnection, timeout: timedelta, request: int, kept: Any, is_send: bool
) -> None:
    """Wait for a message that was not done soon."""
    status = None if is_send else link.MPI.Status()
    num_bytes = 0 if is_send else kept.numel() * kept.itemsize
    started = link.MPI.Request.fromhandle(request)
    link.start(MpiOperation(link, started, kept, None, status, num_bytes)).finish(timeout)
