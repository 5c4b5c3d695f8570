"""Average gradients of programs without modules, in buckets that overlap with computation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from operator import is_not
from typing import Any

import numpy as np
import optree
import torch

from ..arrays import as_tensor, describe, like
from ..backends.work import Work
from ..collectives.flat_sums import assign_buckets, items_of, start_reduction, views_into
from ..collectives.shared_buffers import flat_memory
from ..collectives.torch_private import hidden_from_modes
from ..error_text import first_texts, ranks_text
from ..errors import ArgumentError, DtypeError, GradientError
from ..groups.process_group import GroupLike, resolve_group
from ..reduce_ops import ReduceOp
from ..runtime.fork_safe_locks import ForkSafeLock
from .bucket_layout import bucket_caps
from .replicas import check_equal, tensor_facts

__all__ = ["GradientBuckets"]

_NAMESPACE = "meshdist"
"""The optree namespace of registered classes, which does not affect other libraries."""

_registering = ForkSafeLock()


def flattened(tree: Any) -> tuple[list[optree.PyTreeAccessor], list[Any], optree.PyTreeSpec]:
    """Return the accessors of a tree's leaves, the leaves, and the structure.

    Example:
        >>> @dataclasses.dataclass
        ... class Layer:
        ...     weight: float
        ...     bias: float | None = None
        >>> accessors, leaves, structure = flattened({"head": Layer(1.0)})
        >>> accessors[0].codify("tree"), leaves, structure.unflatten([2.0])
        ("tree['head'].weight", [1.0], {'head': Layer(weight=2.0, bias=None)})
    """
    while True:
        accessors, leaves, structure = optree.tree_flatten_with_accessor(tree, namespace=_NAMESPACE)
        nodes = [leaf for leaf in leaves if dataclasses.is_dataclass(type(leaf))]
        if not nodes:
            return accessors, leaves, structure
        with _registering.current:
            for node in nodes:
                if optree.tree_is_leaf(node, namespace=_NAMESPACE):  # its class is new
                    _register(type(node))


def _register(kind: Any) -> None:
    """Register a dataclass with optree as a node with all fields as children."""
    names = tuple(field.name for field in dataclasses.fields(kind))

    def flatten(node: Any) -> tuple[list[Any], None, tuple[str, ...]]:
        return [getattr(node, name) for name in names], None, names

    def unflatten(_: object, parts: Iterable[Any]) -> Any:
        node = kind.__new__(kind)  # the original was already validated
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(node, name, part)  # works for frozen classes too
        return node

    optree.register_pytree_node(
        kind, flatten, unflatten, path_entry_type=optree.DataclassEntry, namespace=_NAMESPACE
    )


class LeafPaths:
    """The paths of a tree's leaves and subtrees: tuples of keys, as ``ready`` accepts them.

    Example:
        >>> tree = {"layers": [{"weight": 1.0, "bias": 2.0}], "head": 3.0}
        >>> paths = LeafPaths(optree.tree_accessors(tree), "ready")
        >>> paths.find(("layers", 0, "bias")), paths.find("layers"), paths.find(())
        ([1], [1, 2], [0, 1, 2])
    """

    def __init__(self, accessors: Iterable[optree.PyTreeAccessor], caller: str) -> None:
        self._caller = caller
        # By the path of each subtree above them.
        self._leaves: dict[tuple[Any, ...], list[int]] = {}
        for leaf, accessor in enumerate(accessors):
            keys = [
                (entry.entry, *([entry.field] if isinstance(entry, optree.NamedTupleEntry) else []))
                for entry in accessor
            ]
            for depth in range(len(keys) + 1):
                for path in product(*keys[:depth]):
                    self._leaves.setdefault(path, []).append(leaf)

    def find(self, path: Any) -> list[int]:
        """Return the indices of leaves at or below ``path``; raise if there are none."""
        if isinstance(path, optree.PyTreeAccessor):
            path = path.path
        keys = tuple(path) if isinstance(path, (tuple, list)) else (path,)
        with suppress(KeyError, TypeError):  # missing, or not hashable
            return self._leaves[keys]
        paths = list(self._leaves)
        depth = next(count for count in range(len(keys)) if keys[: count + 1] not in paths)
        known = [repr(path[-1]) for path in paths[1:] if path[:-1] == keys[:depth]]
        where = f"at {keys[:depth]!r}" if depth else "in the tree"
        raise ArgumentError(
            f"{self._caller}: the tree has no leaf at path {keys!r}",
            expected="the keys of a leaf or of a subtree",
            found=f"{where}: {first_texts(known, ', ') or 'a leaf'}",
            fix="pass a path listed by optree.tree_paths(tree, namespace='meshdist')",
        )


class GradientBuckets:
    """Average gradients that no ``torch.nn.Module`` holds, in buckets, in place.

    Write gradients into ``views``; ``wait`` returns their averages. Arrays may be NumPy's, CuPy's
    or torch's. The constructor is collective: it compares paths, shapes and dtypes.

    ``ready(path)`` announces a written gradient. A bucket's all-reduce starts once all gradients in
    it, and in the buckets before it, are ready, and overlaps with computation. Buckets are sent in
    the same order on every rank, whatever the order of calls. ``wait()`` sends the rest, so
    ``ready`` is optional. Every rank must call ``wait`` equally often. Only one thread at a time
    may call either.

    Between ``ready`` and the end of ``wait``, do not write into a view: the sent value would be
    undefined. Without a gradient for a view, write zeros, since it holds the previous average.

    Args:
        tree: arrays like the gradients (for example, the parameters), in any nesting of dicts,
            lists, tuples, dataclasses and other optree nodes; floating or complex; values are not
            read. Ranks may use different array libraries.
        group: the ranks that average: an axis, ``mesh["dp"]``; several together, ``mesh["dp",
            "cp"]``; a ProcessGroup; or None for all ranks.
        bucket_cap_mb: the size of a bucket in MiB; by default 25, and 1 for the first.

    Attributes:
        views: a tree like ``tree`` of arrays inside the buckets, of the same libraries, initially
            zeros; never replaced.

    Gradient: none.

    Cost: one all-reduce of all views per round, in buckets. Buckets in shared memory are not
        copied.

    Raises:
        MismatchError: on every rank, if the ranks' trees differ; shows both.
        DtypeError: a leaf has an integer or bool dtype, which has no averages.
        KindError: a leaf is not an array.
        ArgumentError: the tree has no leaves, or the cap is invalid.

    Example:
        >>> import meshdist as md, numpy as np
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     weights = {"first": np.ones(3), "last": np.ones(2)}
        ...     gradients = md.GradientBuckets(weights, mesh["dp"])
        ...     gradients.views["last"][:] = 1.0 + md.get_rank()
        ...     gradients.ready("last")
        ...     gradients.views["first"][:] = 10.0 * md.get_rank()
        ...     averages = gradients.wait()
        ...     return averages["first"].tolist(), averages["last"].tolist()
        >>> md.simulate(program, 2)[0]
        ([5.0, 5.0, 5.0], [1.5, 1.5])
    """

    @hidden_from_modes
    def __init__(
        self, tree: Any, group: GroupLike = None, *, bucket_cap_mb: float | None = None
    ) -> None:
        caps = bucket_caps(bucket_cap_mb)
        self._group = resolve_group(group)
        accessors, leaves, structure = flattened(tree)
        self._names = [accessor.codify("tree") for accessor in accessors]
        originals = [np.asarray(leaf) if isinstance(leaf, np.generic) else leaf for leaf in leaves]
        likes = [
            as_tensor(array, argument=name, operation="GradientBuckets", writable=False).detach()
            for array, name in zip(originals, self._names, strict=True)
        ]
        self._check(likes)
        check_equal(
            {
                name: tensor_facts(x) + ("" if x.is_cpu else f" on {x.device.type}")
                for name, x in zip(self._names, likes, strict=True)
            },
            self._group,
            device=likes[0].device,
            summary="GradientBuckets: the ranks' trees differ",
            fix="pass arrays of the same paths, shapes and dtypes on every rank",
        )
        for device in dict.fromkeys(
            tensor.device for tensor in likes
        ):  # the same number on every rank
            self._group.connect(device)
        # A backward reaches the last layers first.
        assignment = assign_buckets(items_of(likes), range(len(likes) - 1, -1, -1), caps)
        views: list[Any] = [None] * len(likes)
        self._flats: list[Any] = []
        self._bucket_of = [0] * len(likes)
        for number, members in enumerate(assignment):
            first = likes[members[0]]
            count = sum(likes[leaf].numel() for leaf in members)
            flat = flat_memory(count, first.dtype, first.device, self._group).zero_()
            inside = views_into(flat, [likes[leaf] for leaf in members])
            for leaf, view in zip(members, inside, strict=True):
                views[leaf] = like(view, originals[leaf])
                self._bucket_of[leaf] = number
            # CuPy has a separate stream, which collectives use if they get CuPy arrays.
            arrays = [originals[leaf] for leaf in members]
            foreign = [each for each in arrays if not isinstance(each, (torch.Tensor, np.ndarray))]
            self._flats.append(like(flat, foreign[0]) if foreign else flat)
        self._sizes = [len(members) for members in assignment]
        self._paths = LeafPaths(accessors, "GradientBuckets.ready")
        self._works: list[Work] = []
        self._begin_round()
        self._views = views
        self.views: Any = structure.unflatten(views)

    def _check(self, likes: list[torch.Tensor]) -> None:
        if not likes:
            raise ArgumentError(
                "GradientBuckets: the tree has no leaves",
                expected="at least one array",
                fix="pass the parameters, for example dict(model.named_parameters())",
            )
        for name, tensor in zip(self._names, likes, strict=True):
            if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                raise DtypeError(
                    f"GradientBuckets cannot average {name}",
                    expected="floating or complex dtypes",
                    found=describe(tensor),
                    fix="remove it from the tree: integers and bools have no gradients",
                )

    def __repr__(self) -> str:
        arrays, buckets = len(self._names), len(self._flats)
        return f"<GradientBuckets: {arrays} arrays in {buckets} buckets on {self._group.name}>"

    @hidden_from_modes
    def ready(self, path: Any) -> None:
        """Announce that the gradient at ``path``, or all gradients below it, are written.

        Args:
            path: a leaf's or subtree's tuple of keys, such as ``("layers", 0, "weight")`` or
                ``("layers", 0)``; or a single key, such as ``"weight"``. Keys follow optree: a
                dict's key, a list's or tuple's index, a dataclass's field, a namedtuple's index or
                field. An optree accessor also works.

        Raises:
            ArgumentError: the tree has no such leaf or subtree.
            GradientError: a gradient there is already ready.
        """
        leaves = self._paths.find(path)
        if twice := [self._names[leaf] for leaf in leaves if self._is_ready[leaf]]:
            raise GradientError(
                f"the gradient {twice[0]} is already ready",
                where=f"{ranks_text([self._group.world.rank])}, GradientBuckets on "
                f"{self._group.name}",
                expected="one call of ready() per gradient between two calls of wait()",
                fix="accumulate partial gradients in the view first, then call ready() once",
            )
        for leaf in leaves:
            self._is_ready[leaf] = 1
            self._num_pending[self._bucket_of[leaf]] -= 1
        while len(self._works) < len(self._flats) and not self._num_pending[len(self._works)]:
            self._start()

    @hidden_from_modes
    def wait(self) -> Any:
        """Wait until ``views`` hold the averages, and return them; collective over the group.

        Gradients not announced as ready are sent as they are. The next round starts.

        Raises:
            GradientError: a view was replaced by another array; nothing more is sent.
            CollectiveTimeoutError, AbortedError, MismatchError, BackendError: as ``all_reduce``.
        """
        held = flattened(self.views)[1]
        if len(held) != len(self._views) or any(map(is_not, held, self._views)):
            raise GradientError(
                "a view of GradientBuckets was replaced by another array",
                expected="the original views, with gradients written into them",
                fix="write views['w'][...] = gradient instead of views['w'] = gradient",
            )
        try:
            while len(self._works) < len(self._flats):
                self._start()
            for work in self._works:
                work.wait()
        finally:
            self._begin_round()
        return self.views

    def _start(self) -> None:
        """Start the next bucket's all-reduce."""
        flat = self._flats[len(self._works)]
        self._works.append(start_reduction(flat, ReduceOp.AVG, self._group))

    def _begin_round(self) -> None:
        self._works = []
        self._num_pending = list(self._sizes)
        self._is_ready = bytearray(len(self._names))
