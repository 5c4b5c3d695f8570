"""How torch comes to know our backends: by an import, or by itself where the package is
installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshdist as md
from tests.pool import Pool, places
from tests.torch_process_groups.worlds import on_torch

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [more.pop("path", "")])])
    environment = {name: x for name, x in os.environ.items() if not name.startswith("TORCH_")}
    return subprocess.run(
        [*command, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env={**environment, "PYTHONPATH": paths, **more},
        check=False,
    )


def test_an_import_offers_shm() -> None:
    done = run(
        "import meshdist.torch_backends, torch.distributed as dist\n"
        "meshdist.torch_backends.offer()\n"  # a second time changes nothing
        "print(dist.Backend.SHM, dist.is_backend_available('shm'))\n"
        "print(dist.Backend.default_device_backend_map['cpu'])\n"
    )
    assert (done.stdout, done.stderr) == ("shm True\ngloo\n", "")


SHOWS = "print(torch.distributed.Backend.SHM, torch.distributed.is_mpi_available())"
BY_ITSELF = """
import torch, sys
from torch.distributed import Backend, is_mpi_available
print(hasattr(Backend, 'SHM'), is_mpi_available(), 'meshdist.errors' in sys.modules)
"""
SOAK = pytest.mark.soak  # each starts an interpreter that imports torch


@pytest.mark.parametrize(
    ("program", "environment", "told"),
    [
        (BY_ITSELF, {}, "True False False\n"),
        pytest.param(BY_ITSELF, {"PMI_RANK": "1"}, "True True False\n", marks=SOAK),
        pytest.param(BY_ITSELF, {"OMPI_COMM_WORLD_RANK": "1"}, "True True False\n", marks=SOAK),
        (BY_ITSELF, {"PMIX_RANK": "1", "SLURM_PROCID": "1"}, "True True False\n"),  # of srun
        pytest.param(BY_ITSELF, {"SLURM_PROCID": "1"}, "True False False\n", marks=SOAK),
        pytest.param(
            BY_ITSELF, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "False False False\n", marks=SOAK
        ),
        (f"import meshdist as md, torch; md.ReduceOp; {SHOWS}", {}, "shm False\n"),
        pytest.param(
            f"import meshdist.torch_process_groups.construction; import torch; {SHOWS}",
            {},
            "shm False\n",
            marks=SOAK,
        ),
        pytest.param(
            f"import meshdist.torch_backends, torch; {SHOWS}", {}, "shm True\n", marks=SOAK
        ),
    ],
)
def test_an_installed_package_is_found_by_torch(
    program: str, environment: dict[str, str], told: str, tmp_path: Path
) -> None:
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    entry = re.search(r'\[project\.entry-points\."torch\.backends"\]\n(\w+) = "(.+)"', table)
    assert entry is not None
    info = tmp_path / "meshdist-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: meshdist\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{entry[1]} = {entry[2]}\n")
    done = run(program, path=str(tmp_path), **environment)
    assert (done.stdout, done.stderr) == (told, "")


# torch's own hook for MPI, with the shared-memory backend in the place of MPI's.
UNDER_MPIEXEC = """
import torch, torch.distributed as dist, warnings
import meshdist.torch_backends
from meshdist.backends.registry import register_backend
from meshdist.backends.shm.communicator import ShmBackend

class StandIn(ShmBackend):
    name = "mpi"

import meshdist.backends.capabilities
register_backend(StandIn())
assert dist.is_mpi_available()
found = []
for _ in range(2):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dist.init_process_group("mpi", rank=0, world_size=0)
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(1)
    dist.all_reduce(x)
    group = dist.new_group([1])
    alone = torch.ones(1)
    if rank == 1:
        dist.all_reduce(alone, group=group)
    found += [rank, size, int(x), int(alone), dist.get_backend(), "ignored" in str(told[0].message)]
    dist.destroy_process_group()
