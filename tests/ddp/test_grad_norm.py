"""``md.clip_grad_norm_``: torch's on whole gradients on one device, whatever way they are cut."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

import meshdist as md
from meshdist import lax
from meshdist.errors import (
    ArgumentError,
    AxisError,
    AxisTypeError,
    GradientError,
    KindError,
    MeshdistError,
    MeshError,
    MismatchError,
)
from tests.pool import Pool
from tests.typed_mode.typed_cases import in_mesh

F32, F64 = torch.float32, torch.float64
AXES = ("pod", "dp", "tp")


def wholes(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = F64) -> list[torch.Tensor]:
    """Whole gradients, equal wherever they are drawn."""
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, dtype=F64, generator=generator).to(dtype) for shape in shapes]


def parameter_of(gradient: torch.Tensor) -> nn.Parameter:
    """A parameter with this gradient, and with its marks."""
    parameter = nn.Parameter(gradient.detach().clone())
    parameter.__dict__.update(gradient.__dict__)
    parameter.grad = gradient.detach().clone()
    return parameter


def clipped_whole(gradients: Sequence[torch.Tensor], max_norm: float, order: float) -> Any:
    """torch's norm of whole gradients on one device, and the gradients that it has scaled."""
    parameters = [parameter_of(gradient) for gradient in gradients]
    # torch knows no largest value of an empty gradient.
    norm = nn.utils.clip_grad_norm_([p for p in parameters if p.numel()], max_norm, order)
    return norm, [parameter.grad for parameter in parameters]


# -- copies of modules ----------------------------------------------------------------------------


def on_meta_and_back(model: nn.Module) -> nn.Module:
    return model.to("meta").to_empty(device="cpu")


def assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


