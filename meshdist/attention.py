"""Compute attention over a sequence that is sharded along a mesh axis.

``context_parallel`` has two methods. By *heads*, an all-to-all exchanges the sharding of the
sequence for a sharding of the heads, so torch's kernel sees whole sequences. In a *ring*, keys and
values pass from rank to rank; see ``functional.ring_attention``.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from .annotations.axis_types import set_type, type_text
from .arguments import get_integer, get_number, mesh_kind_error
from .arrays import as_tensor, describe, like
from .checking.call_sites import one_frame
from .collectives.torch_private import HiddenFromModes
from .dtypes import dtype_name
from .error_text import with_article
from .errors import ArgumentError, DtypeError, KindError, MeshError, ShapeError
from .functional.data_movement import all_to_all
from .functional.ring_attention import AttentionCall, check_kernel, ring_attention
from .groups.process_group import ProcessGroup
from .mesh.device_mesh import DeviceMesh
from .typed_mode.collective_calls import find_typed_operation, kinds_over
from .typed_mode.context import find_context, mark

__all__ = ["context_parallel", "positions"]

T = TypeVar("T")

_METHODS = ("ring", "heads")
_LAYOUTS = ("contiguous", "zigzag")
_CALL = "attention.context_parallel"


@one_frame
def context_parallel(
    q: T,
    k: Any,
    v: Any,
    axis: DeviceMesh,
    *,
    causal: bool = False,
    method: str = "ring",
    layout: str = "contiguous",
    scale: float | None = None,
) -> T:
    """Compute the attention of this rank's queries to the tokens of all ranks; collective.

    Varying -> varying. On one rank it is ``F.scaled_dot_product_attention``.

    Args:
        q: the queries of this rank's tokens, shape [batch, heads, tokens, d]. Each rank has the
            same number of tokens.
        k, v: the keys and values of the same tokens, shape [batch, kv_heads, tokens, d], with the
            dtype of ``q``. ``heads`` is a multiple of ``kv_heads``.
        axis: the axis that shards the sequence, such as ``mesh["cp"]``.
        causal: whether a token attends only to itself and to earlier tokens.
        method: "ring", or "heads" to exchange tokens for heads by an all-to-all (Ulysses).
        layout: "contiguous" if rank r of p has block r of the sequence; "zigzag" if it has chunks
            r and 2 p - 1 - r of 2 p. In a causal ring, only a zigzag gives all ranks equal work.
            ``positions`` returns the tokens of this rank.
        scale: the factor of the scores; None means 1 / sqrt(d).

    Returns:
        An array of the shape and dtype of ``q``, in new memory. Inside autocast, q, k and v are
        first converted to its dtype.

    Gradient:
        Of q, k and v. All ranks run the backward, or none. A ring has no second derivative.

    Cost:
        For n bytes of k and v on each of p ranks: in a ring, p - 1 steps of n bytes, and in the
        backward p - 1 steps of n bytes and p - 1 of their gradients, which are float32 if q is
        float16 or bfloat16. All transfers but the last run during the computation of a block. A
        rank stores two blocks of n bytes, in the backward also three of gradients. By heads, four
        all-to-alls, of q, k, v and the result, also in the backward.

    Raises:
        KindError, MeshError: ``axis`` is not a mesh of one axis; another argument has a wrong type.
        NotInGroupError: this rank is not in the mesh.
        ArgumentError: an unknown method or layout, or tensors on different devices.
        ShapeError: shapes do not match; heads or tokens do not divide.
        DtypeError: dtypes differ; for a ring, torch has no flash attention kernel for this dtype
            and device.
        GradientError: a second derivative of a ring.
        MismatchError: shapes, dtypes or arguments differ between ranks; on every rank.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        ...     torch.manual_seed(0)
        ...     q, k, v = torch.randn(3, 1, 4, 8, 16)          # 4 heads, 8 tokens on all ranks
        ...     own = md.attention.positions(8, mesh["cp"], "zigzag")
        ...     y = md.attention.context_parallel(
        ...         *(x[:, :, own] for x in (q, k, v)), mesh["cp"], causal=True, layout="zigzag"
        ...     )
        ...     whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        ...     return own.tolist(), torch.allclose(y, whole[:, :, own], atol=1e-6)
        >>> md.simulate(program, 2)
        [([0, 1, 6, 7], True), ([2, 3, 4, 5], True)]

    Source:
        Liu et al., "Ring attention" (arXiv:2310.01889); Jacobs et al., "DeepSpeed Ulysses"
        (arXiv:2309.14509); the zigzag as in Megatron-LM's context parallelism.
    """
    group = _group_along(_CALL, axis)
    _check_name(_CALL, "method", method, _METHODS)
    _check_name(_CALL, "layout", layout, _LAYOUTS)
    if not isinstance(causal, bool):
        raise KindError(
            f"{_CALL}: causal must be True or False",
            found=with_article(type(causal).__name__),
            fix="pass causal=True for a causal mask; other masks are not supported",
        )
    factor = None if scale is None else float(get_number(scale, f"{_CALL}: scale"))
    typed = find_typed_operation(_CALL, axis)
    result: T
    if typed is None:
        result = _attention(q, k, v, group, causal, method, layout, factor)
        return result
    for name, x in zip("qkv", (q, k, v), strict=True):
        if isinstance(x, torch.Tensor):
            typed.result_type(x, name)
    (queries, keys, values), text = typed.joined(q, k, v)
    with HiddenFromModes():
        result = _attention(queries, keys, values, group, causal, method, layout, factor)
        mark(result, text)  # an array of another library has no type
    return result


@one_frame
def positions(length: int, axis: DeviceMesh, layout: str = "contiguous") -> torch.Tensor:
    """Return the indices of this rank's tokens in a sequence that ``axis`` shards; sends nothing.

    Use it to take a rank's tokens from a sequence, ``tokens[:, own]``, and for position embeddings.

    Args:
        length: the number of tokens on all ranks together.
        axis, layout: as for ``context_parallel``.

    Returns:
        int64 of shape [length / p] on p ranks, in increasing order, on the device of the mesh;
        annotated as varying over the axis.

    Raises:
        KindError, MeshError, NotInGroupError: as for ``context_parallel``.
        ArgumentError: an unknown layout. ShapeError: ``length`` does not divide.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     axis = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
        ...     return [md.attention.positions(8, axis, layout).tolist()
        ...             for layout in ("contiguous", "zigzag")]
        >>> md.simulate(program, 2)
        [[[0, 1, 2, 3], [0, 1, 6, 7]], [[4, 5, 6, 7], [2, 3, 4, 5]]]
    """
    call = "attention.positions"
    group = _group_along(call, axis)
    _check_name(call, "layout", layout, _LAYOUTS)
    length = get_integer(length, f"{call}: length", 1)
    me, size = group.rank(), group.size()
    parts = 2 * size if layout == "zigzag" else size
    if length % parts:
        below, above = length // parts * parts, -(-length // parts) * parts
        raise ShapeError(
            f"{call}: a sequence of {length} tokens does not divide into {parts} equal parts",
            where=f"rank {group.world.rank}, {group.name}",
            expected=f"a length divisible by {parts}, "
            + (f"two parts for each of {size} ranks" if layout == "zigzag" else "the axis size"),
            found=f"length={length}, layout={layout!r}",
            fix=f"pad the sequence to {above} tokens"
            + (f", or shorten it to {below}" if below else ""),
        )
    indices = torch.arange(length, device=axis.device_type).chunk(parts)
    own = torch.cat([indices[me], indices[-1 - me]]) if layout == "zigzag" else indices[me].clone()
    mode = find_context()
    kinds = (
        dict.fromkeys(axis.axis_names, "V") if mode is None else kinds_over(mode.mesh, group, "V")
    )
    set_type(own, type_text(kinds))
    return own


def _group_along(call: str, axis: object) -> ProcessGroup:
    """Return the group along a mesh of one axis; or raise."""
    if not isinstance(axis, DeviceMesh):
        raise mesh_kind_error(
            f"{call} takes a mesh of one axis as axis",
            axis,
            expected="a DeviceMesh with one axis",
            fix="pass for example axis=mesh['cp']",
        )
    if axis.ndim != 1:
        raise MeshError(
            f"{call} cannot use a mesh of {axis.ndim} axes as axis",
            expected="one axis, such as mesh['cp']",
            found=f"axis={axis!r}",
            fix="pass one axis of the mesh, or flatten the mesh",
        )
    return axis.open_group()


def _check_name(call: str, argument: str, given: object, known: tuple[str, ...]) -> None:
    if isinstance(given, str) and given in known:
        return
    text = f"{call}: unknown {argument} {given!r}"
    expected = " or ".join(map(repr, known))
    if not isinstance(given, str):
        raise KindError(text, expected=expected, found=with_article(type(given).__name__))
    near = get_close_matches(given, known, 1, 0.0)
    raise ArgumentError(text, expected=expected, fix=f"did you mean {argument}={near[0]!r}?")


@lru_cache(maxsize=1024)  # the native core also compares names by address
def _name_of(*parts: object) -> str:
    method, layout, causal, scale, q, kv, dtype = parts
    return (
        f"{_CALL}({method!r}, {layout!r}, causal={causal}, scale={scale}, q {q}, k and v {kv}, "
        f"{dtype})"
    )


def _attention(
    q: Any,
    k: Any,
    v: Any,
    group: ProcessGroup,
    causal: bool,
    method: str,
    layout: str,
    scale: float | None,
) -> Any:
    """Check the tensors, and compute their attention by ``method``."""
    queries, keys, values = (
        as_tensor(x, argument=name, operation=_CALL, writable=False)
        for name, x in (("q", q), ("k", k), ("v", v))
    )
    device = queries.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        queries, keys, values = (
            x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
            for x in (queries, keys, values)
        )
    _check_tensors(queries, keys, values, group, layout)
    if method == "ring":
        check_kernel(queries, keys, values, group, causal)
    else:
        _check_heads(queries, keys, group)
    scale = queries.shape[3] ** -0.5 if scale is None else scale
    shapes = tuple(queries.shape), tuple(keys.shape)
    name = _name_of(method, layout, causal, scale, *shapes, dtype_name(queries.dtype))
    call = AttentionCall(group, name, causal, layout == "zigzag", scale)
    if method == "ring":
        out = ring_attention(queries, keys, values, call)
    else:
        out = _by_heads(queries, keys, values, call)
    return like(out, q)


def _check_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ProcessGroup, layout: str
) -> None:
    parts = {
        "where": f"rank {group.world.rank}, {group.name}",
        "found": f"q {describe(q)}; k {describe(k)}; v {describe(v)}",
    }
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise DtypeError(
            f"{_CALL}: q, k and v must have the same floating dtype",
            **parts,
            fix=f"convert them, for example k.to({q.dtype}) and v.to({q.dtype})"
            if q.is_floating_point()
            else "convert them to a floating dtype",
        )
    if not q.device == k.device == v.device:
        raise ArgumentError(
            f"{_CALL}: q, k and v must be on the same device",
            where=parts["where"],
            found=f"q on {q.device}, k on {k.device}, v on {v.device}",
            fix=f"move k and v to {q.device}",
        )
    fix = "arrange each as [batch, heads, tokens, d], for example x.transpose(1, 2)"
    if {q.dim(), k.dim(), v.dim()} != {4}:
        raise ShapeError(f"{_CALL}: q, k and v must have 4 dimensions", **parts, fix=fix)
    if k.shape != v.shape or k.shape[::2] != q.shape[::2] or k.shape[3] != q.shape[3]:
        raise ShapeError(
            f"{_CALL}: the shapes of q, k and v do not match",
            expected="[batch, heads, tokens, d], equal except for fewer heads of k and v",
            **parts,
            fix="pass k and v of the same tokens as q; " + fix,
        )
    if not min(q.shape[1:]) or not k.shape[1]:
        raise ShapeError(f"{_CALL}: no dimension except the batch may have size 0", **parts)
    heads, kv_heads, length = q.shape[1], k.shape[1], q.shape[2]
    if heads % kv_heads:
        raise ShapeError(
            f"{_CALL}: {heads} heads of q do not divide by {kv_heads} heads of k and v",
            expected=f"{_divisors_text(heads)} heads of k and v",
            **parts,
            fix=fix,
        )
    if layout == "zigzag" and length % 2:
        raise ShapeError(
            f"{_CALL}: a zigzag shard of {length} tokens does not divide into two chunks",
            expected=f"an even number of tokens on each rank, a total divisible by "
            f"{2 * group.size()}",
            **parts,
            fix=f"pad the sequence to {(length + 1) * group.size()} tokens and take each rank's by "
            "attention.positions(length, axis, 'zigzag'), or pass layout='contiguous'",
        )


def _check_heads(q: torch.Tensor, k: torch.Tensor, group: ProcessGroup) -> None:
    size, kv_heads = group.size(), k.shape[1]
    if kv_heads % size:
        raise ShapeError(
            f"{_CALL}: {kv_heads} heads of k and v do not divide by {size} ranks",
            where=f"rank {group.world.rank}, {group.name}",
            expected=f"with method='heads', {_divisors_text(kv_heads)} ranks",
            found=f"q {describe(q)}; k {describe(k)}",
            fix="pass method='ring'",
        )


def _divisors_text(number: int) -> str:
    """Return the divisors of a number as text: "1, 2 or 4"."""
    *others, last = (str(each) for each in range(1, number + 1) if number % each == 0)
    return f"{', '.join(others)} or {last}" if others else last


def _by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """Exchange tokens for heads, compute attention of whole sequences, and exchange back."""
    group, size = call.group, call.group.size()

    def moved(x: torch.Tensor, name: str, split: int, joined: int) -> torch.Tensor:
        name = f"{name} of {call.name}"
        return all_to_all(x, group, split, joined, tiled=True, leaf_name=name)

    q, k, v = moved(q, "q", 1, 2), moved(k, "k", 1, 2), moved(v, "v", 1, 2)
    # The chunks in the order of ranks: 0 3 1 2 of two ranks in a zigzag.
    arrived = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
    is_mixed = call.is_zigzag and call.is_causal
    if is_mixed:
        order = sorted(range(2 * size), key=arrived.__getitem__)
        q, k, v = (_chunks_in(order, x) for x in (q, k, v))
    has_groups = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=call.is_causal, scale=call.scale, enable_gqa=has_groups
    )
    return moved(_chunks_in(arrived, out) if is_mixed else out, "result", 2, 1)


def _chunks_in(order: list[int], x: torch.Tensor) -> torch.Tensor:
    chunks = x.chunk(len(order), 2)
    return torch.cat([chunks[index] for index in order], 2)