print(*found, flush=True)
"""
MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")


@pytest.mark.mpi
@pytest.mark.soak
def test_torchs_hook_for_mpi(tmp_path: Path) -> None:
    assert MPIEXEC is not None
    done = run(
        UNDER_MPIEXEC,
        *(MPIEXEC, "-n", "2", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        TMPDIR=str(tmp_path),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 2 2 1 mpi True 0 2 2 1 mpi True",
        "1 2 2 1 mpi True 1 2 2 1 mpi True",
    ]


def test_mpi_outside_mpiexec() -> None:
    program = (
        UNDER_MPIEXEC.partition("found = []")[0]
        + "try:\n    dist.init_process_group('mpi')\n"
        + "except dist.DistNetworkError as error:\n    print(error)\n"
    )
    assert "mpiexec -n 4 python" in run(program).stdout


@pytest.mark.soak
def test_torch_keeps_a_hook_of_its_own() -> None:
    done = run(
        "from torch.distributed import distributed_c10d as torchs\n"
        "torchs._MPI_AVAILABLE, torchs.ProcessGroupMPI = True, 'its own'\n"
        "import meshdist.torch_backends\n"
        "print(torchs.ProcessGroupMPI)\n"
    )
    assert done.stdout == "its own\n"


@SOAK
def test_without_mpi4py_mpi_is_not_offered(tmp_path: Path) -> None:
    blocker = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'mpi4py' else find(name)\n"
        "import torch.distributed as dist, meshdist.torch_backends\n"
        "print(dist.is_mpi_available())\n"
    )
    assert run(blocker).stdout == "False\n"


# -- other devices --------------------------------------------------------------------------------


def test_half_of_a_mixed_text_serves_the_cpu(pool: Pool) -> None:
    def program() -> Any:
        x = torch.ones(1)
        dist.all_reduce(x)
        group: Any = dist.group.WORLD
        told = ""
        if not torch.cuda.is_available():
            with pytest.raises(md.BackendError) as found:
                group._get_backend(torch.device("cuda"))
            told = str(found.value)
        return x.item(), dist.get_backend_config(), told

    for x, config, told in on_torch(pool, program, 2, "cpu:shm,cuda:nccl"):
        assert (x, config) == (2.0, "cpu:shm,cuda:nccl")
        assert told.startswith("group '0' (ranks 0-1) does not support cuda tensors") or not told


def test_the_other_half_is_torchs_class_on_the_same_store(pool: Pool) -> None:
    def program() -> Any:
        class StandIn:
            """Takes what NCCL's class takes; Gloo's answers in its place, which needs no GPU."""

            class Options:
                pass

            def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
                given.append(options)
                gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
                made.append(gloo)
                return gloo

        given: list[Any] = []
        made: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(dist, "is_nccl_available", lambda: True)
            patch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
            group: Any = dist.group.WORLD
            backend = group._get_backend(torch.device("cuda"))
            assert group._get_backend(torch.device("cuda", 0)) is backend
        kinds = [device.type for device in group._device_types]
        return backend is made[0], given[0].global_ranks_in_group, kinds

    found = on_torch(pool, program, 2, "cpu:shm,cuda:nccl")
    assert found == [(True, [0, 1], ["cpu", "cuda"])] * 2


@pytest.mark.gpu
def test_cuda_tensors_go_by_nccl(pool: Pool) -> None:
    def program() -> Any:
        x, y = torch.ones(2, device="cuda"), torch.ones(2)
        dist.all_reduce(x)
        dist.all_reduce(y)
        group: Any = dist.group.WORLD
        return x.tolist(), y.tolist(), group._get_backend(torch.device("cuda")).name()

    assert on_torch(pool, program, 1, "cpu:shm,cuda:nccl") == [([1.0, 1.0], [1.0, 1.0], "nccl")]


def test_the_readmes_word_is_all_that_a_script_of_torchs_changes(pool: Pool) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = readme.partition("```diff\n")[2].partition("```")[0].splitlines()
    assert [line[0] for line in lines] == ["-", "+"]
    before, after = (line[1:] for line in lines)
    script = f"""
import torch, torch.distributed
{before}
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
rank = torch.distributed.get_rank()
model(torch.full((4, 2), float(rank))).sum().backward()
print(torch.distributed.get_backend(), model.module.weight.grad.tolist())
torch.distributed.destroy_process_group()
"""
    found = {}
    for name, text in (("gloo", script), ("shm", script.replace(before, after))):
        # torch alone aborts in 3 of 70 such programs as its interpreter ends (2.13, plain Python).
        for _ in range(4):
            ranks = pool.start(text, places(2), has_teardown=False)
            if not any("terminate called without an active" in done.stderr for done in ranks):
                break
        assert [(done.returncode, done.stderr) for done in ranks] == [(0, "")] * 2
        found[name] = [done.stdout for done in ranks]
    assert found["gloo"] == ["gloo [[2.0, 2.0]]\n"] * 2
    assert found["shm"] == [text.replace("gloo", "shm") for text in found["gloo"]]
