"""Whether tensors are equal on all members of a group, and whether leaves get equal gradients.

Half of a floating dtype's digits must agree, measured by the tensor's largest value: equal
computations may still add in another order. Other dtypes must agree wholly. NaN equals NaN, and
infinity equals infinity of its sign.

Gradients of leaves are compared by ``simulate``. Where an equal value meets a varying value a cast
is due (``lax.pvary``), whose backward sums; a forgotten cast leaves each rank with its own part of
a leaf's gradient. So in a world that compares gradients the backward of every verb whose result is
invariant notes the leaves below it, and so does a typed backward from its losses. When the backward
has ended, the rank adds their values and gradients to the notes of all ranks, and the last member
of the verb's group to come compares. Nothing is sent, and no rank waits. Leaves may also part
behind a backward, as by clipping with the norm of each rank's own gradients; they lack no cast. So
the values that the last backward left are compared first. The name of a leaf is the program's: the
variable, parameter or part of a tree that holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, TypeAlias
from zlib import crc32

import optree
import torch
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

from ..arrays import describe
from ..bootstrap.world import World
from ..checking.debug_levels import DebugLevel, get_debug_level
from ..checking.program import call_site, program_frame, show_site
from ..collectives.objects import all_gather_object
from ..collectives.torch_private import are_transforms_active, hidden_from_modes
from ..collectives.verbs import all_gather_into_tensor, broadcast
from ..dtypes import DTYPES
from ..error_text import first_texts, grouped_text, ranks_text
from ..errors import GradientError, UnequalError
from ..groups.process_group import ProcessGroup
from ..mesh.device_mesh import DeviceMesh
from .axis_types import ATTRIBUTE, INVARIANT, kinds_in


def check_invariant(
    x: torch.Tensor,
    group: ProcessGroup,
    what: str,
    *,
    where: str,
    expected: str,
    fix: str | Callable[[Collection[int]], str],
) -> None:
    """Raise the same GradientError on every member unless all hold the same ``x``.

    Args:
        x: equal in shape and dtype on all members, without gradient.
        what: names ``x`` in the error; ``where`` and ``expected`` are fields of the error.
        fix: may be made of the ranks that differ from the group's first member.
    """
    if are_transforms_active():  # there are no plain numbers in a transform of torch.func
        return
    (far,) = find_differing([x], group)
    if far:
        raise GradientError(
            f"{what} over {group.name} is not the same on every rank",
            where=where,
            expected=expected,
            found=difference_text(far, group.ranks[0]),
            fix=fix if isinstance(fix, str) else fix(far),
        )


def is_compared(world: World) -> bool:
    """Return whether ranks compare values unasked: simulated, or debug level DETAIL."""
    if are_transforms_active():  # there are no plain numbers in a transform of torch.func
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
    """Raise the same UnequalError on every rank along ``axes`` unless all hold the same ``x``.

    Args:
        check: whether to compare; None compares on simulated ranks, and at debug level DETAIL.
        has_argument: whether the public call has an argument ``check``, which the error names.
    """
    if check is None:
        check = is_compared(mesh.world)
    sizes = mesh.axis_sizes if check else {}
    names = tuple(axis for axis in sizes if axis in axes and sizes[axis] > 1)
    if not names or are_transforms_active():
        return
    x, group = x.detach(), mesh[names].open_group()
    of_all: list[Any] = [None] * group.size()
    all_gather_object(of_all, (f"{call}, {describe(x)}", host_checksum(x)), group)
    texts = [text for text, _ in of_all]
    is_same = len(set(texts)) == 1
    # Values travel only where checksums differ.
    far = find_differing([x], group)[0] if is_same and len(set(of_all)) > 1 else {}
    if far or not is_same:
        by_rank = grouped_text(zip(group.ranks, texts, strict=True), separator="; ")
        raise UnequalError(
            f"the array is not the same on every rank over {group.name}",
            where=f"{texts[0]}, called at {show_site(call_site())}",
            expected="equal arrays along an axis that the source, or the left side, does not name",
            found=difference_text(far, group.ranks[0]) if far else by_rank,
            fix="md.seed(0) on every rank before it is drawn; or send one rank's: md.device_put(x, "
            "sharding, root=0)"
            + ("; or check=False, where each rank's own is meant" if has_argument else ""),
        )


def host_checksum(x: torch.Tensor) -> int:
    """Return a checksum of a tensor's bits, computed on the host."""
    bits = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)
    return crc32(bits.view(torch.uint8).cpu().numpy().data)


