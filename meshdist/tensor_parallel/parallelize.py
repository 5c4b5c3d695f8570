"""Plans by module names: what a plan does to a model, checked before, done, and explained.

``read_plan`` compares a plan with a model, changes nothing, and raises for whatever cannot be
meant; ``parallelize`` cuts the parameters that it names and changes the classes of their modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from ..annotations.axis_types import annotation_of, find_type
from ..checking.call_sites import one_frame, warn_caller
from ..collectives.torch_private import HiddenFromModes
from ..error_text import explain as explain_text, first_texts
from ..errors import ArgumentError, KindError, MeshError, ShapeError, UnequalError
from ..lax.equality_checks import assert_equal
from ..mesh.device_mesh import DeviceMesh, coordinate_in
from ..mesh.placement import balanced_boundaries
from ..sharding.api import shard
from ..typed_mode.annotations import annotate
from .layers import (
    ColumnParallelLinear,
    CutSequence,
    GatherSequence,
    ReducedForward,
    SplitLayer,
    UseHook,
    note_summed,
)
from .plan_styles import WORDS, words_of

__all__ = ["explain", "parallelize"]

M = TypeVar("M", bound=nn.Module)


_READ_BY_PARENTS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Classes whose fast path reads the weights of their layers, and never calls these."""

_MAKES_HEADS = re.compile(r"(w|to_|c_)?(q|k|v|qkv|kv|query|key|value)(_?(proj|lin|linear))?")
"""The names of layers whose features are heads."""

_PACKED = re.compile(
    r"(to_|c_)?(qkv|kv|query_key_value|key_value|gate_up)(_?(proj|lin|linear))?"
    r"|Wqkv|Wkv|W_pack|c_attn|in_proj"
)
"""The names of layers that pack several projections."""


@dataclass(frozen=True)
class Assignment:
    """A module, its name in the model, and the plan's word for it."""

    name: str
    module: nn.Module
    word: str


# -- reading a plan -------------------------------------------------------------------------------


def read_plan(model: nn.Module, plan: object, axis: str, parts: int) -> list[Assignment]:
    """Return each module in a plan with its word ("column"); raise if unfit to cut in ``parts``."""
    words = words_of(plan)
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, tuple[str, str, Assignment]] = {}
    for pattern, word in words.items():
        names = [name for name in modules if _fits(name, pattern)]
        if not names:
            _fail_mismatched(pattern, word, modules)
        for name in names:
            module = modules[name]
            first, other, _ = found.setdefault(
                id(module), (name, pattern, Assignment(name, module, word))
            )
            if other != pattern and (first == name or words[other] != word):
                raise ArgumentError(
                    f"parallelize: two patterns of the plan fit {name or 'the model itself'}",
                    expected="a pattern for each module",
                    found=f"{other!r}: {words[other]!r} and {pattern!r}: {word!r}",
                    fix="leave one of them out, or make it narrower",
                )
    assigned = [assignment for _, _, assignment in found.values()]
    for assignment in assigned:
        _check(assignment, modules, axis, parts)
    _check_tied(assigned, modules, axis)
    return assigned


