"""Keep the last few checkpoints of a run in one folder."""

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
from .saving import checked_path, mesh_of, read_state, save, save_async
from .trees import entries_of

__all__ = ["Checkpointer"]


class Checkpointer:
    """Save steps as ``root/step-10``, keep the newest, and load the newest complete step.

    Args:
        root: the run's folder. Only one run may save there at a time.
        keep: the number of steps to keep; None keeps all.
        mesh: the participating ranks' mesh; None finds it at each call, as ``save`` does.

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
        """Save a state as ``step-<step>`` and remove steps older than the newest ``keep``.

        Collective, as ``md.checkpoint.save``. Does not rewrite the step that this object saved or
        loaded last; ``wait=True`` waits if it is still being saved.

        Args:
            wait: False returns a pending save, as ``md.checkpoint.save_async``. The newest ``keep``
                steps before it stay until the next save.

        Raises:
            CheckpointError: as ``save``; or another run saves under this root.
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
            members.first_does(self._remove_old)  # the step before is complete now
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
        """Load the newest complete step into a state; return its number, or None if there is none.

        Collective; for other arguments see ``md.checkpoint.load``. Waits for a pending save, and
        raises its failure once.

        Args:
            step: the step to load; None for the newest.

        Raises:
            As ``md.checkpoint.load``; without a complete step, as a save of this state.
        """
        if not self._pending.has_failed:
            self._pending.wait()
        if step is None:
            call = "Checkpointer.load"
            members = Members(mesh_of(state, self._mesh, call), call)
            step = members.first_does(self.latest)
            if step is None:
                members.all_do(lambda: self._check(state, members))
                return None
        path = os.path.join(self._root, f"step-{step}")
        load(state, path, mesh=self._mesh, only=only, missing=missing, verify=verify)
        self._last, self._pending = step, PendingSave(path)
        return step

    def _check(self, state: Any, members: Members) -> None:
        """Raise if this state cannot be saved, before the program trains."""
        tree, error = read_state(members.call, state, self._mesh)
        if error is not None:
            raise error
        entries_of(tree.arrays, members)

    def latest(self) -> int | None:
        """Return the newest complete step's number, or None; no communication."""
        return max(files.find_steps(self._root), default=None)

    def steps(self) -> list[int]:
        """Return all complete steps' numbers, newest last; no communication."""
        return sorted(files.find_steps(self._root))

    def _begin(self) -> None:
        """Lock the root at the first save, and remove earlier saves' leftovers."""
        if self._lock is None:
            self._lock = files.lock_folder(self._root)
            if self._lock is None:
                raise CheckpointError(
                    "Checkpointer.save failed because another run or Checkpointer saves under this "
                    "root",
                    where=self._root,
                    expected="at most one Checkpointer that saves under a root",
                    fix="stop the other run, delete the other object, or use a separate root for "
                    "each",
                )
            weakref.finalize(self, files.close_lock, self._lock)
        self._remove_old()

    def _remove_old(self) -> None:
        if self._keep is not None:
            for step in {*self.steps()[: -self._keep]} - {self._last}:
                files.remove_checkpoint(os.path.join(self._root, f"step-{step}"))
