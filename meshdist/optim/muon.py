"""Provide ``Muon`` for sharded matrices: each rank orthogonalizes the global update.

Worked example: a weight of 3 rows on 2 ranks. Each rank keeps the momentum of its rows:

    on each rank     update of its rows, from gradient and momentum    [2, d] and [1, d]
    all-gather       in bfloat16, as Newton-Schulz begins              [3, d]
    on each rank     Newton-Schulz, with the ratio of the sides 3 / d  [3, d]
    slice            its rows                                          [2, d] and [1, d]

    >>> import meshdist as md
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     rows = torch.nn.Parameter(md.shard(torch.zeros(3, 4), "f@tp d", mesh))
    ...     optimizer = Muon([rows], lr=1.0, mesh=mesh)
    ...     rows.grad = md.shard(-torch.eye(3, 4), "f@tp d", mesh)
    ...     optimizer.step()
    ...     buffer = optimizer.state[rows]["momentum_buffer"]
    ...     return rows.round().tolist(), tuple(buffer.shape)
    >>> md.simulate(program, 2)[1]
    ([[0.0, 0.0, 1.0, 0.0]], (1, 4))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import _muon
from torch.optim.optimizer import ParamsT

from ..annotations.tensor_specs import find_spec
from ..collectives.normalize_args import run_named
from ..collectives.torch_private import hidden_from_modes
from ..error_text import first_texts
from ..mesh.current_mesh import get_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import sharding_axes
from ..reduce_ops import ReduceOp
from ..sharding.api import shard, unshard
from ..sharding.like_tensor import mesh_like

__all__ = ["Muon"]


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` for matrices of which each rank holds a shard; ``step`` is collective.

    A step equals torch's step on the global matrices. The momentum is sharded as the parameter, so
    ``md.checkpoint`` saves and reshards it. A parameter without a spec is a separate matrix on each
    rank, also if it varies over an axis, as an expert does.

    Args:
        params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn:
            as in torch.
        mesh: has the axes of sharded parameters. None looks them up in the current mesh, then in
            the open meshes.

    Cost:
        Each rank receives the elements of the update that it lacks, in 2 bytes each, and runs
        Newton-Schulz on the global matrix. Each step starts with an all-reduce of one byte along
        each axis.

    Raises:
        KindError: ``mesh`` is not a DeviceMesh.
        AxisError: ``step`` raises on a mesh that lacks an axis, before it changes anything.
        MeshError: without ``mesh``, no open mesh has an axis, or several have.
        MismatchError: some ranks lack a gradient that other ranks of the same matrix have.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     md.seed(0)
        ...     model = torch.nn.Linear(4, 6, bias=False)
        ...     md.parallelize(model, mesh["tp"], {"": "column_whole"})
        ...     optimizer = md.optim.Muon(model.parameters(), lr=0.1, mesh=mesh)
        ...     model(torch.ones(2, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     return tuple(optimizer.state[model.weight]["momentum_buffer"].shape)
        >>> md.simulate(program, 2)
        [(3, 4), (3, 4)]

    Source:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
    """

    takes_shards = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (
            _muon.DEFAULT_A,
            _muon.DEFAULT_B,
            _muon.DEFAULT_C,
        ),
        eps: float = _muon.EPS,
        ns_steps: int = _muon.DEFAULT_NS_STEPS,
        adjust_lr_fn: str | None = None,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.mesh = None if mesh is None else get_mesh("optim.Muon", mesh)
        super().__init__(
            params,
            lr,
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "mesh": self.mesh}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; return the result of ``closure``; collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @hidden_from_modes
    def _step(self) -> None:
        self._compare_gradients()
        for group in self.param_groups:
            lists: tuple[list[torch.Tensor], ...] = ([], [], [])
            self._init_group(group, *lists)
            options = {key: value for key, value in group.items() if key in _OPTIONS}
            whole: tuple[list[torch.Tensor], ...] = ([], [], [])
            for p, grad, buffer in zip(*lists, strict=True):
                if _cut_axes(p):
                    self._update_shard(p, grad, buffer, options)
                else:
                    for each, tensor in zip(whole, (p, grad, buffer), strict=True):
                        each.append(tensor)
            _muon.muon(*whole, has_complex=False, **options)

    def _compare_gradients(self) -> None:
        """Check all meshes, then let the ranks of each axis compare which gradients they have."""
        lacking: defaultdict[tuple[DeviceMesh, str], list[str]] = defaultdict(list)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, p in enumerate(parameters):
            for axis in _cut_axes(p):
                found = mesh_like("optim.Muon", p, self.mesh)
                lacking[found, axis] += [f"{index}"] * (p.grad is None)
        for (mesh, axis), indices in sorted(lacking.items(), key=lambda item: item[0][1]):
            text = f", without gradients of parameters {first_texts(indices, ', ')}" * bool(indices)
            axis_group = mesh.get_group(axis)
            flag = torch.zeros(1, dtype=torch.uint8, device=axis_group.first_device_type())
            # The ranks compare the operation name; the flag has no meaning.
            run_named("all_reduce", axis_group, f"optim.Muon.step{text}", flag, ReduceOp.MAX)

    def _update_shard(
        self, p: torch.Tensor, grad: torch.Tensor, buffer: torch.Tensor, options: dict[str, Any]
    ) -> None:
        """Update a shard as torch's ``_single_tensor_muon`` updates a matrix; collective."""
        lr, momentum = _muon._to_scalar(options["lr"]), options["momentum"]
        buffer.lerp_(grad, 1 - momentum)
        mine = grad.lerp(buffer, momentum) if options["nesterov"] else buffer
        update = unshard(mine.bfloat16(), like=p, mesh=self.mesh)
        update = _muon._zeropower_via_newtonschulz(
            update, options["ns_coefficients"], options["ns_steps"], options["eps"]
        )
        adjusted_lr = _muon._adjust_lr(lr, options["adjust_lr_fn"], update.shape)
        p.mul_(1 - lr * options["weight_decay"])
        p.add_(shard(update, like=p, mesh=self.mesh), alpha=-adjusted_lr)


_OPTIONS = (
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "ns_steps",
    "eps",
    "adjust_lr_fn",
)


def _cut_axes(p: torch.Tensor) -> tuple[str, ...]:
    spec = find_spec(p)
    return () if spec is None else sharding_axes(spec)
