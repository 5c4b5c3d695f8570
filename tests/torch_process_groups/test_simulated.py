"""torch's own programs on simulated ranks give what one process gives, and leave no trace in it."""

from __future__ import annotations

import gc
import itertools
import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import meshdist as md
from meshdist.errors import BackendError, DeadlockError, WorldError

NUM_STEPS, WIDTH, LIMIT = 2, 8, 1e-14

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of its own names and views


@pytest.fixture(autouse=True)
def process_is_as_before() -> Iterator[None]:
    hook, helper = sys.excepthook, dist.distributed_c10d._new_process_group_helper
    world = dist.distributed_c10d._world
    yield
    assert sys.excepthook is hook
    assert dist.distributed_c10d._new_process_group_helper is helper
    assert dist.distributed_c10d._world is world and not dist.is_initialized()


def begin() -> None:
    dist.init_process_group("simulated", init_method="simulated://")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)
    return nn.Sequential(*layers).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x[:, :4], x[:, 4:]


def train(
    model: nn.Module, rows: Sequence[int], optimizer: Callable[..., Any] = torch.optim.Adam
) -> list[torch.Tensor]:
    x, y = batch()
    steps = optimizer(model.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        steps.zero_grad()
        F.mse_loss(model(x[rows]), y[rows]).backward()
        steps.step()
    return wholes(model)


def wholes(model: nn.Module) -> list[torch.Tensor]:
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]


def largest_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def share(rank: int, size: int) -> list[int]:
    return list(range(8))[rank::size]


