"""Check the first step of each optimizer whose parameters are sharded.

An optimizer of torch sees this rank's shards as whole parameters. That is right if it updates each
element by itself. The check raises for optimizers and scalers that would train another model, warns
about unknown classes, and compares shards: equal shards were drawn after the split, from one seed.

It is a global hook of torch, registered when the first parameter is annotated as varying.

Worked example: a weight of 4 rows is split over 2 ranks, then the ranks draw their rows from equal
seeds. They compare 64-bit sums of the bits of their rows:

                  rank 0    rank 1
    rows          .3 .9     .3 .9
    sum           71        71        equal, and .3 differs from .9: a warning

    >>> import warnings, meshdist as md
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     rows = torch.nn.Parameter(torch.tensor([0.3, 0.9]))
    ...     torch.optim.SGD([md.annotate(rows, "f@tp", mesh=mesh)]).step()
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     _ = md.simulate(program, 2)
    >>> [str(each.message).splitlines()[0] for each in caught][:1]
    ["1 sharded parameter of SGD is equal on all ranks along 'tp'"]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from operator import is_
from types import FrameType
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..annotations.axis_types import axes_of_kind, find_type, type_of
from ..annotations.tensor_specs import find_spec
from ..bootstrap.world import find_world
from ..checking.call_sites import warn_caller
from ..collectives.torch_private import current_task, hidden_from_modes, step_pre_hooks
from ..collectives.value_comparison import checksum, find_unequal
from ..error_text import explain, first_texts
from ..errors import KindError
from ..mesh.current_mesh import find_current_mesh, find_meshes_with
from ..mesh.device_mesh import DeviceMesh
from ..runtime.graph_breaks import untraced
from .type_errors import tensor_text

_ELEMENTWISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
        optim.SparseAdam,
    }
)
"""torch's optimizers that update each element by itself."""

_ADAMW = (
    "use torch.optim.AdamW, or gather the parameters for each step, as docs/how-to/"
    "tensor_parallel.md shows"
)
_OF_GLOBAL_ARRAYS = {
    optim.Muon: "use md.optim.Muon, or torch.optim.AdamW",
    optim.Adafactor: _ADAMW,
    optim.LBFGS: "use torch.optim.AdamW",
}
"""torch's optimizers whose update of an element depends on others, with fixes."""

_CHECKED = "_meshdist_checked"
"""The key, in an optimizer's ``__dict__``, of its checked parameters. In a table, they would keep
an optimizer alive to which a parameter's hook refers."""

_meshes: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The meshes of annotated parameters, which they keep alive: a comparison must not depend on when a
rank's garbage collector runs."""


def watch_steps(tensors: Iterable[torch.Tensor], mesh: DeviceMesh | None = None) -> None:
    """Register the check of optimizer steps if any annotated parameter varies over an axis.

    Args:
        mesh: has the axes; None for the meshes that have them now.
    """
    for x in tensors:
        axes = axes_of_kind(find_type(x) or "", "V")
        if axes and (x.requires_grad or isinstance(x, torch.nn.Parameter)):
            _meshes[x] = find_meshes_with(axes) if mesh is None else [mesh]
            if check_step not in step_pre_hooks.values():  # simulated ranks have separate tables
                register_optimizer_step_pre_hook(check_step)


@untraced
def check_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Check the parameters of ``optimizer`` unless a step with the same was checked."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    checked = optimizer.__dict__.get(_CHECKED, ())
    if len(parameters) != len(checked) or not all(map(is_, parameters, checked)):
        _check(optimizer, parameters)
        optimizer.__dict__[_CHECKED] = parameters