COPIES: dict[str, Callable[[Any], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": AveragedModel,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "assign": assigned,
    "to_empty": on_meta_and_back,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_that_has_not_run_knows_its_parts(way: str) -> None:
    def body(mesh: md.DeviceMesh) -> list[float]:
        md.seed(0)
        made = nn.Sequential(nn.Linear(3, 8, bias=False), nn.Linear(8, 3, bias=False))
        annotated = md.annotate(nn.Linear(3, 4, bias=False), {"weight": "f@tp d"})
        split = md.parallelize(made, mesh["tp"], {"0": "column", "1": "row"})
        norms = []
        for model in map(COPIES[way], (split, annotated)):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            norms.append(md.clip_grad_norm_(model.parameters(), 1.0, mesh=mesh).item())
        return norms

    for norms in in_mesh(body):
        assert norms == pytest.approx([math.sqrt(48), math.sqrt(24)])


# -- one device as the oracle ---------------------------------------------------------------------


def clipped_shards(
    sizes: tuple[int, ...],
    shapes: Sequence[tuple[int, ...]],
    specs: Sequence[Any],
    max_norm: float,
    order: float,
    foreach: bool | None,
) -> Any:
    """This rank's norm, whether its scaled shards are those of the oracle, and its messages."""
    mesh = md.init_device_mesh("cpu", sizes, mesh_dim_names=AXES[-len(sizes) :])
    whole = wholes(shapes)
    specs = [md.P(*spec) for spec in specs]
    held = [md.shard(x, md.NamedSharding(mesh, p)) for x, p in zip(whole, specs, strict=True)]
    parameters = [parameter_of(x) for x in held]
    group = mesh.open_group()
    before = group.device_groups[0].recorder.sequence if group.device_groups else 0
    norm = md.clip_grad_norm_(parameters, max_norm, order, foreach=foreach, mesh=mesh)
    count = (group.device_groups[0].recorder.sequence if group.device_groups else 0) - before
    _, scaled = clipped_whole(whole, max_norm, order)
    for parameter, x, spec in zip(parameters, scaled, specs, strict=True):
        expected = md.shard(x, md.NamedSharding(mesh, spec))
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-15)
    return norm.item(), count, norm.dtype, norm.ndim


@st.composite
def cases(draw: st.DrawFn) -> Any:
    num_axes = draw(st.integers(1, 3))
    sizes: tuple[int, ...] = ()
    for _ in range(num_axes):
        room = 8 // math.prod(sizes)
        sizes += (draw(st.integers(1, min(room, 4))),)
    names = AXES[-num_axes:]
    shapes, specs = [], []
    for _ in range(draw(st.integers(1, 4))):
        ndim = draw(st.integers(0, 3))
        shapes.append(tuple(draw(st.integers(0, 5)) for _ in range(ndim)))
        entries: list[list[str]] = [[] for _ in range(ndim)]
        for axis in draw(st.permutations(names)):
            place = draw(st.integers(0, ndim))
            if place < ndim:
                entries[place].append(axis)
        specs.append(tuple(tuple(entry) or None for entry in entries))
    max_norm = draw(st.sampled_from([0.0, 0.1, 1.0, 100.0, math.inf]))
    order = draw(st.sampled_from([2.0, 1.0, 3.0, 0.5, 2, math.inf]))
    return sizes, shapes, specs, max_norm, order, draw(st.sampled_from([None, True, False]))


@given(cases())
def test_the_norm_is_that_of_one_device(case: Any) -> None:
    sizes, shapes, specs, max_norm, order, _ = case
    found = md.simulate(clipped_shards, math.prod(sizes), case)
    expected, _ = clipped_whole(wholes(shapes), max_norm, order)
    assert len(set(found)) == 1, "equal bits on all ranks, and as many messages"
    norm, count, dtype, ndim = found[0]
    assert norm == pytest.approx(float(expected), rel=1e-13)
    assert (dtype, ndim) == (F64, 0)
    named = [set(itertools.chain(*(entry or () for entry in spec))) for spec in specs]
    size_of = dict(zip(AXES[-len(sizes) :], sizes, strict=True))
    is_cut = any(size_of[axis] > 1 for axes in named for axis in axes)
    assert count == is_cut


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("order", [2.0, 1.0, 3, math.inf])
def test_on_processes(pool: Pool, backend: str, order: float) -> None:
    shapes = [(8, 4), (5,), (6, 4), (1,), ()]
    specs = [("tp", None), (None,), (("dp", "tp"), None), ("tp",), ()]
    case = (2, 2), shapes, specs, 0.5, order, None
    found = pool.run(clipped_shards, 4, *case, backend=backend)
    expected, _ = clipped_whole(wholes(shapes), 0.5, order)
    assert len(set(found)) == 1
    assert found[0][0] == pytest.approx(float(expected), rel=1e-13)
    assert found[0][1] == 1


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_on_processes(
    pool: Pool, backend: str, order: float, bad: float
) -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        cut = parameter_of(md.shard(torch.arange(6.0), "f@tp", mesh))
        if mesh.get_local_rank() == 1:
            cut.grad[0] = bad
        before = cut.grad.clone()
        try:
            md.clip_grad_norm_([cut], 1.0, order, error_if_nonfinite=True, mesh=mesh)
        except GradientError as error:
            assert torch.equal(cut.grad.nan_to_num(), before.nan_to_num())  # nothing is scaled
            text = error.summary
        return text, md.clip_grad_norm_([cut], 1.0, order, mesh=mesh).item()

    for text, norm in pool.run(program, 3, backend=backend):
        assert text == f"clip_grad_norm_: the norm of all gradients is {bad}"
        assert str(norm) == str(bad)


# -- what is given, and returned ------------------------------------------------------------------


def shards(mesh: md.DeviceMesh, dtype: torch.dtype = F64) -> list[nn.Parameter]:
    """A parameter that is cut over 'tp' and another that is equal on all ranks, with gradients."""
    cut, equal = wholes([(4, 2), (3,)], dtype)
    return [parameter_of(md.shard(cut, "f@tp d", mesh)), parameter_of(equal)]


def expected_norm(order: float = 2.0, dtype: torch.dtype = F64) -> float:
    return float(clipped_whole(wholes([(4, 2), (3,)], dtype), 1.0, order)[0])


def test_any_iterable_and_each_parameter_once() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        given: list[Callable[[list[nn.Parameter]], Any]] = [
            lambda both: both,
            iter,
            lambda both: (each for each in both),
            lambda both: [*both, *both],
            lambda both: nn.ParameterList(both).parameters(),
        ]
        norms = []
        for make in given:
            both = shards(mesh)
            norms.append(md.clip_grad_norm_(make(both), 0.1, mesh=mesh).item())
            again = md.clip_grad_norm_(both, 100.0, mesh=mesh).item()
            assert again == pytest.approx(0.1, rel=1e-5)
        (cut, equal), squares = shards(mesh), wholes([(4, 2), (3,)])
        alone = [md.clip_grad_norm_(each, 1.0, mesh=mesh).item() for each in (cut, equal)]
        assert alone == pytest.approx([float(x.norm()) for x in squares])
        return norms

    for norms in in_mesh(body):
        assert norms == [norms[0]] * 5
        assert norms[0] == pytest.approx(expected_norm())


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, torch.complex64])
def test_dtypes(dtype: torch.dtype, foreach: bool | None) -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        both = shards(mesh, dtype)
        norm = md.clip_grad_norm_(both, 1.0, foreach=foreach, mesh=mesh)
        return norm.item(), norm.dtype, [each.grad for each in both]

    whole = [x.to(F64 if dtype.is_floating_point else dtype) for x in wholes([(4, 2), (3,)], dtype)]
    expected, (cut, equal) = clipped_whole(whole, 1.0, 2.0)
    for rank, (norm, found, grads) in enumerate(in_mesh(body)):
        assert norm == pytest.approx(float(expected), rel=1e-6)
        assert found == F32
        part = cut.chunk(2)[rank % 2]
        torch.testing.assert_close(grads, [part.to(dtype), equal.to(dtype)], rtol=0.01, atol=1e-3)


