"""Compare tensors between ranks, and gradients that must be equal on all ranks.

The result of, for example, psum is equal on all ranks, so its gradient must be equal too. It
differs if the program combined the result with a varying value without a cast (``lax.pvary``, whose
backward sums). So each backward compares a sketch of the gradient: its norm and two products, which
rounding changes as little. The key of a sketch has the numbers of the forward call on the
communicator and of the backward on the node. No rank waits: the first stores its sketch, later
ranks compare and raise.

For example, y = x.exp() / psum(x.exp().sum()) on 2 ranks, call 7 of the communicator "tp".

    rank    the gradient that reaches psum    under tp/gradient/7/1
    0       -0.8                              stores "0 0.8 -0.8 -0.43"
    1       -2.1                              reads it, and raises at the end of its backward

Simulated ranks compare all gradients in shared memory; processes compare the first few of each
shape, with a store request each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import optree
import torch
from torch.autograd import Variable

from ..arrays import describe
from ..bootstrap.world import World
from ..checking.call_sites import call_site, show_site
from ..checking.debug_levels import DebugLevel, get_debug_level
from ..collectives.torch_private import are_transforms_active, hidden_from_modes, keeps_graph
from ..collectives.value_comparison import agree, tolerance
from ..errors import GradientError, StoreError, UnequalError
from ..groups.process_group import ProcessGroup
from ..mesh.device_mesh import DeviceMesh


def check_invariant(
    x: torch.Tensor,
    group: ProcessGroup,
    what: str,
    *,
    where: str,
    expected: str,
    fix: str | Callable[[Collection[int]], str],
) -> None:
    """Raise the same GradientError on every rank unless all ranks have the same ``x``.

    Args:
        what: names ``x`` in the error; ``where`` and ``expected`` are fields of the error.
        fix: the fix, or a function of the ranks that differ from the first rank of the group.
    """
    if are_transforms_active():  # torch.func transforms have no plain numbers
        return
    difference = agree(group, {}, {"": x}, op_name="a check of equal values", device=x.device)
    if difference and not difference.is_rounding:
        raise GradientError(
            f"{what} over {group.name} is not the same on every rank",
            where=where,
            expected=expected,
            found=difference.found,
            fix=fix if isinstance(fix, str) else fix(difference.differing),
        )


def is_compared(world: World) -> bool:
    """Return whether ranks compare values by default: simulated, or at debug level DETAIL."""
    if are_transforms_active():  # torch.func transforms have no plain numbers
        return False
    return world.is_simulated or get_debug_level() == DebugLevel.DETAIL


@hidden_from_modes
def check_replicas(
    x: torch.Tensor,
    mesh: DeviceMesh,
    axes: Collection[str],
    call: str,
    check: bool | None,
    *,
    has_argument: bool = True,
) -> None:
    """Raise the same UnequalError on every rank along ``axes`` unless all have the same ``x``.

    Args:
        check: whether to compare; None compares on simulated ranks and at debug level DETAIL.
        has_argument: whether the fix can mention an argument ``check``.
    """
    if check is None:
        check = is_compared(mesh.world)
    sizes = mesh.axis_sizes if check else {}
    names = tuple(axis for axis in sizes if axis in axes and sizes[axis] > 1)
    if not names or are_transforms_active():
        return
    group = mesh[names].open_group()
    difference = agree(group, {"call": call}, {"": x.detach()}, op_name="a comparison of replicas")
    if difference and not difference.is_rounding:
        raise UnequalError(
            f"the array is not the same on every rank over {group.name}",
            where=f"{call}, {describe(x)}, called at {show_site(call_site())}",
            expected="equal arrays along axes that the source, or the left side, does not name",
            found=difference.found,
            fix="call md.seed(0) on every rank before you draw it; or send one rank's array: "
            "md.device_put(x, sharding, root=0)"
            + ("; or pass check=False to use each rank's own array" if has_argument else ""),
        )


_CONTAINERS = (dict, list, tuple)
_LARGEST_CONTAINER = 1000
"""The largest container that is searched, to skip data sets."""


def names_of(tensors: Iterable[torch.Tensor], frame: FrameType) -> dict[int, str]:
    """Return the variable names of tensors, by ``id``, in ``frame`` and its callers."""
    # For example `weight`, `model.0.bias` of a parameter, or `params['head']` in a tree.
    identities = {id(tensor) for tensor in tensors}
    found: dict[int, str] = {}
    here: FrameType | None = frame
    while here is not None and len(found) < len(identities):
        for name, tensor in _held(here.f_locals):
            if id(tensor) in identities:
                found.setdefault(id(tensor), name)
        here = here.f_back
    return found


def _held(variables: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for tensors in variables, their attributes, modules and trees."""
    values = dict(variables)
    for owner, value in variables.items():  # the attributes of an object, such as a trainer
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(value, (torch.nn.Module, torch.Tensor)):
            values.update({f"{owner}.{name}": attribute for name, attribute in attributes.items()})
    yield from ((name, x) for name, x in values.items() if isinstance(x, torch.Tensor))
    for name, value in values.items():
        if isinstance(value, torch.nn.Module):
            yield from _parameters(name, value)
    for name, value in values.items():
        if isinstance(value, _CONTAINERS) and len(value) <= _LARGEST_CONTAINER:
            yield from _parts(name, value)


