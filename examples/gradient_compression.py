"""Train one network with each communication hook: what it learns, and what its gradients cost.

    meshdist run -n 2 examples/gradient_compression.py
    meshdist run -n 4 examples/gradient_compression.py --hooks plain bf16 powersgd --width 1024
    torchrun --nproc-per-node 2 examples/gradient_compression.py --check

A network learns to answer as another one with fixed weights does, each rank from its own questions.
Every hook begins with the same weights and sees the same questions. Prints, for each, the loss at
the end and the milliseconds of a step. With --check it exits with 1 unless all ranks end with equal
weights, and each hook with a loss close to that of plain averages.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import meshdist as md
import meshdist.distributed as dist

hooks = dist.comm_hooks
LIMIT = 0.1  # largest difference of a loss to that of plain averages, relative to the loss at first


def low_rank() -> Any:
    return hooks.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=5)


# By name: the state and the hook. None as state, or in it, is the group of the wrapper.
HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "plain": lambda: (None, hooks.allreduce_hook),
    "fp16": lambda: (None, hooks.fp16_compress_hook),
    "bf16": lambda: (None, hooks.bf16_compress_hook),
    "8bit": lambda: (None, hooks.quantization_perchannel_hook),
    "powersgd": lambda: (low_rank(), hooks.powerSGD_hook),
    "powersgd-fp16": lambda: (low_rank(), hooks.fp16_compress_wrapper(hooks.powerSGD_hook)),
    "batched": lambda: (low_rank(), hooks.batched_powerSGD_hook),
}


def make_network(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


def train(
    name: str, width: int, num_steps: int, dp: md.DeviceMesh
) -> tuple[list[float], float, bool]:
    """Return the losses, the milliseconds of a step, and whether all ranks have equal weights."""
    teacher = make_network(32, seed=1)
    network = md.DDP(make_network(width, seed=2), device_mesh=dp)
    network.register_comm_hook(*HOOKS[name]())
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(dp.get_local_rank())
    losses = torch.zeros(num_steps)
    begin = time.perf_counter()
    for step in range(num_steps):
        questions = torch.randn(64, 16, generator=generator)
        with torch.no_grad():
            answers = teacher(questions)
        loss = (network(questions) - answers).square().mean()
        optimizer.zero_grad()
        loss.backward()  # the hook averages the gradients over dp
        optimizer.step()
        losses[step] = loss.detach()
    step_ms = 1e3 * (time.perf_counter() - begin) / num_steps

    md.all_reduce(losses, op=md.ReduceOp.AVG, group=dp)
    weights = torch.cat([one.detach().flatten() for one in network.parameters()])
    greatest = weights.clone()
    md.all_reduce(greatest, op=md.ReduceOp.MAX, group=dp)
    differ = torch.tensor(float(not torch.equal(greatest, weights)))
    md.all_reduce(differ, group=dp)
    return losses.tolist(), step_ms, differ.item() == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--hooks", nargs="+", choices=[*HOOKS], default=[*HOOKS])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--check", action="store_true", help="fail where a hook learns less")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.width < 1:
        parser.error("--steps and --width are at least 1")

    mesh = md.init_device_mesh("cpu", (-1,), mesh_dim_names=("dp",))
    dp, is_first = mesh["dp"], md.get_rank() == 0
    plain, _, _ = train("plain", args.width, args.steps, dp)
    is_right = True
    for name in args.hooks:
        losses, step_ms, are_equal = train(name, args.width, args.steps, dp)
        off = abs(losses[-1] - plain[-1]) / plain[0]
        is_right &= are_equal and off <= LIMIT
        if is_first:
            weights = "equal" if are_equal else "NOT EQUAL"
            print(f"{name:<14} loss {losses[-1]:.4f}  {step_ms:6.2f} ms a step  weights {weights}")
    if args.check and is_first:
        outcome = "yes" if is_right else "NO"
        print(f"each within {LIMIT:.0%} of the first loss, {plain[0]:.4f}, of plain: {outcome}")
    md.destroy_process_group()
    return 0 if is_right or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