def test_a_norm_beyond_half_precision() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        large = parameter_of(md.shard(torch.full((8,), 6e4, dtype=torch.float16), "f@tp", mesh))
        return md.clip_grad_norm_(large, 1.0, mesh=mesh).item(), large.grad.tolist()

    for norm, grads in in_mesh(body):
        assert norm == pytest.approx(6e4 * math.sqrt(8), rel=1e-3)
        assert grads == pytest.approx([1 / math.sqrt(8)] * 4, rel=1e-3)


def test_dtypes_and_ways_of_being_cut_mix() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        small, large, along = wholes([(4, 2), (3,), (6, 2)])
        held = [
            parameter_of(md.shard(small.float(), "f@tp d", mesh)),
            parameter_of(large.bfloat16()),
            parameter_of(md.shard(along, "f@dp d", mesh)),
        ]
        return md.clip_grad_norm_(held, 1.0, mesh=mesh).item()

    small, large, along = wholes([(4, 2), (3,), (6, 2)])
    whole = torch.cat([x.double().flatten() for x in (small.float(), large.bfloat16(), along)])
    assert in_mesh(body) == pytest.approx([float(whole.norm())] * 4, rel=1e-6)


def test_gradients_that_are_missing() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        both, norms = shards(mesh), []
        if mesh.get_local_rank("tp") == 1:
            both[0].grad = None
        norms.append(md.clip_grad_norm_(both, 100.0, mesh=mesh).item())
        both[1].grad = None
        norms.append(md.clip_grad_norm_(both, 100.0, mesh=mesh).item())
        both[0].grad = None
        norms.append(md.clip_grad_norm_(both, 100.0, mesh=mesh).item())
        norms.append(md.clip_grad_norm_([], 1.0, mesh=mesh).item())
        return norms

    cut, equal = wholes([(4, 2), (3,)])
    half = cut.chunk(2)[0]
    first = math.hypot(float(half.norm()), float(equal.norm()))
    for norms in in_mesh(body):
        assert norms == pytest.approx([first, float(half.norm()), 0.0, 0.0])


def test_parameters_of_stages_that_differ_in_number() -> None:
    def body(mesh: md.DeviceMesh) -> float:
        stage = mesh.get_local_rank("dp")
        mine = [parameter_of(torch.full((2,), 1.0 + stage)) for _ in range(1 + stage)]
        for parameter in mine:
            md.annotate(parameter, varying="dp")
        return md.clip_grad_norm_(mine, 1.0, mesh=mesh).item()

    # Stage 0 has one parameter of ones, stage 1 two of twos.
    assert in_mesh(body) == pytest.approx([math.sqrt(2 * 1 + 4 * 4)] * 4)


def test_a_rank_without_experts_passes_an_empty_parameter() -> None:
    def body(mesh: md.DeviceMesh) -> float:
        num_own = 1 - mesh.get_local_rank("tp")
        expert = md.annotate(parameter_of(torch.full((num_own, 2), 3.0)), varying="tp", mesh=mesh)
        return md.clip_grad_norm_([expert], 1.0, mesh=mesh).item()

    assert in_mesh(body) == pytest.approx([math.sqrt(2 * 9)] * 4)


