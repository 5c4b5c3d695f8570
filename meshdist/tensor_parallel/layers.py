"""Define tensor-parallel layers: subclasses of torch's layers whose forward is ``md.einsum``.

A layer holds this rank's part of the parameters, under torch's names, and the global sizes.
``parallelize`` changes the class of torch's layer, so copies, pickles and ``isinstance`` keep
working. A copy keeps ``mesh``; loading a pickle opens it again.

Worked example: the styles ``column`` and ``row`` on an axis 'tp' of 2 ranks. Rank 0 has the first 8
of 16 hidden features: the first 8 rows of ``up``, and the first 8 columns of ``down``:

    x [n, 4], whole     up   [8, 4]     h [n, 8]    down [4, 8]    a partial sum    y [n, 4], whole
    the same on both -> its features -> its part -> its features -> of y      -> all-reduce

    >>> from torch import nn
    >>> import meshdist as md
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     md.seed(0)
    ...     model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    ...     md.parallelize(model, mesh, {"0": "column", "2": "row"})
    ...     return [tuple(weight.shape) for weight in model.parameters()]
    >>> md.simulate(program, 2)[0]
    [(8, 4), (8,), (4, 8), (4,)]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..annotations.axis_types import annotation_of, axes_of_kind, change_annotation, type_of
from ..collectives.torch_private import HiddenFromModes, are_transforms_active, current_task
from ..errors import ArgumentError, KindError, ShapeError, UnequalError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.placement import balanced_boundaries
from ..runtime.graph_breaks import untraced
from ..sharding.api import reshard
from ..sharding.deferred_reductions import axes_of_leaves
from ..sharding.einsum import einsum
from ..typed_mode.context import find_context
from ..typed_mode.module_annotations import restore_annotations
from ..typed_mode.random_draws import draws_differ_over, fork_rng

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]


class SplitLayer(nn.Module):
    """A layer with this rank's part of its parameters, on a mesh of one axis."""

    mesh: DeviceMesh
    style: str
    weight: torch.Tensor
    specs: ClassVar[Mapping[str, str]]
    """The specs of the parameters over ``{tp}``, by name; other parameters are not split."""

    @property
    def axis(self) -> str:
        return self.mesh.axis_names[0]

    def ready(self) -> None:
        """Restore missing annotations; raise if the weight is computed or a shape has changed."""
        if annotation_of(self.weight).dims is None:
            self.check_plain()
            restore_annotations(self)

    def check_plain(self) -> None:
        """Raise if the weight is computed from other parameters, as with spectral_norm."""
        if "weight" in self._parameters:
            return
        lists: Any = getattr(self, "parametrizations", {})
        computed_by = lists["weight"] if "weight" in lists else self._forward_pre_hooks.values()
        kinds = [type(each).__name__.lstrip("_") for each in computed_by]
        raise KindError(
            f"{self.style} cannot use a weight that is computed from a part of the matrix",
            where=f"rank {self.mesh.world.rank}, {self!r}",
            expected="a plain weight (a parametrization, such as a norm, would see this rank's "
            "part of the weight)",
            found=", ".join(kinds) or "no parameter of this name",
            fix="call nn.utils.parametrize.remove_parametrizations(layer, 'weight'), or leave the "
            "layer out of the plan",
        )

    def check_features(self, x: torch.Tensor, expected: int, fix: str) -> None:
        """Raise unless the input has the style's number of features."""
        if not x.dim() or x.shape[-1] != expected:
            raise ShapeError(
                f"{self.style} cannot take an input with this number of features",
                where=f"rank {self.mesh.world.rank}, {self!r}",
                expected=f"an input of shape [..., {expected}]",
                found=f"shape {tuple(x.shape)}",
                fix=fix,
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.style} over {self.axis}={self.mesh.size()}"


class ColumnParallelLinear(SplitLayer, nn.Linear):
    """A ``torch.nn.Linear`` whose output features are split over an axis, and the bias with them.

    ``md.parallelize`` makes it, for the styles ``column``, ``column_whole``, ``column_sequence``
    and ``column_sequence_whole``.

    Gradient:
        One all-reduce over the axis sums the gradient of the input for all layers with this input
        (``_sequence``: one reduce-scatter).

    Cost:
        The forward sends nothing. ``_sequence`` gathers the input once for all layers with this
        input; ``_whole`` gathers the output.
    """

    specs = MappingProxyType({"weight": "f@{tp} d", "bias": "f@{tp}"})

    @untraced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's features of the output; with ``_whole``, all features."""
        self.ready()
        fix = "use 'row' or 'column_whole' for the layer before it, or remove that from the plan"
        self.check_features(x, self.in_features, fix)
        tp, f, lies = self.axis, self.out_features, "... d"
        if "sequence" in self.style:
            # Each rank has a partial sum of the gathered input's gradient; R makes the gather's
            # backward add them.
            x, lies = gathered_sequence(x, self.mesh), f"... d {{R:{tp}}}"
        y = einsum(f"{lies}, f@{tp} d -> ... f@{tp}", x, self.weight, mesh=self.mesh, f=f)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)  # Under autocast, y has another dtype.
        return moved(y, f"... f@{tp} -> ... f", self.mesh, f=f) if "whole" in self.style else y