@hidden_from_modes
@torch.no_grad()
def _check(optimizer: optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    axes = {index: cut for index, x in enumerate(parameters) if (cut := _varying_axes(x))}
    if not axes:
        return
    kind = type(optimizer)
    found = first_texts([f"parameter {i}, {tensor_text(parameters[i])}" for i in axes], "; ")
    if kind in _OF_GLOBAL_ARRAYS:
        raise KindError(
            f"{kind.__name__} cannot update sharded parameters: the update of an element depends "
            "on the global array",
            expected="an optimizer that updates each element by itself, or reads annotations",
            found=found,
            fix=_OF_GLOBAL_ARRAYS[kind],
        )
    if _is_scaled_by_torch():
        raise KindError(
            "torch.amp.GradScaler cannot scale gradients of sharded parameters: each rank checks "
            "its own shards, and ranks would skip different steps",
            expected="a scaler that skips a step on all ranks or on none",
            found=found,
            fix="use md.optim.GradScaler(device, mesh=mesh)",
        )
    if kind not in _ELEMENTWISE and not getattr(kind, "takes_shards", False):
        warn_caller(
            explain(
                f"{kind.__name__} may train sharded parameters wrongly: meshdist does not know "
                "whether it updates each element by itself",
                expected="a class with takes_shards = True",
                found=found,
                fix=f"set {kind.__name__}.takes_shards = True if it does, or if it reads "
                "annotations; otherwise use torch.optim.AdamW",
            )
        )
    _warn_of_equal_shards(kind.__name__, parameters, axes)


def _varying_axes(x: torch.Tensor) -> tuple[str, ...]:
    """Return the axes larger than 1 along which each rank holds its own values."""
    return tuple(axis for axis in axes_of_kind(type_of(x), "V") if _is_larger_than_1(axis))


def _is_larger_than_1(axis: str) -> bool:
    mesh, world = find_current_mesh(), find_world()
    if mesh is not None and axis in mesh.axis_names:
        return mesh.size(axis) > 1
    return world is not None and any(it.axis_sizes[axis] > 1 for it in world.layouts_with(axis))


def _is_scaled_by_torch() -> bool:
    """Return whether a scaler that checks only this rank's gradients has called the step."""
    plain = torch.amp.GradScaler
    frame: FrameType | None = sys._getframe(1)
    # Only torch's frames: Python would keep the variables in ``f_locals`` of the program alive.
    while frame is not None and frame.f_code not in (
        plain.step.__code__,
        plain._maybe_opt_step.__code__,
    ):
        frame = frame.f_back
    if frame is None:
        return False
    scaler: torch.amp.GradScaler = frame.f_locals["self"]
    # FSDP's scaler and md.optim.GradScaler override this method.
    return type(scaler)._unscale_grads_ is plain._unscale_grads_ and scaler.is_enabled()


def _warn_of_equal_shards(
    name: str, parameters: list[torch.Tensor], axes: dict[int, tuple[str, ...]]
) -> None:
    """Warn of shards that are equal along an axis and not constant; collective along each axis."""
    # Optimizers that step inside a backward may step in another order on each rank.
    if current_task() != -1:
        return
    lines: dict[tuple[str, DeviceMesh], list[int]] = {}
    for index, found in axes.items():
        for axis in found if find_spec(parameters[index]) is not None else ():
            if (mesh := _mesh_that_all_know(axis, parameters[index])) is not None:
                lines.setdefault((axis, mesh), []).append(index)
    for (axis, mesh), indices in sorted(lines.items(), key=lambda item: item[0][0]):
        group = mesh.get_group(axis)
        device = torch.device(group.first_device_type())
        sums = torch.stack([checksum([parameters[i]], device) for i in indices])
        unequal = find_unequal(sums, group, f"a comparison of {len(indices)} shards of {name}")
        equal = [
            f"parameter {i}, {tensor_text(x)}"
            for i, differs in zip(indices, unequal.tolist(), strict=True)
            if not differs
            and bool(((flat := (x := parameters[i]).flatten())[1:] != flat[:-1]).any())
        ]
        if equal:
            are = "parameter of {} is" if len(equal) == 1 else "parameters of {} are"
            warn_caller(
                explain(
                    f"{len(equal)} sharded {are.format(name)} equal on all ranks along {axis!r}",
                    expected="different parts of a global array (equal parts were probably "
                    "initialized after the split, from the same seed)",
                    found=first_texts(equal, "; "),
                    fix="initialize the model before you split it, or pass the initialization to "
                    "md.tensor_parallel.apply(model, fn)",
                )
            )


def _mesh_that_all_know(axis: str, parameter: torch.Tensor) -> DeviceMesh | None:
    """Return the open mesh with ``axis`` that all its ranks use for ``parameter``, or None."""
    # The result must be equal on all ranks of the axis. All ranks of a world know a mesh of all
    # ranks; a mesh of some ranks counts if it is the current mesh.
    current, world = find_current_mesh(), find_world()
    if current is not None and axis in current.axis_names:
        return current
    known = [
        mesh
        for mesh in _meshes.get(parameter, [])
        if axis in mesh.axis_names
        and mesh.root.world is world
        and id(mesh.root) in world.meshes
        and mesh.root.size() == world.size
    ]
    return known[0] if len(known) == 1 else None
