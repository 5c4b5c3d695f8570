"""Find the modules that a plan names, and check that they can be split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
from torch import nn

from ..annotations.axis_types import annotation_of
from ..error_text import first_texts, with_article
from ..errors import ArgumentError, KindError, ShapeError
from ..mesh.placement import balanced_boundaries
from .layers import ColumnParallelLinear, find_parallelized
from .plan_styles import STYLES, Assignment, styles_of

_READ_BY_PARENTS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Classes whose fast path reads the weights of their layers without calling the layers."""

_MAKES_HEADS = re.compile(r"(w|to_|c_)?(q|k|v|qkv|kv|query|key|value)(_?(proj|lin|linear))?")
"""The names of layers whose features are heads."""

_REMOVE = "remove it from the plan: modules that the plan does not name are not split"


def read_plan(
    model: nn.Module, plan: object, axis: str, parts: int, *, takes_meta: bool = False
) -> list[Assignment]:
    """Return the plan's modules and styles; raise if a module cannot be split in ``parts``."""
    styles = styles_of(plan)
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, tuple[str, str, Assignment]] = {}
    for pattern, style in styles.items():
        names = [name for name in modules if _fits(name, pattern)]
        if not names:
            _fail_mismatched(pattern, style, modules)
        for name in names:
            module = modules[name]
            first, other, _ = found.setdefault(
                id(module), (name, pattern, Assignment(name, module, style))
            )
            if other != pattern and (first == name or styles[other] != style):
                raise ArgumentError(
                    f"parallelize: two patterns of the plan match {name or 'the model itself'}",
                    expected="one pattern for each module",
                    found=f"{other!r}: {styles[other]!r} and {pattern!r}: {style!r}",
                    fix="remove one of the patterns, or make it narrower",
                )
    assigned = [assignment for _, _, assignment in found.values()]
    for assignment in assigned:
        _check(assignment, modules, axis, parts, takes_meta)
    _check_tied(assigned, modules, axis)
    return assigned


