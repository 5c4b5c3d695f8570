"""One rank of one side of ``before_after``, run by the interpreter of that side's checkout.

    python benchmarks/_side.py SIDE LABEL

``import meshdist`` finds what that interpreter has installed, of which only public names are used.
The loop that measures is this checkout's for both sides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _operations import BLOCKING, IN_FLIGHT, calls_of_operations

import meshdist as md

_WORKER = Path(__file__).resolve().parents[1] / "meshdist" / "bench" / "worker.py"

Call = Callable[[], Any]


class Side:
    """A world over one backend; what ``call`` returns is measured.

    Args:
        backend: the backend.
        make: makes what is measured whatever is asked for; None measures collectives.
    """

    def __init__(self, backend: str, make: Callable[[], Call] | None = None) -> None:
        torch.set_num_threads(1)
        md.init_process_group(backend)
        self.rank, self.size = md.get_rank(), md.get_world_size()
        self._program = None if make is None else make()

    def call(self, operation: str, num_bytes: int, dtype: str) -> Call:
        """Return a function that does ``operation`` once; ``num_bytes`` is the size of its
        result."""
        if self._program is not None:
            return self._program
        if operation in (*BLOCKING, *IN_FLIGHT):
            return calls_of_operations(num_bytes)[operation]
        whole = torch.ones(max(1, num_bytes // 4))
        if operation == "all_reduce":
            return partial(md.all_reduce, whole)
        if operation == "send_recv":
            return partial(self._ping_pong, whole)
        part = torch.ones(max(1, whole.numel() // self.size))
        return partial(getattr(md, operation), part.new_empty(part.numel() * self.size), part)

    def _ping_pong(self, x: torch.Tensor) -> None:
        for sender in (0, 1):
            if self.rank == sender:
                md.send(x, 1 - sender)
            else:
                md.recv(x, sender)

    def barrier(self) -> None:
        """Wait for all ranks."""
        md.barrier()

    def close(self) -> None:
        """End the world."""
        md.destroy_process_group()


def mesh_maker() -> Call:
    """Return what makes a mesh of (2, 2) ranks, and closes it."""
    return lambda: md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).close()


def demo_step() -> Call:
    """Return one training step of examples/train_lm.py."""
    import _demo

    mesh = _demo.make_mesh()
    args = _demo.arguments_of()
    share = _demo.share_of_batch(args, md.get_rank())
    step = _demo.step_of(_demo.our_model(args, mesh), share, args.lr)

    def on_mesh() -> torch.Tensor:
        with mesh:
            return step()

    return on_mesh


def ddp_step(name: str) -> Call:
    """Return one training step of a wrapped model of ``_models.MODELS``."""
    from _models import MODELS, step_of

    training = MODELS[name]
    return step_of(md.DDP(training.make()), training.make_input())


def joined_step(name: str) -> Call:
    """Return one such step in a join context, which lasts as long as this process."""
    from _models import MODELS, step_of

    training = MODELS[name]
    model = md.DDP(training.make())
    model.join().__enter__()
    return step_of(model, training.make_input())


def call_behind() -> Call:
    """Return a sum of 1 KiB after an uneven loop, in which it was called, too."""
    x = torch.ones(256)
    for _ in md.uneven(range(1 + md.get_rank())):
        md.all_reduce(x)
    return partial(md.all_reduce, x)


def typed_step() -> Call:
    """Return one step of a small model in a typed context, over dp."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    x = md.annotate(torch.randn(8, 64), varying="dp", mesh=mesh)

    def step() -> None:
        model.zero_grad()
        with md.typed(mesh):
            md.lax.pmean(model(x).square().mean(), "dp").backward()

    return step


SIDES: dict[str, Callable[[], Side]] = {
    "shm": partial(Side, "shm"),
    "mpi": partial(Side, "mpi"),
    "gloo": partial(Side, "gloo"),
    "operations-shm": partial(Side, "shm"),
    "operations-mpi": partial(Side, "mpi"),
    "operations-gloo": partial(Side, "gloo"),
    "mesh": partial(Side, "shm", mesh_maker),
    "demo": partial(Side, "shm", demo_step),
    "ddp-many": partial(Side, "shm", partial(ddp_step, "many")),
    "ddp-mlp": partial(Side, "shm", partial(ddp_step, "mlp")),
    "ddp-gloo": partial(Side, "gloo", partial(ddp_step, "many")),
    "typed": partial(Side, "shm", typed_step),
    **{
        f"join-{name}-{backend}": partial(Side, backend, partial(joined_step, name))
        for name in ("mlp", "transformer", "many")
        for backend in ("shm", "gloo")
    },
    "join-behind-shm": partial(Side, "shm", call_behind),
    "join-behind-gloo": partial(Side, "gloo", call_behind),
}


def main() -> None:
    """Open the side that is named, and measure on it."""
    # Under the name of this file: calls from a file of the package look further up for their line,
    # and for one of the two sides the loop's own file is the package's.
    worker: dict[str, Any] = {"__name__": "worker"}
    exec(compile(_WORKER.read_text(encoding="utf-8"), __file__, "exec"), worker)
    worker["serve"](SIDES[sys.argv[1]](), sys.argv[2])


if __name__ == "__main__":
    main()
