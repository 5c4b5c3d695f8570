"""Initialize a split model like an unsplit model: ``md.tensor_parallel.apply``.

Each split layer gets its complete parameters and torch's class while the function sees it, so the
function draws for complete matrices. All ranks draw the same numbers, and each keeps its part.

Worked example: a weight of 4 rows, split over an axis 'tp' of 2 ranks, and a generator that draws
1, 2, 3, ... on both ranks.

                         rank 0         rank 1
    the layer's part     [0, 0]         [0, 0]
    while fn sees it     [1, 2, 3, 4]   [1, 2, 3, 4]
    its part after it    [1, 2]         [3, 4]       drawn on parts: [1, 2] twice

    >>> import torch, meshdist as md
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     layer = torch.nn.Linear(1, 4, bias=False, device="meta")
    ...     md.parallelize(layer, mesh["tp"], {"": "column"}, check=False)
    ...     layer.to_empty(device="cpu").weight.data.zero_()
    ...     apply(layer, lambda layer: layer.weight.data.copy_(torch.arange(1, 5)[:, None]))
    ...     return layer.weight.flatten().tolist()
    >>> md.simulate(program, 2)
    [[1.0, 2.0], [3.0, 4.0]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..annotations.axis_types import ANNOTATION
from ..arrays import shape_text
from ..checking.call_sites import one_frame
from ..collectives.torch_private import HiddenFromModes
from ..collectives.value_comparison import agree
from ..error_text import with_article
from ..errors import ArgumentError, KindError, UnequalError
from ..lax.equality_checks import check_equal
from ..mesh.device_mesh import DeviceMesh
from ..sharding.api import shard, unshard
from ..typed_mode.function_rules import tensors_in
from ..typed_mode.module_annotations import restore_annotations
from .layers import SplitLayer
from .plan_checks import specs_of
from .plan_styles import STYLES, Assignment

__all__ = ["apply"]

M = TypeVar("M", bound=nn.Module)

_FIX = "call md.seed(0) on every rank before md.tensor_parallel.apply"


@one_frame
def apply(model: M, fn: Callable[[nn.Module], Any]) -> M:
    """Call ``fn`` for each module, as ``model.apply(fn)``, on complete parameters; collective.

    Use it to initialize a model after ``md.parallelize``: functions such as ``nn.init`` would draw
    each part of a weight as if it were the complete weight. With equal seeds, the parameters
    are bitwise equal to an initialization before the split.

    While ``fn`` sees a split layer, the layer has torch's class, such as ``nn.Linear``, and its
    complete parameters with their current values. Then each rank keeps its part. While ``fn`` sees
    a parent of a split layer, it cannot change the layer's parameters.

    Args:
        model: a model that ``parallelize`` has split, wrapped or not.
        fn: a function of a module; equal on all ranks, and called on children first.

    Returns:
        ``model``.

    Cost:
        One layer at a time: each rank gathers the layer's parameters, and 16 bytes are sent to
        compare them. At the end, the other parameters are compared as in ``md.assert_equal``.

    Raises:
        KindError: if ``model`` is not a module, or a split layer is on the meta device or has a
            computed weight.
        ArgumentError: if ``fn`` changes split parameters of a layer inside the module that it gets,
            or adds, removes or reshapes parameters of a split layer.
        UnequalError: if ``fn`` gives ranks different values, because their generators differ.

    Example:
        >>> import torch, meshdist as md
        >>> def init(module):
        ...     if isinstance(module, torch.nn.Linear):
        ...         torch.nn.init.xavier_uniform_(module.weight)
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     md.seed(0)
        ...     whole = torch.nn.Linear(4, 6).apply(init)
        ...     split = torch.nn.Sequential(torch.nn.Linear(4, 6, device="meta"))
        ...     md.parallelize(split, mesh["tp"], {"0": "column"}, check=False)
        ...     split.to_empty(device="cpu")
        ...     md.seed(0)
        ...     torch.nn.Linear(4, 6)  # The unsplit layer drew this, too.
        ...     md.tensor_parallel.apply(split, init)
        ...     weight = md.unshard(split[0].weight.detach(), "f@tp d", mesh)
        ...     return torch.equal(weight, whole.weight)
        >>> md.simulate(program, 2)
        [True, True]
    """
    if not isinstance(model, nn.Module):
        raise KindError(
            "md.tensor_parallel.apply takes a module",
            found=with_article(type(model).__name__),
            fix="pass the torch.nn.Module as the first argument",
        )
    names = {module: name for name, module in model.named_modules()}
    layers = {module: name for module, name in names.items() if isinstance(module, SplitLayer)}
    for layer, name in layers.items():
        layer.check_plain()
        if any(x.is_meta for x in layer.parameters(recurse=False)):
            raise KindError(
                "md.tensor_parallel.apply cannot initialize a layer without storage",
                where=name or "the model",
                found="parameters on the meta device",
                fix="call model.to_empty(device=...) first",
            )
    _apply(model, fn, names)
    for mesh in dict.fromkeys(layer.mesh for layer in layers):
        try:
            check_equal("md.tensor_parallel.apply", model, mesh)
        except UnequalError as error:
            error.add_fix(_FIX)
            raise
    return model


def _apply(module: nn.Module, fn: Callable[[nn.Module], Any], names: dict[nn.Module, str]) -> None:
    """Call ``fn`` on the module's children, and then on the module."""
    for child in module.children():
        _apply(child, fn, names)
    if isinstance(module, SplitLayer):
        with _complete(module, names[module]):
            fn(module)
    elif split := _split_parameters(module, names):
        with _Unwritten(split, names[module]):
            fn(module)
    else:
        fn(module)


