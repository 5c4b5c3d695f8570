"""Compare a model before and after its split on example inputs, forward and backward.

Forward hooks keep the outputs of all modules of the unsplit model. After the split, each output is
compared in order of execution. An output that is split has another shape: then the outputs that
depend on it are compared. The gradients belong to a weighted sum of the model's outputs.

Worked example: a softmax between a column and a row layer, on an axis 'tp' of 2 ranks.

    module       before      after       compared
    up           [n, 16]     [n, 8]      no: split
    softmax      [n, 16]     [n, 8]      no: split
    down         [n, 4]      [n, 4]      differs: the first that does
    the model    [n, 4]      [n, 4]

    >>> import torch, meshdist as md
    >>> from torch import nn
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     md.seed(0)
    ...     model = nn.Sequential(nn.Linear(4, 16), nn.Softmax(-1), nn.Linear(16, 4))
    ...     try:
    ...         plan, x = {"0": "column", "2": "row"}, torch.randn(3, 4)
    ...         md.parallelize(model, mesh["tp"], plan, example=(x,))
    ...     except md.errors.UnequalError as error:
    ...         return error.found.partition(" by ")[0], type(model[0]).__name__
    >>> md.simulate(program, 2)[0]
    ('ranks 0-1: the output of 2, shape (3, 4), float32, differs', 'Linear')
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import nn

from ..annotations.axis_types import axes_of_kind, type_of
from ..arrays import describe
from ..collectives.objects import gather_from_all
from ..collectives.tensor_collectives import all_reduce
from ..collectives.value_comparison import (
    agree,
    is_any,
    largest_gap,
    largest_value,
    relative_distance,
    tolerance,
)
from ..error_text import grouped_text, with_article
from ..errors import KindError, MeshdistError, UnequalError
from ..mesh.device_mesh import DeviceMesh
from ..runtime.generators import unchanged_generators
from ..sharding.api import shard
from ..typed_mode.function_rules import tensors_in
from .layers import own_part

__all__ = ["ExampleCheck"]

_NAME = "parallelize example"
_LEAST = 0.01
"""The part of the model's largest gradient to which smaller gradients are relative."""

_FIX = (
    "correct the code of this module, or before it: split packed projections, leave the number of "
    "heads open (unflatten(-1, (-1, head_dim))), call layers instead of reading their weights, and "
    "use 'column_whole' and 'row_whole' around functions of all features"
)

_RAISES = "the split model raises"
_FIX_OF_PLAN = (
    "complete the plan: a layer after 'column' needs 'row' or 'row_whole'; or correct the code of "
    "this module"
)


