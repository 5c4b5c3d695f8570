"""Every exception that a program can see.

Each derives from ``MeshdistError`` and from the class of torch or the builtin that a program
written for torch.distributed would catch in its place. The text follows one form (see
``error_text``), and its fields are attributes, so that a handler need not parse it.
"""

from __future__ import annotations

import os
import pickle
from types import TracebackType
from typing import cast

import torch
from torch.distributed import (
    DebugLevel,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    get_debug_level,
)

from .error_text import ExplainedError

__all__ = [
    "AbortedError",
    "MismatchError",
    "ArgumentError",
    "AxisError",
    "AxisTypeError",
    "BackendError",
    "CheckpointError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DtypeError",
    "GradientError",
    "GroupClosedError",
    "GroupKindError",
    "JoinError",
    "KindError",
    "LengthError",
    "MeshAttributeError",
    "MeshError",
    "MeshdistError",
    "NestedCollectiveError",
    "NotInGroupError",
    "NotInitializedError",
    "PatternError",
    "PicklingError",
    "QueueEmptyError",
    "RankFailedError",
    "RendezvousError",
    "ShapeError",
    "StoreError",
    "UnequalError",
    "VaryingNumberWarning",
    "WorldError",
]


_HIDDEN = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__)
)


def __dir__() -> list[str]:
    return __all__


class MeshdistError(ExplainedError):
    """The base of all: a summary, and the fields ``where``, ``expected``, ``found``, ``fix``."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: without our frames and torch's but at DETAIL."""
        # IPython asks an exception that has this method; by itself it always shows the last frame.
        from IPython import get_ipython  # type: ignore[import-not-found, unused-ignore]

        frames = []
        shown = self.__traceback__
        while shown is not None:
            if not shown.tb_frame.f_code.co_filename.startswith(_HIDDEN):
                frames.append((shown.tb_frame, shown.tb_lasti, shown.tb_lineno))
            shown = shown.tb_next
        for frame in reversed(frames):
            shown = TracebackType(shown, *frame)
        if get_debug_level() == DebugLevel.DETAIL or len(frames) < 2:  # the first is IPython's own
            shown = self.__traceback__
        show = get_ipython().InteractiveTB
        lines = show.structured_traceback(type(self), self, shown, tb_offset=show.tb_offset)
        return cast("list[str]", lines)


class ArgumentError(MeshdistError, ValueError, RuntimeError):
    """An argument has a value that the call cannot serve; nothing was sent."""


class KindError(ArgumentError, TypeError):
    """An argument has the wrong type; nothing was sent."""


class GroupKindError(KindError, AttributeError, KeyError):
    """The argument ``group`` is no group; nothing was sent."""


class LengthError(ArgumentError, IndexError, TypeError):
    """A list has another length than the call needs; nothing was sent."""


class PicklingError(KindError, pickle.PicklingError, AttributeError):
    """An object cannot be pickled; nothing was sent."""


class ShapeError(ArgumentError, IndexError):
    """A tensor's shape does not fit the call or the group."""


class DtypeError(ArgumentError, TypeError):
    """A tensor's dtype does not fit the call, the reduction or the backend."""


class MeshError(ArgumentError):
    """A mesh cannot be made, changed or asked as the call wants."""


class MeshAttributeError(MeshError, AttributeError):
    """A mesh has no such attribute, but torch's DeviceMesh has; nothing was sent."""


class PatternError(ArgumentError):
    """A text is no pattern, or a pattern does not fit the call; nothing was sent.

    Attributes:
        text: the pattern.
        column: where in it, from 0; its length where something is missing at its end.
    """

    text: str = ""
    column: int = 0


class AxisError(MeshError, KeyError, IndexError, TypeError):
    """A mesh has no such axis, or an axis is given twice.

    Attributes:
        axis: the name that the mesh does not have; "" where something else is wrong.
    """

    axis: str = ""


class NotInGroupError(ArgumentError, KeyError, IndexError):
    """This rank is no member of the group or mesh that the call names."""


class GroupClosedError(ArgumentError):
    """The group, mesh or world was closed before."""


class NotInitializedError(MeshdistError, ValueError, RuntimeError):
    """The call needs a world, and none is there."""


class WorldError(MeshdistError, ValueError, RuntimeError):
    """The world is there already, belongs to another process, or cannot be used so."""


class RendezvousError(MeshdistError, DistNetworkError, ValueError):
    """The ranks did not find each other: variables, address, file or a missing rank."""


class StoreError(MeshdistError, DistStoreError):
    """The store was lost, closed, or did not answer in time."""


class BackendError(MeshdistError, DistBackendError):
    """A backend failed, is missing, or cannot do what was asked."""


class MismatchError(BackendError, ValueError):
    """Members of one group called with different definitions; all of them raise it."""


class CollectiveTimeoutError(BackendError, TimeoutError):
    """A collective, an opening or a rendezvous waited longer than its timeout."""


class AbortedError(BackendError):
    """The group was aborted, by this rank or by another."""


class JoinError(MeshdistError, RuntimeError):
    """A rank called a collective that ranks which ran out of data do not make."""


class NestedCollectiveError(MeshdistError, RuntimeError):
    """A collective was called inside another, as by a signal's handler; nothing was sent."""


class RankFailedError(MeshdistError, RuntimeError):
    """A rank that this program started raised; the cause is its exception.

    Attributes:
        rank: the first rank that failed.
    """

    rank: int = -1


class DeadlockError(BackendError):
    """No simulated rank can go on; the text says what each waits for."""


class GradientError(MeshdistError, RuntimeError):
    """A gradient was asked of a collective that has none."""


class UnequalError(MeshdistError, AssertionError):
    """Values that should be equal along an axis are not; every rank along it raises."""


class CheckpointError(MeshdistError, OSError):
    """A checkpoint cannot be written or read; all ranks raise it, and the files are as before."""


class AxisTypeError(MeshdistError, TypeError):
    """Kinds of values over mesh axes do not fit, mostly in ``md.typed``; nothing was sent."""


class VaryingNumberWarning(UserWarning):
    """Inside ``md.typed``: a number that differs between ranks was read from a tensor."""
