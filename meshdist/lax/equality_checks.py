"""Compare values that should be equal along a mesh axis (``md.assert_equal``)."""

from __future__ import annotations

from typing import Any

import optree
import torch

from ..annotations.axis_types import axes_of_kind, shown, type_of
from ..arrays import as_tensor
from ..checking.call_sites import call_site, one_frame, show_site
from ..collectives.objects import gather_from_all
from ..collectives.torch_private import are_transforms_active, hidden_from_modes
from ..collectives.value_comparison import agree
from ..error_text import with_article
from ..errors import ArgumentError, KindError, UnequalError
from ..groups.process_group import ProcessGroup, resolve_group
from ..mesh.device_mesh import DeviceMesh
from ..typed_mode.module_annotations import restore_annotations
from .axes import AxisName, get_axes

__all__ = ["assert_equal"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # exactly these
_FIX = (
    "check for different seeds or data, and for a gradient that was not summed; in a backward, "
    "cast an equal value with lax.pvary(x, axis) before you combine it with a varying value"
)


@one_frame
@hidden_from_modes
def assert_equal(tree: Any, axis: AxisName, *, mesh: DeviceMesh | None = None) -> None:
    """Raise on every rank unless all ranks along ``axis`` hold an equal ``tree``; collective.

    Find diverged replicas, and gradients that lack a cast, in programs without ``md.typed``.

    Args:
        tree: a pytree of arrays, numbers, strings and None; or a module, whose parameters and
            buffers are compared along axes over which they do not vary (``md.annotate``).
        axis: an axis of the mesh, a tuple of axes, or a 1-D mesh.
        mesh: the mesh; None uses the current mesh.

    Floating-point arrays may differ by less than half of their dtype's digits, relative to the
    largest value, because equal computations may add in another order. Integers, bool and
    non-arrays must be identical. NaN equals NaN.

    Cost:
        Each rank reads its arrays once; one all-reduce of 16 bytes. If leaves differ, a broadcast
        of these arrays and some small rounds.

    Raises:
        UnequalError: values, leaves, shapes, dtypes or annotations differ; with paths, ranks and
            distances. On every rank along the axis.
        AxisError, MeshError: as for ``psum``, or an empty tuple.
        KindError: a leaf of another type. ArgumentError: called inside a torch.func transform.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     state = {"w": torch.ones(3), "scale": torch.tensor(1 + mesh.get_local_rank("tp"))}
        ...     md.assert_equal(state, "dp", mesh=mesh)
        ...     try:
        ...         md.assert_equal(state, "tp", mesh=mesh)
        ...     except md.errors.UnequalError as error:
        ...         return error.found
        >>> print(md.simulate(program, 4)[0])
        tree['scale'], shape (), int64: rank 1 differs from rank 0, by up to 1 of its largest value
    """
    check_equal("assert_equal", tree, axis, mesh)


def check_equal(call: str, tree: Any, axis: AxisName, mesh: DeviceMesh | None = None) -> None:
    """Implement ``assert_equal`` for the public function ``call``, which errors show."""
    axes = get_axes(call, axis, mesh, argument="axis")
    group = resolve_group(axes)
    if are_transforms_active():
        raise ArgumentError(
            f"{call} cannot compare inside a transform of torch.func",
            where=group.name,
            expected="a call outside of grad, vmap and other transforms",
            fix="call it before the transform, or on its result",
        )
    if isinstance(tree, torch.optim.Optimizer):
        raise KindError(
            f"{call} cannot compare an optimizer",
            found=with_article(type(tree).__name__),
            fix="pass optimizer.state_dict()",
        )
    if isinstance(tree, torch.nn.Module):
        leaves: dict[str, Any] = {**dict(tree.named_parameters()), **dict(tree.named_buffers())}
    else:
        paths, values, _ = optree.tree_flatten_with_accessor(tree, none_is_leaf=True)
        leaves = {path.codify("tree"): leaf for path, leaf in zip(paths, values, strict=True)}
    own = _own_axes(tree, leaves, axes)
    with torch.no_grad():
        tensors = {
            path: as_tensor(leaf, argument=path, operation=call, writable=False).detach()
            for path, leaf in leaves.items()
            if type(leaf) not in _PLAIN
        }
        for path, x in tensors.items():
            if x.is_meta:
                raise KindError(
                    f"{call}: {path} has no values because it is on the meta device",
                    fix="call model.to_empty(device=...) and load its values first",
                )
        # Shards may differ in shape along the axes that split them, but not in annotations.
        texts = {path: repr(leaf) for path, leaf in leaves.items() if path not in tensors}
        texts |= {path: f"varying over {shown(cut)}" for path, cut in own.items() if cut}
        equal = {path: x for path, x in tensors.items() if path not in texts}
        found = _find_different(call, texts, equal, group)
        if not found and any(own.values()):
            shards = {path: x for path, x in tensors.items() if path in texts}
            found = _find_different_shards(call, shards, own, axes)
    if found:
        raise UnequalError(
            f"{call}: values are not the same on every rank over {group.name}",
            where=show_site(call_site()),
            expected="equal leaves; for floating dtypes, equal in half of the digits",
            found=found,
            fix=_FIX,
        )


def _own_axes(tree: Any, leaves: dict[str, Any], axes: DeviceMesh) -> dict[str, tuple[str, ...]]:
    """Return, by path, the axes over which a module's tensors vary or are unreduced."""
    if not isinstance(tree, torch.nn.Module):
        return {}
    restore_annotations(tree)
    own = {path: axes_of_kind(type_of(tensor), "VU") for path, tensor in leaves.items()}
    return {path: tuple(n for n in axes.axis_names if n in names) for path, names in own.items()}


def _find_different(
    call: str, texts: dict[str, str], tensors: dict[str, torch.Tensor], group: ProcessGroup
) -> str:
    """Return lines on leaves that differ between ranks, "" if they are equal; collective."""
    difference = agree(group, texts, tensors, op_name=call)
    return difference.found if difference and not difference.is_rounding else ""


def _find_different_shards(
    call: str, shards: dict[str, torch.Tensor], own: dict[str, tuple[str, ...]], axes: DeviceMesh
) -> str:
    """Return lines on shards that differ along axes not in ``own``, "" if none; collective."""
    lines = []
    for cut in sorted({own[path] for path in shards}):
        kept = tuple(axis for axis in axes.axis_names if axis not in cut)
        if kept:
            group = axes[kept].open_group()
            here = {path: x for path, x in shards.items() if own[path] == cut}
            found = _find_different(call, {}, here, group)
            lines += [found] if group.rank() == 0 else []  # other ranks found the same
    of_all = gather_from_all(lines, axes.open_group())
    return "\n".join(dict.fromkeys(line for of_rank in of_all for line in of_rank if line))