@torch.no_grad()
def find_differing(tensors: Sequence[torch.Tensor], group: ProcessGroup) -> list[dict[int, float]]:
    """Return, per tensor, {global rank: relative distance to the first} of differing ranks.

    Args:
        tensors: without gradient; as many on all members, of equal shapes and dtypes.
    """
    if not tensors:
        return []
    distances = []
    for x in tensors:
        mine = x.clone(memory_format=torch.contiguous_format)
        first = mine.clone()
        broadcast(first, group=group, group_src=0)
        distances.append(relative_distance(mine, first))
    own = torch.tensor(distances, dtype=torch.float64).to(tensors[0].device)
    of_all = own.new_empty((group.size(), len(tensors)))
    all_gather_into_tensor(of_all, own.view(1, -1), group=group)
    return [
        {
            rank: distance
            for rank, distance in zip(group.ranks, column, strict=True)
            if distance > tolerance(x)
        }
        for x, column in zip(tensors, of_all.t().tolist(), strict=True)
    ]


def difference_text(far: Mapping[int, float], first: int) -> str:
    """Return text that the ranks in ``far`` differ from rank ``first``, and how much."""
    verb = "differs" if len(far) == 1 else "differ"
    return (
        f"{ranks_text(tuple(far))} {verb} from rank {first}, by up to {max(far.values()):.2g} of "
        "its largest value"
    )


def tolerance(x: torch.Tensor) -> float:
    """Return the relative distance up to which tensors of this dtype count as equal."""
    return torch.finfo(x.dtype).eps ** 0.5 if _is_inexact(x) else 0.0


