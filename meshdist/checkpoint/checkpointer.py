"""``md.checkpoint.Checkpointer``: the last few steps of a run, under one folder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from ..arguments import get_integer
from ..errors import CheckpointError
from ..mesh.device_mesh import DeviceMesh
from . import files
from .loading import load
from .participants import Members
from .pending_saves import PendingSave
from .saving import checked_path, mesh_of, save, save_async

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves steps as ``root/step-10``, keeps the newest, and loads the newest whole step.

    Args:
        root: the folder of the run. One run saves there at a time.
        keep: how many steps stay; None keeps all.
        mesh: of the ranks that take part; None finds them at each call, as ``save`` does.

    Example:
        >>> import tempfile, torch, meshdist as md
        >>> state = md.checkpoint.State(model=torch.nn.Linear(2, 2), step=0)
        >>> with tempfile.TemporaryDirectory() as root:
        ...     checkpoints = md.checkpoint.Checkpointer(root, keep=2)
        ...     first = checkpoints.load(state)
        ...     for state.step in range(10, 50, 10):
        ...         checkpoints.save(state, state.step)
        ...     first, checkpoints.steps(), checkpoints.load(state)
        (None, [30, 40], 40)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._root = checked_path("Checkpointer", root)
        self._keep = None if keep is None else get_integer(keep, "Checkpointer: keep", 1)
        self._mesh = mesh
        self._lock: int | None = None
        self._last: int | None = None
        self._pending = PendingSave("")

    def save(self, state: Any, step: int, wait: bool = True) -> PendingSave | None:
        """Save a state as ``step-<step>``, and remove what is older than the newest ``keep``.

        Collective, as ``md.checkpoint.save``. A step that this object has saved or loaded last is
        not written again. If that step is still being saved, ``wait=True`` waits for it.

        Args:
            wait: False returns a pending save, as ``md.checkpoint.save_async``.

        Raises:
            CheckpointError: as ``save``; another run saves under this root.
        """
        step = get_integer(step, "Checkpointer.save: step", 0)
        path = os.path.join(self._root, f"step-{step}")
        call = "Checkpointer.save"
        if step == self._last and not self._pending.has_failed:
            if wait:
                self._pending.wait()
            return None if wait else self._pending
        members = Members(mesh_of(state, self._mesh, call), call)
        members.first_does(self._begin)
        if not wait:
            self._pending = save_async(state, path, mesh=self._mesh)
            self._last = step
            return self._pending
        save(state, path, mesh=self._mesh)
        self._last, self._pending = step, PendingSave(path)
        members.first_does(self._remove_old)
        return None

    def load(
        self,
        state: Any,
        step: int | None = None,
        *,
        only: str | Sequence[str] | None = None,
        missing: str = "error",
        verify: bool = False,
    ) -> int | None:
        """Load the newest whole step into a state; return its number, None where there is none.

        Collective; other arguments as for ``md.checkpoint.load``. Waits for a pending
        save, and raises its failure once.

        Args:
            step: which step; None: the newest.
        """
        if not self._pending.has_failed:
            self._pending.wait()
        if step is None:
            call = "Checkpointer.load"
            members = Members(mesh_of(state, self._mesh, call), call)
            step = members.first_does(self.latest)
        if step is None:
            return None
        path = os.path.join(self._root, f"step-{step}")
        load(state, path, mesh=self._mesh, only=only, missing=missing, verify=verify)
        self._last, self._pending = step, PendingSave(path)
        return step

    def latest(self) -> int | None:
        """The number of the newest whole step here, None where there is none; nothing is sent."""
        return max(files.find_steps(self._root), default=None)

    def steps(self) -> list[int]:
        """The numbers of all steps here, the newest last; nothing is sent."""
        return sorted(files.find_steps(self._root))

    def _begin(self) -> None:
        """Take the root's lock, at the first save, and remove what an earlier save left over."""
        if self._lock is None:
            self._lock = files.lock_folder(self._root)
            if self._lock is None:
                raise CheckpointError(
                    "Checkpointer: another run, or another Checkpointer, saves under this root",
                    where=self._root,
                    expected="one Checkpointer that saves under a root, as long as it lives",
                    fix="end the other run, drop the other object, or give each its own root",
                )
            weakref.finalize(self, files.close_lock, self._lock)
        self._remove_old()

    def _remove_old(self) -> None:
        if self._keep is not None:
            for step in {*self.steps()[: -self._keep]} - {self._last}:
                files.remove_checkpoint(os.path.join(self._root, f"step-{step}"))