def test_shards_without_marks_count_as_replicas() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        unmarked = parameter_of(torch.full((1,), 3.0 + mesh.get_local_rank("tp")))
        alone = md.clip_grad_norm_([unmarked], 100.0, mesh=mesh).item()
        marked = parameter_of(md.shard(torch.zeros(2), "f@tp", mesh))
        return alone, md.clip_grad_norm_([unmarked, marked], 100.0, mesh=mesh).item()

    found = in_mesh(body)
    assert [alone for alone, _ in found] == [3.0, 4.0, 3.0, 4.0]
    assert [both for _, both in found] == pytest.approx([math.sqrt((9 + 16) / 2)] * 4)


def test_views_into_the_buckets_of_ddp() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        torch.manual_seed(0)
        whole = nn.Linear(4, 6, dtype=F64)
        part = nn.Linear(4, 3, dtype=F64)
        with torch.no_grad():
            place = mesh.get_local_rank("tp")
            part.weight.copy_(whole.weight.chunk(2)[place])
            part.bias.copy_(whole.bias.chunk(2)[place])
        md.annotate(part, {"weight": "f@tp d", "bias": "f@tp"}, mesh=mesh)
        x = torch.randn(8, 4, dtype=F64)
        model = md.DDP(part, device_mesh=mesh["dp"])
        model(x.chunk(2)[mesh.get_local_rank("dp")]).square().sum().div(4).backward()
        whole(x).square().sum().div(8).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        norm = md.clip_grad_norm_(model.parameters(), 0.1, mesh=mesh)
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(part.weight.grad, whole.weight.grad.chunk(2)[place])
        return norm.item()

    assert len(set(in_mesh(body))) == 1


def test_what_ddp_reduces_over_further_axes_is_complete() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        layer = md.annotate(nn.Linear(1, 1), {"weight": "f d {R:tp}", "bias": "f"}, mesh=mesh)
        model = md.DDP(layer, device_mesh=mesh["dp"])
        model(torch.full((1, 1), 1.0 + mesh.world.rank)).sum().backward()
        return md.clip_grad_norm_(model.parameters(), 100.0, mesh=mesh).item()

    # Inputs 1 to 4: the sums 1 + 2 and 3 + 4 over 'tp', of which 5 is the mean over 'dp'.
    assert in_mesh(body) == pytest.approx([math.hypot(5, 1)] * 4)


# -- without a mesh, and in a typed context -------------------------------------------------------


@pytest.mark.parametrize("order", [2.0, 1, math.inf])
def test_without_a_mesh_it_is_torchs(order: float) -> None:
    gradients = wholes([(4, 2), (3,)], F32)
    expected, scaled = clipped_whole(gradients, 0.5, order)
    parameters = [parameter_of(x) for x in gradients]
    assert torch.equal(md.clip_grad_norm_(iter(parameters), 0.5, order), expected)
    assert all(torch.equal(p.grad, x) for p, x in zip(parameters, scaled, strict=True))
    assert md.clip_grad_norm_([], 1.0).item() == 0.0


def test_a_mesh_without_cuts_sends_nothing() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        gradients = wholes([(4, 2), (3,)], F32)
        expected, scaled = clipped_whole(gradients, 0.5, 2.0)
        parameters = [parameter_of(x) for x in gradients]
        if mesh.world.rank == 3:
            return None  # it would be missed
        with mesh:
            torch.testing.assert_close(md.clip_grad_norm_(parameters, 0.5), expected)
        torch.testing.assert_close([p.grad for p in parameters], scaled)
        return None

    in_mesh(body)