@contextmanager
def _complete(layer: SplitLayer, name: str) -> Iterator[None]:
    """Give a split layer complete parameters and torch's class; after it, this rank's parts."""
    kind, mesh, style = type(layer), layer.mesh, STYLES[layer.style]
    specs = specs_of(Assignment(name, layer, layer.style), layer.axis)
    before: dict[str, tuple[Any, torch.Tensor, Any]] = {}
    tables = [(table, dict(table)) for table in vars(layer).values() if isinstance(table, dict)]
    assert style.takes is not None
    restore_annotations(layer)
    try:
        with _plain_tensors():
            for leaf in specs:
                parameter: Any = getattr(layer, leaf)
                whole = unshard(parameter.detach(), like=parameter, mesh=mesh)
                annotation = parameter.__dict__.pop(ANNOTATION)
                before[leaf] = parameter, parameter.data, annotation
                parameter.data = whole
        layer.__class__ = style.takes  # type: ignore[assignment]
        shapes = {leaf: tuple(x.shape) for leaf, x in _own_parameters(layer).items()}
        yield
        with _plain_tensors():
            found = _own_parameters(layer)
            _check_shapes(name, shapes, found)
            wholes = {leaf: found[leaf].detach() for leaf in before}
            _check_equal({f"{name}.{leaf}": x for leaf, x in wholes.items()}, mesh)
            parts = {leaf: shard(x, specs[leaf], mesh, check=False) for leaf, x in wholes.items()}
    except BaseException:
        layer.__class__ = kind
        for leaf in before:
            vars(layer).pop(leaf, None)  # as torch's old weight_norm sets it
        for table, entries in tables:  # parameters, modules and hooks, which `fn` may have changed
            table.clear()
            table.update(entries)
        parts = {leaf: part for leaf, (_, part, _) in before.items()}
        raise
    finally:
        layer.__class__ = kind
        with HiddenFromModes():
            for leaf, (parameter, _, annotation) in before.items():
                current: Any = getattr(layer, leaf)
                current.data = parts[leaf]
                if current is parameter:
                    parameter.__dict__[ANNOTATION] = annotation
        restore_annotations(layer)


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make tensors without types and gradients, also inside ``torch.inference_mode``."""
    with HiddenFromModes(), torch.inference_mode(False), torch.no_grad():
        yield


def _own_parameters(layer: nn.Module) -> dict[str, torch.Tensor]:
    return dict(layer.named_parameters(recurse=False))


def _check_shapes(
    name: str, before: Mapping[str, tuple[int, ...]], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Raise ArgumentError if ``fn`` has changed which parameters a layer has, or their shapes."""
    found = {leaf: tuple(x.shape) for leaf, x in parameters.items()}
    if found != before:
        raise ArgumentError(
            f"md.tensor_parallel.apply: fn must not change which parameters {name or 'the model'} "
            "has, or their shapes",
            expected=_shapes_text(before),
            found=_shapes_text(found),
            fix="change the layer before you split it",
        )


def _shapes_text(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{leaf} {shape_text(shape)}" for leaf, shape in shapes.items()) or "none"


def _check_equal(wholes: dict[str, torch.Tensor], mesh: DeviceMesh) -> None:
    """Raise UnequalError on every rank if ranks hold different parameters; collective."""
    difference = agree(mesh.open_group(), {}, wholes, op_name="tensor_parallel.apply")
    if difference is not None and not difference.is_rounding:
        raise UnequalError(
            "md.tensor_parallel.apply: fn gives ranks different values",
            where=f"over {mesh.axis_names[0]!r}, {mesh.size()} ranks",
            expected="equal parameters on every rank along the axis",
            found=difference.found,
            fix=_FIX,
        )


# -- writes of a parent ---------------------------------------------------------------------------


def _split_parameters(
    module: nn.Module, names: dict[nn.Module, str]
) -> dict[str, tuple[SplitLayer, str]]:
    """Return, by full name, the layer and name of each split parameter inside ``module``."""
    return {
        f"{names[layer]}.{leaf}": (layer, leaf)
        for layer in module.modules()
        if isinstance(layer, SplitLayer)
        for leaf in layer.specs
        if getattr(layer, leaf) is not None
    }


class _Unwritten(TorchDispatchMode):
    """A context that raises if the block changes split parameters."""

    def __init__(self, split: dict[str, tuple[SplitLayer, str]], parent: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._split, self._parent = split, parent or "the model"
        self._names = {memory: name for name, memory in self._memories()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._check(tensors_in(value))
            self._check(tensors_in(kwargs.get("out")))
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)  # type: ignore[no-untyped-call]
        if kind is None:
            for name, memory in self._memories():
                if self._names.get(memory) is None:  # By `p.data = ...`, or another Parameter.
                    self._fail(name)

    def _memories(self) -> list[tuple[str, int]]:
        """Return the address of each split parameter."""
        with HiddenFromModes():
            return [
                (name, getattr(layer, leaf).untyped_storage().data_ptr())
                for name, (layer, leaf) in self._split.items()
            ]

    def _check(self, written: list[torch.Tensor]) -> None:
        for x in written:
            if x.numel() and (name := self._names.get(x.untyped_storage().data_ptr())):
                self._fail(name)

    def _fail(self, name: str) -> NoReturn:
        raise ArgumentError(
            f"md.tensor_parallel.apply: fn must not change {name} while it sees {self._parent}",
            expected="changes of a split layer's parameters while fn sees the layer itself, with "
            "complete parameters",
            fix="change the layer when fn gets it: if it depends on the name, find the name in "
            "dict(model.named_modules())",
        )
