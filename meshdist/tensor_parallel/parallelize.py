"""Split a model by a plan, and explain the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ..annotations.axis_types import GlobalSizes, annotation_of
from ..checking.call_sites import one_frame
from ..collectives.torch_private import HiddenFromModes
from ..error_text import with_article
from ..errors import KindError, MeshError, UnequalError
from ..lax.equality_checks import check_equal
from ..mesh.device_mesh import DeviceMesh, coordinate_in
from ..sharding.api import shard
from ..typed_mode.mode import untyped
from ..typed_mode.module_annotations import annotate_module
from .example_check import ExampleCheck
from .layers import (
    CutSequence,
    DrawingForward,
    GatherSequence,
    ReducedForward,
    SplitLayer,
    find_parallelized,
    note_summed,
)
from .plan_checks import generic_name, read_plan, specs_of
from .plan_styles import DRAWS, STYLES, Assignment
from .plan_warnings import warn_of_dropout, warn_of_norms, warn_of_packed

__all__ = ["explain", "parallelize"]

M = TypeVar("M", bound=nn.Module)


# -- the split ------------------------------------------------------------------------------------


@one_frame
def parallelize(
    module: M,
    mesh: DeviceMesh,
    plan: Mapping[str, str],
    *,
    check: bool = True,
    example: tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> M:
    """Split the layers that ``plan`` names over a mesh axis, in place; collective along the axis.

    All ranks along the axis must hold the same module: call ``md.seed`` before you create it, or
    load it from one file. Modules that the plan omits are not split. If the call raises, the module
    is unchanged.

    Args:
        module: the model, before it is wrapped.
        mesh: one axis, such as ``mesh["tp"]``.
        plan: a mapping from patterns of module names to styles, or ``model.tp_plan`` of
            transformers. ``*`` matches one part between dots. The styles are ``column`` (splits the
            outputs), ``row`` (splits the inputs) and ``vocab`` (splits an embedding's rows);
            ``column_whole`` (gathers the outputs) and ``row_whole`` (takes unsplit inputs);
            ``column_sequence``, ``row_sequence`` and ``vocab_sequence``, whose other activations
            are split along the sequence, the dimension before the last; ``column_sequence_whole``;
            ``reduced``, for an unsplit module that each rank uses on its own part, such as a norm
            in a split sequence; ``cut_sequence`` and ``gather_sequence``, for the output of any
            module; ``own_draws`` and ``whole_draws``, for any module that draws random numbers,
            such as dropout: on each rank its own numbers, or the same numbers on all ranks.
        check: whether ranks compare their models first. Pass False if you load values later; then
            nothing is sent, and parameters may be on the meta device: call ``to_empty`` and
            ``md.tensor_parallel.apply`` after the split.
        example: the arguments of the model, a tuple or a dict of keyword arguments, equal on all
            ranks. The model runs on them before and after the split, in eval mode, forward and
            backward. If an output of a module or the gradient of a parameter differs by more than
            half of its dtype's digits, the split is undone. Buffers, generators, ``.grad`` and
            flags stay as they are; other state that the forward changes does not. Both runs get
            the complete example, also if the plan splits the sequence.

    Returns:
        ``module``. Its split parameters are the same objects; they hold this rank's part and are
        annotated with their specs. Uneven sizes are balanced.

    Gradient:
        As of the unsplit model; each rank holds its part for split parameters. Gradients of
        ``reduced`` modules are summed over the axis.

    Cost:
        See ``md.tensor_parallel.explain(module)``. The comparison reads the model once and sends 16
        bytes. An example takes two forward and backward passes, and until it is compared, memory
        for all modules' outputs, the unsplit parameters, their gradients, and a copy of buffers.

    Raises:
        ArgumentError: if a pattern matches no module, two patterns match the same module, a style
            is unknown, a module is split or wrapped already, or a tied parameter would be split in
            two ways.
        KindError: if a style does not support the module's class, or is a torch ParallelStyle; or
            if the model's output on the example holds no tensor, or a parameter has no values.
        ShapeError: if a size is smaller than the axis, or a ``column`` layer would be split inside
            a head (its parent has a ``head_dim``).
        MeshError: if ``mesh`` does not have exactly one axis.
        NotInGroupError: if this rank is not in the mesh.
        UnequalError: if ranks hold different modules and ``check`` is True, if the example differs
            between ranks, or if the split model computes something else on it; on every rank. It
            names the first module whose output differs, else the first such gradient.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     md.seed(0)
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
        ...     x, whole = torch.ones(1, 4), model(torch.ones(1, 4))
        ...     md.parallelize(model, mesh["tp"], {"0": "column", "1": "row"}, example=(x,))
        ...     return tuple(model[0].weight.shape), torch.allclose(model(x), whole)
        >>> md.simulate(program, 2)
        [((3, 4), True), ((3, 4), True)]

    Source:
        Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism, 2019, section 3; with the sequence cut: Korthikanti et al., Reducing Activation
        Recomputation in Large Transformer Models, 2022, section 4.2.
    """
    if not isinstance(module, nn.Module):
        raise KindError(
            "parallelize takes a module",
            found=with_article(type(module).__name__),
            fix="pass the torch.nn.Module as the first argument",
        )
    axis = _axis_of(mesh)
    assigned = read_plan(module, plan, axis, mesh.size(), takes_meta=not check)
    checked = None if example is None else ExampleCheck(module, mesh, example)
    with HiddenFromModes(), torch.no_grad():
        if check:
            _check_equal(module, mesh)
    if checked is not None:
        with untyped():
            checked.run_unsplit()
    with HiddenFromModes(), torch.no_grad():
        parts, specs = {}, {}
        for each in assigned:
            for leaf, spec in specs_of(each, axis).items():
                parameter = getattr(each.module, leaf)
                if parameter not in parts:
                    parts[parameter] = shard(parameter.detach(), spec, mesh, check=False)
                    specs[parameter] = spec
        before = None if checked is None else _Unsplit(assigned)
        for parameter, part in parts.items():
            _set_data(parameter, part)
    sizes = {parameter: annotation_of(part).global_sizes for parameter, part in parts.items()}
    for each in assigned:
        _change(each, mesh, sizes)
    if checked is not None and before is not None:
        with untyped():
            try:
                checked.compare_split(specs)
            except BaseException:
                before.restore()
                raise
    warn_of_norms(module, assigned, axis)
    if mesh.size() > 1:
        warn_of_dropout(module, assigned)
        if example is None:
            warn_of_packed(assigned)
    return module


class _Unsplit:
    """The state of a plan's modules before the split."""

    def __init__(self, assigned: list[Assignment]) -> None:
        modules = [each.module for each in assigned]
        self._modules = [(x, type(x), dict(vars(x)), set(x._forward_hooks)) for x in modules]
        own = dict.fromkeys(p for x in modules for p in x.parameters(recurse=False))
        self._parameters = [(p, p.data, dict(vars(p))) for p in own]

    def restore(self) -> None:
        """Undo the split."""
        for module, kind, attributes, hooks in self._modules:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for key in module._forward_hooks.keys() - hooks:
                del module._forward_hooks[key]
        for parameter, data, attributes in self._parameters:
            _set_data(parameter, data)
            vars(parameter).clear()
            vars(parameter).update(attributes)


def _set_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Set the data of a parameter to data of another shape."""
    # A graph of an earlier forward that is still in memory keeps the parameter's gradient
    # accumulator, which raises for another shape. torch replaces it only for another dtype.
    other = torch.float32 if data.dtype is torch.float16 else torch.float16
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def _check_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise UnequalError on every rank if ranks hold different models; collective."""
    try:
        check_equal("parallelize", model, mesh)
    except UnequalError as error:
        error.add_fix(
            "call md.seed(0) on every rank before you create the model, or load one file on all "
            "ranks; or pass check=False if you load values later"
        )
        raise


def _axis_of(mesh: object) -> str:
    if not isinstance(mesh, DeviceMesh):
        raise KindError(
            "parallelize takes one axis of a meshdist.DeviceMesh",
            expected='mesh["tp"]',
            found=f"a {type(mesh).__module__}.{type(mesh).__qualname__}",
            fix='convert it: DeviceMesh.from_torch(mesh)["tp"]'
            if type(mesh).__name__ == "DeviceMesh"
            else 'pass the axis of a mesh: mesh["tp"]',
        )
    if len(mesh.axis_names) != 1:
        raise MeshError(
            "parallelize takes one named axis of a mesh",
            expected='mesh["tp"]',
            found=repr(mesh),
            fix='pass one axis: mesh["tp"]; or name the axes: mesh_dim_names=("dp", "tp")',
        )
    coordinate_in(mesh, "parallelize")
    return mesh.axis_names[0]


def _change(each: Assignment, mesh: DeviceMesh, sizes: Mapping[torch.Tensor, GlobalSizes]) -> None:
    """Change a module's class, or add a hook, for its style; annotate its parameters.

    Args:
        sizes: the global sizes of split parameters.
    """
    module, style = each.module, each.style
    becomes, specs = STYLES[style].becomes, specs_of(each, mesh.axis_names[0])
    if becomes is not None:
        module.__class__ = becomes
        assert isinstance(module, SplitLayer)
        module.mesh, module.style = mesh, style
        annotate_module(module, specs, mesh, {leaf: sizes[getattr(module, leaf)] for leaf in specs})
        if style == "row_sequence" and isinstance(module.bias, torch.Tensor):
            note_summed(module.bias, mesh)
    elif style == "reduced":
        for parameter in module.parameters(recurse=False):
            note_summed(parameter, mesh)
        module.__dict__["forward"] = ReducedForward(style, mesh, module, module.forward)
    elif style in DRAWS:
        module.__dict__["forward"] = DrawingForward(style, mesh, module.forward)
    else:
        hook = CutSequence if style == "cut_sequence" else GatherSequence
        module.register_forward_hook(hook(style, mesh))


# -- the explanation ------------------------------------------------------------------------------


def explain(
    module: nn.Module, mesh: DeviceMesh | None = None, plan: Mapping[str, str] | None = None
) -> str:
    """Describe the communication of a module's layers in the forward and backward pass.

    Args:
        module: a module that ``parallelize`` has changed. With ``mesh`` and ``plan``, a module that
            you want to parallelize: it is not changed.
        mesh, plan: the arguments of ``parallelize``.

    Returns:
        A few lines of text for each style and size; layers whose names differ only in numbers share
        an entry. Sizes are global; ``...`` are the batch dimensions, ``s`` the sequence.

    Raises:
        All errors of ``parallelize``, if ``mesh`` and ``plan`` are given.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
        ...     return md.tensor_parallel.explain(model, mesh, {"1": "row"})
        >>> print(md.simulate(program, 2)[0])
        tensor parallel over tp=2
          *  row
            forward:  all-reduce of the output, [..., 4]
            backward: nothing
    """
    if plan is not None:
        axis = _axis_of(mesh)
        assert mesh is not None
        over = f"{axis}={mesh.size()}"
        found = [(over, each) for each in read_plan(module, plan, axis, mesh.size())]
    else:
        found = list(_parallelized(module))
    if not found:
        return "no layer is parallelized"
    grouped: dict[str, dict[str, int]] = {}
    for over, each in found:
        lines = grouped.setdefault(over, {})
        text = f"{generic_name(each.name) or 'the model itself'}  {_explained(each)}"
        lines[text] = lines.get(text, 0) + 1
    return "\n".join(
        "\n".join([f"tensor parallel over {over}", *map(_with_count, lines.items())])
        for over, lines in grouped.items()
    )


def _parallelized(module: nn.Module) -> Iterator[tuple[str, Assignment]]:
    """Yield ("tp=2", assignment) for each parallelized module."""
    for name, child in module.named_modules():
        if (made := find_parallelized(child)) is not None:
            over = f"{made.mesh.axis_names[0]}={made.mesh.size()}"
            yield over, Assignment(name, child, made.style)


def _explained(each: Assignment) -> str:
    style, module = STYLES[each.style], each.module
    sizes: dict[str, object] = {"d": "", "f": ""}
    if isinstance(module, nn.Linear):
        sizes = {"d": module.in_features, "f": module.out_features}
    elif isinstance(module, nn.Embedding):
        sizes = {"f": module.embedding_dim}
    backward = style.backward.format(**sizes)
    if each.style == "reduced":
        count = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        backward += f", {count} elements"
    return f"{each.style}\n    forward:  {style.forward.format(**sizes)}\n    backward: {backward}"


def _with_count(item: tuple[str, int]) -> str:
    text, count = item
    head, rest = text.split("\n", 1)
    return f"  {head}{f', {count} times' if count > 1 else ''}\n{rest}"
