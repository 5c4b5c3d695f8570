"""Our backends offered to torch: after ``import meshdist.torch_backends``, torch.distributed takes
``"shm"`` and ``"mpi"`` for backends, and torch programs run on them unchanged.

    import torch.distributed as dist
    import meshdist.torch_backends

    dist.init_process_group("shm")
"""

from __future__ import annotations

from .torch_process_groups.backend_registration import offer

offer()
