"""Keep the annotations of a module's parameters and buffers when its tensors are replaced.

``copy.deepcopy``, ``load_state_dict(assign=True)`` and ``to_empty`` create tensors without
annotations. So ``md.annotate(module, {...})`` also records the annotations by name in each tensor's
owner, in a dict that is copied and pickled but not in the ``state_dict``. The owner's dicts of
tensors annotate each new tensor.

Worked example: torch copies a tensor without its annotation; a module annotates the copy.

    module.up._noted_marks                 annotation_of(module.up.weight)
    {"weight": ("V:tp", "4@tp, 6")}        Annotation(kinds="V:tp", dims="4@tp, 6")

    copy.deepcopy(module.up.weight)        Annotation()
    copy.deepcopy(module).up.weight        Annotation(kinds="V:tp", dims="4@tp, 6")

    >>> import copy, torch
    >>> layer = annotate_module(torch.nn.Linear(6, 4), {"weight": "f@tp d"}, None)
    >>> layer._noted_marks
    {'weight': ('V:tp', '4@tp, 6')}
    >>> copied = copy.deepcopy(layer.weight), copy.deepcopy(layer).weight
    >>> [annotation_of(weight).dims for weight in copied]
    [None, '4@tp, 6']
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..annotations.axis_types import GlobalSizes, annotation_of, find_type, set_spec
from ..annotations.tensor_specs import checked_spec, layout_of, read_spec, spec_texts
from ..arrays import describe
from ..error_text import fields_among, with_article
from ..errors import ArgumentError, AxisError, AxisTypeError, KindError, MeshdistError, ShapeError
from ..mesh.current_mesh import with_outer_mesh_hint
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import PartitionSpec
from .context import PLAIN_TENSORS
from .step_checks import watch_steps
from .type_errors import of_a_subclass

M = TypeVar("M", bound=nn.Module)

NOTED_MARKS = "_noted_marks"
"""The key, in a module's ``__dict__``, of its tensors' axis types, dims, and global sizes if known,
by name."""


class AnnotatedTensors(dict[str, Any]):
    """A module's dict of parameters or buffers, which types new tensors by ``notes``."""

    # Pickled modules refer to this class: if you move it, keep this name as an alias.

    notes: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    """The owner's; none as long as a pickle is read, whose tensors have their marks."""

    def __setitem__(self, leaf: str, tensor: torch.Tensor | None) -> None:
        super().__setitem__(leaf, tensor)
        noted = self.notes.get(leaf)
        # A compiled ``functional_call`` sets traced tensors, which have no ``__dict__``.
        if noted is None or tensor is None or torch.compiler.is_compiling():
            return
        if type(tensor) not in PLAIN_TENSORS or is_lazy(tensor) or find_type(tensor) is not None:
            return
        # ``restore_annotations`` raises for another shape. An error here could interrupt a load.
        if read_spec(*noted[:2], tuple(tensor.shape)) is not None:
            set_spec(tensor, *noted)
            watch_steps([tensor])


def annotate_module(
    module: M,
    specs: object,
    mesh: DeviceMesh | None,
    global_sizes: Mapping[str, GlobalSizes] = MappingProxyType({}),
) -> M:
    """Annotate the tensors that ``specs`` name, record this, return ``module``.

    Args:
        global_sizes: of tensors whose global shape is known, by name.
    """
    if not isinstance(specs, Mapping) or not all(isinstance(pattern, str) for pattern in specs):
        raise KindError(
            "annotate takes a mapping from names to specs for a module",
            expected="a mapping from names of parameters and buffers to specs",
            found=f"{specs!r}, {with_article(type(specs).__name__)}",
            fix='pass for example {"up.weight": "f@tp d", "norm.*": "... {R:tp}"}',
        )
    tensors = dict(_tensors_of(module))
    found = {name: specs[pattern] for name, pattern in _patterns_of(list(tensors), specs).items()}
    noted: dict[str, tuple[Any, ...]] = {}
    first_names: dict[int, str] = {}
    for name, spec in found.items():
        tensor = tensors[name][2]
        texts = spec_texts(_checked(name, tensor, spec, mesh), tuple(tensor.shape))
        noted[name] = (*texts, global_sizes[name]) if name in global_sizes else texts
        first = first_names.setdefault(id(tensor), name)
        if noted[first] != noted[name]:
            raise ArgumentError(
                f"annotate cannot give one tensor two specs: {first} and {name} are the same "
                "tensor",
                expected="one spec for a tensor that has several names",
                found=f"{first}: {found[first]!r}; {name}: {spec!r}",
                fix="give both names the same spec, or leave one of them out",
            )
    for owner, leaf, tensor in tensors.values():  # Tied tensors have several owners.
        if (first_name := first_names.get(id(tensor))) is not None:
            set_spec(tensor, *noted[first_name])
            _notes_of(owner)[leaf] = noted[first_name]
            watch_steps([tensor], mesh)
    return module


