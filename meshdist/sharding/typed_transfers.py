"""Resharding inside typed contexts: what an operand's type must be, and which type the result has.

Over an axis that cuts a dim a value varies; over the others it is unreduced, reduced or invariant,
as its sharding says. So a sharding says all that a type says.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..collectives.axis_types import ATTRIBUTE, REDUCED_BY_OWNER, kinds_in, with_kinds
from ..collectives.carried_specs import find_spec
from ..collectives.contexts import ContextMode
from ..collectives.type_errors import foreign_mesh, refused_sharding, unmarked_shard
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import NamedSharding

__all__ = ["kinds_of", "typed_operand", "typed_result"]

_PASSES = {"V": "IRV", "R": "IR", "U": "UV", "I": "I"}
"""By the kind that a sharding says, the kinds of values that are cast to it, or taken for it: what
each rank has is its summand where the sharding says so, as for ``lax.psum``."""


def kinds_of(sharding: NamedSharding) -> Mapping[str, str]:
    """The kind of a value over each axis of a sharding's mesh.

    Example:
        >>> from ..mesh.layout import Layout
        >>> from ..mesh.spec import P
        >>> mesh = Layout.from_shape((2, 2, 2), ("dp", "tp", "cp"))
        >>> dict(kinds_of(NamedSharding(mesh, P("dp", unreduced={"cp"}))))
        {'dp': 'V', 'tp': 'I', 'cp': 'U'}
    """
    spec = sharding.spec
    kinds = dict.fromkeys(sharding.layout.names or (), "V")
    kinds.update(dict.fromkeys(sharding.replicated_axes, "I"))
    kinds.update(dict.fromkeys(spec.unreduced, "U"))
    kinds.update(dict.fromkeys(spec.reduced, "R"))
    return kinds


def typed_operand(
    mode: ContextMode, verb: str, x: torch.Tensor, source: NamedSharding, mesh: DeviceMesh
) -> torch.Tensor:
    """``x``, cast where it is invariant and its sharding says more.

    Raises:
        AxisTypeError: ``x`` is of another kind over one of the axes; it requires a gradient, is
            cut, and nothing says that its parts differ; or the axes are none of the context's mesh.
    """
    _check_mesh(mode, verb, mesh)
    kinds = kinds_in(mode.operand_type(x, verb))
    missing = {}
    for axis, wanted in kinds_of(source).items():
        kind = kinds.get(axis, "I")
        is_cut = kind == "V" and find_spec(x) is not None
        if kind not in _PASSES[wanted] or (is_cut and wanted == "U"):
            raise refused_sharding(verb, x, axis, wanted, mode.mesh, repr(source.spec))
        if kind == "I" != wanted:
            if wanted == "V" and x.requires_grad and torch.is_grad_enabled() and not _is_said(x):
                raise unmarked_shard(verb, x, axis, mode.mesh, repr(source.spec))
            missing[axis] = wanted
    return mode.cast(x, missing)


def _is_said(x: torch.Tensor) -> bool:
    """Whether the program has said of ``x`` itself that it is equal: ``md.annotate(w)``.

    A result may be made from a leaf that lacks its mark, and a wrapper marks all its leaves.
    """
    return x.is_leaf and ATTRIBUTE in x.__dict__ and REDUCED_BY_OWNER not in x.__dict__


def typed_result(
    mode: ContextMode, verb: str, x: torch.Tensor, target: NamedSharding, mesh: DeviceMesh
) -> str:
    """The type of what a resharding of ``x`` to ``target`` gives; as ``x`` over other axes."""
    _check_mesh(mode, verb, mesh)
    return with_kinds(mode.operand_type(x, verb), kinds_of(target))


def _check_mesh(mode: ContextMode, verb: str, mesh: DeviceMesh) -> None:
    own = mode.mesh
    if mesh is own or all(
        name in own.axis_names and own.get_group(name).ranks == mesh.get_group(name).ranks
        for name in mesh.axis_names
    ):
        return
    raise foreign_mesh(verb, mesh.axis_names, own, mesh)
