"""Define every exception that meshdist raises.

Each derives from ``MeshdistError`` and from the torch or builtin class that torch programs catch.
All texts have the same form (``error_text``), and their fields are attributes.
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
    """Base class of all errors, with fields ``where``, ``expected``, ``found`` and ``fix``."""

    def _render_traceback_(self) -> list[str]:
        """Return the traceback for IPython, without meshdist's and torch's frames below DETAIL."""
        # IPython calls this method if it exists; otherwise it always shows the last frame.
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
    """An argument has an unsupported value; a call that raises it or a subclass sent nothing."""


class KindError(ArgumentError, TypeError):
    """An argument has the wrong type."""


class GroupKindError(KindError, AttributeError, KeyError):
    """The argument ``group`` is not a process group."""


class LengthError(ArgumentError, IndexError, TypeError):
    """A list has the wrong length."""


class PicklingError(KindError, pickle.PicklingError, AttributeError):
    """An object cannot be pickled."""


class ShapeError(ArgumentError, IndexError):
    """The call or the group does not support a tensor's shape."""


class DtypeError(ArgumentError, TypeError):
    """The call, the reduction or the backend does not support a tensor's dtype."""


class MeshError(ArgumentError):
    """A mesh cannot be created or changed, or does not support the call."""


class MeshAttributeError(MeshError, AttributeError):
    """An attribute exists only in torch's DeviceMesh."""


class PatternError(ArgumentError):
    """A pattern is invalid, or does not match the call.

    Attributes:
        text: the pattern.
        column: the position of the error, from 0; the length of ``text`` if its end is missing.
    """

    text: str = ""
    column: int = 0


class AxisError(MeshError, KeyError, IndexError, TypeError):
    """A mesh has no such axis, or an axis is given twice.

    Attributes:
        axis: the name that the mesh does not have; "" for other errors.
    """

    axis: str = ""


class NotInGroupError(ArgumentError, KeyError, IndexError):
    """This rank is not in the group or mesh."""


class GroupClosedError(ArgumentError):
    """The group, mesh or world is already closed."""


class NotInitializedError(MeshdistError, ValueError, RuntimeError):
    """The call requires an initialized world."""


class WorldError(MeshdistError, ValueError, RuntimeError):
    """The world is already initialized, belongs to another process, or rejects the call."""


class RendezvousError(MeshdistError, DistNetworkError, ValueError):
    """Rendezvous failed: wrong environment variables, address or file, or a missing rank."""


class StoreError(MeshdistError, DistStoreError):
    """The store is lost or closed, or did not respond in time."""


class BackendError(MeshdistError, DistBackendError):
    """A backend failed, is not available, or does not support the call."""


class MismatchError(BackendError, ValueError):
    """Ranks of a group made mismatched calls; every rank of the group raises it."""


class CollectiveTimeoutError(BackendError, TimeoutError):
    """A collective, connection setup or rendezvous exceeded its timeout."""


class AbortedError(BackendError):
    """The group was aborted, by this rank or by another."""


class JoinError(MeshdistError, RuntimeError):
    """A rank called a collective that ranks out of data cannot shadow (``Join``)."""


class NestedCollectiveError(MeshdistError, RuntimeError):
    """A collective was called inside another, as by a signal handler; nothing was sent."""


class RankFailedError(MeshdistError, RuntimeError):
    """A rank that this program started raised the exception that caused this error.

    Attributes:
        rank: the first rank that failed.
    """

    rank: int = -1


class DeadlockError(BackendError):
    """All simulated ranks wait; the text lists the call of each rank."""


class GradientError(MeshdistError, RuntimeError):
    """A gradient does not exist or differs between ranks."""


class UnequalError(MeshdistError, AssertionError):
    """Values that must be equal along an axis differ; every rank along the axis raises it."""


class CheckpointError(MeshdistError, OSError):
    """A checkpoint cannot be written or read; all ranks raise it, and no file has changed."""


class AxisTypeError(MeshdistError, TypeError):
    """An operation does not support the axis types of its operands."""


class VaryingNumberWarning(UserWarning):
    """A number that differs between ranks was read from a tensor inside ``md.typed``."""