def _notes_of(owner: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return a module's recorded annotations; its dicts then also type new tensors."""
    notes: dict[str, tuple[Any, ...]] = owner.__dict__.setdefault(NOTED_MARKS, {})
    for name in ("_parameters", "_buffers"):
        tensors = owner.__dict__[name]
        # Another library's dict, which may gather parameters on lookup, stays in use. Then only
        # ``restore_annotations`` annotates.
        if type(tensors) in (dict, OrderedDict):
            owner.__dict__[name] = tensors = AnnotatedTensors(tensors)
            tensors.notes = notes
    return notes


def restore_annotations(module: M) -> M:
    """Restore missing annotations; return ``module``; raise if shapes changed."""
    lost: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
    for name, (owner, leaf, tensor) in _tensors_of(module):
        noted = owner.__dict__.get(NOTED_MARKS, {}).get(leaf)
        if noted is None or find_type(tensor) is not None:
            continue
        if read_spec(*noted[:2], tuple(tensor.shape)) is None:
            raise ShapeError(
                f"cannot restore the annotation of {name}: its shape has changed",
                expected=f"dims {noted[1]}, as recorded in the module",
                found=describe(tensor),
                fix=f"annotate it again: md.annotate(module, {{{name!r}: ...}}, mesh=mesh)",
            )
        lost.append((tensor, noted))
    for tensor, noted in lost:
        set_spec(tensor, *noted)
    watch_steps(tensor for tensor, _ in lost)
    return module


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, torch.Tensor]]]:
    """Yield (full name, (owning module, name there, tensor)) of parameters and buffers."""
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for tensors in (owner.named_parameters, owner.named_buffers):
            for leaf, tensor in tensors(recurse=False, remove_duplicate=False):
                yield prefix + leaf, (owner, leaf, tensor)
        # A parametrization stores the tensor under another name; the owner keeps the annotation.
        if is_parametrized(owner):
            lists: Any = owner.parametrizations
            for leaf, parametrizations in lists.items():
                if isinstance(tensor := getattr(parametrizations, "original", None), torch.Tensor):
                    yield f"{prefix}{leaf}", (owner, leaf, tensor)


def _patterns_of(names: list[str], specs: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: pattern}; raise for patterns without names or names with two."""
    found: dict[str, str] = {}
    for pattern in specs:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            raise ArgumentError(
                f"annotate: {pattern!r} matches no parameter or buffer of the module",
                expected="a name, or a pattern of names such as 'norm.*'",
                found=f"{len(names)} names: " + ", ".join(names[:8]) + ", ..." * (len(names) > 8),
                fix=f"did you mean {near[0]!r}?" if near else "use a name that the module has",
            )
        for name in fitting:
            if name in found:
                raise ArgumentError(
                    f"annotate: two patterns match {name!r}",
                    expected="one pattern for each name",
                    found=f"{found[name]!r}: {specs[found[name]]!r}; {pattern!r}: "
                    f"{specs[pattern]!r}",
                    fix="make the wider pattern narrower, or name each parameter",
                )
            found[name] = pattern
    return found


def _checked(
    name: str, tensor: torch.Tensor, given: object, mesh: DeviceMesh | None
) -> PartitionSpec:
    """Return ``given`` as the tensor's spec; raise if invalid, or a wrapper's tensor."""
    if type(tensor) not in PLAIN_TENSORS:
        raise _about(of_a_subclass(tensor, "annotate"), name)
    if annotation_of(tensor).has_owner:
        raise AxisTypeError(
            f"annotate cannot change {name}: its module is wrapped already",
            expected="a module that is not wrapped yet",
            fix="annotate the module first, then wrap it: md.DDP(md.annotate(module, {...}))",
        )
    if is_lazy(tensor):
        raise ArgumentError(
            f"annotate: {name} has no shape yet",
            expected="an initialized parameter",
            found=with_article(type(tensor).__name__),
            fix="run one forward pass of the module first, then annotate it",
        )
    try:
        return checked_spec(tensor, given, layout_of(given, mesh), "annotate")
    except MeshdistError as error:
        raised = with_outer_mesh_hint(error, mesh) if isinstance(error, AxisError) else error
        raise _about(raised, f"{name}, {describe(tensor)}") from None


def _about(error: MeshdistError, name: str) -> MeshdistError:
    """Return a copy of ``error`` whose ``where`` begins with ``name``."""
    where = name if error.where is None else f"{name}\n{error.where}"
    raised = type(error)(error.summary, **{**fields_among(vars(error)), "where": where})
    raised.__dict__.update({key: value for key, value in vars(error).items() if key != "where"})
    return raised
