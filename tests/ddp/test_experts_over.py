"""`experts_over`: a model with experts trains as on one process, over any mesh and in any way."""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md
from meshdist import lax
from meshdist.errors import (
    AxisError,
    AxisTypeError,
    GradientError,
    JoinError,
    KindError,
    MeshError,
    MismatchError,
)
from tests.pool import Pool

F64 = torch.float64
WIDTH, EXPERTS, CHOSEN, VOCABULARY, LENGTH, BATCH, STEPS = 6, 4, 2, 11, 5, 24, 4
SPECS = {"*.up": "e@ep d f", "*.down": "e@ep f d"}


class Mixture(nn.Module):
    """A router and its experts: this rank's share of them, or all of them without a mesh."""

    def __init__(self, mesh: md.DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        up, down = torch.randn(EXPERTS, WIDTH, 8) / 2, torch.randn(EXPERTS, 8, WIDTH) / 2
        if mesh is not None:
            up, down = (md.shard(x, "e@ep a b", mesh) for x in (up, down))
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, probabilities = x.flatten(0, 1), self.router(x.flatten(0, 1)).softmax(-1)
        weights, chosen = probabilities.topk(CHOSEN)
        share = F.one_hot(chosen, EXPERTS).to(x.dtype).mean((0, 1))
        if self.mesh is None:
            every = torch.einsum("tef,efd->ted", self.hidden(rows), self.down)
            y = torch.einsum("tk,tkd->td", weights, every[torch.arange(len(rows))[:, None], chosen])
        else:
            share = lax.pmean(share, self.mesh.axis_names, mesh=self.mesh)
            sent, route = md.experts.dispatch(rows, chosen, "ep", EXPERTS, mesh=self.mesh)
            with md.untyped():  # the counts may differ between ranks
                counts = route.counts.tolist()
            parts = zip(sent.split(counts), self.up, self.down, strict=True)
            y = md.experts.combine(
                torch.cat([torch.tanh(part @ up) @ down for part, up, down in parts]),
                route,
                weights,
            )
        self.balance = EXPERTS * (share * probabilities.mean(0)).sum()
        return y.view_as(x)

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.einsum("td,edf->tef", rows, self.up))


