"""What torch.distributed has and meshdist lacks: each name says where to go."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import meshdist
from meshdist import comm_hooks, lax
from tests.inner import where_else

# What torch says of itself while its own modules are imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

ROOT = Path(__file__).resolve().parents[1]

# Torch's homes of what programs import.
HOMES = ("", ".fsdp", ".optim", ".pipelining", ".tensor", ".tensor.parallel")
# What people type besides: names of torch's deeper modules, of JAX, of rooms of ours.
TYPED = """
FSDP NamedOptimizer ElasticDistributedSampler RRef RemoteModule ShardedGradScaler save
load async_save rpc_sync init_rpc _make_nccl_premul_sum deprecated jit pjit pmap
vmap grad value_and_grad Mesh psum pmean ppermute axis_index process_index device_count
with_sharding_constraint init rank size world_size local_rank manual_seed allreduce allgather
DataParallel no_sync
"""
# Modules of Python's that torch.distributed has as attributes, and its logger.
NOT_TORCHS = {"log", "logging", "sys", "timedelta", "torch", "traceback", "typing"}


def names_of_torch() -> list[tuple[str, str]]:
    """Each public name that meshdist lacks, with torch's module that has it."""
    found = []
    for home in HOMES:
        module = importlib.import_module(f"torch.distributed{home}")
        names = dir(module) if not home else module.__all__
        found += [(module.__name__, name) for name in names if not name.startswith("_")]
    ours = {*dir(meshdist.distributed), *NOT_TORCHS}
    return [one for one in found if one[1] not in ours and not hasattr(meshdist, one[1])]


def test_every_name_that_torch_has_and_meshdist_lacks_says_where_it_is() -> None:
    absent = names_of_torch()
    assert len(absent) > 80
    unknown = [(module, name) for module, name in absent if where_else(name) is None]
    assert unknown == []
    wrong = [
        (module, name)
        for module, name in absent
        if not isinstance(getattr(importlib.import_module(module), name), ModuleType)
        and f"from {module} import {name}" not in str(where_else(name))
    ]
    assert wrong == []


@pytest.mark.parametrize("name", [*TYPED.split(), *comm_hooks.__all__, *lax.__all__])
@pytest.mark.parametrize("listener", [meshdist, meshdist.distributed])
def test_what_people_type_is_never_a_bare_attribute_error(listener: ModuleType, name: str) -> None:
    if hasattr(listener, name):
        return
    for read in (
        lambda: getattr(listener, name),
        lambda: exec(f"from {listener.__name__} import {name}"),
    ):
        with pytest.raises(
            (AttributeError, ImportError), match=r"meshdist\S* has no [\s\S]*fix: "
        ) as e:
            read()
    line = str(e.value).partition("fix:")[2].partition(", after torch.")[0].strip()
    statement = line.rpartition("; or use torch: ")[2]
    if statement.startswith("from torch"):
        exec(statement)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("allreduce", "meshdist.lax.psum"),
        ("all_reduce", "meshdist.lax.psum"),
        ("reduce_scatter", "meshdist.lax.psum_scatter"),
    ],
)
def test_a_collective_that_lax_has_under_jaxs_name_is_told_by_it(name: str, fix: str) -> None:
    told = f"meshdist.lax has no {name}\n  fix:      use {fix}"
    with pytest.raises(AttributeError) as caught:
        getattr(lax, name)
    assert str(caught.value) == told
    with pytest.raises(ImportError) as rejected:
        exec(f"from meshdist.lax import {name}")
    assert str(rejected.value) == told
    with pytest.raises(AttributeError, match=r"^module 'meshdist\.lax' has no attribute 'psun'$"):
        lax.psun  # type: ignore[attr-defined]  # noqa: B018


def test_the_ours_that_are_named_exist() -> None:
    from tests.inner import absent_names

    assert {*absent_names.IN_LAX.values()} <= {*lax.__all__}

    named = {name: text.format(name) for name, text in absent_names.PLACES.items()}
    for name, text in (absent_names.OURS | named).items():
        words = text.replace(",", " ").replace(";", " ").split()
        for word in words:
            if word.startswith("meshdist.") and word != "meshdist.":
                found: object = meshdist
                for part in word.partition("(")[0].split(".")[1:]:
                    assert hasattr(found, part), (name, word)
                    found = getattr(found, part)