def relative_distance(mine: torch.Tensor, first: torch.Tensor) -> float:
    """Return the largest |mine - first| over the largest |first|; NaN and infinities are equal."""
    mine, first = _computable(mine), _computable(first)
    differs = (mine != first) & ~(mine.isnan() & first.isnan())
    if not bool(differs.any()):
        return 0.0
    if not _is_inexact(mine):  # differences of whole numbers might not fit into their dtype
        mine, first = mine.double(), first.double()
    gap = float((mine - first)[differs].abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    finite = first[first.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return gap / scale if scale else torch.inf


def _computable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in a dtype that can be subtracted, or as bytes if torch has no arithmetic."""
    facts = DTYPES.get(x.dtype)
    if facts is None:
        return x.contiguous().view(torch.uint8)
    return x.to(facts.wide) if facts.wide is not None and _is_inexact(x) else x


def _is_inexact(x: torch.Tensor) -> bool:
    return x.dtype in DTYPES and (x.is_floating_point() or x.is_complex())


_CONTAINERS = (dict, list, tuple)
_LARGEST_CONTAINER = 1000
"""Entries up to which a container is looked into: those of data sets are not."""


def names_of(tensors: Iterable[torch.Tensor], frame: FrameType) -> dict[int, str]:
    """Return variables' names of tensors, by ``id``, in ``frame`` and its callers."""
    # Such as `weight` of a variable, `model.0.bias` of a parameter, `params['head']` in a tree.
    wanted = {id(tensor) for tensor in tensors}
    found: dict[int, str] = {}
    here: FrameType | None = frame
    while here is not None and len(found) < len(wanted):
        for name, tensor in _held(here.f_locals):
            if id(tensor) in wanted:
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
    except Exception:  # a tree that holds itself, or a class whose own flattening raises
        return
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            yield path.codify(name), leaf
        elif isinstance(leaf, torch.nn.Module):
            yield from _parameters(path.codify(name), leaf)


_KEPT_BACKWARDS = 8
"""A rank keeps the notes of so many backwards for members that have yet to end the first."""


@dataclass(frozen=True)
class _LeafNote:
    """A leaf on a rank: its value before a backward, and its gradient behind.

    Args:
        gradient: a copy; None stands for zeros.
        grad: the gradient itself, which the program may change.
        left: checksums of the value and gradient of the leaf's last note.
        changed: the distance by which the last note's ``grad`` was changed since.
    """

    value: torch.Tensor
    gradient: torch.Tensor | None
    grad: torch.Tensor | None
    left: str
    changed: float


class _ObservedLeaf:
    """A leaf in a running backward, with a hook that records its gradient."""

    def __init__(self, tensor: torch.Tensor, last: _LeafNote | None) -> None:
        self.tensor, self._left, self._changed = tensor, "", 0.0
        if last is not None and last.grad is not None and last.gradient is not None:
            self._left = f"{host_checksum(last.value)} {host_checksum(last.gradient)}"
            self._changed = relative_distance(last.grad.detach().to_dense(), last.gradient)
        self._value = tensor.detach().clone()
        self._before = self._state()
        self._arrived: torch.Tensor | None = None
        self._hook = tensor.register_hook(partial(setattr, self, "_arrived"))

    def _state(self) -> tuple[int, int]:
        grad = self.tensor.grad
        return id(grad), -1 if grad is None else grad._version

    def note(self) -> _LeafNote:
        """Remove the hook, and return the leaf's value and gradient after the backward."""
        # `.grad` where the backward wrote it, since wrappers may have summed it; else the gradient
        # that arrived, as for torch.autograd.grad.
        self._hook.remove()
        grad = self.tensor.grad
        if grad is None or self._state() == self._before:
            grad = self._arrived
        dense = None if grad is None else grad.detach().to_dense().clone()
        return _LeafNote(self._value, dense, grad, self._left, self._changed)


@dataclass
class _Below:
    """The leaves in the graph below one group's verbs that a backward has reached."""

    group: ProcessGroup
    nodes: set[Any] = field(default_factory=set)
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, verb: Any) -> Iterator[torch.Tensor]:
        """Keep and yield the new leaves below node ``verb`` whose gradients must be equal."""
        open_nodes = [verb]
        while open_nodes:
            for node, _ in open_nodes.pop().next_functions:
                if node is None or node in self.nodes:
                    continue
                self.nodes.add(node)
                open_nodes.append(node)
                leaf = getattr(node, "variable", None)
                if leaf is None:
                    continue
                # By its type, the gradient may differ along some axes.
                own = kinds_in(leaf.__dict__.get(ATTRIBUTE, INVARIANT))
                if own.keys().isdisjoint(self.group.axis_names):
                    self.leaves[id(leaf)] = leaf
                    yield leaf


@dataclass
class _ObservedBackward:
    """The leaves observed in a running backward of this rank."""

    below: dict[tuple[int, ...], _Below] = field(default_factory=dict)
    leaves: dict[int, _ObservedLeaf] = field(default_factory=dict)
    is_typed: bool = False


_Ended: TypeAlias = dict[tuple[tuple[int, ...], int], dict[int, dict[str, _LeafNote]]]


@dataclass
class GradientNotes:
    """The notes of ended backwards that all ranks of a world share."""

    backwards: dict[tuple[int, int], _ObservedBackward] = field(default_factory=dict)
    """The backwards that run, by rank and autograd's number."""
    last: dict[int, WeakIdKeyDictionary] = field(default_factory=dict)
    """The notes of the leaves of each rank's last backward, by rank."""
    ended: _Ended = field(default_factory=dict)
    """The notes of ended backwards: by group and number, then by member, then by leaf's name."""


def note_leaves(verb: Any, group: ProcessGroup, *, is_typed: bool = False) -> None:
    """Observe the leaves below node ``verb`` if gradients are compared; ``is_typed``: in typed."""
    compared = group.world.compared
    if compared is None or group.size() == 1 or are_transforms_active():
        return
    notes, rank = compared.of(GradientNotes), group.world.rank
    key = (rank, torch._C._current_graph_task_id())
    last = notes.last.setdefault(rank, WeakIdKeyDictionary())
    backward = notes.backwards.get(key)
    if backward is None:
        backward = notes.backwards[key] = _ObservedBackward()

        def ends() -> None:
            _compare(notes.backwards.pop(key), notes.ended, last)

        # What wrappers do at the end of a backward is queued before its second round begins.
        engine = Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(ends))
    backward.is_typed |= is_typed
    below = backward.below.setdefault(group.ranks, _Below(group))
    for leaf in below.add(verb):
        if id(leaf) not in backward.leaves:
            backward.leaves[id(leaf)] = _ObservedLeaf(leaf, last.get(leaf))


def _compare(backward: _ObservedBackward, ended: _Ended, last: WeakIdKeyDictionary) -> None:
    """Add this rank's ``backward`` to ``ended``; raise if all members' are there and differ.

    Args:
        ended: of all ranks, which are simulated and share it.
        last: of this rank: the latest note of each leaf, set here and read in later backwards.
    """
    names = names_of(
        (leaf.tensor for leaf in backward.leaves.values()), program_frame(sys._getframe())
    )
    own = {key: leaf.note() for key, leaf in backward.leaves.items()}
    last.update({leaf.tensor: own[key] for key, leaf in backward.leaves.items()})
    for ranks, below in backward.below.items():
        world = below.group.world
        count = world.next_number(("backward over", ranks))
        ended.pop((ranks, count - _KEPT_BACKWARDS), None)
        of_members = ended.setdefault((ranks, count), {})
        of_members[world.rank] = {
            names.get(key, f"leaf {place} of the graph"): own[key]
            for place, key in enumerate(below.leaves)
        }
        if len(of_members) == len(ranks):
            del ended[ranks, count]
            of_members = {rank: of_members[rank] for rank in ranks}
            _compare_members(of_members, below.group, is_typed=backward.is_typed)