class Gpt(nn.Module):
    """A transformer of one block; its loss includes the balance of the experts."""

    def __init__(self, mesh: md.DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = Mixture(mesh)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()
        if mesh is not None:
            md.annotate(self, SPECS, mesh=mesh)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return self.head(x + self.mixture(self.norm(x)))

    def loss(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        entropy = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        return entropy + 0.1 * self.mixture.balance


def texts(step: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=draws)


Backward = Callable[[Any, Gpt, torch.Tensor], None]


def one_batch(model: Any, net: Gpt, tokens: torch.Tensor) -> None:
    net.loss(model, tokens).backward()


def two_backwards(model: Any, net: Gpt, tokens: torch.Tensor) -> None:
    """Average twice: the second average is of the first and a new increment."""
    for _ in range(2):
        (net.loss(model, tokens) / 2).backward()


def without_sync(model: Any, net: Gpt, tokens: torch.Tensor) -> None:
    with model.no_sync():
        (net.loss(model, tokens) / 4).backward()
        (net.loss(model, tokens) / 4).backward()
    (net.loss(model, tokens) / 2).backward()


def a_retained_graph(model: Any, net: Gpt, tokens: torch.Tensor) -> None:
    loss = net.loss(model, tokens) / 2
    loss.backward(retain_graph=True)
    loss.backward()


WAYS = [one_batch, two_backwards, without_sync, a_retained_graph]


def expected() -> list[torch.Tensor]:
    """Return losses, norms and final weights of one process, without meshdist."""
    net = Gpt(None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net.loss(net, texts(step))
        loss.backward()
        found += [loss.detach(), nn.utils.clip_grad_norm_(net.parameters(), 0.5)]
        optimizer.step()
    return [*found, *(x.detach() for x in net.parameters())]


def trained(
    mesh: md.DeviceMesh, way: Backward = one_batch, steps: int = STEPS, **options: Any
) -> tuple[Gpt, Any, list[torch.Tensor]]:
    """Return the model, its optimizer, and the losses and norms of its steps."""
    net = Gpt(mesh)
    model = md.DDP(net, device_mesh=mesh, experts_over="ep", **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    return net, optimizer, steps_of(model, net, optimizer, range(steps), way)


def steps_of(
    model: Any, net: Gpt, optimizer: Any, steps: range, way: Backward = one_batch
) -> list[torch.Tensor]:
    mesh, found = net.mixture.mesh, []
    for step in steps:
        optimizer.zero_grad()
        tokens = md.shard(texts(step), f"b@({','.join(mesh.axis_names)}) s", mesh)
        with torch.no_grad():
            loss = lax.pmean(net.loss(net, tokens), mesh.axis_names, mesh=mesh)
        way(model, net, tokens)
        found += [loss, md.clip_grad_norm_(net.parameters(), 0.5, mesh=mesh)]
        optimizer.step()
    return found


def distance(net: Gpt, found: list[torch.Tensor]) -> float:
    """Return the largest difference from one process."""
    whole = expected()
    pairs = zip(found, whole[: len(found)], strict=True)
    off = [abs(float((a - b).detach())) for a, b in pairs]
    for (name, mine), other in zip(net.named_parameters(), whole[2 * STEPS :], strict=True):
        if name.endswith((".up", ".down")):
            other = md.shard(other, "e@ep a b", net.mixture.mesh)
        off.append(float((mine.detach() - other).abs().max()))
    return max(off)


def program(shape: tuple[int, ...], way: Backward = one_batch, **options: Any) -> float:
    names = ("pod", "dp", "ep")[-len(shape) :]
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=names)
    net, _, found = trained(mesh, way, **options)
    return distance(net, found)


@pytest.mark.parametrize(
    "shape",
    [(1, 1), (2, 2), (1, 2), (1, 4), (2, 1), (4, 2), (4,), (1, 3), (2, 1, 2), (2, 2, 2)],
    ids=str,
)
def test_it_trains_as_one_process(shape: tuple[int, ...]) -> None:
    assert max(md.simulate(program, math.prod(shape), args=(shape,))) < 1e-12


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way.__name__)
def test_backwards_of_a_step(way: Backward) -> None:
    assert max(md.simulate(program, 4, args=((2, 2), way))) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 1e-5},
        {"gradient_as_bucket_view": False},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"skip_all_reduce_unused_params": True},
        {"init_sync": False},
        {"verify_every": 1},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    assert max(md.simulate(lambda: program((2, 2), **options), 4)) < 1e-12


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    assert max(pool.run(over_processes, 2, backend=backend)) < 1e-12


def over_processes() -> float:
    return max(program((2,)), *(program((1, 2), way) for way in WAYS))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_parameter_that_is_frozen_on_one_rank(pool: Pool, backend: str) -> None:
    for text in pool.run(frozen_on_one_rank, 4, backend=backend):
        assert "found:    rank 3: own (index 0)\n" in text


def frozen_on_one_rank() -> str:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    net, model = expert_and_own(mesh)
    if md.get_rank() == 3:
        net.own.requires_grad_(False)
    model(torch.ones((), dtype=F64)).backward()
    with pytest.raises(GradientError) as raised:
        model.check_gradients()
    return str(raised.value)


