"""Write docs/reference/common_mistakes.md: twelve mistakes with meshdist, torch and JAX.

    python packaging/mistakes.py --jax PYTHON      (an interpreter that has JAX; four minutes)

Each program is run: ours and torch's as two processes over shared memory and Gloo, JAX's on two
devices of one process. The page shows how each ends. What hangs is ended after 15 seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "common_mistakes.md"
LIMIT_S = 15

OURS = """\
from datetime import timedelta
import torch
import meshdist as md
md.init_process_group(timeout=timedelta(seconds=5))
rank = md.get_rank()
mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
x = torch.ones(4)
"""
TORCHS = """\
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()
mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
x = torch.ones(4)
"""
JAXS = """\
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.ones(4)
def run(f, *args, i=P("tp"), o=P("tp")):
    return jax.shard_map(f, mesh=mesh, in_specs=i, out_specs=o)(*args)
"""


@dataclass(frozen=True)
class Mistake:
    """One mistake, and the lines that make it; "" where the library has no such thing."""

    title: str
    ours: str
    torchs: str
    jaxs: str


MISTAKES = (
    Mistake(
        "One rank does not call",
        "if rank == 0:\n    md.all_reduce(x)",
        "if rank == 0:\n    dist.all_reduce(x)",
        'run(lambda x: jax.lax.psum(x, "tp") if jax.lax.axis_index("tp") == 0 else x, x)',
    ),
    Mistake(
        "Tensors of other sizes",
        "md.all_reduce(torch.ones(4 + rank))",
        "y = torch.ones(4 + rank)\ndist.all_reduce(y)\nprint(y)",
        'run(lambda x: jax.lax.psum(x, "tp"), jnp.ones(5))',
    ),
    Mistake(
        "Tensors of other dtypes",
        "md.all_reduce(x if rank else x.double())",
        "y = x if rank else x.double()\ndist.all_reduce(y)\nprint(y)",
        "",
    ),
    Mistake(
        "Another collective on another rank",
        "if rank == 0:\n    md.all_reduce(x)\nelse:\n    md.broadcast(x, src=0)",
        "if rank == 0:\n    dist.all_reduce(x)\nelse:\n    dist.broadcast(x, src=0)\nprint(x)",
        "",
    ),
    Mistake(
        "A name that no axis has",
        'md.lax.psum(x, "model", mesh=mesh)',
        'dist.all_reduce(x, group=mesh["model"].get_group())',
        'run(lambda x: jax.lax.psum(x, "model"), x)',
    ),
    Mistake(
        "A root outside the group",
        "md.broadcast(x, src=2)",
        "dist.broadcast(x, src=2)",
        "",
    ),
    Mistake(
        "No tensor",
        "md.all_reduce([1.0, 2.0])",
        "dist.all_reduce([1.0, 2.0])",
        'run(lambda x: jax.lax.psum("x", "tp"), x)',
    ),
    Mistake(
        "A gradient that lacks its sum",
        "w = torch.ones(4, requires_grad=True)\n"
        "part = md.annotate(x * (rank + 1), varying='tp')\n"
        "with md.typed(mesh):\n"
        "    (w * part).sum().backward()",
        "w = torch.ones(4, requires_grad=True)\n"
        "(w * x * (rank + 1)).sum().backward()\n"
        "print(w.grad)",
        "def loss(w, x):\n"
        "    return (w * x).sum()\n"
        "run(jax.grad(loss), jnp.ones(2), x, i=(P(), P('tp')), o=P())",
    ),
    Mistake(
        "A size that does not divide",
        "md.reduce_scatter_tensor(torch.empty(2), torch.ones(5))",
        "dist.reduce_scatter_tensor(torch.empty(2), torch.ones(5))",
        'run(lambda x: jax.lax.psum_scatter(x, "tp", tiled=True), jnp.ones(5), i=P())',
    ),
    Mistake(
        "A group that was destroyed",
        "group = md.distributed.new_group([0, 1])\nmd.destroy_process_group(group)\n"
        "md.all_reduce(x, group=group)",
        "group = dist.new_group([0, 1])\ndist.destroy_process_group(group)\n"
        "dist.all_reduce(x, group=group)\nprint(x)",
        "",
    ),
    Mistake(
        "A receive without a send",
        "if rank == 0:\n    md.recv(x, src=1)",
        "if rank == 0:\n    dist.recv(x, src=1)",
        'print(run(lambda x: jax.lax.ppermute(x, "tp", []), x))',
    ),
    Mistake(
        "A model that differs between ranks",
        "md.DDP(torch.nn.Linear(4 + rank, 1))",
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4 + rank, 1))",
        "",
    ),
)


def ending(command: list[str], script: Path, text: str, **variables: str) -> str:
    """How a program ends: its error, what it prints without one, or that it hangs."""
    script.write_text(text)
    job = subprocess.Popen(
        [*command, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, 15)
        job.communicate()
        return f"(hangs: ended after {LIMIT_S} s)"
    output = output.replace(f"{script.parent}{os.sep}", "")
    if job.returncode != 0:
        return error_in(output)
    shown = "\n".join(sorted(set(output.strip().splitlines()))[:4])
    return f"(no error)\n{shown}".strip()


_ERROR = re.compile(r"^(?:\[rank\d\]: ?)?([\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


def error_in(output: str) -> str:
    """The last error in what a program wrote, without its traceback."""
    found = [one for one in _ERROR.finditer(output) if "ChildFailedError" not in one[1]]
    if not found:
        return (
            "(no report) " + (output.strip().splitlines() or ["it ended without a word"])[-1][:300]
        )
    last = found[-1]
    rest = output[last.end() :].splitlines()[1:]
    more = []
    for line in rest:
        line = re.sub(r"^\[rank\d\]: ?", "", line)
        if not line.startswith("  ") or len(more) == 12:
            break
        more.append(line)
    text = "\n".join([last[1], *more])
    text = re.sub(r"\[[EFW]\d{4} [\d:.]+ ", "[", text)
    text = re.sub(r"\[[^\]]*/(\w+\.(?:cc|cpp|h)):\d+\]", r"[\1]", text)
    return re.sub(r"\[?\b(\d{1,3}(?:\.\d{1,3}){3}|0x[0-9a-f]+)\]?(:\d+)?", "…", text)[:1500]


def ours(mistake: Mistake, folder: Path) -> str:
    """How meshdist's program ends."""
    run = [sys.executable, "-m", "meshdist", "run", "-n", "2"]
    return ending(run, folder / "train.py", OURS + mistake.ours + "\n", PYTHONPATH=str(ROOT))