def _fits(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name, part by part between dots; only "" matches "".

    Example:
        >>> _fits("layers.0.up", "layers.*.up"), _fits("layers.0.mlp.up", "layers.*.up")
        (True, False)
        >>> _fits("0", "*"), _fits("", "*"), _fits("", "")
        (True, False, True)
    """
    if not name:  # The model itself, whose name has no parts.
        return not pattern
    parts, names = name.split("."), pattern.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, parts, names))


def generic_name(name: str) -> str:
    """Return ``name`` with "*" instead of each number between dots."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _fail_mismatched(pattern: str, style: str, modules: Mapping[str, nn.Module]) -> NoReturn:
    names, takes = [*filter(None, modules)], STYLES[style].takes
    near = get_close_matches(pattern, list(dict.fromkeys(map(generic_name, names))), 1, 0.5)
    # If no name is similar, suggest the modules that the style is for, or all modules.
    fitting = [name for name in names if type(modules[name]) is takes] or names
    fix = "use '' for the model itself, which has no submodules"
    if near:
        fix = f"did you mean {near[0]!r}?"
    elif fitting:
        fix = f"use module names of this model: {first_texts(list(map(repr, fitting)), ', ')}"
    raise ArgumentError(
        f"parallelize: {pattern!r} matches no module",
        where=f"{pattern!r}: {style!r}",
        expected="a name as in model.named_modules(), in which * matches one part between dots",
        fix=fix,
    )


def _check(
    each: Assignment,
    modules: Mapping[str, nn.Module],
    axis: str,
    parts: int,
    takes_meta: bool,
) -> None:
    """Raise unless the module can be split in its style."""
    name, module, style = each.name, each.module, STYLES[each.style]
    where = f"{name!r}: {each.style!r}"
    if (made := find_parallelized(module)) is not None:
        raise ArgumentError(
            f"parallelize: {name} is parallelized already",
            where=where,
            found=made.style,
            fix="call parallelize once, with the complete plan",
        )
    own = dict(module.named_parameters(recurse=False))
    if style.takes is not None:
        _check_class(each, style.takes, own, takes_meta)
        _check_size(each, getattr(module, style.cut), axis, parts)
        _check_around(each, modules, axis, parts)
    elif each.style == "reduced" and (not own or _computes_parameters(module)):
        raise KindError(
            f"parallelize: {name}, {with_article(type(module).__name__)}, has no plain parameters",
            where=where,
            expected="a module with plain parameters, such as a norm",
            fix="remove weight_norm, spectral_norm or pruning first"
            if own
            else "remove it from the plan, or name its submodules",
        )
    for leaf, parameter in own.items():
        if annotation_of(parameter).has_owner:
            raise ArgumentError(
                f"parallelize: {name}.{leaf} belongs to a DistributedDataParallel",
                where=where,
                expected="a model that is not wrapped yet",
                fix="parallelize first: DDP(md.parallelize(model, mesh['tp'], plan), "
                "device_mesh=mesh['dp'])",
            )
        if style.takes is not None and parameter.grad is not None:
            raise ArgumentError(
                f"parallelize cannot split {name}.{leaf} while it has a gradient",
                where=where,
                fix="call optimizer.zero_grad() or module.zero_grad() first",
            )


def _computes_parameters(module: nn.Module) -> bool:
    """Return whether weights are computed from other parameters, as with weight_norm."""
    computed = [x for x in vars(module).values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return bool(computed) or nn.utils.parametrize.is_parametrized(module)


def _check_class(
    each: Assignment, takes: type[nn.Module], own: Mapping[str, Any], takes_meta: bool
) -> None:
    """Raise unless the module is exactly a ``takes``, with plain parameters (``own``)."""
    module, wanted = each.module, f"a torch.nn.{takes.__name__} (not a subclass)"
    found = fix = None
    if nn.utils.parametrize.is_parametrized(module):
        found = "parametrized"
        fix = "call nn.utils.parametrize.remove_parametrizations first"
    elif type(module) is not takes:
        found = f"a {type(module).__module__}.{type(module).__qualname__}"
    elif not {"weight"} <= own.keys() <= {"weight", "bias"}:
        found = f"with the parameters {', '.join(own) or 'none'}"
        fix = "remove weight_norm, spectral_norm or pruning first"
    elif kinds := [type(p).__name__ for p in own.values() if type(p) is not nn.Parameter]:
        found = f"with a {kinds[0]} as parameter"
    elif not takes_meta and any(parameter.is_meta for parameter in own.values()):
        found, fix = (
            "on the meta device, without values",
            "pass check=False, and then call module.to_empty(device=...) and "
            "md.tensor_parallel.apply(module, fn), or load values",
        )
    elif isinstance(module, nn.Embedding):
        options = [name for name in ("max_norm", "scale_grad_by_freq") if getattr(module, name)]
        if options:
            found = f"with {options[0]}, which reads all rows"
    if found is not None:
        raise KindError(
            f"parallelize cannot use {each.style!r} for {each.name or 'the model'}",
            where=f"{each.name!r}: {each.style!r}",
            expected=f"{wanted} with plain parameters",
            found=f"{type(module).__name__} {found}" if not found.startswith("a ") else found,
            fix=fix or _REMOVE,
        )


def _check_size(each: Assignment, size: int, axis: str, parts: int) -> None:
    if size < parts:
        raise ShapeError(
            f"parallelize: {each.name} is too small for the {parts} ranks of {axis!r}",
            where=f"{each.name!r}: {each.style!r}",
            expected=f"{STYLES[each.style].cut} of {parts} or more",
            found=f"{size}",
            fix=_REMOVE,
        )


def _check_around(
    each: Assignment, modules: Mapping[str, nn.Module], axis: str, parts: int
) -> None:
    """Raise if the parent module may read the layer's weights, or if ``parts`` would cut a head."""
    path, _, leaf = each.name.rpartition(".")
    around = modules.get(path)
    if isinstance(around, _READ_BY_PARENTS) and torch.backends.mha.get_fastpath_enabled():
        raise KindError(
            f"parallelize: {type(around).__name__} may read the weights of {each.name} directly",
            where=f"{each.name!r}: {each.style!r}",
            expected="a module that calls its layers",
            fix="call torch.backends.mha.set_fastpath_enabled(False) first",
        )
    head_dim = getattr(around, "head_dim", None)
    is_column = STYLES[each.style].becomes is ColumnParallelLinear
    if not (is_column and _MAKES_HEADS.fullmatch(leaf) and isinstance(head_dim, int)):
        return
    features = each.module.out_features
    if head_dim < 1 or "whole" in each.style or features % head_dim:  # type: ignore[operator]
        return
    bounds = balanced_boundaries(features, (parts,))  # type: ignore[arg-type]
    if any(bound % head_dim for bound in bounds):
        raise ShapeError(
            f"parallelize cannot split {each.name} inside an attention head",
            where=f"{each.name!r}: {each.style!r}",
            expected=f"a number of heads that is divisible by {parts}, the size of {axis!r}",
            found=f"{features // head_dim} heads of {head_dim} features (head_dim of "  # type: ignore[operator]
            f"{type(around).__name__})",
            fix="use fewer ranks along the axis, or remove the layers of this attention from "
            "the plan",
        )


def _check_tied(assigned: list[Assignment], modules: Mapping[str, nn.Module], axis: str) -> None:
    """Raise if modules would split a shared parameter in different ways."""
    layouts = {id(each.module): _layout_texts(each, axis) for each in assigned}
    seen: dict[int, tuple[str, str]] = {}
    for path, module in modules.items():
        own = layouts.get(id(module), {})
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            how = own.get(leaf, "not split")
            first, first_how = seen.setdefault(id(parameter), (name, how))
            if first_how != how:
                raise ArgumentError(
                    f"parallelize cannot split one parameter in two ways: {first} and {name} are "
                    "tied",
                    expected="styles that split both the same way, such as 'vocab' for an "
                    "embedding and 'column' for the head that is tied to it",
                    found=f"{first}: {first_how}; {name}: {how}",
                    fix="name both modules in the plan, or none of them",
                )


def _layout_texts(each: Assignment, axis: str) -> dict[str, str]:
    """Return how each parameter is split or reduced, as text."""
    if each.style == "reduced":
        return {leaf: "reduced" for leaf, _ in each.module.named_parameters(recurse=False)}
    return {leaf: _dim_text(spec) for leaf, spec in specs_of(each, axis).items()}


def _dim_text(spec: str) -> str:
    dims = ["@" in dim for dim in spec.split()]
    return f"split along dim {dims.index(True)} of {len(dims)}"


def specs_of(each: Assignment, axis: str) -> dict[str, str]:
    """Return, by parameter, the style's spec over ``axis``."""
    becomes = STYLES[each.style].becomes
    own = dict(each.module.named_parameters(recurse=False))
    if becomes is None:
        return {}
    return {leaf: spec.format(tp=axis) for leaf, spec in becomes.specs.items() if leaf in own}