def _parameters(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, parameter in module.named_parameters():
        yield f"{name}.{path}", parameter


def _parts(name: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        paths, leaves, _ = optree.tree_flatten_with_accessor(tree)
    except Exception:  # a tree that contains itself, or a class whose flattening raises
        return
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            yield path.codify(name), leaf
        elif isinstance(leaf, torch.nn.Module):
            yield from _parameters(path.codify(name), leaf)


PVARY_FIX = (
    "if you combine a result y of {operation} with values that vary along the axis, for example a "
    "shard of weights, cast it first: y = lax.pvary(y, axis)"
)

_COMPARED_OF_EACH = 64
"""The largest number of compared gradients of one call, shape and dtype."""
_COMPARED_IN_ALL = 4096
"""The largest number of compared gradients, and of records of simulated ranks."""


def keep_number(node: Any, x: torch.Tensor, group: ProcessGroup) -> None:
    """Store on ``node`` the number of its latest call, equal on every rank."""
    if x.requires_grad and group.size() > 1 and not are_transforms_active():
        device_group = group.open_device_group(x.device.type)
        node.number = f"{device_group.opened.label}/gradient/{device_group.recorder.sequence}"


def compare_reached(node: Any, grad: torch.Tensor, group: ProcessGroup, operation: str) -> None:
    """Raise at the end of this backward if another rank's gradient at ``node`` differs."""
    # No rank waits for another: each reads the sketch of the first rank, or stores its own. So
    # nothing hangs if only some ranks run a backward, or if an operand needs no gradient on some.
    number, world = getattr(node, "number", None), group.world
    if number is None or are_transforms_active():
        return
    if grad.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if world.compared is None:
        counts, kind = world.num_compared, (operation, grad.shape, grad.dtype)
        if counts[kind] >= _COMPARED_OF_EACH or counts["all"] >= _COMPARED_IN_ALL:
            return
        counts.update((kind, "all"))
    node.times = getattr(node, "times", 0) + 1
    what = f"{operation}, gradient of {describe(grad)}"
    # Do not compare a pass that retains the graph with a pass that frees it.
    key = f"{number}/{node.times}/{keeps_graph()}/{what}"
    sketch = _sketch(grad)
    mine = " ".join(map(repr, (world.rank, *sketch)))
    if world.compared is None:
        try:
            first = world.store.compare_set(key, "", mine).decode()
        except StoreError:  # open groups outlive the process that hosts the store
            return
    else:
        first = world.compared.setdefault(key, mine)
        if len(world.compared) > _COMPARED_IN_ALL:
            del world.compared[next(iter(world.compared))]
    rank, *numbers = first.split()
    distance = _sketch_distance(sketch, [*map(float, numbers)])
    if distance <= tolerance(grad):
        return
    error = GradientError(
        f"the gradient that reaches {operation} over {group.name} is not the same on every rank",
        where=f"backward of {what}",
        expected=f"equal gradients, since the result of {operation} is equal on every rank",
        found=f"rank {world.rank} differs from rank {rank}, by {distance:.2g} of its norm",
        fix=PVARY_FIX.format(operation=operation),
    )

    def report() -> None:
        raise error

    # Wrappers queue their work for the end of a backward before the second round of callbacks.
    engine = Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(report))


def _sketch(x: torch.Tensor) -> list[float]:
    """Return the norm of a tensor and its products with two fixed vectors.

    Example:
        >>> [round(number, 3) for number in _sketch(torch.tensor([3.0, 4.0]))]
        [5.0, 7.0, -0.044]
    """
    line = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1).double()
    waves = torch.arange(1, len(line) + 1, dtype=line.dtype, device=line.device).cos()
    found: list[float] = torch.stack([line.norm(), line.sum(), line @ waves]).tolist()
    return found


def _sketch_distance(mine: Sequence[float], first: Sequence[float]) -> float:
    """Return the distance of two sketches relative to the norm of ``first``."""
    if mine == first or not (math.isfinite(mine[0]) or math.isfinite(first[0])):
        return 0.0
    gap = max(abs(here - there) for here, there in zip(mine, first, strict=True))
    return gap / first[0] if first[0] and math.isfinite(gap) else math.inf
