"""Define the reductions, under torch's names, and the factor of PREMUL_SUM."""

from __future__ import annotations

import warnings
from functools import cache
from numbers import Complex, Real
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed import ReduceOp as TorchReduceOp, _make_nccl_premul_sum

from .dtypes import DTYPES, SIGNED, dtype_name
from .errors import ArgumentError, KindError

__all__ = [
    "ReduceOp",
    "reduce_op",
]

ReduceKind: TypeAlias = TorchReduceOp.RedOpType
"""A plain reduction: ``ReduceOp.SUM`` and its like."""

Reduction: TypeAlias = "ReduceKind | TorchReduceOp"
"""The argument ``op`` of a collective: a plain reduction or from ``ReduceOp.premul_sum``."""

Factor: TypeAlias = "float | complex | torch.Tensor"
"""The factor of PREMUL_SUM: a number, or a 0-dim tensor on its device."""


class _Reductions(type(TorchReduceOp)):  # type: ignore[misc]
    """Metaclass of ReduceOp: calls make torch's objects, which count as instances."""

    def __call__(cls, op: ReduceKind) -> TorchReduceOp:
        if op == TorchReduceOp.PREMUL_SUM:
            raise _no_factor()
        return TorchReduceOp(op)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, TorchReduceOp)


class ReduceOp(TorchReduceOp, metaclass=_Reductions):
    """torch's reductions: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR; and PREMUL_SUM.

    They are torch's values. AVG is not for bool; MIN, MAX and PRODUCT are not for complex dtypes;
    BAND, BOR and BXOR are for integers and bool. On bool, SUM and MAX are or, PRODUCT and MIN are
    and. Sums of integers wrap; AVG divides theirs and rounds toward zero.

    Example:
        >>> ReduceOp.SUM is torch.distributed.ReduceOp.SUM
        True
    """

    @staticmethod
    def premul_sum(factor: Any) -> TorchReduceOp:
        """Return the reduction that multiplies each rank's tensor by its factor, then sums.

        Args:
            factor: a number, or a tensor or array of one element; it may differ between ranks.
                Integer tensors need whole factors, complex factors complex tensors; bool is not
                supported.

        Returns:
            A ReduceOp for ``op=``, torch's for NCCL; every backend supports it.

        Raises:
            KindError: no number and no array.
            ArgumentError: an array of another size, or of bool.

        Example:
            >>> import meshdist as md, torch
            >>> def program():
            ...     x = torch.ones(2)
            ...     md.all_reduce(x, op=md.ReduceOp.premul_sum(0.5 + md.get_rank()))
            ...     return x.tolist()
            >>> md.simulate(program, 2)
            [[2.0, 2.0], [2.0, 2.0]]
        """
        return _make_nccl_premul_sum(_checked_factor(factor))


_BY_NAME: dict[str, ReduceKind] = {
    name: getattr(ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
PLAIN_OPS = tuple(_BY_NAME.values())
"""All except PREMUL_SUM; SUM is first."""

_ANY, _ALL = ReduceOp.BOR, ReduceOp.BAND
ON_BOOL: dict[ReduceKind, ReduceKind] = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, _ANY), _ANY),
    **dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, _ALL), _ALL),
    ReduceOp.BXOR: ReduceOp.BXOR,
}
"""Each reduction's function on the bits of bool."""

_PREMUL_SUM: ReduceKind = ReduceOp.PREMUL_SUM
_PREMUL_NUMBER = _PREMUL_SUM.value


def split_premul(op: object) -> tuple[ReduceKind, Factor | None]:
    """Return the plain reduction, and the factor to multiply by first, or None.

    Example:
        >>> split_premul(ReduceOp.premul_sum(0.5))
        (<RedOpType.SUM: 0>, 0.5)
        >>> split_premul(ReduceOp.MAX)
        (<RedOpType.MAX: 4>, None)
    """
    if type(op) is ReduceKind:
        if op.value == _PREMUL_NUMBER:  # numbers are compared ten times as fast
            raise _no_factor()
        return op, None
    if isinstance(op, TorchReduceOp) and not isinstance(op, type):  # not the class itself
        state: tuple[ReduceKind, Any] = op.__getstate__()  # type: ignore[assignment]
        kind, factor = state
        if kind != _PREMUL_SUM:
            return kind, None
        if factor is not None:
            if isinstance(factor, torch.Tensor):  # a number, unless reading it would wait
                return ReduceOp.SUM, factor.item() if factor.is_cpu else factor.detach().reshape(())
            return ReduceOp.SUM, float(factor)
    raise KindError(
        f"{op!r} is not a reduction",
        expected="one of ReduceOp." + ", ReduceOp.".join(_BY_NAME) + ", or ReduceOp.premul_sum(..)",
        fix="pass for example op=meshdist.ReduceOp.SUM; a group or mesh goes as group=",
    )


@cache
def find_refusal(op: ReduceKind, dtype: torch.dtype) -> str | None:
    """Return which dtypes ``op`` supports if ``dtype`` is not among them, else None.

    Example:
        >>> find_refusal(ReduceOp.AVG, torch.bool)
        'a dtype of numbers for AVG'
    """
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        return None if is_whole else f"an integer dtype or bool for {op.name}"
    if op in (ReduceOp.AVG, _PREMUL_SUM):
        return f"a dtype of numbers for {op.name}" if dtype is torch.bool else None
    if op == ReduceOp.SUM or not dtype.is_complex:
        return None
    return f"a dtype that is not complex for {op.name}"


