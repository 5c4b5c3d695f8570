"""Parameters keep the marks of the tensors that they are made of."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.utils.parametrize import ParametrizationList

from ..errors import AxisTypeError
from ..runtime.untraced import leave_untraced
from .axis_types import ATTRIBUTE, REDUCED_BY_OWNER, SPEC_ATTRIBUTE
from .type_errors import tensor_text, type_of

__all__ = ["keep_marks_in_parameters"]


def keep_marks_in_parameters() -> None:
    """Let ``nn.Parameter(x)`` have the marks of ``x``, as pickling and ``model.to`` keep them.

    torch makes a bare tensor of ``x`` in C++, which asks no mode and no hook, so the constructor is
    wrapped. Kinds over the axes of a wrapper stay behind: the new parameter is not the wrapper's.
    """
    new = Parameter.__new__

    @leave_untraced
    @wraps(new)
    def marked(cls: type[Parameter], data: Any = None, *rest: Any, **named: Any) -> Parameter:
        made = new(cls, data, *rest, **named)
        marks = getattr(data, "__dict__", {})
        if ATTRIBUTE in marks and REDUCED_BY_OWNER not in marks:
            kept = (ATTRIBUTE, SPEC_ATTRIBUTE)
            made.__dict__.update({name: marks[name] for name in kept if name in marks})
        elif (caller := sys._getframe(1)).f_code is ParametrizationList.__init__.__code__:
            _check_lost(caller.f_locals["original"])
        return made

    Parameter.__new__ = marked  # type: ignore[method-assign, assignment]


def _check_lost(original: torch.Tensor) -> None:
    """Raise where a parametrization, such as torch's weight_norm, parts a leaf into several that
    have no mark, since what makes them ran outside of a context.
    """
    if type_of(original) and REDUCED_BY_OWNER not in original.__dict__:
        raise AxisTypeError(
            "a parametrization makes several leaves of one that is marked, and loses its mark",
            expected="leaves with marks: without one a leaf is equal on all ranks, and its "
            "gradient is summed",
            found=f"original: {tensor_text(original)}",
            fix="register it inside `with md.typed(mesh):`, where types follow; or register it "
            "first, and annotate each of its leaves",
        )