def _fits(name: str, pattern: str) -> bool:
    """Return whether a pattern fits a name: part by part, between dots; only "" fits "".

    Example:
        >>> _fits("layers.0.up", "layers.*.up"), _fits("layers.0.mlp.up", "layers.*.up")
        (True, False)
        >>> _fits("0", "*"), _fits("", "*"), _fits("", "")
        (True, False, True)
    """
    if not name:  # the model itself, which has no parts
        return not pattern
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _generic(name: str) -> str:
    """Return ``name`` with "*" in place of numbers between dots."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _fail_mismatched(pattern: str, word: str, modules: Mapping[str, nn.Module]) -> NoReturn:
    names, takes = [*filter(None, modules)], WORDS[word].takes
    near = get_close_matches(pattern, list(dict.fromkeys(map(_generic, names))), 1, 0.5)
    # Where nothing is alike: the modules that the word is for, or all.
    fitting = [name for name in names if type(modules[name]) is takes] or names
    fix = "'' names the model itself, which has no modules inside"
    if near:
        fix = f"did you mean {near[0]!r}?"
    elif fitting:
        fix = f"name modules of this model: {first_texts(list(map(repr, fitting)), ', ')}"
    raise ArgumentError(
        f"parallelize: {pattern!r} fits no module",
        where=f"{pattern!r}: {word!r}",
        expected="names as model.named_modules() gives them; * stands for a part between dots",
        fix=fix,
    )


def _check(each: Assignment, modules: Mapping[str, nn.Module], axis: str, parts: int) -> None:
    """Raise unless the module can be split as the plan's word says."""
    name, module, word = each.name, each.module, WORDS[each.word]
    where = f"{name!r}: {each.word!r}"
    if isinstance(module, SplitLayer) or _uses_of(module):
        raise ArgumentError(
            f"parallelize: {name} is parallelized already",
            where=where,
            found=module.word if isinstance(module, SplitLayer) else _uses_of(module)[0].word,
            fix="call parallelize once, with the whole plan",
        )
    own = dict(module.named_parameters(recurse=False))
    if word.takes is not None:
        _check_class(each, word.takes, own)
        _check_size(each, getattr(module, word.cut), axis, parts)
        _check_around(each, modules, axis, parts)
    elif each.word == "reduced" and (not own or _computes_parameters(module)):
        raise KindError(
            f"parallelize: {name}, a {type(module).__name__}, has no plain parameters",
            where=where,
            expected="a module with plain parameters, such as a norm",
            fix="remove weight_norm, spectral_norm or pruning first" if own else None,
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
        if word.takes is not None and parameter.grad is not None:
            raise ArgumentError(
                f"parallelize: {name}.{leaf} has a gradient, of the whole",
                where=where,
                fix="optimizer.zero_grad(), or module.zero_grad(), first",
            )


def _computes_parameters(module: nn.Module) -> bool:
    """Return whether a module's weights are computed of parameters, as under weight_norm."""
    computed = [x for x in vars(module).values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return bool(computed) or nn.utils.parametrize.is_parametrized(module)


def _check_class(each: Assignment, takes: type[nn.Module], own: Mapping[str, Any]) -> None:
    """Raise unless the module is exactly of class ``takes``, with plain parameters (``own``)."""
    module, wanted = each.module, f"a torch.nn.{takes.__name__}, and no subclass"
    found = fix = None
    if nn.utils.parametrize.is_parametrized(module):
        found, fix = "parametrized", "nn.utils.parametrize.remove_parametrizations first"
    elif type(module) is not takes:
        found = f"a {type(module).__module__}.{type(module).__qualname__}"
    elif not {"weight"} <= own.keys() <= {"weight", "bias"}:
        found = f"with the parameters {', '.join(own) or 'none'}"
        fix = "take weight_norm, spectral_norm or pruning off first"
    elif kinds := [type(p).__name__ for p in own.values() if type(p) is not nn.Parameter]:
        found = f"with a {kinds[0]} as parameter"
    elif any(parameter.is_meta for parameter in own.values()):
        found, fix = (
            "on the meta device, without values",
            "module.to_empty(device=...) first, and check=False where values are loaded later",
        )
    elif isinstance(module, nn.Embedding):
        options = [name for name in ("max_norm", "scale_grad_by_freq") if getattr(module, name)]
        if options:
            found = f"with {options[0]}, which looks at all rows"
    if found is not None:
        raise KindError(
            f"parallelize: {each.name or 'the model'} cannot be {each.word!r}",
            where=f"{each.name!r}: {each.word!r}",
            expected=f"{wanted}, with plain parameters",
            found=f"{type(module).__name__} {found}" if not found.startswith("a ") else found,
            fix=fix or "leave it out of the plan: what a plan does not name stays whole",
        )


def _check_size(each: Assignment, size: int, axis: str, parts: int) -> None:
    if size < parts:
        raise ShapeError(
            f"parallelize: {each.name} is too small for the {parts} ranks of {axis!r}",
            where=f"{each.name!r}: {each.word!r}",
            expected=f"{WORDS[each.word].cut} of {parts} or more",
            found=f"{size}",
            fix="leave it out of the plan: what a plan does not name stays whole",
        )


def _check_around(
    each: Assignment, modules: Mapping[str, nn.Module], axis: str, parts: int
) -> None:
    """Raise if the parent module may read the layer's weights, or if ``parts`` would cut a head."""
    path, _, leaf = each.name.rpartition(".")
    around = modules.get(path)
    if isinstance(around, _READ_BY_PARENTS) and torch.backends.mha.get_fastpath_enabled():
        raise KindError(
            f"parallelize: {type(around).__name__} may read the weights of {each.name} itself",
            where=f"{each.name!r}: {each.word!r}",
            expected="a module that calls its layers",
            fix="torch.backends.mha.set_fastpath_enabled(False) first",
        )
    head_dim = getattr(around, "head_dim", None)
    is_column = WORDS[each.word].becomes is ColumnParallelLinear
    if not (is_column and _MAKES_HEADS.fullmatch(leaf) and isinstance(head_dim, int)):
        return
    features = each.module.out_features
    if head_dim < 1 or "whole" in each.word or features % head_dim:  # type: ignore[operator]
        return
    bounds = balanced_boundaries(features, (parts,))  # type: ignore[arg-type]
    if any(bound % head_dim for bound in bounds):
        raise ShapeError(
            f"parallelize: {each.name} would be cut inside of a head",
            where=f"{each.name!r}: {each.word!r}",
            expected=f"a number of heads that the {parts} ranks of {axis!r} can divide",
            found=f"{features // head_dim} heads of {head_dim} features, as head_dim of "  # type: ignore[operator]
            f"{type(around).__name__} says",
            fix="fewer ranks along the axis; or leave the layers of this attention out of the plan",
        )


def _check_tied(assigned: list[Assignment], modules: Mapping[str, nn.Module], axis: str) -> None:
    """Raise if modules share a parameter and would cut it in different ways."""
    lies = {id(each.module): _layout_texts(each, axis) for each in assigned}
    seen: dict[int, tuple[str, str]] = {}
    for path, module in modules.items():
        own = lies.get(id(module), {})
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            how = own.get(leaf, "whole")
            first, there = seen.setdefault(id(parameter), (name, how))
            if there != how:
                raise ArgumentError(
                    f"parallelize: {first} and {name} are one parameter, which would lie in two "
                    "ways",
                    expected="words for both modules that cut it alike, such as 'vocab' of an "
                    "embedding and 'column' of the head that is tied to it",
                    found=f"{first}: {there}; {name}: {how}",
                    fix="name both modules in the plan, or none of them",
                )


def _layout_texts(each: Assignment, axis: str) -> dict[str, str]:
    """Return, by parameter, a text of how it is cut or reduced."""
    if each.word == "reduced":
        return {leaf: "reduced" for leaf, _ in each.module.named_parameters(recurse=False)}
    return {leaf: _dim_text(spec) for leaf, spec in _specs(each, axis).items()}


def _dim_text(spec: str) -> str:
    dims = ["@" in dim for dim in spec.split()]
    return f"cut along dim {dims.index(True)} of {len(dims)}"


def _specs(each: Assignment, axis: str) -> dict[str, str]:
    """Return, by parameter, the spec over ``axis`` that the plan's word for its module gives."""
    becomes = WORDS[each.word].becomes
    own = dict(each.module.named_parameters(recurse=False))
    if becomes is None:
        return {}
    return {leaf: spec.format(tp=axis) for leaf, spec in becomes.specs.items() if leaf in own}


# -- the split ------------------------------------------------------------------------------------


@one_frame
def parallelize(module: M, mesh: DeviceMesh, plan: Mapping[str, str], *, check: bool = True) -> M:
    """Every rank holds its part of the layers that a plan names; collective along the axis.

    The module itself is changed. All ranks along the axis must hold the same module, as after
    ``md.seed`` or from one file. What the plan does not name stays whole. On an error nothing has
    changed.

    Args:
        module: the model, before it is wrapped.
        mesh: the axis, such as ``mesh["tp"]``.
        plan: words by patterns of module names; ``*`` stands for a part between dots. Or
            ``model.tp_plan`` of transformers. The words: ``column`` (outputs are cut), ``row``
            (inputs are cut), ``vocab`` (an embedding's rows are); ``column_whole`` and
            ``row_whole``, whose cut side is whole outside; ``column_sequence``, ``row_sequence``
            and ``vocab_sequence``, whose other side is cut along the sequence, the dim before the
            last; ``column_sequence_whole``; ``reduced``, a whole module that each rank uses on its
            own part, as a norm between the latter; ``cut_sequence`` and ``gather_sequence``, of the
            output of any module.
        check: whether ranks compare their models. Pass False if you load values later; then nothing
            is sent.

    Returns:
        ``module``. Its cut parameters are the same objects, with this rank's part as values, marked
        with their specs; uneven sizes are balanced.

    Gradient:
        That of the whole model. Of what is cut each rank has its part's; of ``reduced`` modules it
        is summed over the axis.

    Cost:
        As ``md.tensor_parallel.explain(module)`` tells. The comparison reads the model once, and
        sends 16 bytes.

    Raises:
        ArgumentError: a pattern that fits no module, two that fit the same, an unknown word, a
            module that is split or wrapped already, a tied parameter that would lie in two ways.
        KindError: a module of another class than a word is for, a style of torch's.
        ShapeError: sizes smaller than the axis; a cut inside of a head, where the module around a
            ``column`` has a ``head_dim``.
        MeshError: several axes, or none. NotInGroupError: this rank is not in the mesh.
        UnequalError: ranks hold different modules, and check is True.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     md.seed(0)
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
        ...     x, whole = torch.ones(1, 4), model(torch.ones(1, 4))
        ...     md.parallelize(model, mesh["tp"], {"0": "column", "1": "row"})
        ...     return tuple(model[0].weight.shape), torch.allclose(model(x), whole)
        >>> md.simulate(program, 2)
        [((3, 4), True), ((3, 4), True)]

    Source:
        Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism, 2019, section 3; with the sequence cut: Korthikanti et al., Reducing Activation
        Recomputation in Large Transformer Models, 2022, section 4.2.
    """
    if not isinstance(module, nn.Module):
        raise KindError("parallelize takes a module", found=f"a {type(module).__name__}")
    axis = _axis_of(mesh)
    assigned = read_plan(module, plan, axis, mesh.size())
    with HiddenFromModes(), torch.no_grad():
        if check:
            _check_equal(module, mesh)
        parts = {}
        for each in assigned:
            for leaf, spec in _specs(each, axis).items():
                parameter = getattr(each.module, leaf)
                if parameter not in parts:
                    parts[parameter] = shard(parameter.detach(), spec, mesh, check=False)
        for parameter, part in parts.items():
            parameter.data = part
    for each in assigned:
        _change(each, mesh)
    _warn_of_norms(module, assigned, axis)
    if mesh.size() > 1:
        _warn_of_packed(assigned)
    return module


def _check_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise UnequalError on every rank along the axis if they hold different models; collective."""
    try:
        assert_equal(model, mesh)
    except UnequalError as error:
        error.add_fix(
            "md.seed(0) on every rank before the model is made, or one file for all; or "
            "parallelize(..., check=False) where values are loaded later"
        )
        raise


def _warn_of_norms(model: nn.Module, assigned: list[Assignment], axis: str) -> None:
    """Warn of norm layers that a plan leaves out although it cuts the sequence over ``axis``."""
    if not any("sequence" in each.word for each in assigned):
        return
    named = {id(each.module) for each in assigned}
    left_out = [
        name
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Norm")
        and id(module) not in named
        # A mark says that the program has thought of it.
        and any(find_type(x) is None for x in module.parameters(recurse=False))
    ]
    if left_out:
        summary = "parallelize: the plan cuts the sequence, and leaves norms out"
        warn_caller(
            explain_text(
                summary,
                expected=f"'reduced' for each norm whose input is cut over {axis!r}: else its "
                "gradient is this rank's part, outside of md.typed",
                found=first_texts(left_out, ", "),
                fix="add them to the plan; where a norm sees whole sequences say so: "
                "md.annotate(model, {'norm.*': '...'}, mesh=mesh)",
            )
        )


def _warn_of_packed(assigned: list[Assignment]) -> None:
    """Warn of layers that are cut by outputs and named like packed projections."""
    packed = [
        each.name
        for each in assigned
        if WORDS[each.word].becomes is ColumnParallelLinear
        and "whole" not in each.word
        and _PACKED.fullmatch(each.name.rpartition(".")[2])
    ]
    if packed:
        warn_caller(
            explain_text(
                "parallelize: a column layer is named like a packed projection",
                expected="features that lie head after head: where q, k and v lie one after the "
                "other, chunk(3) of a rank's part mixes them",
                found=first_texts(packed, ", "),
                fix="split it into a layer for each projection, or make it 'column_whole'; if its "
                "features lie head after head, give the layer another name, or\n"
                "warnings.filterwarnings('ignore', '.*named like a packed projection')",
            )
        )


def _axis_of(mesh: object) -> str:
    if not isinstance(mesh, DeviceMesh):
        raise KindError(
            "parallelize takes an axis of a mesh of meshdist's",
            expected='mesh["tp"]',
            found=f"a {type(mesh).__module__}.{type(mesh).__qualname__}",
            fix="DeviceMesh.from_torch(mesh)" if type(mesh).__name__ == "DeviceMesh" else None,
        )
    if len(mesh.axis_names) != 1:
        raise MeshError(
            "parallelize takes one axis of a mesh, with a name",
            expected='mesh["tp"]',
            found=repr(mesh),
        )
    coordinate_in(mesh, "parallelize")
    return mesh.axis_names[0]


def _change(each: Assignment, mesh: DeviceMesh) -> None:
    """Change a module's class, or hook it, as the plan's word says; cut its parameters."""
    module, word = each.module, each.word
    becomes, specs = WORDS[word].becomes, _specs(each, mesh.axis_names[0])
    if becomes is not None:
        module.__class__ = becomes
        assert isinstance(module, SplitLayer)
        module.mesh, module.word = mesh, word
        annotate(module, specs, mesh=mesh)
        if word == "row_sequence" and isinstance(module.bias, torch.Tensor):
            note_summed(module.bias, mesh)
    elif word == "reduced":
        for parameter in module.parameters(recurse=False):
            note_summed(parameter, mesh)
        module.__dict__["forward"] = ReducedForward(word, mesh, module, module.forward)
    else:
        hook = CutSequence if word == "cut_sequence" else GatherSequence
        module.register_forward_hook(hook(word, mesh))


# -- what was done, in words ----------------------------------------------------------------------


def explain(
    module: nn.Module, mesh: DeviceMesh | None = None, plan: Mapping[str, str] | None = None
) -> str:
    """Return what each layer of a module sends, forward and backward, as text.

    Args:
        module: a module that ``parallelize`` has changed; or, with ``mesh`` and ``plan``, a module
            for which these would be right: it is not changed, and all errors of ``parallelize``
            are raised.

    Returns:
        A few lines for each word and size; layers that differ in their numbers stand together.
        Sizes are those of the whole arrays; ``...`` are the batch's dims, ``s`` the sequence.

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
        text = f"{_generic(each.name) or 'the model itself'}  {_explained(each)}"
        lines[text] = lines.get(text, 0) + 1
    return "\n".join(
        "\n".join([f"tensor parallel over {over}", *map(_with_count, lines.items())])
        for over, lines in grouped.items()
    )


def _parallelized(module: nn.Module) -> Iterator[tuple[str, Assignment]]:
    """Yield ("tp=2", assignment) for each parallelized module: its axis and size, its layer."""
    for name, child in module.named_modules():
        uses = [child] if isinstance(child, SplitLayer) else _uses_of(child)
        for use in uses[:1]:
            over = f"{use.mesh.axis_names[0]}={use.mesh.size()}"
            yield over, Assignment(name, child, use.word)


def _uses_of(module: nn.Module) -> list[UseHook]:
    found: list[object] = [module.forward, *module._forward_hooks.values()]
    return [use for use in found if isinstance(use, UseHook)]


def _explained(each: Assignment) -> str:
    word, module = WORDS[each.word], each.module
    sizes: dict[str, object] = {"d": "", "f": ""}
    if isinstance(module, nn.Linear):
        sizes = {"d": module.in_features, "f": module.out_features}
    elif isinstance(module, nn.Embedding):
        sizes = {"f": module.embedding_dim}
    backward = word.backward.format(**sizes)
    if each.word == "reduced":
        count = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        backward += f", {count} elements"
    return f"{each.word}\n    forward:  {word.forward.format(**sizes)}\n    backward: {backward}"


def _with_count(item: tuple[str, int]) -> str:
    text, count = item
    head, rest = text.split("\n", 1)
    return f"  {head}{f', {count} times' if count > 1 else ''}\n{rest}"