def operations() -> Any:
    begin()
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, async_op=True).wait()
    gathered = [torch.empty(2) for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    scattered, exchanged = torch.empty(2), torch.empty(size)
    dist.reduce_scatter_tensor(scattered, torch.arange(2.0 * size))
    dist.all_to_all_single(exchanged, torch.arange(float(size)) + 10 * rank)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    mine = torch.full((1,), float(rank))
    beside = torch.empty(1)
    ops = [
        dist.P2POp(dist.isend, mine, (rank + 1) % size),
        dist.P2POp(dist.irecv, beside, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        dist.all_reduce(mine, group=group)
    dist.barrier()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    future = work.get_future().then(lambda done: done.value()[0].item())
    kept = dist.get_backend(), dist.get_process_group_ranks(group)
    return (
        [x[0], gathered[-1][0], *scattered, *exchanged, beside, mine, future.wait()],
        objects,
        kept,
    )


def test_collectives_objects_messages_and_groups() -> None:
    for rank, (numbers, objects, kept) in enumerate(md.simulate(operations, 4)):
        sums = [8.0 * rank, 8.0 * rank + 4]
        exchanged = [rank + 10.0 * sender for sender in range(4)]
        group = 2.0 if rank in (0, 2) else rank
        expected = [6.0, 3.0, *sums, *exchanged, (rank - 1) % 4, group, 4.0]
        assert [float(x) for x in numbers] == expected
        assert objects == [{"rank": other} for other in range(4)]
        assert kept == ("simulated", [0, 2])


def data_parallel(optimizer: Callable[..., Any]) -> list[torch.Tensor]:
    begin()
    model = nn.parallel.DistributedDataParallel(net())
    sampler = torch.utils.data.DistributedSampler(range(8), shuffle=False)
    return train(model, [*sampler], optimizer)


def sharded_optimizer(parameters: Any, lr: float) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr)


def fully_sharded(shape: tuple[int, ...]) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    names = ("dp", "tp")[: len(shape)]
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=names).to_torch()
    model = net()
    if len(shape) == 2:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return train(model, share(mesh.get_local_rank("dp"), shape[0]))


@pytest.mark.parametrize(
    ("program", "argument", "size"),
    [
        (data_parallel, torch.optim.Adam, 4),
        (data_parallel, sharded_optimizer, 2),
        (fully_sharded, (4,), 4),
        (fully_sharded, (2, 2), 4),
    ],
    ids=["DDP", "ZeRO", "FSDP2", "FSDP2 and tensor parallel"],
)
def test_training(program: Callable[..., Any], argument: Any, size: int) -> None:
    expected = train(net(), range(8))
    for found in md.simulate(program, size, args=(argument,)):
        assert largest_error(found, expected) < LIMIT


def test_dtensors_on_torchs_own_mesh_and_on_ours() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def program() -> list[float]:
        begin()
        torchs = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        ours = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        torch.manual_seed(0)
        a = torch.randn(5, 7, dtype=torch.float64)
        b = torch.randn(7, 3, dtype=torch.float64)
        errors = []
        for mesh in (torchs, ours.to_torch()):
            x = distribute_tensor(a, mesh, [Shard(0), Shard(1)])
            y = distribute_tensor(b, mesh, [Replicate(), Shard(0)])
            errors.append(((x @ y).full_tensor() - a @ b).abs().max().item())
        array = md.ShardedArray(
            md.shard(a, "x@a y@b", ours), md.NamedSharding(ours, md.P("a", "b")), a.shape
        )
        errors.append((md.to_dtensor(array).full_tensor() - a).abs().max().item())
        return errors

    assert max(map(max, md.simulate(program, 4))) < LIMIT


def redistributed(shape: tuple[int, ...], rows: int) -> int:
    """Redistribute a tensor between all placements; return how many results were right."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    begin()
    mesh = dist.init_device_mesh("cpu", shape)
    x = torch.arange(rows * 5.0).view(rows, 5)
    placements = list(itertools.product([Shard(0), Shard(1), Replicate()], repeat=len(shape)))
    for source, target in itertools.product(placements, repeat=2):
        moved = distribute_tensor(x, mesh, source).redistribute(placements=target)
        assert torch.equal(moved.to_local(), distribute_tensor(x, mesh, target).to_local())
        assert torch.equal(moved.full_tensor(), x)
    return len(placements) ** 2


FURTHER_SHAPES = [(3,), (2, 3), (3, 2)]


@pytest.mark.parametrize("rows", [1, 5, *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 9))])
@pytest.mark.parametrize(
    "shape",
    [(1,), (2,), (5,), (2, 2), *(pytest.param(s, marks=pytest.mark.soak) for s in FURTHER_SHAPES)],
)
def test_dtensors_with_uneven_parts(shape: tuple[int, ...], rows: int) -> None:
    size = math.prod(shape)
    assert md.simulate(redistributed, size, args=(shape, rows)) == [9 ** len(shape)] * size


def test_meshes_of_ranks_differ_and_do_not_outlive_them() -> None:
    meshes: list[Any] = []

    def program() -> int:
        from torch.distributed.tensor import Shard, distribute_tensor

        begin()
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        part = mesh["a"]
        meshes.extend(map(weakref.ref, (mesh, part)))
        distribute_tensor(torch.ones(3), part, [Shard(0)]).full_tensor()
        dist.barrier()
        return len({each() for each in meshes})

    assert md.simulate(program, 2) == [4, 4]
    gc.collect()
    assert [each() for each in meshes] == [None] * 4


def test_a_loss_of_cut_logits() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    whole = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 5, 9, 15])

    def program() -> tuple[float, torch.Tensor]:
        begin()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        x = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(x, labels)
            loss.backward()
        return loss.full_tensor().item(), x.grad.full_tensor()

    alone = whole.clone().requires_grad_()
    F.cross_entropy(alone, labels).backward()
    for size in (1, 2, 4):
        for loss, grad in md.simulate(program, size):
            assert abs(loss - F.cross_entropy(whole, labels).item()) < LIMIT
            assert torch.allclose(grad, alone.grad, atol=LIMIT)


def test_checkpoints(tmp_path: Path) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    def sharded(model: nn.Module) -> nn.Module:
        mesh = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("dp",))
        return fully_shard(model, mesh=mesh.to_torch())

    def save() -> None:
        checkpoint.save(get_model_state_dict(sharded(net())), checkpoint_id=tmp_path)

    def load() -> list[torch.Tensor]:
        model = net()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state = get_model_state_dict(sharded(model))
        checkpoint.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(model, state)
        return wholes(model)

    md.simulate(save, 4)
    for found in md.simulate(load, 2):
        assert largest_error(found, wholes(net())) == 0


def test_many_ranks_twice_and_twice_in_a_rank() -> None:
    def program() -> list[float]:
        found = []
        for _ in range(2):
            begin()
            x = torch.full((1,), float(dist.get_rank()))
            dist.all_reduce(x)
            found.append(x.item())
            dist.destroy_process_group()
        return found

    for _ in range(2):
        assert md.simulate(program, 32) == [[496.0, 496.0]] * 32


def test_the_callers_world_of_torchs_stays(tmp_path: Path) -> None:
    def program() -> float:
        assert not dist.is_initialized()
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)).to_torch()
        x = torch.ones(1)
        dist.all_reduce(x, group=mesh.get_group())
        return x.item()

    def fails() -> None:
        begin()
        raise ValueError("no data here")

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/w", rank=0, world_size=1)
    try:
        name, hook = dist.group.WORLD.group_name, sys.excepthook
        assert md.simulate(program, 2) == [2.0, 2.0]
        with pytest.raises(ValueError, match="no data here"):
            md.simulate(fails, 2)
        assert sys.excepthook is hook
        assert dist.get_backend() == "gloo"
        functional = torch.ops._c10d_functional
        summed = functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", name))
        assert summed.item() == 1.0  # found by its name in torch's registry
    finally:
        dist.destroy_process_group()
        sys.excepthook = sys.__excepthook__


def test_a_rank_that_stays_away_is_named() -> None:
    def program() -> None:
        begin()
        if dist.get_rank() != 2:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(DeadlockError) as caught:
        md.simulate(program, 4)
    text = str(caught.value)
    assert (
        "ranks 0-1, 3: waits in all_reduce((1,) float32, SUM) for rank 2; call 1 on group '0'"
        in text
    )
    assert "rank 2: returned" in text


def test_calls_that_differ_are_told_on_all() -> None:
    def program() -> str:
        begin()
        with pytest.raises(md.MismatchError) as caught:
            dist.all_reduce(torch.ones(1 + dist.get_rank()))
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert "rank 0: all_reduce((1,) float32, SUM)" in text
        assert "rank 1: all_reduce((2,) float32, SUM)" in text


@pytest.mark.parametrize("backend", ["gloo", "shm", "cpu:gloo,cuda:simulated"])
def test_backends_of_processes_are_rejected(backend: str) -> None:
    def program() -> tuple[str, str]:
        with pytest.raises(BackendError) as first:
            dist.init_process_group(backend, init_method="simulated://")
        begin()
        with pytest.raises(BackendError) as second:
            dist.new_group([0], backend=backend)
        return str(first.value), str(second.value)

    name = "shm" if backend == "shm" else "gloo"
    for texts in md.simulate(program, 1):
        for text in texts:
            assert text == (
                f"torch's backend {name!r} cannot run on simulated ranks, only on processes\n"
                "  expected: backend 'simulated' for each process group of torch\n"
                '  fix:      torch.distributed.init_process_group("simulated", '
                'init_method="simulated://"), or run the program as processes: '
                "meshdist run -n 4 script.py"
            )


def test_a_second_start_is_rejected_by_torch() -> None:
    def program() -> None:
        begin()
        with pytest.raises(ValueError, match="process group twice"):
            begin()

    md.simulate(program, 2)


def test_processes_have_no_simulated_world(tmp_path: Path) -> None:
    with pytest.raises(WorldError) as caught:
        begin()
    assert str(caught.value) == (
        "'simulated://' works only on simulated ranks, but this is a process\n"
        "  expected: a program that meshdist.simulate runs\n"
        "  fix:      call meshdist.simulate(program, 4), or name another init_method, such as "
        "'env://'"
    )
    method = f"file://{tmp_path}/world"
    with pytest.raises(BackendError) as rejected:
        dist.init_process_group("simulated", init_method=method, rank=0, world_size=1)
    assert str(rejected.value) == (
        "backend 'simulated' works only on simulated ranks, but this is a process\n"
        "  expected: a program that meshdist.simulate runs\n"
        "  fix:      call meshdist.simulate(program, 4), or name another backend, such as 'shm'"
    )


def test_another_thread_of_a_rank_has_no_world_of_torchs() -> None:
    def program() -> str:
        begin()
        told: list[str] = []

        def call() -> None:
            try:
                dist.all_reduce(torch.ones(1))
            except ValueError as error:
                told.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return told[0]

    for text in md.simulate(program, 2):
        assert text.startswith("Default process group has not been initialized")


def test_a_collective_that_is_rejected_ends_its_record_in_the_profile() -> None:
    def program() -> list[tuple[str, bool]]:
        begin()
        with torch.profiler.profile() as profile:
            try:
                dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
            except Exception as error:
                kept = error  # and its traceback, until the profiler has ended
            time.sleep(0.2)
        assert "BAND" in str(kept)
        ours = [event for event in profile.events() if event.name.startswith("simulated:")]
        return [(event.name, event.time_range.elapsed_us() < 2e5) for event in ours]

    assert md.simulate(program, 1) == [[("simulated:all_reduce", True)]]


def test_a_profile_names_the_collectives() -> None:
    def program() -> list[str]:
        begin()
        with torch.profiler.profile() as profile:
            dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(4), async_op=True).wait()
        return [event.name for event in profile.events() if event.name.startswith("simulated:")]

    assert md.simulate(program, 1) == [["simulated:all_reduce"] * 2]


def test_a_torch_without_a_name_that_is_needed() -> None:
    program = """
import torch
from torch.distributed import distributed_c10d
del distributed_c10d._default_pg_init_method
import meshdist as md

def begin():
    torch.distributed.init_process_group("simulated", init_method="simulated://")

try:
    md.simulate(begin, 2)
except md.BackendError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.rstrip("\n") == (
        f"torch {torch.__version__} does not support process groups of simulated ranks\n"
        "  expected: a tested torch version, see docs/install.md\n"
        "  found:    torch without its internal _default_pg_init_method\n"
        "  fix:      install a tested torch version, or run the program as processes: meshdist "
        "run -n 4 "
        "script.py"
    )


def test_another_place_than_the_ranks_is_rejected() -> None:
    def program() -> str:
        with pytest.raises(WorldError) as caught:
            dist.init_process_group(
                "simulated", init_method="simulated://", rank=md.get_rank(), world_size=3
            )
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert text == (
            "this simulated rank has world_size 2, not 3\n"
            "  expected: world_size=2, or none\n"
            '  fix:      call init_process_group("simulated", init_method="simulated://")'
        )


def test_another_thread_keeps_its_world(tmp_path: Path) -> None:
    is_over, seen = threading.Event(), set()

    def program() -> None:
        begin()
        for _ in range(50):
            dist.barrier()

    def simulate() -> None:
        md.simulate(program, 3)
        is_over.set()

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/w", rank=0, world_size=1)
    try:
        thread = threading.Thread(target=simulate)
        thread.start()
        while not is_over.is_set():
            seen.add((dist.get_rank(), dist.get_world_size()))
            dist.all_reduce(torch.ones(1))
        thread.join()
    finally:
        dist.destroy_process_group()
        sys.excepthook = sys.__excepthook__
    assert seen == {(0, 1)}