def test_a_checkpoint_goes_on_over_another_mesh(tmp_path: Path) -> None:
    """Two steps on each of three meshes, the optimizer's momentum included."""

    def two_steps(shape: tuple[int, int], first: int) -> tuple[float, float]:
        with md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")) as mesh:
            net = Gpt(mesh)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
            state = md.checkpoint.State(model=net, optimizer=optimizer)
            saver = md.checkpoint.Checkpointer(str(tmp_path), mesh=mesh)
            saver.load(state)
            model = md.DDP(net, device_mesh=mesh["dp", "ep"], experts_over="ep")
            found = steps_of(model, net, optimizer, range(first, first + 2))
            saver.save(state, first + 2)
            done = expected()[2 * first : 2 * first + 4]
            off = max(abs(float(a - b)) for a, b in zip(found, done, strict=True))
            return off, distance(net, []) if first + 2 == STEPS else 0.0

    for first, shape in enumerate(((2, 2), (1, 4))):
        found = md.simulate(two_steps, 4, args=(shape, 2 * first))
        assert max(map(max, found)) < 1e-12


# -- groups ---------------------------------------------------------------------------------------

PARAMETERS = {
    "own": "d",
    "expert": "d@ep",
    "norm": "d {R:tp}",
    "both": "d@ep {R:tp}",
}


class Numbers(nn.Module):
    """Parameters whose gradient is this rank's input; the expert's is used once or not."""

    def __init__(self, specs: dict[str, str], mesh: md.DeviceMesh) -> None:
        super().__init__()
        for name in specs:
            values = torch.full((2,), float(md.get_rank()), dtype=F64)
            self.register_parameter(name, nn.Parameter(values))
        md.annotate(self, specs, mesh=mesh)

    def forward(self, x: torch.Tensor, leaves_out: str = "") -> torch.Tensor:
        return sum((p * x).sum() for name, p in self.named_parameters() if name != leaves_out)