def _compare_members(
    of_members: Mapping[int, Mapping[str, _LeafNote]], group: ProcessGroup, *, is_typed: bool
) -> None:
    lines, parted, wrong = list[str](), list[str](), ""
    for name in dict.fromkeys(name for leaves in of_members.values() for name in leaves):
        held = {rank: leaves[name] for rank, leaves in of_members.items() if name in leaves}
        text, count = f"{name}, {describe(next(iter(held.values())).value)}: ", len(lines)
        for ranks in _ranks_with_equal_values(held):
            far = _far({rank: held[rank] for rank in ranks})
            if far:
                wrong = wrong or name
                lines.append(text + difference_text(far, ranks[0]))
        parted += [
            text + divergence
            for divergence in _divergences(held, has_far_gradients=len(lines) > count)
        ]
    if not lines and not parted:
        return
    axes = group.axis_names
    axis = repr(axes[0] if len(axes) == 1 else axes) if axes else "axis"
    if parted:
        raise GradientError(
            f"leaves that were equal over {group.name} when the last backward ended have parted",
            where=f"before the backward at {show_site(call_site())}",
            expected="leaves that stay equal, as their gradients were",
            found=first_texts(parted),
            fix="look at what each rank does by itself behind a backward: torch's "
            "clip_grad_norm_ takes the norm of its own gradients, md.clip_grad_norm_ that of all; "
            "a learning rate, or weights that it loads",
        )
    mend = f"cast where it meets values that vary: lax.pvary({wrong}, {axis})\n"
    if is_typed:
        mend = f"say which data differ, where they enter: md.annotate(batch, varying={axis})\n"
    raise GradientError(
        f"leaves that are equal over {group.name} have gradients that are not",
        where=f"behind the backward at {show_site(call_site())}",
        expected="equal gradients, as leaves that are equal along an axis are invariant there",
        found=first_texts(lines),
        fix=f"{mend}or, where equal numbers are chance, as zeros of a shard: "
        f"md.annotate({wrong}, varying={axis})\n"
        f"or, where gradients are summed later: md.annotate({wrong}, reduced={axis})",
    )


def _divergences(held: Mapping[int, _LeafNote], *, has_far_gradients: bool) -> Iterator[str]:
    """Yield a text for each set of ranks whose equal leaf values diverged after the last backward.

    Args:
        has_far_gradients: whether the gradients of this backward differ; then a text comes, too,
            for equal values whose gradients changed by different amounts.
    """
    for left in {note.left for note in held.values() if note.left}:
        same = {rank: note for rank, note in held.items() if note.left == left}
        (first, base), *_ = same.items()
        apart = {rank: relative_distance(note.value, base.value) for rank, note in same.items()}
        far = {rank: distance for rank, distance in apart.items() if distance}
        changes = {rank: f"{note.changed:.4g}" for rank, note in same.items()}
        if far or (has_far_gradients and len({*changes.values()}) > 1):
            by_rank = grouped_text(changes.items(), separator=", ")
            value = difference_text(far, first) if far else "equal"
            yield f"{value}; its gradient changed since by {by_rank} of its largest value"


def _ranks_with_equal_values(held: Mapping[int, _LeafNote]) -> list[list[int]]:
    """Return the lists of two or more ranks whose values are equal within a tolerance."""
    found: list[list[int]] = []
    for rank, note in held.items():
        for ranks in found:
            first = held[ranks[0]].value
            if (first.shape, first.dtype) == (
                note.value.shape,
                note.value.dtype,
            ) and relative_distance(note.value, first) <= tolerance(first):
                ranks.append(rank)
                break
        else:
            found.append([rank])
    return [ranks for ranks in found if len(ranks) > 1]


def _far(held: Mapping[int, _LeafNote]) -> dict[int, float]:
    """Return, by rank, the distance of gradients that differ from the first rank's."""
    gradients = [
        torch.zeros_like(note.value) if note.gradient is None else note.gradient
        for note in held.values()
    ]
    limit = tolerance(gradients[0])
    distances = {
        rank: relative_distance(gradient, gradients[0])
        for rank, gradient in zip(held, gradients, strict=True)
    }
    return {rank: distance for rank, distance in distances.items() if distance > limit}