class RowParallelLinear(SplitLayer, nn.Linear):
    """A ``torch.nn.Linear`` whose input features are split over an axis.

    The bias is not split, and is added once, to the sum. ``md.parallelize`` makes it, for the
    styles ``row``, ``row_whole`` and ``row_sequence``.

    Gradient:
        Each rank holds the gradient of its input features. ``_whole`` gathers this gradient;
        ``_sequence`` gathers the gradient of the output.

    Cost:
        One all-reduce of the output; with ``_sequence`` one reduce-scatter.
    """

    specs = MappingProxyType({"weight": "f d@{tp}"})

    @untraced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output; ``_sequence``: this rank's part of the sequence."""
        self.ready()
        if self.style == "row_whole":
            self.check_features(x, self.in_features, "use 'row', which takes this rank's part")
        else:
            start, stop = own_part(self.in_features, self.mesh)
            fix = "use 'column' for the layer before it, or 'row_whole' for this layer"
            self.check_features(x, stop - start, fix)
        tp = self.axis
        bias: torch.Tensor | None = self.bias
        lies = "... d" if self.style == "row_whole" else f"... d@{tp}"
        end = f" {{U:{tp}}}" if self.style == "row_sequence" else ""
        line = f"{lies}, f d@{tp} -> ... f{end}"
        y = einsum(line, x, self.weight, mesh=self.mesh, d=self.in_features)
        if self.style == "row_sequence":
            y = scattered_sequence(y, self.mesh)
            bias = bias if bias is None else with_summed_gradient(bias, self.mesh)
        return y if bias is None else y + bias.to(y.dtype)  # Under autocast, y has another dtype.


class VocabParallelEmbedding(SplitLayer, nn.Embedding):
    """A ``torch.nn.Embedding`` whose rows are split over an axis.

    ``md.parallelize`` makes it, for the styles ``vocab`` and ``vocab_sequence``. An index out of
    range is an error, as in torch.

    Gradient:
        Each rank holds the gradient of its rows; ``_sequence`` gathers the output's gradient.

    Cost:
        One all-reduce of the output; with ``_sequence`` one reduce-scatter.
    """

    specs = MappingProxyType({"weight": "v@{tp} d"})

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the indices; ``_sequence``: this rank's part of the sequence."""
        self.ready()
        start, stop = own_part(self.num_embeddings, self.mesh)
        index, is_own = local_index(input, start, stop, self.num_embeddings, "vocab")
        padding = self.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < stop else None
        rows = F.embedding(index, self.weight, padding, sparse=self.sparse)
        rows = rows.masked_fill(~is_own[..., None], 0)
        if self.style == "vocab_sequence":
            return scattered_sequence(rows, self.mesh)
        return moved(rows, f"... {{U:{self.axis}}} -> ...", self.mesh)


# -- shared by layers -----------------------------------------------------------------------------


def moved(x: torch.Tensor, pattern: str, mesh: DeviceMesh, **sizes: Any) -> torch.Tensor:
    """Return this rank's shard after a reshard by ``pattern``."""
    result: torch.Tensor = reshard(x, pattern, mesh, **sizes)
    return result


