"""Check that DDP, which makes tensors equal over its group, overwrites no shard.

Annotations state the axes along which tensors vary. Without them a shard looks like a replica, so
you must name the wrapper's axes. If you name several, values are compared.

Worked example: a weight on (dp=2, tp=2), wrapped over both axes, by its checksum on each rank.

                       tp=0  tp=1
    a replica   dp=0     7     7      equal along both axes
                dp=1     7     7
    a shard     dp=0     7     9      equal along 'dp', different along 'tp': rejected
                dp=1     7     9
    different   dp=0     7     9      different along both: made equal, as torch's DDP does
    seeds       dp=1     4     2

Shards initialized from the same seed are equal and pass.

    >>> differs_along = {"replica": (0, 0), "shard": (0, 1), "seeds": (1, 1)}
    >>> [name for name, differs in differs_along.items() if 0 < sum(differs) < len(differs)]
    ['shard']
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ..annotations.axis_types import find_type, kinds_in, shown, type_of
from ..collectives.tensor_collectives import all_reduce
from ..collectives.value_comparison import checksum, find_unequal
from ..error_text import first_texts
from ..errors import MeshError
from ..groups.process_group import ProcessGroup, resolve_group
from ..mesh.device_mesh import DeviceMesh
from ..reduce_ops import ReduceOp
from ..typed_mode.type_errors import mesh_text, tensor_text
from .axis_reducer import OWNER, of_a_shard
from .extra_axis_groups import axes_spanned, layouts_with


def reject_marked_shards(
    tensors: Mapping[str, torch.Tensor],
    group: ProcessGroup,
    axes: DeviceMesh | None,
    experts: Mapping[str, Sequence[str]],
) -> None:
    """Raise if a tensor is annotated as varying or unreduced over an axis of ``group``.

    Args:
        experts: by name, the axes over which a parameter may vary.
    """
    is_spanned: dict[str, bool] = {}
    for name, tensor in tensors.items():
        kinds, allowed = kinds_in(type_of(tensor)), experts.get(name, ())
        for axis in (it for it, kind in kinds.items() if kind in "VU" and it not in allowed):
            if axis not in is_spanned:
                layouts = layouts_with(axis, group, axes)
                is_spanned[axis] = any(axis in axes_spanned(it, group.ranks) for it in layouts)
            if is_spanned[axis]:
                raise of_a_shard(name, tensor, axis, f"rank {group.world.rank}, {group.name}")


def without_annotations(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if find_type(tensor) is None}


def reject_unnamed_axes(parameters: Mapping[str, torch.Tensor], group: ProcessGroup) -> None:
    """Raise if ``group`` spans several axes of an open mesh without annotations of parameters."""
    unmarked = [*without_annotations(parameters)]
    if not unmarked:
        return
    for layout in +group.world.open_layouts:
        spanned = axes_spanned(layout, group.ranks)
        if len(spanned) > 1:
            axis = "dp" if "dp" in spanned else spanned[0]
            raise MeshError(
                f"{OWNER} without device_mesh= would make the model equal on all ranks along "
                f"{shown(spanned)}, but some parameters could be shards",
                where=f"rank {group.world.rank}, while DeviceMesh({layout.axis_text()}) is open",
                expected="the names of the axes along which the model is replicated",
                found=f"not annotated: {first_texts(unmarked, ', ')}",
                fix=f"pass device_mesh=mesh[{axis!r}]; if all parameters are replicas, pass "
                "process_group=md.distributed.group.WORLD; or annotate shards: "
                "md.annotate(module, {name: pattern}, mesh=mesh)",
            )


@torch.no_grad()
def reject_probable_shards(
    unmarked: Mapping[str, torch.Tensor], axes: DeviceMesh, device: torch.device
) -> None:
    """Raise on all ranks if a tensor differs along some of the axes only; collective."""
    # One reduction over each axis and one over all: 16 bytes per tensor and axis.
    group = resolve_group(axes)
    grid, names = axes, [axis for axis, size in axes.axis_sizes.items() if size > 1]
    of_root = axes_spanned(axes.root.layout, group.ranks)  # several for a flattened axis
    sizes = axes.root.axis_sizes
    if len(of_root) > len(names) and math.prod(sizes[it] for it in of_root) == group.size():
        grid, names = axes.root, [*of_root]
    if len(names) < 2 or not unmarked:
        return
    sums = torch.stack([checksum([tensor.detach()], device) for tensor in unmarked.values()])
    op_name = "a search for shards"
    differ = [find_unequal(sums, resolve_group(grid[axis]), op_name) for axis in names]
    anywhere = torch.stack(differ).to(torch.uint8)  # [axes, tensors]
    all_reduce(anywhere, ReduceOp.MAX, group)
    for name, column in zip(unmarked, anywhere.T.tolist(), strict=True):
        if 0 < sum(column) < len(names):
            raise _probable(name, unmarked[name], axes, names, column)


def _probable(
    name: str, tensor: torch.Tensor, axes: DeviceMesh, names: Sequence[str], differs: Sequence[int]
) -> MeshError:
    pairs = list(zip(names, differs, strict=True))
    cut, alike = [axis for axis, d in pairs if d], [axis for axis, d in pairs if not d]
    kept = repr(alike[0]) if len(alike) == 1 else ", ".join(map(repr, alike))
    over = repr(cut[0]) if len(cut) == 1 else f"({', '.join(map(repr, cut))})"
    group = resolve_group(axes)
    is_world = group.size() == group.world.size
    whole = (
        "md.distributed.group.WORLD"
        if is_world
        else f"mesh[{', '.join(map(repr, names))}].open_group()"
    )
    return MeshError(
        f"{name} is probably a shard: equal along {shown(alike)}, different along {shown(cut)}",
        where=f"rank {axes.world.rank}, {OWNER} over {shown(names)} of {mesh_text(axes.root)}",
        expected="a model that is equal along all axes of the wrapper, or along none of them",
        found=f"{name}: {tensor_text(tensor)}",
        fix=f"if it holds experts and the ranks along {shown(cut)} have different data, annotate "
        f"it with md.annotate and pass experts_over={over}; if they have the same data, wrap over "
        f"the replicated axes only: device_mesh=mesh[{kept}]; to make it equal on all ranks, "
        f"wrap with process_group={whole}",
    )