@pytest.mark.parametrize("is_typed", [True, False])
def test_clipping_in_a_context_and_outside(is_typed: bool) -> None:
    """Trains a model with split layers, clipped, inside a typed context and with casts by hand."""

    def body(mesh: md.DeviceMesh) -> Any:
        torch.manual_seed(0)
        up, down = torch.randn(4, 8, dtype=F64), torch.randn(8, 4, dtype=F64)
        scale = nn.Parameter(torch.ones(4, dtype=F64))
        w1 = nn.Parameter(md.shard(up, "d f@tp", mesh))
        w2 = nn.Parameter(md.shard(down, "f@tp d", mesh))
        optimizer, norms = torch.optim.AdamW([scale, w1, w2], lr=0.1), []
        for step in range(3):
            x = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(step))
            mine = x.chunk(2)[mesh.get_local_rank("dp")].clone()
            optimizer.zero_grad()
            if is_typed:
                md.annotate(mine, varying="dp")
                with md.typed(mesh):
                    y = lax.psum((mine * scale) @ w1 @ w2, "tp")
                    lax.pmean(y.square().mean(), "dp").backward()
                    norm = md.clip_grad_norm_([scale, w1, w2], 0.1)
                    assert str(md.typeof(norm)) == "float64[]"
                    optimizer.step()
            else:
                with mesh:
                    s = lax.pvary(scale, ("dp", "tp"))
                    y = lax.psum((mine * s) @ lax.pvary(w1, "dp") @ lax.pvary(w2, "dp"), "tp")
                    lax.pmean(y.square().mean(), "dp").backward()
                    norm = md.clip_grad_norm_([scale, w1, w2], 0.1)
                    optimizer.step()
            norms.append(norm.item())
        return norms, scale.detach()

    def alone() -> Any:
        torch.manual_seed(0)
        w1, w2 = (nn.Parameter(torch.randn(*shape, dtype=F64)) for shape in ((4, 8), (8, 4)))
        scale = nn.Parameter(torch.ones(4, dtype=F64))
        optimizer, norms = torch.optim.AdamW([scale, w1, w2], lr=0.1), []
        for step in range(3):
            x = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            ((x * scale) @ w1 @ w2).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_([scale, w1, w2], 0.1).item())
            optimizer.step()
        return norms, scale.detach()

    expected, of_scale = alone()
    for norms, scale in in_mesh(body):
        assert norms == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(scale, of_scale)


def test_replicas_that_are_clipped_so_stay_equal() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        part, whole = (nn.Parameter(torch.ones(3)) for _ in range(2))
        md.annotate(part, varying="tp")
        for step in range(3):
            x = md.annotate(torch.full((3,), 1.0 + step + md.get_rank()), varying=("dp", "tp"))
            with md.typed(mesh):
                lax.pmean(((whole + part) * x).square().sum(), ("dp", "tp")).backward()
            md.clip_grad_norm_([part, whole], 0.1, mesh=mesh)
            with torch.no_grad():
                for each in (part, whole):
                    each -= 0.1 * each.grad
                    each.grad.zero_()
        return whole.tolist()

    found = md.simulate(program, 4)
    assert found == [found[0]] * 4


# -- DTensors -------------------------------------------------------------------------------------


def test_dtensors_plain_tensors_and_several_meshes_mix() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    shapes = [(6, 4), (5, 3), (5,), (4, 4), (3, 2), (7, 2)]

    def body(mesh: md.DeviceMesh, order: float) -> Any:
        theirs = mesh.to_torch()
        whole = wholes(shapes)

        def held(x: torch.Tensor, on: Any, *placements: Any) -> nn.Parameter:
            parameter = nn.Parameter(distribute_tensor(x, on, placements))
            parameter.grad = distribute_tensor(x.clone(), on, placements)
            return parameter

        parameters = [
            held(whole[0], theirs, Replicate(), Shard(0)),
            held(whole[1], theirs, Shard(0), Shard(1)),
            parameter_of(whole[2]),
            parameter_of(md.shard(whole[3], "a@(dp,tp) b", mesh)),
            held(whole[4], theirs["dp"], Shard(0)),
            held(whole[5], theirs["dp", "tp"]._flatten(), Shard(0)),  # uneven: rank 3 has a row
        ]
        norm = md.clip_grad_norm_(parameters, 0.5, order, mesh=mesh)
        _, scaled = clipped_whole(whole, 0.5, order)
        for parameter, x in zip(parameters, scaled, strict=True):
            if hasattr(parameter, "full_tensor"):
                torch.testing.assert_close(parameter.grad.full_tensor(), x)
        torch.testing.assert_close(parameters[2].grad, scaled[2])
        torch.testing.assert_close(parameters[3].grad, scaled[3][mesh.world.rank :][:1])
        return norm.item()

    for order in (2.0, math.inf, 1.0):
        expected, _ = clipped_whole(wholes(shapes), 0.5, order)
        found = in_mesh(body, order)
        assert len(set(found)) == 1
        assert found[0] == pytest.approx(float(expected))


