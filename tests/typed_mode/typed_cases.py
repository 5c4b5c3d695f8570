"""What tests of typed contexts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md

F64 = torch.float64


def in_mesh(body: Callable[..., Any], *args: Any, shape: tuple[int, ...] = (2, 2)) -> list[Any]:
    """Call ``body(mesh, *args)`` on simulated ranks of a mesh ("dp", "tp"), or of its last axes."""

    def program(*args: Any) -> Any:
        names = ("pp", "dp", "tp")[3 - len(shape) :] if len(shape) > 1 else ("dp",)
        return body(md.init_device_mesh("cpu", shape, mesh_dim_names=names), *args)

    return md.simulate(program, int(np.prod(shape)), args=args)


def refusal(
    kind: type[Exception], body: Callable[[md.DeviceMesh], Any], shape: tuple[int, ...] = (2, 2)
) -> str:
    """The text with which ``body`` is rejected, inside a typed context, on rank 0."""

    def rejected(mesh: md.DeviceMesh) -> str:
        with md.typed(mesh), pytest.raises(kind) as caught:
            body(mesh)
        return str(caught.value)

    return in_mesh(rejected, shape=shape)[0]


def varying(x: torch.Tensor, *axes: str) -> torch.Tensor:
    return md.annotate(x, varying=axes or "dp")


def kinds(x: torch.Tensor) -> str:
    """The kinds of a tensor, as its type shows them."""
    return str(md.typeof(x)).partition("]")[2].strip("{}")
