"""``md.seed``, and the types of what random generators draw inside typed contexts.

A draw differs between ranks exactly where the generators' states differ, which a rank cannot see
from its own state. So ``md.seed`` notes the axes along which it has made them differ. The note is
valid while the generator's ``initial_seed()`` is what it was then: every other way of seeding
changes that number, while a checkpoint that restores a state does not.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import numpy as np
import torch

from ..annotations.axis_types import INVARIANT, kinds_in, type_of, type_text
from ..arguments import get_integer, mesh_kind_error
from ..checking.call_sites import is_between
from ..errors import AxisError, KindError
from ..mesh.current_mesh import mesh_in_force, with_hidden_mesh
from ..mesh.device_mesh import DeviceMesh, coordinate_in
from ..mesh.layout import Layout
from ..runtime.generators import seed_notes
from .context import ContextMode
from .function_rules import TorchFunction, tensors_in
from .type_errors import unseeded_draw

__all__ = ["seed"]

_WORD = 1 << 64
_NUMPY_WORD = 1 << 32


@dataclass(frozen=True)
class _Seeding:
    """A generator's seed, and the axes of ``layout`` along which ranks' seeds differ."""

    number: int
    axes: tuple[str, ...] = ()
    layout: Layout | None = None


def seed(
    seed: int,
    *,
    differ_over: str | tuple[str, ...] = (),
    mesh: DeviceMesh | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Seed the random generators: ranks draw alike, but for those that differ along some axes.

    Ranks with equal coordinates along the axes of ``differ_over`` draw the same numbers. Without
    such axes all do, the numbers that torch.manual_seed(seed) leads to. Call it on every rank with
    equal arguments; nothing is sent.

    Inside ``md.typed`` a draw varies over the axes of its operands and those of ``differ_over``.
    There an operation that draws from a generator seeded in another way is an AxisTypeError, unless
    its operands vary over all axes: dropout of what differs on all ranks may draw what it likes.
    What a custom Function draws inside itself is not seen.

    Args:
        seed: an integer, as for torch.manual_seed.
        differ_over: axes along which ranks shall draw their own numbers.
        mesh: has the axes; None takes the mesh in force.
        generator: is seeded alone. None seeds torch's own generators, of all devices, NumPy's
            global generator and that of ``random``.

    Raises:
        KindError: an argument is of the wrong type.
        ArgumentError: the number has more than 64 bits.
        MeshError: axes are named, there is no current mesh, and none is given.
        AxisError: the mesh has no such axis.
        NotInGroupError: this rank is not in the mesh.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) as mesh:
        ...         md.seed(0, differ_over="dp")
        ...         drawn = torch.rand(1).item()
        ...         with md.typed(mesh):
        ...             return drawn, md.typeof(torch.rand(3))
        >>> (a, its_type), (b, _), (c, _), (d, _) = md.simulate(program, 4)
        >>> a == b, c == d, a == c, its_type
        (True, True, False, float32[3]{V:dp})
    """
    bits = "a number of 64 bits: from -2**63 to 2**64 - 1"
    number = get_integer(seed, "md.seed: seed", -_WORD // 2, _WORD - 1, expected=bits)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise KindError(
            "md.seed takes a generator of torch's",
            found=f"a {type(generator).__name__}",
            fix="without generator= it seeds NumPy's global one and that of `random` as well",
        )
    mesh, axes = _find_mesh_and_axes(differ_over, mesh)
    layout = None
    if mesh is not None:
        number, layout = _number_at(number, mesh, axes), mesh.layout
    number %= _WORD
    if generator is None:
        torch.manual_seed(number)
        np.random.seed(number % _NUMPY_WORD)
        random.seed(number)
        generator = torch.default_generator
    else:
        generator.manual_seed(number)
    seed_notes()[generator] = _Seeding(number, axes, layout)


def find_seeded_axes() -> tuple[str, ...] | None:
    """Return the axes along which ``md.seed`` gave unequal seeds; None if it did not seed last."""
    seeding = seed_notes().get(torch.default_generator)
    if seeding is None or seeding.number != torch.initial_seed() % _WORD:
        return None
    return tuple(seeding.axes)


def note_seeding(axes: tuple[str, ...], layout: Layout | None) -> None:
    """Record that the restored seeds of torch's generator differ along ``axes`` of ``layout``."""
    number = torch.initial_seed() % _WORD
    seed_notes()[torch.default_generator] = _Seeding(number, axes, layout)