@pytest.mark.parametrize(
    ("statement", "begins", "contains"),
    [
        (
            "from meshdist import fully_shard",
            "ImportError: meshdist has no fully_shard",
            "from torch.distributed.fsdp import fully_shard, after "
            "torch.distributed.init_process_group('shm')",
        ),
        (
            "from meshdist.fsdp import fully_shard",
            "ImportError: meshdist has no fsdp",
            "from torch.distributed import fsdp",
        ),
        (
            "from meshdist.device_mesh import init_device_mesh",
            "ImportError: meshdist has no device_mesh",
            "use DeviceMesh and init_device_mesh of meshdist; or use torch: ",
        ),
        (
            "import meshdist.pipelining",
            "ImportError: meshdist has no pipelining",
            "from torch.distributed import pipelining",
        ),
        (
            "import meshdist; meshdist.ZeroRedundancyOptimizer",
            "AttributeError: meshdist has no ZeroRedundancyOptimizer",
            "from torch.distributed.optim import ZeroRedundancyOptimizer",
        ),
        (
            "import meshdist; meshdist.nn.functional",
            "AttributeError: meshdist has no nn",
            "meshdist.lax, whose collectives have gradients",
        ),
        (
            "from meshdist import FSDP",
            "ImportError: meshdist has no FSDP",
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, after ",
        ),
        (
            "from meshdist import pmap",
            "ImportError: meshdist has no pmap",
            "meshdist.shard_map",
        ),
        (
            "import meshdist; meshdist.local_rank",
            "AttributeError: meshdist has no local_rank",
            "fix:      use meshdist.distributed.get_node_local_rank()",
        ),
        (
            "from meshdist.distributed import FSDP",
            "ImportError: meshdist has no FSDP",
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, after ",
        ),
        (
            "from meshdist.distributed.device_mesh import init_device_mesh",
            "ImportError: meshdist has no device_mesh",
            "use DeviceMesh and init_device_mesh of meshdist; or use torch: ",
        ),
        (
            "import meshdist.distributed as dist; dist.ZeroRedundancyOptimizer",
            "AttributeError: meshdist has no ZeroRedundancyOptimizer",
            "from torch.distributed.optim import ZeroRedundancyOptimizer",
        ),
        (
            "from meshdist.distributed import DDP",
            "ImportError: meshdist.distributed has no DDP",
            "fix:      from meshdist import DDP",
        ),
        (
            "import meshdist; meshdist.find_current_mesh",
            "AttributeError: meshdist has no find_current_mesh",
            "fix:      use meshdist.get_current_mesh(), which raises without a current mesh",
        ),
        (
            "from meshdist import ProcessGroupGloo",
            "ImportError: meshdist has no ProcessGroupGloo",
            "expected: the name in torch\n",
        ),
    ],
)
def test_an_import_says_where_to_go_and_loads_no_torch(
    statement: str, begins: str, contains: str
) -> None:
    code = (
        "import sys\n"
        f"try: exec({statement!r})\n"
        "except (ImportError, AttributeError) as error:\n"
        "    print(f'{type(error).__name__}: {error}', 'torch' in sys.modules, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""
    assert done.stdout.startswith(begins)
    assert contains in done.stdout
    assert done.stdout.endswith("\nFalse\n")


def test_a_typo_is_told_with_the_name_that_was_meant() -> None:
    code = "import meshdist as md; md.all_reduec"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "module 'meshdist' has no attribute 'all_reduec'" in done.stderr
    assert "Did you mean: 'all_reduce'?" in done.stderr  # Python's own, from the module's names


def test_other_names_are_missing_as_ever() -> None:
    assert where_else("all_reduction") is None
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'meshdist\.all_reduction'$"):
        importlib.import_module("meshdist.all_reduction")
    with pytest.raises(ImportError, match="cannot import name 'all_reduction' from 'meshdist'"):
        exec("from meshdist import all_reduction")
    assert not hasattr(meshdist, "fully_shard")  # programs ask so what is there