def own_part(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return (start, stop) of this rank's part of ``size``."""
    bounds, index = balanced_boundaries(size, (mesh.size(),)), mesh.get_local_rank()
    return bounds[index], bounds[index + 1]


def local_index(
    index: torch.Tensor, start: int, stop: int, size: int, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices into this rank's part, 0 for other ranks' indices; mask of own indices).

    Raises:
        ArgumentError: if an index on the CPU is out of range; on a GPU, torch's own check raises.
    """
    is_own = (index >= start) & (index < stop)
    is_absent = (index < 0) | (index >= size)
    with HiddenFromModes():
        is_rejected = index.device.type == "cpu" and bool(is_absent.any())
    if is_rejected:
        raise ArgumentError(
            f"{what}: index out of range for size {size}",
            expected=f"indices from 0 to {size - 1}",
            found=f"{index[is_absent].flatten()[0].item()} among {index.numel()} indices",
            fix="correct these indices, or create the model with a larger size",
        )
    return (index - start).masked_fill(~is_own & ~is_absent, 0), is_own


def scattered_sequence(y: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's part (dim -2) of the sum of all ranks' ``y``."""
    check_length(y, mesh)
    tp = mesh.axis_names[0]
    return moved(y, f"... s f {{U:{tp}}} -> ... s@{tp} f", mesh)


def check_length(y: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise unless the axis can cut dim -2 of ``y`` into equal parts."""
    length, parts = y.shape[-2] if y.dim() > 1 else 0, mesh.size()
    if not length or length % parts:
        raise ShapeError(
            f"cannot split a sequence of length {length} over {mesh.axis_names[0]!r}, which has "
            f"{parts} ranks",
            expected=f"an output of shape [..., s, f] with s a multiple of {parts}",
            found=f"shape {tuple(y.shape)}",
            fix=f"pad the sequence to a multiple of {parts}, or use styles without _sequence",
        )


def gathered_sequence(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the global sequence: all ranks' parts ``x``, gathered along dim -2."""
    # The projections q, k and v share one gather of their activation. The cache excludes leaves,
    # which are not activations, and inference tensors, whose writes torch does not count.
    if x.is_inference() or (x.is_leaf and x.requires_grad) or are_transforms_active():
        return _gathered(x, mesh)
    return mesh.caches.of(_GatherCache).get(x, mesh)


def _gathered(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    tp = mesh.axis_names[0]
    return moved(x, f"... s@{tp} d -> ... s d {{R:{tp}}}", mesh)


class _GatherCache:
    """Cache of gathered sequences, while their activations are in memory."""

    def __init__(self) -> None:
        self._cached: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Return the global sequence of ``x``, gathered once for several uses."""
        # Recomputation in a backward, calls without gradient and typed calls need other tensors.
        key = x._version, current_task(), torch.is_grad_enabled(), find_context() is None
        found = self._cached.get(x)
        if found is None or found[0] != key or not found[1].is_set_to(x):  # For `x.data = ...`.
            found = self._cached[x] = key, x.detach(), _gathered(x, mesh)
        whole: torch.Tensor = found[2]
        return whole


def note_summed(parameter: torch.Tensor, mesh: DeviceMesh) -> None:
    """Record that uses of ``parameter`` sum its gradient along the mesh's first axis."""
    axes = dict.fromkeys([*annotation_of(parameter).summed_axes, mesh.axis_names[0]])
    change_annotation(parameter, summed_axes=tuple(axes))


def with_summed_gradient(parameter: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return ``parameter``, or an alias whose gradient is summed along the mesh's first axis."""
    tp = mesh.axis_names[0]
    # A typed context sums the gradients. A wrapper does, too, if the parameter is reduced over the
    # axis; with mixed precision, the module uses copies, which are not annotated.
    if (
        not (parameter.requires_grad and torch.is_grad_enabled())
        or find_context() is not None
        or tp in axes_of_kind(type_of(parameter), "R")
        or axes_of_leaves("...", (parameter,), mesh)[0]
    ):
        return parameter
    return moved(parameter, f"... -> ... {{R:{tp}}}", mesh)


# -- modules that are not split -------------------------------------------------------------------


@dataclass(frozen=True)
class UseHook:
    """A hook on a module that keeps its class."""

    style: str
    mesh: DeviceMesh


@dataclass(frozen=True)
class ReducedForward(UseHook):
    """A module's ``forward`` that uses parameters with summed gradients.

    Args:
        forward: the original method.
    """

    module: nn.Module
    forward: Callable[..., Any]

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward while attributes replace parameters by aliases with summed gradients."""
        attributes, aliases = self.module.__dict__, dict[str, torch.Tensor]()
        for name, parameter in self.module.named_parameters(recurse=False, remove_duplicate=False):
            if name not in attributes:  # A forward that calls itself uses the outer call's alias.
                used = with_summed_gradient(parameter, self.mesh)
                if used is not parameter:
                    aliases[name] = used
        try:
            attributes.update(aliases)
            return self.forward(*args, **kwargs)
        finally:  # After Ctrl-C, torch would not run a hook.
            for name in aliases:
                attributes.pop(name, None)


@dataclass(frozen=True)
class DrawingForward(UseHook):
    """A module's ``forward`` whose draws differ along the axis, or are equal along it.

    Args:
        forward: the original method.
    """

    forward: Callable[..., Any]

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; with ``whole_draws``, raise if the generators differ along the axis."""
        tp = self.mesh.axis_names[0]
        if self.style == "own_draws":
            with fork_rng(tp, mesh=self.mesh):
                return self.forward(*args, **kwargs)
        if draws_differ_over(self.mesh):
            raise UnequalError(
                f"whole_draws: the random generators differ over {tp!r}",
                where=f"rank {self.mesh.world.rank}",
                expected=f"seeds that are equal along {tp!r}",
                fix=f"leave {tp!r} out of differ_over= of md.seed; or use 'own_draws' for this "
                "module, if it draws for split features",
            )
        return self.forward(*args, **kwargs)


class CutSequence(UseHook):
    """A forward hook that keeps this rank's part of the sequence (dim -2)."""

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        check_length(output, self.mesh)
        tp = self.mesh.axis_names[0]
        return moved(output, f"... s d -> ... s@{tp} d", self.mesh)


class GatherSequence(UseHook):
    """A forward hook that gathers the global sequence from all ranks' parts."""

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        tp = self.mesh.axis_names[0]
        return moved(output, f"... s@{tp} d -> ... s d", self.mesh)


def find_parallelized(module: nn.Module) -> SplitLayer | UseHook | None:
    """Return the split layer that a module has become, or its hook; None if it is unchanged."""
    if isinstance(module, SplitLayer):
        return module
    found: list[object] = [module.forward, *module._forward_hooks.values()]
    return next((each for each in found if isinstance(each, UseHook)), None)