REDUCIBLE = frozenset(
    (op.value, dtype) for op in PLAIN_OPS for dtype in DTYPES if find_refusal(op, dtype) is None
)
"""Each plain reduction's number, with each dtype that it supports."""


def is_whole_mean(op: ReduceKind, dtype: torch.dtype) -> bool:
    """Return whether ``op`` is AVG on an integer dtype: the sum, divided towards zero."""
    return op == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex)


def find_factor_refusal(factor: Factor, dtype: torch.dtype) -> str | None:
    """Return which factors PREMUL_SUM supports if ``factor`` is not among them, else None.

    Example:
        >>> find_factor_refusal(0.5, torch.int32)
        'an integer as factor of an integer tensor, not 0.5'
        >>> find_factor_refusal(2.0, torch.int32) is None
        True
    """
    refusal = find_refusal(_PREMUL_SUM, dtype)
    if refusal is not None or dtype.is_complex:
        return refusal
    is_tensor = isinstance(factor, torch.Tensor)
    shown = f"a tensor of {factor.dtype}" if is_tensor else f"{factor}"  # type: ignore[union-attr]
    if factor.dtype.is_complex if is_tensor else isinstance(factor, complex):  # type: ignore[union-attr]
        return f"a complex dtype for the complex factor {shown}"
    if dtype.is_floating_point:
        return None
    if is_tensor:  # on its device: reading its value would wait
        is_whole = not factor.is_floating_point()  # type: ignore[union-attr]
    else:
        is_whole = isinstance(factor, int) or factor.is_integer()  # type: ignore[union-attr]
    return None if is_whole else f"an integer as factor of an integer tensor, not {shown}"


def multiply(tensor: torch.Tensor, factor: Factor) -> None:
    """Multiply ``tensor`` by the factor of PREMUL_SUM, in place; integers wrap."""
    dtype = tensor.dtype
    if isinstance(factor, torch.Tensor):
        factor = factor.to(tensor.device)
    with torch.inference_mode():  # it may be a parameter, or an inference tensor
        if not (dtype.is_floating_point or dtype.is_complex):
            whole = tensor.view(SIGNED.get(dtype, dtype))
            whole.mul_(
                factor if isinstance(factor, torch.Tensor) else _wrapped(factor, whole.dtype)
            )
        elif dtype.itemsize == 1 or dtype is torch.complex32:  # torch does not multiply these
            wide = tensor.to(torch.complex64 if dtype.is_complex else torch.float32)
            tensor.copy_(wide.mul_(factor))
        else:
            tensor.mul_(factor)


def _wrapped(factor: Any, dtype: torch.dtype) -> int:
    """Return ``factor`` modulo the range of ``dtype``, with the same product."""
    limits = torch.iinfo(dtype)
    return (int(factor) - limits.min) % (1 << limits.bits) + limits.min


def _no_factor() -> KindError:
    return KindError(
        "ReduceOp.PREMUL_SUM needs a factor",
        expected="a reduction made by ReduceOp.premul_sum(factor)",
        found="the bare name of its kind",
        fix="pass for example op=meshdist.ReduceOp.premul_sum(0.5)",
    )


def _checked_factor(factor: Any) -> float | torch.Tensor:
    """Return ``factor`` as a float if exact, else as a tensor; or raise."""
    if isinstance(factor, torch.Tensor):
        return _one_element(factor.detach())
    is_truth = isinstance(factor, bool)
    if isinstance(factor, Real) and not is_truth:
        return _exact(factor)
    if isinstance(factor, Complex) and not is_truth:
        return torch.tensor(complex(factor), dtype=torch.complex128, device="cpu")
    if isinstance(factor, np.ndarray) and factor.dtype.kind in "iufcb":
        return _one_element(torch.from_numpy(np.array(factor)))
    if hasattr(factor, "__cuda_array_interface__"):
        return _one_element(torch.as_tensor(factor))
    raise KindError(
        f"{factor!r} is not a factor for PREMUL_SUM",
        expected="a number, or a tensor or array of one element",
        found=type(factor).__name__,
    )


def _exact(factor: Any) -> float | torch.Tensor:
    try:
        as_float = float(factor)
        if not isinstance(factor, (int, np.integer)) or int(as_float) == int(factor):
            return as_float
        return torch.tensor(int(factor), dtype=torch.int64, device="cpu")
    except (OverflowError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            "a factor that no dtype holds",
            expected="an integer of 64 bits, or a float",
            found=f"{factor}",
        ) from error


def _one_element(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 1 and tensor.dtype is not torch.bool:
        return tensor
    raise ArgumentError(
        "the factor of PREMUL_SUM is one number",
        expected="a number, or a tensor or array of one element, not bool",
        found=f"shape {tuple(tensor.shape)}, {dtype_name(tensor.dtype)}",
        fix="multiply the tensor by the factors before, and use ReduceOp.SUM",
    )


class _OldSpelling:
    """The class ``reduce_op``, torch's old name of ReduceOp; every use warns."""

    def __getattr__(self, name: str) -> Any:
        if name != "__members__" and name not in ReduceKind.__members__:
            raise AttributeError(f"reduce_op has no reduction {name!r}")
        warnings.warn(
            "reduce_op is the old spelling: use meshdist.ReduceOp instead",
            FutureWarning,
            stacklevel=2,
        )
        members = ReduceKind.__members__
        return members if name == "__members__" else members[name]

    def __repr__(self) -> str:
        return "meshdist.distributed.reduce_op"


reduce_op = _OldSpelling()
"""The old spelling of ``ReduceOp``: ``reduce_op.SUM`` gives a FutureWarning."""
