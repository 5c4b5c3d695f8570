"""Which group a hook works on, where its state names none; torch's own states.

Torch's states say None for torch's world. Here that means the group of the wrapper: it stands in
the state while the hook runs, so that torch's own functions find it there too. A state that is
pickled names no group: it belongs to the wrapper that it is registered with next.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from ...groups.process_group import ProcessGroup, resolve_group
from .bucket import GradBucket

__all__ = ["PostLocalSGDState", "PowerSGDState", "group_for", "group_in_state", "is_mesh"]

_GROUPS = ("process_group", "subgroup")


def group_for(given: Any, bucket: GradBucket) -> ProcessGroup:
    """The group that a hook's state names: a group or a mesh; None is that of the wrapper."""
    return bucket.group() if given is None else resolve_group(given)


def is_mesh(given: object) -> bool:
    """Whether this is a mesh of ours, and so stands for a group."""
    return hasattr(given, "open_group")


@contextmanager
def group_in_state(state: object, group: ProcessGroup) -> Iterator[None]:
    """In this context one of torch's states names a group, also where it says None, or a mesh."""
    given = getattr(state, "process_group", None)
    if not isinstance(state, (PowerSGDState, PostLocalSGDState)) or not (
        given is None or is_mesh(given)
    ):
        yield
        return
    state.process_group = group if given is None else resolve_group(given)
    try:
        yield
    finally:
        state.process_group = given


def restored(kind: Any, fields: dict[str, Any]) -> Any:
    """Make a state of torch's again of what was pickled of it."""
    state = kind.__new__(kind)
    for name in kind.__slots__:
        setattr(state, name, fields.get(name))
    return state


def _reduced(state: Any) -> tuple[Any, ...]:
    fields = {name: getattr(state, name) for name in state.__slots__ if name not in _GROUPS}
    return restored, (type(state), fields)


# PowerSGDState's own way asks for torch's world when it is loaded; the other has none for groups.
copyreg.pickle(PowerSGDState, _reduced)
copyreg.pickle(PostLocalSGDState, _reduced)