class ExampleCheck:
    """A model, example inputs, and the results of the unsplit model.

    Raises:
        KindError: the example is not a tuple or a mapping, or a parameter has no values.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, example: object) -> None:
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        if isinstance(example, Mapping):
            self._kwargs = dict(example)
        elif isinstance(example, (tuple, list)):
            self._args = tuple(example)
        else:
            raise KindError(
                "parallelize takes the arguments of the model as example",
                expected="a tuple of arguments, or a dict of keyword arguments",
                found=with_article(type(example).__name__),
                fix="pass example=(x,)",
            )
        if meta := [name for name, x in model.named_parameters() if x.is_meta]:
            raise KindError(
                "parallelize cannot run an example on a model without values",
                found=f"{meta[0]} on the meta device",
                fix="call module.to_empty(device=...) and load its values first, or omit example=",
            )
        self._model, self._mesh, self._group = model, mesh, mesh.open_group()
        self._calls: Counter[str] = Counter()
        self._running: list[str] = []
        self._tolerance = 0.0
        # Of the unsplit model.
        self._outputs: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._shapes: list[tuple[int, ...]] = []
        self._gradients: dict[torch.Tensor, torch.Tensor | None] = {}
        # Of the split model: the order and the text of the first difference.
        self._difference: tuple[int, str] | None = None
        self._last_equal = ""

    # -- the unsplit model ------------------------------------------------------------------------

    def run_unsplit(self) -> None:
        """Keep the results of the unsplit model; collective.

        Raises:
            KindError: its output holds no tensor.
            UnequalError: examples or outputs differ between ranks, or other ranks failed.
        """
        error, outputs = None, list[torch.Tensor]()
        try:
            outputs, self._gradients = self._run(self._keep)
        except Exception as raised:
            error = raised
        if failed := self._reports(None if error is None else (0, self._text_of(error)), error):
            if error is not None:
                raise error
            raise UnequalError(
                "parallelize: the unsplit model failed on the example on other ranks",
                where=self._where(),
                found=failed,
                fix="correct the example or the model on these ranks",
            )
        given = {f"example tensor {i}": x for i, x in enumerate(tensors_in(self._inputs()))}
        results = {f"output tensor {i}": x for i, x in enumerate(outputs)}
        difference = agree(self._group, {}, {**given, **results}, op_name=_NAME)
        if difference is not None and not difference.is_rounding:
            raise UnequalError(
                "parallelize: the example differs between ranks",
                where=self._where(),
                expected="equal inputs and outputs of the unsplit model on every rank",
                found=difference.found,
                fix="call md.seed(0) on every rank before you draw the example",
            )

    def _keep(self, name: str, output: Any) -> None:
        self._outputs[name, self._calls[name]] = [x.detach().clone() for x in tensors_in(output)]

    # -- the split model --------------------------------------------------------------------------

    def compare_split(self, specs: Mapping[torch.Tensor, str]) -> None:
        """Raise UnequalError on every rank if the split model differs from the unsplit; collective.

        Args:
            specs: the specs of the split parameters over the axis.
        """
        error = None
        try:
            _, gradients = self._run(self._compare)
            self._compare_gradients(gradients, specs)
        except Exception as raised:
            error, self._difference = raised, (-1, f"{_RAISES} {self._text_of(raised)}")
        try:
            if found := self._reports(self._difference, error):
                raise UnequalError(
                    "parallelize: the split model differs from the unsplit model on the example",
                    where=self._where(),
                    expected="equal outputs and gradients before and after the split",
                    found=found,
                    fix=_FIX_OF_PLAN if _RAISES in found else _FIX,
                ) from error
        finally:
            del error  # A cycle of the error and this frame would keep the graph in memory.

    def _compare(self, name: str, output: Any) -> None:
        kept, found = self._outputs.pop((name, self._calls[name]), []), tensors_in(output)
        shown = f"the output of {name or 'the model'}"
        if not name and len(kept) != len(found):
            self._note(f"{shown} holds {len(found)} tensors, not {len(kept)}")
        for whole, mine in zip(kept, found, strict=False):
            allowed = self._allowed(mine)
            # A layer's part may be stored in any order; of the model, it is a slice.
            part = whole if name else _part_like(whole, tuple(mine.shape), self._mesh)
            if part is None:
                self._note(f"{shown} has the shape {tuple(mine.shape)}, not {tuple(whole.shape)}")
            elif part.shape == mine.shape:
                distance = relative_distance(mine, part)
                if distance > allowed:
                    self._note(f"{shown}, {describe(mine)}, differs", distance)
                elif self._difference is None:
                    self._last_equal = name

    def _compare_gradients(
        self, found: Mapping[torch.Tensor, torch.Tensor | None], specs: Mapping[torch.Tensor, str]
    ) -> None:
        """Note the first parameter whose gradient differs; collective."""
        wholes = self._gradients
        largest = max([largest_value(x) for x in wholes.values() if x is not None], default=0.0)
        for index, (name, parameter) in enumerate(self._model.named_parameters()):
            if parameter not in found:
                continue
            zeros, gradient = torch.zeros_like(parameter), found[parameter]
            mine = zeros if gradient is None else gradient
            if self._mesh.axis_names[0] in axes_of_kind(type_of(parameter), "R"):
                mine = mine.clone()  # A wrapper sums it later.
                all_reduce(mine, group=self._group)
            whole, part, own_scale = wholes.get(parameter), zeros, 0.0
            if whole is not None:
                own_scale = largest_value(whole)
                is_split = parameter in specs
                part = (
                    shard(whole, specs[parameter], self._mesh, check=False) if is_split else whole
                )
            scale, gap = max(own_scale, _LEAST * largest), largest_gap(mine, part)
            if gap > self._allowed(mine) * scale:
                distance = gap / scale if scale else torch.inf
                self._note(
                    f"the gradient of {name}, {describe(mine)}, differs", distance, index + 1
                )

    def _allowed(self, x: torch.Tensor) -> float:
        """Return the distance that rounding explains: of the coarsest dtype up to ``x``."""
        own = tolerance(x)
        self._tolerance = max(self._tolerance, own)
        return self._tolerance if own else 0.0

    def _note(self, text: str, distance: float | None = None, index: int = 0) -> None:
        """Record the first difference; ignore later differences."""
        if self._difference is None:
            if distance is not None:
                text += f" by up to {distance:.2g} of its largest value"
            if self._last_equal:
                text += f"; the last module with an equal output is {self._last_equal}"
            self._difference = sum(self._calls.values()) + index, text

    # -- shared -----------------------------------------------------------------------------------

    def _run(
        self, visit: Callable[[str, Any], None]
    ) -> tuple[list[torch.Tensor], dict[torch.Tensor, torch.Tensor | None]]:
        """Return the model's output tensors, and the gradient of each trainable parameter.

        Args:
            visit: called with a module's name and output, after each call of a module.
        """
        self._calls.clear()
        self._running.clear()

        def hook(name: str) -> Callable[..., None]:
            def after(module: nn.Module, args: Any, output: Any) -> None:
                with torch.no_grad():
                    visit(name, output)
                self._calls[name] += 1
                self._running.pop()

            return after

        def before(name: str) -> Callable[..., None]:
            return lambda module, args: self._running.append(name)

        with _unchanged(self._model), torch.enable_grad():
            handles = [
                handle
                for name, module in self._model.named_modules()
                for handle in (
                    module.register_forward_pre_hook(before(name)),
                    module.register_forward_hook(hook(name)),
                )
            ]
            try:
                args, kwargs = self._inputs()
                returned = self._model(*args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()
            outputs = tensors_in(returned)
            if not outputs:
                raise KindError(
                    "parallelize: the model's output on the example holds no tensor",
                    expected="a tensor, or tensors in lists, tuples and dicts",
                    found=with_article(type(returned).__name__),
                    fix="return tensors, or omit example=",
                )
            gradients = self._differentiate(outputs)
            return [x.detach() for x in outputs], gradients

    def _inputs(self) -> Any:
        """Return copies of the example's arguments, which the model may change."""
        given: Any = self._args, self._kwargs
        return optree.tree_map(_copied, given, none_is_leaf=True)

    def _differentiate(
        self, outputs: list[torch.Tensor]
    ) -> dict[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of a weighted sum of the outputs."""
        # Unlike backward(), this writes no `.grad`, and runs no hooks of written gradients.
        parameters = [x for x in self._model.parameters() if x.requires_grad]
        self._shapes = self._shapes or [tuple(x.shape) for x in outputs]
        reached = {i: x for i, x in enumerate(outputs[: len(self._shapes)]) if x.requires_grad}
        if not (parameters and reached):
            return dict.fromkeys(parameters)
        weights = []
        for i, x in reached.items():
            count = math.prod(self._shapes[i])
            whole = torch.linspace(-1, 1, count, device=x.device).view(self._shapes[i])
            part = _part_like(whole, tuple(x.shape), self._mesh)
            weights.append(torch.zeros_like(x) if part is None else part.to(x.dtype))
        found = torch.autograd.grad([*reached.values()], parameters, weights, allow_unused=True)
        dense = [x.to_dense() if x is not None and x.is_sparse else x for x in found]
        return dict(zip(parameters, dense, strict=True))

    def _reports(self, mine: tuple[int, str] | None, error: Exception | None) -> str:
        """Return the first difference that any rank has found, "" for none; collective."""
        try:
            if not is_any(mine is not None, self._group, _NAME):
                return ""
            reports = zip(self._group.ranks, gather_from_all(mine, self._group), strict=True)
        except MeshdistError as later:  # For example, this rank left the others in a collective.
            raise error or later from later
        found = [(rank, report) for rank, report in reports if report is not None]
        first = min(order for _, (order, _) in found)
        return grouped_text((rank, text) for rank, (order, text) in found if order == first)

    def _text_of(self, error: Exception) -> str:
        """Return the first line of an error, with the module that raised it and the error's fix."""
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if self._running:
            text += f", in {self._running[-1] or 'the model'}"
        fix = getattr(error, "fix", None)
        return f"{text} (fix: {fix})" if fix else text

    def _where(self) -> str:
        return f"over {self._mesh.axis_names[0]!r}, {self._mesh.size()} ranks"


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _part_like(
    whole: torch.Tensor, shape: tuple[int, ...], mesh: DeviceMesh
) -> torch.Tensor | None:
    """Return ``whole``, or this rank's part of it if ``shape`` is the shape of a part, or None."""
    differing = [dim for dim, size in enumerate(whole.shape) if shape[dim : dim + 1] != (size,)]
    if not differing and len(shape) == whole.dim():
        return whole
    if len(differing) != 1 or len(shape) != whole.dim():
        return None
    (dim,) = differing
    start, stop = own_part(whole.shape[dim], mesh)
    return whole.narrow(dim, start, stop - start) if stop - start == shape[dim] else None


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode; restore training flags, buffers and generators after it."""
    # Module.train may be overridden, for example to merge weights, so it is not called.
    training = [(module, module.training) for module in model.modules()]
    owned = [(module, dict(module._buffers)) for module in model.modules()]
    values = {x: x.clone() for x in model.buffers()}
    try:
        for module, _ in training:
            module.training = False
        with unchanged_generators():
            yield
    finally:
        for module, flag in training:
            module.training = flag
        for module, buffers in owned:
            for name in module._buffers.keys() - buffers:  # registered by the forward
                delattr(module, name)
            module._buffers.update(buffers)
        for x, value in values.items():
            if not torch.equal(x, value):
                x.data.copy_(value)
