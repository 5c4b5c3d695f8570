"""Scale gradients in mixed precision so that all ranks of a mesh skip the same steps.

Worked example: a weight is split over 2 ranks, and a gradient overflows on rank 1.

                          torch's GradScaler      found_inf after MAX
                          rank 0      rank 1      rank 0      rank 1
    found_inf             0           1           1           1
    step                  made        skipped     skipped     skipped
    scale after update    as before   halved      halved      halved

    >>> import meshdist as md
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     rows = torch.nn.Parameter(md.shard(torch.ones(4), "f@tp", mesh))
    ...     optimizer, scaler = torch.optim.SGD([rows]), GradScaler("cpu", 8.0, mesh=mesh)
    ...     scaler.scale((rows * 10.0 ** (38 * md.get_rank())).sum()).backward()
    ...     scaler.step(optimizer)
    ...     scaler.update()
    ...     return rows.tolist(), scaler.get_scale()
    >>> md.simulate(program, 2)
    [([1.0, 1.0], 4.0), ([1.0, 1.0], 4.0)]
"""

from __future__ import annotations

import torch

from ..collectives.normalize_args import run_named
from ..collectives.torch_private import hidden_from_modes
from ..mesh.current_mesh import get_mesh
from ..mesh.device_mesh import DeviceMesh
from ..reduce_ops import ReduceOp

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a mesh: if a gradient of any rank overflows, all ranks skip.

    All ranks of the mesh call ``unscale_`` or ``step`` for the same optimizers in the same order,
    also ranks without gradients or without a loss. ``state_dict`` is torch's.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        mesh: the mesh of all ranks that train the model; None takes the current mesh.

    Cost:
        An all-reduce of 4 bytes over the mesh for each optimizer and step.

    Raises:
        MeshError: no mesh is given or current. NotInGroupError: this rank is not in the mesh.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     model = torch.nn.Linear(4, 4)
        ...     md.parallelize(model, mesh["tp"], {"": "column"}, check=False)
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     scaler = md.optim.GradScaler("cpu", 1024.0, mesh=mesh)
        ...     with torch.autocast("cpu", torch.float16):
        ...         loss = model(torch.ones(2, 4)).square().mean()
        ...     scaler.scale(loss).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     return scaler.get_scale()
        >>> md.simulate(program, 2)
        [1024.0, 1024.0]
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.mesh = get_mesh("GradScaler", mesh)
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        # ``scale`` creates the scale. Of a pipeline's ranks, only the last stage's call it.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    @hidden_from_modes
    @torch.no_grad()
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale the gradients; return whether any rank's overflow; collective over the mesh."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for each in found.values():  # of several devices
            found_inf = torch.maximum(found_inf, each.to(found_inf.device))
        run_named("all_reduce", self.mesh.open_group(), "GradScaler", found_inf, ReduceOp.MAX)
        return {found_inf.device: found_inf}
