"""Seed random generators (``md.seed``, ``md.fork_rng``), and infer the types of random values.

A rank cannot know whether its generator's state differs from other ranks'. So ``md.seed`` records
the axes along which seeds differ. The record is valid while ``initial_seed()`` is unchanged: every
other seeding changes it, while restoring a state from a checkpoint does not.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import numpy as np
import torch

from ..annotations.axis_types import INVARIANT, kinds_in, type_of, type_text
from ..arguments import get_integer, mesh_kind_error
from ..checking.call_sites import is_between
from ..collectives.torch_private import HiddenFromModes, outside_transforms
from ..error_text import with_article
from ..errors import ArgumentError, AxisError, KindError
from ..mesh.current_mesh import require_current_mesh, with_outer_mesh_hint
from ..mesh.device_mesh import DeviceMesh, coordinate_in
from ..mesh.layout import Layout
from ..runtime.generators import default_generators, seed_notes
from ..runtime.graph_breaks import untraced
from .context import ContextMode
from .function_rules import TorchFunction, tensors_in
from .type_errors import unseeded_draw

__all__ = ["fork_rng", "seed"]

_WORD = 1 << 64
_NUMPY_WORD = 1 << 32


@dataclass(frozen=True)
class _Seeding:
    """A generator's seed, and the axes along which seeds differ, each with its layout."""

    number: int
    differing: tuple[tuple[tuple[str, ...], Layout], ...] = ()


def seed(
    seed: int,
    *,
    differ_over: str | tuple[str, ...] = (),
    mesh: DeviceMesh | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Seed the random generators equally on all ranks, or differently along some mesh axes.

    Ranks with equal coordinates along ``differ_over`` draw the same numbers. Without these axes,
    all ranks draw the numbers of ``torch.manual_seed(seed)``. Call it on every rank with the same
    arguments; nothing is sent.

    Inside ``md.typed``, random values vary over the axes of the operands and of ``differ_over``. An
    operation that draws from a generator without such a seed raises ``AxisTypeError``, unless its
    operands vary over all axes. Draws inside a custom autograd Function are not checked.

    Args:
        seed: an integer, as for ``torch.manual_seed``.
        differ_over: the axes along which ranks draw different numbers.
        mesh: the mesh of these axes; None means the current mesh.
        generator: the only generator to seed. None seeds torch's default generators of all devices
            and the global generators of NumPy and ``random``.

    Raises:
        KindError: if an argument has the wrong type.
        ArgumentError: if the seed has more than 64 bits.
        MeshError: if you name axes without a mesh.
        AxisError: if the mesh has no such axis.
        NotInGroupError: if this rank is not in the mesh.

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
            "md.seed takes a torch.Generator as generator",
            found=with_article(type(generator).__name__),
            fix="pass a torch.Generator; or omit generator= to seed torch, NumPy and `random`",
        )
    mesh, axes = _find_mesh_and_axes("md.seed", differ_over, mesh)
    if mesh is not None:
        number = _number_at(number, mesh, axes)
    number %= _WORD
    if generator is None:
        torch.manual_seed(number)
        np.random.seed(number % _NUMPY_WORD)
        random.seed(number)
        generator = torch.default_generator
    else:
        generator.manual_seed(number)
    seed_notes()[generator] = _Seeding(number, () if mesh is None else ((axes, mesh.layout),))


@contextmanager
@untraced
def fork_rng(
    differ_over: str | tuple[str, ...], *, mesh: DeviceMesh | None = None
) -> Iterator[None]:
    """Draw different numbers along mesh axes inside the block, from equal generators.

    Use it for dropout on features that are split over the axis, while all other draws stay equal
    along it. The call draws a number, combines it with this rank's coordinate along the axes, and
    seeds torch's default generators of the CPU and of the current accelerator with the result.
    After the block, it restores them, so their states are equal again. A forward that
    ``torch.utils.checkpoint`` recomputes draws the same numbers again. Generators of NumPy and
    ``random``, and generators that you pass to torch, are not changed.

    Inside ``md.typed``, random values of the block vary over these axes and over the axes of
    ``md.seed``.

    Args:
        differ_over: the axes along which ranks draw different numbers.
        mesh: the mesh of these axes; None means the current mesh.

    Cost:
        Some microseconds; nothing is sent.

    Raises:
        KindError: if an argument has the wrong type.
        ArgumentError: if there is no axis in ``differ_over``.
        MeshError: if there is no current mesh.
        AxisError: if the mesh has no such axis.
        NotInGroupError: if this rank is not in the mesh.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     md.seed(0)
        ...     with md.fork_rng("tp", mesh=mesh):
        ...         different = torch.rand(1).item()
        ...     return different, torch.rand(1).item()
        >>> (a, c), (b, d) = md.simulate(program, 2)
        >>> a == b, c == d
        (False, True)
    """
    found, axes = _find_mesh_and_axes("md.fork_rng", differ_over, mesh)
    if found is None:
        raise ArgumentError(
            "md.fork_rng takes the axes along which ranks draw different numbers",
            found=f"differ_over={differ_over!r}",
            fix="pass for example differ_over='tp'",
        )
    notes, default = seed_notes(), torch.default_generator
    outer, seed_before = notes.get(default), default.initial_seed()
    with HiddenFromModes(), outside_transforms():
        drawn = int(torch.randint(_WORD >> 2, ()))  # Without modes: on the CPU.
    number = _number_at(drawn, found, axes)
    states = [(generator, generator.get_state()) for generator in default_generators()]
    try:
        for generator, _ in states:
            generator.manual_seed(number)
        if outer is not None and outer.number == seed_before:
            # All slices mesh["tp"] of a mesh fork equally, so the record is of the whole mesh.
            is_slice = set(axes) <= set(found.root.axis_names)
            layout = found.root.layout if is_slice else found.layout
            notes[default] = _Seeding(number, (*outer.differing, (axes, layout)))
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        if outer is not None:
            seed_notes()[default] = outer


