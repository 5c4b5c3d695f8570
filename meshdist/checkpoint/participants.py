"""Coordinate the ranks that save or load together, so that all raise the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import errors
from ..bootstrap.world import World, find_launched_rank, find_world
from ..collectives.objects import broadcast_object_list, gather_from_all
from ..collectives.value_comparison import agree
from ..error_text import fields_among, first_line, ranks_text, with_article
from ..errors import CheckpointError, KindError, MeshdistError, MismatchError
from ..groups.process_group import ProcessGroup, resolve_group
from ..mesh.device_mesh import DeviceMesh, coordinate_in
from .files import FAILURES

RANKS = "ranks"
"""The axis name of the mesh of all ranks, if the program has no mesh."""


class Members:
    """The ranks that take part in a save or load: a mesh's, all ranks, or this process."""

    def __init__(self, mesh: DeviceMesh | None, call: str) -> None:
        self.call = call
        self.mesh = mesh
        self.group: ProcessGroup | None = None
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise KindError(
                f"{call}: mesh= must be a DeviceMesh",
                expected="a DeviceMesh, or None",
                found=f"{mesh!r}, {with_article(type(mesh).__name__)}",
                fix="pass mesh=mesh, or leave it out to use the current mesh",
            )
        if mesh is not None:
            coordinate_in(mesh, call)
        if find_world() is not None or find_launched_rank() is not None:
            # The arrays may define a mesh of all ranks, but a failing rank may lack the arrays and
            # uses the group of all ranks. Use this group here, too.
            self.group = resolve_group(None)
            if mesh is not None and set(mesh.layout.ranks().flat) != set(self.group.ranks):
                self.group = mesh.open_group()
        self.ranks: Sequence[int] = (0,) if self.group is None else self.group.ranks
        self.rank = 0 if self.group is None else self.group.world.rank
        self.group_rank = self.ranks.index(self.rank)
        self.is_first = self.group_rank == 0

    @property
    def world(self) -> World | None:
        return None if self.group is None else self.group.world

    def any_mesh(self) -> DeviceMesh | None:
        """Return the mesh, made of the group if there is none; None without a world."""
        if self.mesh is None and self.group is not None:
            device_type = self.group.first_device_type()
            self.mesh = DeviceMesh.from_group(self.group, device_type, mesh_dim_names=(RANKS,))
        return self.mesh

    def all_do(self, step: Callable[[], Any]) -> Any:
        """Return ``step()`` of this rank; raise on all ranks if any raises; collective."""
        return self.all_agree(lambda: (step(), {}, {}))

    def all_agree(
        self, read: Callable[[], tuple[Any, Mapping[str, str], Mapping[str, torch.Tensor]]]
    ) -> Any:
        """Return the value of ``read()`` on this rank; raise on all ranks if any raises.

        Args:
            read: returns a value, and texts and tensors by label; raises MismatchError if these
                differ between ranks.
        """
        found: Any = (None, {"error": f"on rank {self.rank}"}, {})  # different from all other ranks
        error: Exception | None = None
        try:
            found = read()
        except Exception as raised:  # an object of the state may raise anything
            error = raised
        value, texts, tensors = found
        if self.group is None and error is not None:
            raise as_checkpoint_error(error, self.call)
        group = self.group
        difference = None if group is None else agree(group, texts, tensors, op_name=self.call)
        if group is None or (difference is None and error is None):
            return value
        failure = None if error is None else error_to_json(error, self.call)
        of_all = gather_from_all(failure, group)
        failures = [(rank, each) for rank, each in zip(self.ranks, of_all, strict=True) if each]
        if failures:
            raise error_from_json(failures, self.ranks) from error
        assert difference is not None
        raise MismatchError(
            f"{self.call}: names, arrays or values differ between ranks",
            expected="the same on every rank",
            found=difference.found,
            fix="pass the same state on all ranks, for example with "
            "md.distributed.broadcast_object_list; shards of a global array need a spec: "
            "md.checkpoint.State(model=model), or md.annotate(x, spec)",
        )

    def first_does(self, step: Callable[[], Any]) -> Any:
        """Return the first rank's ``step()``, or raise its error, on all ranks; collective."""
        box: list[Any] = [None]
        if self.is_first:
            try:
                box = [(step(), None)]
            except Exception as error:
                box = [(None, error_to_json(error, self.call))]
        if self.group is not None:
            broadcast_object_list(box, group=self.group, group_src=0)
        result, failure = box[0]
        if failure is not None:
            raise error_from_json([(self.ranks[0], failure)], self.ranks)
        return result

    def is_last(self, name: str) -> bool:
        """Count this rank under ``name``; return whether it is the last; no rank waits."""
        if self.group is None:
            return True
        store = self.group.world.store
        is_last = store.add(name, 1) == len(self.ranks)
        if is_last:
            store.delete_key(name)
        return is_last


@contextmanager
def convert_file_errors(call: str) -> Iterator[None]:
    """Raise file errors of the block as CheckpointErrors of ``call``."""
    try:
        yield
    except FAILURES as error:
        raise as_checkpoint_error(error, call) from error


def as_checkpoint_error(error: Exception, call: str) -> Exception:
    """Return a file error as a CheckpointError, others unchanged."""
    if isinstance(error, MeshdistError) or not isinstance(error, FAILURES):
        return error
    path = getattr(error, "filename", None)
    found = CheckpointError(
        f"{call} failed because of a disk or file system error",
        where=None if path is None else str(path),
        found=f"{type(error).__name__}: {first_line(error)}",
        fix="correct the path, its permissions or the free space, then try again",
    )
    found.__cause__ = error
    return found


def error_to_json(error: Exception, call: str) -> dict[str, Any]:
    """Return an error as JSON, the inverse of ``error_from_json``."""
    raised = as_checkpoint_error(error, call)
    if not isinstance(raised, MeshdistError):
        raised = CheckpointError(f"{call}: {type(error).__name__}: {first_line(error)}")
    fields = {"summary": raised.summary, **fields_among(vars(raised))}
    return {"kind": type(raised).__name__, "fields": fields}


def error_from_json(
    failures: Sequence[tuple[int, dict[str, Any]]], ranks: Sequence[int]
) -> MeshdistError:
    """Return the first error of (rank, error) pairs, with its ranks."""
    _, failed = failures[0]
    fields = dict(failed["fields"])
    if len(ranks) > 1:
        same = [rank for rank, each in failures if each["fields"]["summary"] == fields["summary"]]
        fields["where"] = ", ".join(filter(None, [ranks_text(same), fields.get("where")]))
    error: MeshdistError = getattr(errors, failed["kind"], CheckpointError)(**fields)
    return error