def _find_mesh_and_axes(differ_over: Any, mesh: Any) -> tuple[DeviceMesh | None, tuple[str, ...]]:
    """Return the mesh and its axes that ``differ_over`` names, (None, ()) if none; or raise.

    Args:
        differ_over: an axis's name, or a tuple or list of names.
        mesh: None takes the mesh in force, if there are names.
    """
    names = (differ_over,) if isinstance(differ_over, str) else differ_over
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise KindError(
            f"md.seed cannot take {differ_over!r} as differ_over",
            expected="the name of an axis, or a tuple of names",
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise mesh_kind_error("md.seed takes a mesh", mesh)
    if not names:
        return None, ()
    given_mesh, mesh = mesh, mesh or mesh_in_force("md.seed")
    try:
        mesh.layout.axis_indices(tuple(names))  # raises unless they are different axes of this mesh
    except AxisError as error:
        raise with_hidden_mesh(error, given_mesh) from None
    coordinate_in(mesh, "md.seed")
    return mesh, tuple(axis for axis in mesh.axis_names if axis in names)


def _number_at(number: int, mesh: DeviceMesh, axes: Sequence[str]) -> int:
    """Return a seed of ``number`` and this rank's coordinate along ``axes``."""
    coordinate = " ".join(f"{axis}={mesh.get_local_rank(axis)}" for axis in axes)
    digest = hashlib.sha256(f"{number} {coordinate}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


# -- draws in a context ---------------------------------------------------------------------------


def type_of_draw(
    mode: ContextMode,
    operation: TorchFunction,
    operands: Sequence[torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    """Return the type of a random draw; raise if md.seed did not set the generator's state."""
    values = (*args, *kwargs.values())
    given = next((value for value in values if isinstance(value, torch.Generator)), None)
    noted = seed_notes().get(given or torch.default_generator)
    generator = given or _own_generator(args, kwargs)
    number = generator.initial_seed()
    if noted is not None and noted.number == number:
        text = _type_over(noted.axes, noted.layout, mode.mesh.layout)
        if text is not None:
            return INVARIANT if text and _is_of_a_loader() else text
    kinds = [kinds_in(type_of(each)) for each in operands]
    lacking = [
        axis for axis in mode.mesh.axis_names if not any(each.get(axis) == "V" for each in kinds)
    ]
    if not lacking or _is_of_a_loader():
        return INVARIANT
    if noted is None:
        why = "which md.seed has never seeded"
    elif noted.number != number:
        why = f"seeded since md.seed, with {number}"
    else:
        why = "seeded over a mesh that lacks ranks of this one"
    raise unseeded_draw(operation.name, operands, lacking, mode.mesh, why, is_own=given is None)


_LOADERS = frozenset(
    f"torch.utils.data.{name}" for name in ("dataloader", "distributed", "sampler")
)


def _is_of_a_loader() -> bool:
    """Return whether the draw comes from torch's DataLoader or samplers."""
    # Its draws are indices; the batches get types where they enter, by md.annotate.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_between[frame.f_code.co_filename]:
        if frame.f_globals.get("__name__") in _LOADERS:
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=256)
def _type_over(axes: tuple[str, ...], seeded: Layout | None, layout: Layout) -> str | None:
    varying = varying_axes(axes, seeded, layout)
    return None if varying is None else type_text(dict.fromkeys(varying, "V"))


def varying_axes(
    axes: tuple[str, ...], seeded: Layout | None, layout: Layout
) -> tuple[str, ...] | None:
    """Return the axes of ``layout`` along which seeds differ, or None if a rank has no seed.

    Args:
        axes: those of ``seeded`` along which seeds differ; without a layout none do.
    """
    if seeded is None:
        return ()
    if seeded == layout:
        return axes
    indices = seeded.axis_indices(axes)
    places = {}
    for rank in layout.ranks().ravel().tolist():
        coordinate = seeded.coordinate_of(rank)
        if coordinate is None:
            return None
        places[rank] = tuple(coordinate[index] for index in indices)
    return tuple(
        name
        for axis, name in enumerate(layout.axis_sizes)
        if any(len({places[rank] for rank in group}) > 1 for group in layout.groups_of_axis(axis))
    )


def _own_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """Return torch's default generator for the device of a call."""
    if not torch.cuda.is_initialized():
        return torch.default_generator
    device = kwargs.get("device")
    if device is None:
        given = tensors_in((*args, *kwargs.values()))
        device = given[0].device if given else torch.get_default_device()
    device = torch.device(device)
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