def torchs(mistake: Mistake, folder: Path) -> str:
    """How torch's program ends."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return ending(run, folder / "train.py", TORCHS + mistake.torchs + "\n")


def jaxs(mistake: Mistake, folder: Path, python: str) -> str:
    """How JAX's program ends."""
    if not mistake.jaxs:
        return "(cannot be written: one program runs on all devices, on one array)"
    flags = "--xla_force_host_platform_device_count=2"
    text = JAXS + mistake.jaxs + "\n"
    return ending([python], folder / "train.py", text, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


def section(number: int, mistake: Mistake, texts: dict[str, str]) -> str:
    """One mistake on the page."""
    lines = [f"## {number}. {mistake.title}", ""]
    programs = {"meshdist": mistake.ours, "torch": mistake.torchs, "JAX": mistake.jaxs}
    for name, text in texts.items():
        lines += [f"**{name}**", ""]
        for part in (programs[name], text):
            if part:
                lines += ["```text", textwrap.dedent(part), "```", ""]
    return "\n".join(lines)


def main() -> int:
    """Run all programs, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jax", required=True, metavar="PYTHON", help="an interpreter with JAX")
    python = parser.parse_args().jax
    ask = [python, "-c", "import jax; print(jax.__version__)"]
    version = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    import torch

    parts = [
        "# Twelve mistakes",
        "",
        "Typical mistakes of parallel programs, and what meshdist, torch.distributed (on Gloo) and",
        "JAX say. Ours and torch's run as two processes, JAX's on two devices of one.",
        "",
        f"Generated on {date.today()} by `packaging/mistakes.py`, which ran every program; torch "
        f"{torch.__version__.split('+')[0]}, JAX {version}.",
        "",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, mistake in enumerate(MISTAKES, start=1):
            texts = {
                "meshdist": ours(mistake, folder),
                "torch": torchs(mistake, folder),
                "JAX": jaxs(mistake, folder, python),
            }
            parts.append(section(number, mistake, texts))
            print(number, mistake.title, flush=True)
    PAGE.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