def find_seeded_axes() -> tuple[str, ...] | None:
    """Return the axes along which ``md.seed`` last gave unequal seeds; None after other seeding."""
    seeding = _find_valid_seeding()
    if seeding is None:
        return None
    return tuple(dict.fromkeys(axis for axes, _ in seeding.differing for axis in axes))


def draws_differ_over(mesh: DeviceMesh) -> bool:
    """Return whether ``md.seed`` or ``md.fork_rng`` gave ranks of ``mesh`` unequal seeds."""
    seeding = _find_valid_seeding()
    # A seed over other ranks says nothing, like no seed.
    return seeding is not None and any(_type_over((it,), mesh.layout) for it in seeding.differing)


def _find_valid_seeding() -> _Seeding | None:
    """Return the record of torch's generator; None after other seeding."""
    seeding: _Seeding | None = seed_notes().get(torch.default_generator)
    is_valid = seeding is not None and seeding.number == torch.initial_seed() % _WORD
    return seeding if is_valid else None


def note_seeding(axes: tuple[str, ...], layout: Layout) -> None:
    """Record that restored seeds of torch's generator differ along ``axes``."""
    number = torch.initial_seed() % _WORD
    seed_notes()[torch.default_generator] = _Seeding(number, ((axes, layout),))


def _find_mesh_and_axes(
    call: str, differ_over: Any, mesh: Any
) -> tuple[DeviceMesh | None, tuple[str, ...]]:
    """Return the mesh and its axes that ``differ_over`` names, or (None, ())."""
    names = (differ_over,) if isinstance(differ_over, str) else differ_over
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise KindError(
            f"{call} cannot take {differ_over!r} as differ_over",
            expected="the name of an axis, or a tuple of names",
            fix="pass for example differ_over='dp' or differ_over=('dp', 'tp')",
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise mesh_kind_error(f"{call} takes a mesh", mesh)
    if not names:
        return None, ()
    given_mesh, mesh = mesh, mesh or require_current_mesh(call)
    try:
        mesh.layout.axis_indices(tuple(names))  # Raises for unknown or repeated axes.
    except AxisError as error:
        raise with_outer_mesh_hint(error, given_mesh) from None
    coordinate_in(mesh, call)
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
    """Return a random draw's type; raise if md.seed did not set the generator's state."""
    values = (*args, *kwargs.values())
    given = next((value for value in values if isinstance(value, torch.Generator)), None)
    noted = seed_notes().get(given or torch.default_generator)
    generator = given or _own_generator(args, kwargs)
    number = generator.initial_seed()
    if noted is not None and noted.number == number:
        text = _type_over(noted.differing, mode.mesh.layout)
        if text is not None:
            return INVARIANT if text and _is_of_a_loader() else text
    kinds = [kinds_in(type_of(each)) for each in operands]
    lacking = [
        axis for axis in mode.mesh.axis_names if not any(each.get(axis) == "V" for each in kinds)
    ]
    if not lacking or _is_of_a_loader():
        return INVARIANT
    if noted is None:
        why = "never seeded by md.seed"
    elif noted.number != number:
        why = f"seeded with {number} after md.seed"
    else:
        why = "seeded by md.seed over a mesh that lacks ranks of this mesh"
    raise unseeded_draw(operation.name, operands, lacking, mode.mesh, why, is_own=given is None)


_LOADERS = frozenset(
    f"torch.utils.data.{name}" for name in ("dataloader", "distributed", "sampler")
)


def _is_of_a_loader() -> bool:
    """Return whether torch's DataLoader or a sampler draws."""
    # A loader draws indices, which need no type; md.annotate types the batches.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_between[frame.f_code.co_filename]:
        if frame.f_globals.get("__name__") in _LOADERS:
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=256)
def _type_over(differing: tuple[tuple[tuple[str, ...], Layout], ...], layout: Layout) -> str | None:
    """Return the type of draws over the axes of ``layout``, or None if a rank has no seed."""
    kinds: dict[str, str] = {}
    for axes, seeded in differing:
        varying = varying_axes(axes, seeded, layout)
        if varying is None:
            return None
        kinds.update(dict.fromkeys(varying, "V"))
    return type_text(kinds)


def varying_axes(axes: tuple[str, ...], seeded: Layout, layout: Layout) -> tuple[str, ...] | None:
    """Return the axes of ``layout`` along which seeds differ, or None if a rank has no seed.

    Args:
        axes: the axes of ``seeded`` along which seeds differ.
    """
    if seeded == layout:
        return axes
    indices = seeded.axis_indices(axes)
    indices_of = {}
    for rank in layout.ranks().ravel().tolist():
        coordinate = seeded.coordinate_of(rank)
        if coordinate is None:
            return None
        indices_of[rank] = tuple(coordinate[index] for index in indices)
    return tuple(
        name
        for axis, name in enumerate(layout.axis_sizes)
        if any(
            len({indices_of[rank] for rank in group}) > 1 for group in layout.groups_of_axis(axis)
        )
    )


def _own_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """Return torch's default generator for a call's device."""
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