def gradients(
    net: Numbers, mesh: md.DeviceMesh, over: str | tuple[str, ...], **options: Any
) -> dict[str, tuple[float, float]]:
    """Return values after wrapping, and gradients: of a step, and of two without zeroing."""
    model = md.DDP(net, device_mesh=mesh, experts_over=over, **options)
    values = {name: x[0].item() for name, x in net.named_parameters()}
    x = torch.full((), 1.0 + md.get_rank(), dtype=F64)
    model(x).backward()
    model.zero_grad()
    model(x).backward()
    once = {name: p.grad[0].item() for name, p in net.named_parameters()}
    model(x).backward()
    for name, p in net.named_parameters():
        assert p.grad[0].item() == pytest.approx(2 * once[name])
    return {name: (values[name], once[name]) for name in once}


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=str)
def test_experts_next_to_parameters_reduced_over_additional_axes(options: dict[str, Any]) -> None:
    def three_axes() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
        return gradients(Numbers(PARAMETERS, mesh), mesh["dp", "ep"], "ep", **options)

    # Ranks are 4 dp + 2 ep + tp, and their gradients 1 + rank.
    for rank, found in enumerate(md.simulate(three_axes, 8)):
        ep, tp = rank // 2 % 2, rank % 2
        ranks = {
            "own": [r for r in range(8) if r % 2 == tp],
            "expert": [r for r in range(8) if (r // 2 % 2, r % 2) == (ep, tp)],
            "norm": [*range(8)],
            "both": [r for r in range(8) if r // 2 % 2 == ep],
        }
        for name, holders in ranks.items():
            wanted = sum(1 + r for r in holders) / 4
            assert found[name] == (holders[0], pytest.approx(wanted)), name


def test_several_axes_of_experts() -> None:
    specs = {"own": "d", "first": "d@ep", "second": "d@tp", "all": "d@(ep,tp)"}

    def two_axes() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
        return gradients(Numbers(specs, mesh), mesh, ["ep", "tp"])

    for rank, found in enumerate(md.simulate(two_axes, 8)):
        ep, tp = rank // 2 % 2, rank % 2
        ranks = {
            "own": [*range(8)],
            "first": [r for r in range(8) if r // 2 % 2 == ep],
            "second": [r for r in range(8) if r % 2 == tp],
            "all": [r for r in range(8) if (r // 2 % 2, r % 2) == (ep, tp)],
        }
        for name, holders in ranks.items():
            wanted = sum(1 + r for r in holders) / 8
            assert found[name] == (holders[0], pytest.approx(wanted)), name


def test_shards_of_tensor_parallelism_would_be_divided() -> None:
    """A mistake that no check can find: the ranks along 'tp' have equal data."""

    def divided() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found = []
        for axes, over in (("dp", None), (("dp", "tp"), "tp")):
            net = Numbers({"own": "d", "shard": "d@tp"}, mesh)
            model = md.DDP(net, device_mesh=mesh[axes], experts_over=over)
            model(torch.ones((), dtype=F64)).backward()
            found.append(net.shard.grad[0].item())
        return found

    assert md.simulate(divided, 4) == [[1.0, 0.5]] * 4


SUBMESHES = {
    "one axis": (lambda mesh: mesh["ep"], "ep", 2, lambda r: [r]),
    "turned": (lambda mesh: mesh["ep", "dp"], "ep", 4, lambda r: [r % 2, r % 2 + 2]),
    "a flattened axis": (lambda mesh: mesh.flatten(name="all"), "all", 4, lambda r: [r]),
    "an axis of two": (
        lambda mesh: mesh.flatten(name="all").unflatten("all", (2, 2), ("ep", "dp")),
        "ep",
        4,
        lambda r: [r // 2 * 2, r // 2 * 2 + 1],
    ),
}


@pytest.mark.parametrize("how", SUBMESHES)
def test_submeshes(how: str) -> None:
    submesh, axis, size, holders = SUBMESHES[how]

    def wrapped() -> Any:
        mesh = submesh(md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))
        return gradients(Numbers({"own": "d", "expert": f"d@{axis}"}, mesh), mesh, axis)

    for rank, found in enumerate(md.simulate(wrapped, 4)):
        same = holders(rank)
        assert found["expert"] == (same[0], sum(1 + r for r in same) / size)


def test_a_dropped_wrapper_leaves_no_group_open(pool: Pool) -> None:
    assert pool.run(warnings_of_a_dropped_wrapper, 2) == [[], []]


def warnings_of_a_dropped_wrapper() -> list[str]:
    """Drop a wrapper over 'ep' alone, along which each rank holds other experts."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(Numbers({"own": "d", "expert": "d@ep"}, mesh), mesh["ep"], "ep")
        gc.collect()
    return [str(each.message) for each in caught]


def test_frozen_experts_are_equal_along_the_other_axes_only() -> None:
    def frozen() -> tuple[float, str]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        net = Numbers({"own": "d", "expert": "d@ep"}, mesh)
        net.expert.requires_grad_(False)
        model = md.DDP(net, device_mesh=mesh, experts_over="ep", verify_every=1)
        value = net.expert[0].item()
        x = torch.ones((), dtype=F64)
        model(x).backward()
        model.check_gradients()
        if md.get_rank() == 3:
            net.expert.add_(1)
        model(x).backward()
        with pytest.raises(GradientError) as raised:
            model.check_gradients()
        return value, str(raised.value)

    for rank, (value, text) in enumerate(md.simulate(frozen, 4)):
        assert value == rank % 2
        assert text.startswith("the replicas have diverged")
        assert "expert, shape (2,), float64: rank 3 differs from rank 1" in text
        assert "md.assert_equal(model, 'dp', mesh=mesh)" in text


def test_experts_that_differ_along_the_other_axes_with_an_axis_of_one_rank() -> None:
    def differing() -> str:
        mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
        net, model = expert_and_own(mesh, verify_every=1)
        net.expert.data.add_(md.get_rank())
        model(torch.ones((), dtype=F64)).backward()
        with pytest.raises(GradientError) as raised:
            model.check_gradients()
        return str(raised.value)

    for text in md.simulate(differing, 2):
        assert "expert, shape (2,), float64: rank 1 differs from rank 0" in text


def test_types_of_experts() -> None:
    """Inside `md.typed`, experts vary over 'ep' and the wrapper reduces them over 'dp'."""

    def typed() -> tuple[float, str, str]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        net = Gpt(mesh)
        model = md.DDP(net, device_mesh=mesh["dp", "ep"], experts_over="ep")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            tokens = md.annotate(
                md.shard(texts(step), "b@(dp,ep) s", mesh), varying=("dp", "ep"), mesh=mesh
            )
            with md.typed(mesh):
                loss = net.loss(model, tokens)
                loss.backward()
                found += [lax.pmean(loss.detach(), ("dp", "ep"))]
                found += [md.clip_grad_norm_(net.parameters(), 0.5)]
                optimizer.step()
        kinds = str(md.typeof(net.mixture.up)), str(md.typeof(net.mixture.up.grad))
        return distance(net, found), *kinds

    for off, kind, of_grad in md.simulate(typed, 4):
        assert off < 1e-12
        assert (kind, of_grad) == ("float64[2@ep, 6, 8]{R:dp}", "float64[2, 6, 8]{V:ep}")


# -- other ways to reduce -------------------------------------------------------------------------


def expert_and_own(mesh: md.DeviceMesh, **options: Any) -> tuple[Numbers, Any]:
    net = Numbers({"own": "d", "expert": "d@ep"}, mesh)
    return net, md.DDP(net, device_mesh=mesh["dp", "ep"], experts_over="ep", **options)


def test_a_gradient_that_some_ranks_lack() -> None:
    def missing(allowed: bool) -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        net, model = expert_and_own(mesh, find_unused_parameters=allowed)
        found = []
        for _ in range(3):
            model.zero_grad()
            model(torch.tensor(1.0, dtype=F64), "expert" if md.get_rank() == 3 else "").backward()
            if not allowed:
                with pytest.raises(GradientError) as raised:
                    model.check_gradients()
                return str(raised.value)
            found.append((net.own.grad[0].item(), net.expert.grad[0].item()))
        return found

    for rank, found in enumerate(md.simulate(missing, 4, (True,))):
        assert found == [(1.0, 0.5 if rank % 2 == 0 else 0.25)] * 3
    for text in md.simulate(missing, 4, (False,)):
        assert "found:    rank 3: expert (index 1)\n" in text


def test_a_communication_hook_serves_the_other_parameters() -> None:
    def hooked() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        net, model = expert_and_own(mesh)
        with pytest.warns(UserWarning, match="averaged over other axes: expert") as warned:
            model.register_comm_hook(None, md.distributed.comm_hooks.bf16_compress_hook)
        for _ in range(3):
            model.zero_grad()
            model(torch.tensor(1.0 + md.get_rank(), dtype=F64)).backward()
        return net.own.grad[0].item(), net.expert.grad[0].item(), len(warned)

    assert md.simulate(hooked, 4) == [(2.5, 1.0, 1), (2.5, 1.5, 1)] * 2


def test_join_contexts_and_other_groups_raise() -> None:
    def rejected() -> list[str]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        _, model = expert_and_own(mesh)
        with pytest.raises(JoinError) as joined, model.join():
            pass
        with pytest.raises(GradientError) as changed:
            model._update_process_group(mesh["dp"])
        return [str(joined.value), str(changed.value)]

    for joined, changed in md.simulate(rejected, 4):
        assert joined.startswith(
            "cannot use a join context with parameters that are averaged over other axes than the "
            "wrapper's\n"
        )
        assert "loop over md.uneven(loader, mesh)" in joined
        assert changed.startswith(
            "cannot change the group of a wrapper whose parameters are annotated as reduced or as "
            "experts\n"
        )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_sparse_gradients_and_delayed_parameters() -> None:
    def sparse() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        net = nn.Sequential(nn.Embedding(2, 2, sparse=True), nn.Linear(2, 1, bias=False))
        md.annotate(net, {"0.weight": "v@ep d"}, mesh=mesh)
        nn.init.ones_(net[1].weight)
        model = md.DDP(
            net,
            device_mesh=mesh["dp", "ep"],
            experts_over="ep",
            delay_all_reduce_named_params=[*net.named_parameters()],
            param_to_hook_all_reduce=net[1].weight,
        )
        for _ in range(3):
            model.zero_grad()
            (model(torch.tensor([0])) * (1.0 + md.get_rank())).sum().backward()
        return net[0].weight.grad.to_dense()[:, 0].tolist()

    assert md.simulate(sparse, 4) == [[1.0, 0.0], [1.5, 0.0]] * 2


def test_mixed_precision_and_ignored_experts() -> None:
    def mixed() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        precision = md.distributed.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
        net, model = expert_and_own(mesh, mixed_precision=precision)
        model(torch.tensor(1.0 + md.get_rank())).backward()
        return net.expert.grad[0].item(), net.expert.grad.dtype

    assert md.simulate(mixed, 4) == [(1.0, F64), (1.5, F64)] * 2


def test_a_copied_wrapper_keeps_its_experts() -> None:
    def copied() -> float:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = copy.deepcopy(expert_and_own(mesh)[1])
        model(torch.tensor(1.0 + md.get_rank(), dtype=F64)).backward()
        return model.module.expert.grad[0].item()

    assert md.simulate(copied, 4) == [1.0, 1.5] * 2


# -- bad input ------------------------------------------------------------------------------------


def rejected(
    kind: type[Exception], make: Callable[[md.DeviceMesh], Any], ranks: int = 4
) -> list[str]:
    """Return the text of the error that ``make(mesh)`` raises on each rank."""

    def raises() -> str:
        mesh = md.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "ep"))
        with pytest.raises(kind) as raised:
            make(mesh)
        return str(raised.value)

    return md.simulate(raises, ranks)


def wrap(over: Any, specs: dict[str, str] | None = None, *axes: str) -> Callable[..., Any]:
    names = axes or ("dp", "ep")

    def make(mesh: md.DeviceMesh) -> Any:
        net = Numbers(specs or {"own": "d", "expert": "d@ep"}, mesh)
        return md.DDP(net, device_mesh=mesh[names], experts_over=over)

    return make


def test_without_the_argument_the_error_names_it() -> None:
    for rank, text in enumerate(rejected(AxisTypeError, wrap(None))):
        assert text.startswith(
            "DDP cannot replicate expert: it is annotated as varying over 'ep'\n"
            f"  where:    rank {rank}, "
        )
        assert text.endswith(
            "if the ranks along 'ep' have different data, as with experts to which "
            "md.experts.dispatch sends tokens, pass a device_mesh with 'ep', and "
            "experts_over='ep'; if they have the same data, pass as device_mesh= only axes along "
            "which the model is replicated, without 'ep'"
        )
        assert "_set_params" not in text

    def of_a_buffer(mesh: md.DeviceMesh) -> None:
        net = nn.BatchNorm1d(2)
        md.annotate(net, {"running_mean": "d@ep"}, mesh=mesh)
        try:
            md.DDP(net, device_mesh=mesh["dp", "ep"])
        except AxisTypeError:
            md.DDP(net, device_mesh=mesh["dp", "ep"], broadcast_buffers=False)  # as proposed
            raise

    for text in rejected(AxisTypeError, of_a_buffer):
        assert text.endswith("or pass broadcast_buffers=False, which leaves buffers as they are")
        assert "experts_over" not in text


def test_a_parameter_that_varies_over_another_axis_too() -> None:
    make = wrap("ep", {"own": "d", "expert": "d@(dp,ep)"})
    for text in rejected(AxisTypeError, make):
        assert text.startswith("DDP cannot replicate expert: it is annotated as varying over 'dp'")


def test_experts_over_is_no_axis_of_the_wrapper() -> None:
    for text in rejected(AxisError, wrap("pe")):
        assert text == (
            "no axis 'pe' in the mesh\n"
            "  where:    experts_over of DDP over 'dp', 'ep' of DeviceMesh(dp=2, ep=2)\n"
            "  expected: one of 'dp', 'ep'\n"
            "  fix:      did you mean 'ep'?"
        )
    for text in rejected(AxisError, wrap("ep", None, "dp")):
        assert "  expected: one of 'dp'\n" in text
        assert text.endswith(
            "pass device_mesh=mesh['dp', 'ep'] if the ranks along 'ep' have different data"
        )

    def without_mesh(mesh: md.DeviceMesh) -> None:
        net = Numbers({"own": "d", "expert": "d@ep"}, mesh)
        md.DDP(net, process_group=md.distributed.group.WORLD, experts_over="ep")

    for text in rejected(MeshError, without_mesh):
        assert text == (
            "experts_over='ep' requires a device_mesh with this axis\n"
            "  expected: the axes along which the ranks have different data, as device_mesh=\n"
            "  found:    no device_mesh\n"
            "  fix:      pass for example device_mesh=mesh['dp', 'ep'], experts_over='ep'"
        )
    for text in rejected(KindError, wrap(1)):
        assert text == (
            "experts_over is 1\n"
            "  expected: the name of an axis of device_mesh, or a tuple of names\n"
            "  fix:      pass for example experts_over='ep'"
        )


def test_no_parameter_varies_over_the_axis() -> None:
    for text in rejected(AxisTypeError, wrap("ep", {"own": "d"})):
        assert text == (
            "experts_over='ep': no parameter is annotated as varying over 'ep'\n"
            "  where:    DDP over 'dp', 'ep' of DeviceMesh(dp=2, ep=2)\n"
            "  expected: experts that are annotated as sharded over 'ep'\n"
            "  found:    own: float64[2]\n"
            "  fix:      annotate the experts before you wrap the model: "
            "md.annotate(model, {'*.experts.*': 'e@ep ...'}, mesh=mesh); or remove experts_over"
        )


def test_a_forgotten_annotation_is_named() -> None:
    def forgotten(mesh: md.DeviceMesh) -> None:
        net = nn.Linear(2, 2)
        nn.init.constant_(net.weight, float(mesh.get_local_rank("ep")))
        nn.init.zeros_(net.bias)
        md.DDP(net, device_mesh=mesh["dp", "ep"], experts_over="ep")

    for text in rejected(AxisTypeError, forgotten):
        assert "fix:      annotate the experts before you wrap the model: " in text


@pytest.mark.parametrize("ranks", [4, 6])
def test_ranks_with_other_experts_all_raise(ranks: int) -> None:
    def count(mesh: md.DeviceMesh) -> None:
        last = md.get_rank() == ranks - 1
        wrap("ep", {"own": "d"} if last else None)(mesh)

    for text in rejected(MismatchError, count, ranks):
        assert f"expert: ranks 0-{ranks - 2}: varies over 'ep'; rank {ranks - 1}: missing" in text

    def shape(mesh: md.DeviceMesh) -> None:
        """A rank with another shape than its replica along 'dp'; along 'ep' shapes may differ."""
        net = Numbers({"own": "d", "expert": "d@ep"}, mesh)
        rows = 9 if md.get_rank() == ranks - 1 else 2 + mesh.get_local_rank("ep")
        net.expert = nn.Parameter(torch.zeros(rows, dtype=F64))
        md.annotate(net, {"expert": "d@ep"}, mesh=mesh)
        try:
            md.DDP(net, device_mesh=mesh["dp", "ep"], experts_over="ep")
        except MismatchError:
            assert str(md.typeof(net.own)) == "float64[2]"  # it is as before
            raise

    for text in rejected(MismatchError, shape, ranks):
        last, other = ranks - 1, ranks // 2 - 1
        size = 2 + other
        assert f"expert: rank {other}: ({size},) float64; rank {last}: (9,) float64" in text