def test_a_model_of_torchs_fully_shard_beside_layers_of_its_own() -> None:
    from torch.distributed.fsdp import fully_shard

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).to(F64)

    def body(mesh: md.DeviceMesh) -> Any:
        net, x = model(), torch.randn(8, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
        fully_shard(net[0], mesh=mesh.to_torch()["dp"])  # the last layer stays plain
        net(x).square().mean().backward()
        norm = md.clip_grad_norm_(net.parameters(), 0.1, mesh=mesh)
        return norm.item(), [
            getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in net.parameters()
        ]

    alone, x = model(), torch.randn(8, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    alone(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1).item()
    for norm, gradients in in_mesh(body):
        assert norm == pytest.approx(expected)
        torch.testing.assert_close(gradients, [p.grad for p in alone.parameters()])


def test_refusals_of_dtensors() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    def body(mesh: md.DeviceMesh) -> Any:
        theirs = mesh.to_torch()
        partial = nn.Parameter(distribute_tensor(torch.ones(4), theirs, [Replicate()] * 2))
        partial.grad = DTensor.from_local(torch.ones(4), theirs, [Replicate(), Partial()])
        cut = nn.Parameter(distribute_tensor(torch.ones(4), theirs, [Shard(0), Replicate()]))
        cut.grad = cut.detach().clone()
        plain = parameter_of(torch.ones(3))
        texts = []
        for kind, held, on in (
            (AxisTypeError, [partial], mesh),
            (MeshError, [plain, cut], mesh["tp"]),
            (MeshError, [plain, cut], None),
            (KindError, [cut], theirs),
        ):
            with pytest.raises(kind) as caught:
                md.clip_grad_norm_(held, 1.0, mesh=on)
            texts.append(str(caught.value))
        return texts

    partial, mesh, mixed, theirs = in_mesh(body)[1]
    lines = partial.splitlines()
    assert lines[0] == "clip_grad_norm_ of a gradient that is unreduced over 'tp'"
    assert lines[-2:] == [
        "  found:    parameter 0, float32[4]",
        "  fix:      reduce it first: p.grad = p.grad.redistribute(placements=p.placements)",
    ]
    lines = mesh.splitlines()
    assert lines[0] == ("clip_grad_norm_: the ranks of a DTensor form no axes of the mesh")
    assert lines[2:] == [
        "  expected: the ranks along one or several axes of DeviceMesh(tp=2)",
        "  found:    parameter 1, float32[4], as S(0) over ranks 1, 3",
        "  fix:      pass a mesh that has this axis: mesh=md.DeviceMesh.from_torch(...)",
    ]
    assert mixed == (
        "clip_grad_norm_ of DTensors on several meshes, or mixed with plain tensors: there "
        "is no current mesh\n"
        "  expected: a mesh with named axes\n"
        "  fix:      call it inside `with mesh:`, or pass the mesh: clip_grad_norm_(..., "
        "mesh=mesh)"
    )
    assert theirs == (
        "clip_grad_norm_ requires a mesh as mesh=\n"
        "  expected: a DeviceMesh of meshdist\n"
        "  found:    a torch.distributed.device_mesh.DeviceMesh\n"
        "  fix:      convert it: DeviceMesh.from_torch(mesh)"
    )


# -- rejections ------------------------------------------------------------------------------------


def rejected(kind: type[MeshdistError], body: Callable[[md.DeviceMesh], Any]) -> list[str]:
    """The texts with which all four ranks are rejected."""

    def program(mesh: md.DeviceMesh) -> str:
        with pytest.raises(kind) as caught:
            body(mesh)
        assert type(caught.value) is kind
        return str(caught.value)

    return in_mesh(program)


def test_a_norm_that_is_not_finite_is_an_error_on_all_ranks() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        both = shards(mesh)
        if mesh.world.rank in (1, 3):
            both[0].grad[0, 0] = math.inf
        before = [each.grad.clone() for each in both]
        try:
            md.clip_grad_norm_(both, 1.0, error_if_nonfinite=True, mesh=mesh)
        finally:
            assert all(torch.equal(p.grad, x) for p, x in zip(both, before, strict=True))

    for rank, text in enumerate(rejected(GradientError, body)):
        lines = text.splitlines()
        assert lines[0] == "clip_grad_norm_: the norm of all gradients is inf"
        assert f"rank {rank} " in lines[1]
        assert lines[2:] == [
            "  expected: a finite norm of order 2.0, required by error_if_nonfinite=True",
            "  found:    a gradient with NaN, infinity, or values too large for their dtype",
            "  fix:      skip this step on every rank (no gradient has been scaled), or "
            "correct the loss that is not finite",
        ]


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_gradient_that_is_unreduced(is_cut: bool) -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        parameter = parameter_of(torch.ones(4))
        md.annotate(parameter, varying="dp" if is_cut else (), reduced="tp")
        return md.clip_grad_norm_([parameter], 1.0, mesh=mesh)

    mark, shown = (", varying='dp'", "{V:dp R:tp}") if is_cut else ("", "{R:tp}")
    for text in rejected(AxisTypeError, body):
        lines = text.splitlines()
        assert lines[0] == "clip_grad_norm_ of a gradient that is unreduced over 'tp'"
        assert "axis 'tp' (size 2)" in lines[1]
        assert lines[2:] == [
            "  expected: complete gradients (the norm of a sum cannot be computed from partial "
            "sums)",
            f"  found:    parameter 0, float32[4]{shown}",
            f"  fix:      reduce it first: p.grad = md.annotate(lax.psum(p.grad, 'tp'){mark}); or "
            "clip after md.accumulate_gradients, which reduces at its end",
        ]


def test_unreduced_gradients_that_are_complete() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        parameter = parameter_of(torch.ones(4))
        md.annotate(parameter, reduced="tp")
        with mesh:
            parameter.grad = md.annotate(lax.psum(parameter.grad, "tp"))
        norms = [md.clip_grad_norm_([parameter], 100.0, mesh=mesh).item()]
        parameter.grad = None
        norms.append(md.clip_grad_norm_([parameter], 100.0, mesh=mesh).item())
        return norms

    assert in_mesh(body) == [[4.0, 0.0]] * 4
    alone = parameter_of(torch.ones(4))
    md.annotate(alone, reduced="tp")
    with pytest.raises(AxisTypeError, match="of a gradient that is unreduced over 'tp'"):
        md.clip_grad_norm_([alone], 1.0)
    # Over an axis of one rank its partial sum is the sum.
    assert (
        in_mesh(lambda mesh: md.clip_grad_norm_([alone], 9.0, mesh=mesh).item(), shape=(4, 1))
        == [2.0] * 4
    )


def test_a_skipped_backward_of_a_wrapper_leaves_gradients_unreduced() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        model = md.DDP(nn.Linear(2, 1), device_mesh=mesh["dp"])
        x = md.annotate(torch.ones(1, 2), varying="dp")
        with md.typed(mesh), contextlib.ExitStack() as stack:
            stack.enter_context(model.no_sync())
            model(x).sum().backward()
            return md.clip_grad_norm_(model.parameters(), 1.0)

    for text in rejected(AxisTypeError, body):
        assert text.startswith("clip_grad_norm_ of a gradient that is unreduced over 'dp'\n")


def test_a_backward_in_inference_mode_leaves_gradients_local() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        model = md.DDP(nn.Linear(2, 1), device_mesh=mesh["dp"])
        with model.no_sync():
            loss = model(torch.ones(1, 2)).sum()
            with torch.inference_mode():
                loss.backward()
        assert all(p.grad.is_inference() for p in model.parameters())
        cut = md.annotate(parameter_of(torch.ones(4, 2)), "f@dp d", mesh=mesh)
        return md.clip_grad_norm_([*model.parameters(), cut], 1.0, mesh=mesh)

    for text in rejected(GradientError, body):
        assert "no_sync" in text


def test_parameters_that_are_cut_without_a_mesh() -> None:
    parameter = md.annotate(parameter_of(torch.ones(4, 2)), "f@tp d")
    with pytest.raises(MeshError) as caught:
        md.clip_grad_norm_([parameter], 1.0)
    assert str(caught.value) == (
        "clip_grad_norm_ of a parameter that is sharded over 'tp': there is no current mesh\n"
        "  expected: a mesh with named axes\n"
        "  fix:      call it inside `with mesh:`, or pass the mesh: clip_grad_norm_(..., "
        "mesh=mesh)"
    )


def test_an_axis_that_the_mesh_lacks() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        return md.clip_grad_norm_(shards(mesh), 1.0, mesh=mesh["dp"])

    for text in rejected(AxisError, body):
        assert text == (
            "no axis 'tp' in the mesh\n"
            "  where:    clip_grad_norm_ on DeviceMesh(dp=2)\n"
            "  expected: one of 'dp'"
        )

    def hidden(mesh: md.DeviceMesh) -> Any:
        with mesh, mesh["dp"]:
            return md.clip_grad_norm_(shards(mesh), 1.0)

    for text in rejected(AxisError, hidden):
        assert "an outer `with mesh:` of DeviceMesh(dp=2, tp=2), which has axis 'tp'" in text


def test_ranks_that_pass_other_arguments() -> None:
    def other_parameters(mesh: md.DeviceMesh) -> Any:
        both = shards(mesh)
        return md.clip_grad_norm_(both[:1] if mesh.world.rank == 3 else both, 1.0, mesh=mesh)

    def missing(mesh: md.DeviceMesh) -> Any:
        both = shards(mesh)
        if mesh.world.rank == 3:
            both[1].grad = None
        return md.clip_grad_norm_(both, 1.0, mesh=mesh)

    for body in (other_parameters, missing):
        for text in rejected(MismatchError, body):
            assert "with 1 gradients, of 3 elements, that are equal on all ranks" in text
            assert "with 0 gradients, of 0 elements, that are equal on all ranks" in text

    def other_norm(mesh: md.DeviceMesh) -> Any:
        return md.clip_grad_norm_(shards(mesh), 1.0 + (mesh.world.rank == 3), mesh=mesh)

    for text in rejected(MismatchError, other_norm):
        assert "clip_grad_norm_(max_norm=1.0, norm_type=2.0, error_if_nonfinite=False)" in text
        assert "clip_grad_norm_(max_norm=2.0, norm_type=2.0, error_if_nonfinite=False)" in text


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (
            KindError,
            {"parameters": nn.Linear(1, 1)},
            "clip_grad_norm_ requires an iterable of parameters\n"
            "  found:    a Linear\n"
            "  fix:      pass module.parameters()",
        ),
        (
            KindError,
            {"parameters": 3},
            ("clip_grad_norm_ requires an iterable of parameters\n  found:    an int"),
        ),
        (
            KindError,
            {"parameters": nn.Linear(1, 1).named_parameters()},
            "clip_grad_norm_ requires parameters\n"
            "  expected: tensors in the iterable\n"
            "  found:    entry 0 is a tuple\n"
            "  fix:      pass module.parameters(), without names",
        ),
        (KindError, {"max_norm": "1"}, "clip_grad_norm_: max_norm must be a number"),
        (
            ArgumentError,
            {"max_norm": -1},
            (
                "clip_grad_norm_: max_norm must not be negative\n"
                "  expected: a number of 0 or more\n"
                "  found:    -1.0"
            ),
        ),
        (ArgumentError, {"max_norm": math.nan}, "clip_grad_norm_: max_norm must not be negative"),
        (KindError, {"norm_type": "nuc"}, "clip_grad_norm_: norm_type must be a number"),
        (
            ArgumentError,
            {"norm_type": 0},
            "clip_grad_norm_: norm_type must be positive\n"
            "  expected: a number above 0, or math.inf\n"
            "  found:    0",
        ),
        (ArgumentError, {"norm_type": -math.inf}, "found:    -inf"),
        (ArgumentError, {"norm_type": math.nan}, "found:    nan"),
        (
            KindError,
            {"mesh": "dp"},
            "found:    a str\n  fix:      pass mesh=mesh, or mesh=mesh['dp'] for one axis",
        ),
    ],
)
def test_arguments(kind: type[MeshdistError], arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(kind) as caught:
        md.clip_grad_norm_(**{"parameters": [], "max_norm": 1.0, **arguments})
    assert type(caught.value) is kind
    assert text in str(caught.value)


def test_orders_as_texts() -> None:
    parameter = parameter_of(torch.tensor([1.0, -3.0]))
    assert md.clip_grad_norm_([parameter], 9.0, "inf").item() == 3.0


def test_sparse_gradients() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    with torch.sparse.check_sparse_tensor_invariants():
        parameter.grad = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (3, 2))
    for parameters in ([parameter], parameter):
        with pytest.raises(KindError) as caught:
            md.clip_grad_norm_(parameters, 1.0)
        assert str(caught.value) == (
            "clip_grad_norm_ requires dense gradients\n"
            "  found:    parameter 0, float32[3, 2], whose gradient is torch.sparse_coo\n"
            "  fix:      convert it: parameter.grad = parameter.grad.to_dense()"
        )


def test_an_empty_generator() -> None:
    with pytest.warns(UserWarning, match=r"the generator yields no \(more\) parameters"):
        md.clip_grad_norm_((each for each in ()), 1.0)


def test_a_device_without_kernels_for_many_tensors() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        parameter = nn.Parameter(torch.ones(3, device="meta"))
        parameter.grad = torch.ones(3, device="meta")
        return md.clip_grad_norm_([parameter], 1.0, foreach=True, mesh=mesh)

    assert (
        rejected(KindError, body)
        == [
            "clip_grad_norm_: torch has no foreach kernels for meta\n"
            "  found:    foreach=True\n"
            "  fix:      remove foreach=True"
        ]
        * 4
    )
