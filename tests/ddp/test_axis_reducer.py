"""DDP inside typed contexts: what it marks and claims, and one model trained in every way."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md
from meshdist import lax
from meshdist.errors import AxisTypeError
from tests.pool import Pool
from tests.typed_mode.typed_cases import F64, in_mesh, kinds, refusal, varying

# -- one model, in every way ----------------------------------------------------------------------


class Mlp(nn.Module):
    """A layer whose sequence is split over 'tp' between its blocks, its width inside of them."""

    def __init__(self, width: int, tp: md.DeviceMesh | None, *, is_typed: bool) -> None:
        super().__init__()
        self.tp, self.is_typed = tp, is_typed
        self.norm = nn.LayerNorm(width, dtype=F64)
        nn.init.normal_(self.norm.weight)
        self.up = self.shard(torch.randn(4 * width, width, dtype=F64), 0)
        self.down = self.shard(torch.randn(width, 4 * width, dtype=F64) / width, 1)
        self.bias = nn.Parameter(torch.randn(width, dtype=F64))

    def shard(self, whole: torch.Tensor, dim: int) -> nn.Parameter:
        if self.tp is None:
            return nn.Parameter(whole)
        part = nn.Parameter(whole.chunk(self.tp.size(), dim)[self.tp.get_local_rank()].clone())
        return varying(part, "tp") if self.is_typed else part

    def cast(self, parameter: torch.Tensor) -> torch.Tensor:
        """What a program writes by hand where it has no types."""
        by_hand = self.tp is not None and not self.is_typed
        return lax.pvary(parameter, self.tp) if by_hand else parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.cast(self.norm.weight), self.cast(self.norm.bias)
        h = F.layer_norm(x, self.norm.normalized_shape, weight, bias)
        if self.tp is not None:
            h = lax.all_gather(h, self.tp, axis=1, tiled=True)
        y = F.linear(F.gelu(F.linear(h, self.up)), self.down)
        if self.tp is not None:
            y = lax.psum_scatter(y, self.tp, scatter_dimension=1, tiled=True)
        return x + y + self.cast(self.bias)


def model(tp: md.DeviceMesh | None = None, *, is_typed: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp(8, tp, is_typed=is_typed) for _ in range(2)))


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).pow(3).mean()


BATCH = torch.randn(8, 6, 8, dtype=F64, generator=torch.Generator().manual_seed(1))


def by_types(mesh: md.DeviceMesh, net: nn.Module, x: torch.Tensor, axes: tuple[str, ...]) -> None:
    with md.typed(mesh):
        lax.pmean(loss_of(net, x), axes).backward()


def by_ddp(mesh: md.DeviceMesh, net: nn.Module, x: torch.Tensor, axes: tuple[str, ...]) -> None:
    with mesh:
        loss = loss_of(net, x)
        (lax.pmean(loss, "tp") if "tp" in axes else loss).backward()


def by_ddp_with_types(
    mesh: md.DeviceMesh, net: nn.Module, x: torch.Tensor, axes: tuple[str, ...]
) -> None:
    with md.typed(mesh):
        loss = loss_of(net, x)
        assert kinds(loss) == f"V:{','.join(axes)}"
        (lax.pmean(loss, "tp") if "tp" in axes else loss).backward()


def by_accumulation(
    mesh: md.DeviceMesh, net: nn.Module, x: torch.Tensor, axes: tuple[str, ...]
) -> None:
    halves = [md.annotate(half.clone(), varying=axes) for half in x.chunk(2)]
    with md.typed(mesh), md.accumulate_gradients(net.parameters(), "dp"):
        for half in halves:
            (lax.pmean(loss_of(net, half), axes) / 2).backward()


WAYS: dict[str, Callable[..., None]] = {
    "types": by_types,
    "ddp": by_ddp,
    "ddp with types": by_ddp_with_types,
    "accumulation": by_accumulation,
}


def gradients(mesh: md.DeviceMesh, way: str) -> list[torch.Tensor]:
    """One rank's gradients of the third step, made whole over 'tp'."""
    axes = mesh.axis_names
    tp = mesh["tp"] if "tp" in axes else None
    net = model(tp, is_typed=way != "ddp")
    x = BATCH.chunk(mesh.size("dp"))[mesh.get_local_rank("dp")]
    if tp is not None:
        x = x.chunk(tp.size(), 1)[tp.get_local_rank()]
    x = varying(x.clone(), *axes)
    trained = md.DDP(net, device_mesh=mesh["dp"]) if "ddp" in way else net
    for _ in range(3):  # buckets are laid after the first
        for parameter in net.parameters():
            parameter.grad = None
        WAYS[way](mesh, trained, x, axes)
    found = []
    for name, parameter in net.named_parameters():
        grad = parameter.grad.clone()
        if tp is not None and name.endswith(("up", "down")):
            dim = 0 if name.endswith("up") else 1
            grad = lax.all_gather(grad, tp, axis=dim, tiled=True)
        found.append(grad)
    return found


def check_every_way(found: dict[str, list[torch.Tensor]]) -> None:
    """One rank's gradients against one device's, and DDP's against DDP's without types."""
    reference = model()
    loss_of(reference, BATCH).backward()
    for way, grads in found.items():
        for grad, one in zip(grads, reference.parameters(), strict=True):
            torch.testing.assert_close(grad, one.grad, rtol=0, atol=1e-13, msg=way)
    for plain, typed in zip(found["ddp"], found["ddp with types"], strict=True):
        assert torch.equal(plain, typed)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["dp", "dp x sequence-parallel tp"])
def test_one_model_in_every_way(shape: tuple[int, ...]) -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        return {way: gradients(mesh, way) for way in WAYS}

    for found in in_mesh(body, shape=shape):
        check_every_way(found)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_one_model_in_every_way_on_processes(pool: Pool, backend: str) -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        md.seed(3, differ_over="dp", mesh=mesh)
        draw = torch.rand(1).item()
        with md.typed(mesh):
            assert kinds(torch.rand(1)) == "V:dp"
        return {way: gradients(mesh, way) for way in WAYS}, draw

    results = pool.run(program, 4, backend=backend)
    for found, _ in results:
        check_every_way(found)
    a, b, c, d = (draw for _, draw in results)
    assert a == b != c == d


def test_values_that_claim_to_be_equal_are_compared_at_debug_level_detail() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        return {way: gradients(mesh, way) for way in WAYS}

    md.set_debug_level(md.DebugLevel.DETAIL)
    found = in_mesh(body)
    check_every_way(found[0])


# -- marks ----------------------------------------------------------------------------------------


def layer() -> nn.Module:
    with md.untyped():  # its first values are drawn
        net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    return net


def test_parameters_are_marked_while_the_wrapper_lives() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        net = nn.Linear(2, 2)
        net.bias.requires_grad_(False)
        varying(net.weight, "tp")
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        found = [kinds(net.weight), kinds(net.bias)]
        clone = copy.deepcopy(ddp)
        found.append(kinds(clone.module.weight))
        del ddp
        gc.collect()
        found.append(kinds(net.weight))
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        ddp._remove_autograd_hooks()
        return [*found, kinds(net.weight)]

    # A copy of a parameter has no marks but what its own wrapper gives.
    assert in_mesh(body) == [["V:tp R:dp", "", "R:dp", "V:tp", "V:tp"]] * 4


def test_a_wrapper_made_inside_a_context_and_used_outside_of_it() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        x = varying(torch.full((1, 1), 1.0 + mesh.get_local_rank("dp")))
        with md.typed(mesh):
            ddp = md.DDP(layer(), device_mesh=mesh["dp"])
            with torch.no_grad():
                seen = kinds(ddp(x))  # claims nothing: no backward follows
            (lax.pmean(x.sum(), "dp") * torch.ones((), requires_grad=True)).backward()
        ddp(x.detach()).sum().backward()
        return seen, ddp.module.weight.grad.item()

    assert in_mesh(body) == [("V:dp", 1.5)] * 4


@pytest.mark.parametrize("how", ["mesh", "group", "flat", "slice", "turned"])
def test_gradients_are_invariant_over_the_wrappers_axes(how: str) -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        given: dict[str, Any] = {
            "mesh": {"device_mesh": mesh["dp"]},
            "group": {"process_group": mesh.get_group("dp")},
            "flat": {"device_mesh": mesh["dp", "tp"].flatten(name="all")},
            "slice": {"device_mesh": mesh["dp", "tp"]},
            "turned": {"device_mesh": mesh["tp", "dp"]},
        }[how]
        axes = ("dp",) if how in ("mesh", "group") else ("dp", "tp")
        net = layer()
        ddp = md.DDP(net, **given)
        x = varying(torch.full((1, 1), float(mesh.get_local_rank("dp"))), *axes)
        with md.typed(mesh):
            ddp(x).sum().backward()
            grad, weight = kinds(net.weight.grad), kinds(net.weight)
            torch.optim.SGD(net.parameters(), lr=1.0).step()
            return weight, grad, kinds(net.weight), net.weight.item()

    reduced = "R:dp" if how in ("mesh", "group") else "R:dp,tp"
    assert in_mesh(body) == [(reduced, "", reduced, 0.5)] * 4


def test_over_the_world_it_owns_all_axes() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        net = layer()
        ddp = md.DDP(net, process_group=md.group.WORLD)
        x = varying(torch.full((1, 1), float(md.get_rank())), "dp", "tp")
        with md.typed(mesh):
            ddp(x).sum().backward()
        return kinds(net.weight), net.weight.grad.item()

    assert in_mesh(body) == [("R:dp,tp", 1.5)] * 4
    for shape in ((1,), (1, 1)):  # an axis of one rank is an axis: the first
        names = ("dp",)

        def alone(mesh: md.DeviceMesh, names: Any = names) -> Any:
            net = layer()
            ddp = md.DDP(net)
            with md.typed(mesh):
                ddp(varying(torch.ones(1, 1), *names)).sum().backward()
            return kinds(net.weight), net.weight.grad.item()

        assert in_mesh(alone, shape=shape) == [("R:dp", 1.0)]


def test_an_axis_of_one_rank_is_the_one_that_is_named() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        net = layer()
        ddp = md.DDP(net, device_mesh=mesh["tp"])
        with md.typed(mesh):
            ddp(varying(torch.ones(1, 1), "tp")).sum().backward()
        return kinds(net.weight), net.weight.grad.item()

    assert in_mesh(body, shape=(1, 1)) == [("R:tp", 1.0)]


def test_what_adds_up_in_no_sync_is_no_gradient_yet() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        net, found = layer(), []
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
        x = varying(torch.full((1, 1), 1.0 + mesh.get_local_rank("dp")))
        with md.typed(mesh):
            for _ in range(2):
                optimizer.zero_grad(set_to_none=False)
                ddp(x).sum().backward()
                found.append(kinds(net.weight.grad))
                with ddp.no_sync():
                    ddp(x).sum().backward()
                found.append(kinds(net.weight.grad))
                with pytest.raises(AxisTypeError, match="cannot apply an unreduced gradient"):
                    optimizer.step()
                ddp(x).sum().backward()
                found.append(kinds(net.weight.grad))
                optimizer.step()
        return found, net.weight.grad.item()

    assert in_mesh(body) == [(["", "U:dp", ""] * 2, 4.5)] * 4


def test_buffers_are_equal_where_the_wrapper_has_made_them_so() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        norm = nn.BatchNorm1d(2)
        ddp = md.DDP(norm, device_mesh=mesh["dp"])
        x = varying(torch.randn(4, 2, generator=torch.Generator().manual_seed(md.get_rank())))
        with md.typed(mesh):
            ddp(x).sum().backward()
            behind = kinds(norm.running_mean)
            ddp.eval()
            with torch.no_grad():
                out = ddp(torch.ones(4, 2))
            return behind, kinds(norm.running_mean), kinds(out), out.tolist()

    found = in_mesh(body, shape=(2,))
    assert found[0] == found[1]
    # The weights are reduced: equal on all ranks.
    assert found[0][:3] == ("V:dp", "", "R:dp")


def test_terms_of_parameters_may_stand_outside_the_wrapper() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        net = layer()
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        x = varying(torch.full((1, 1), 1.0 + mesh.get_local_rank("dp")))
        with md.typed(mesh):
            (ddp(x).sum() + 10 * net.weight.sum()).backward()
            (100 * net.weight.sum()).backward()  # equal on each rank, as its mean is
        return net.weight.grad.item()

    assert in_mesh(body) == [111.5] * 4


# -- what is rejected ------------------------------------------------------------------------------


def test_a_loss_that_is_complete_over_the_wrappers_axis() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        ddp = md.DDP(layer(), device_mesh=mesh["dp"])
        lax.pmean(ddp(varying(torch.ones(1, 1))).sum(), "dp").backward()

    text = refusal(AxisTypeError, body)
    assert text.startswith(
        "backward cannot start from a loss that is invariant over 'dp': DDP already averages "
        "gradients over this axis\n"
    )
    assert "axis 'dp' (size 2)" in text
    assert "test_axis_reducer.py:" in text
    assert "loss: float32[]" in text
    assert "remove the lax.pmean over 'dp'" in text

    def unreduced(mesh: md.DeviceMesh) -> None:
        ddp = md.DDP(layer(), device_mesh=mesh["dp"])
        loss = ddp(varying(torch.ones(1, 1))).sum()
        lax.pcast(loss, "dp", to="unreduced").backward()

    text = refusal(AxisTypeError, unreduced)
    assert text.startswith(
        "backward cannot start from a loss that is unreduced over 'dp': DDP already averages "
        "gradients over this axis\n"
    )
    assert "remove the cast over 'dp'" in text


def test_a_leaf_that_is_not_the_wrappers() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        head = nn.Parameter(torch.ones(1, 1))
        ddp = md.DDP(layer(), device_mesh=mesh["dp"])
        (ddp(varying(torch.ones(1, 1))) @ head).sum().backward()

    text = refusal(AxisTypeError, body)
    assert text.startswith(
        "backward cannot reach a leaf outside DDP, which averages gradients over 'dp'\n"
    )
    assert "averages their gradients, while the gradient of another leaf is summed" in text
    assert "leaf: float32[1, 1], cast to varying" in text
    assert "wrap everything you train in one module" in text and "lax.pmean(loss, 'dp')" in text


def test_a_group_that_lies_along_no_axes() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        other = md.new_group([0, 3]), md.new_group([1, 2])
        group = other[0] if md.get_rank() in (0, 3) else other[1]
        md.DDP(layer(), process_group=group)(torch.ones(1, 1))

    text = refusal(AxisTypeError, body)
    assert text.startswith("DDP averages over ranks that form no axes of the context's mesh\n")
    assert "the ranks along one or several of 'dp', 'tp' of DeviceMesh(dp=2, tp=2)" in text
    assert "ranks 0, 3" in text
    assert "DDP(module, device_mesh=mesh['dp'])" in text

    def reversed_ranks(mesh: md.DeviceMesh) -> None:
        turned = md.DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("all",))
        md.DDP(layer(), device_mesh=turned)(torch.ones(1, 1))

    assert "ranks 3, 2, 1, 0" in refusal(AxisTypeError, reversed_ranks)


def test_a_parameter_that_differs_between_the_ranks() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        net = layer()
        varying(net.weight, "tp")
        md.DDP(net, device_mesh=mesh["dp", "tp"])

    text = refusal(AxisTypeError, body)
    assert text.startswith("DDP cannot replicate weight: it is annotated as varying over 'tp'\n")
    assert "weight: float32[1, 1]{V:tp}" in text
    assert "only axes along which the model is replicated" in text

    def at_the_forward(mesh: md.DeviceMesh) -> None:
        net = layer()
        varying(net.weight, "tp")
        md.DDP(net)(torch.ones(1, 1))

    assert "cannot replicate weight: it is annotated as varying over 'tp'" in refusal(
        AxisTypeError, at_the_forward
    )


@pytest.mark.parametrize("how", ["neither", "group", "new group", "flat", "turned"])
@pytest.mark.parametrize("what", ["trained", "frozen", "buffer"])
def test_shards_are_rejected_wherever_the_group_comes_from(how: str, what: str) -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        torch.manual_seed(md.get_rank())
        net = nn.Linear(2, 2)
        net.register_buffer("shift", torch.rand(2))
        net.bias.requires_grad_(False)
        tensor = {"trained": net.weight, "frozen": net.bias, "buffer": net.shift}[what]
        varying(tensor, "tp")
        before = tensor.tolist()
        given: dict[str, Callable[[], dict[str, Any]]] = {
            "neither": dict,
            "group": lambda: {"process_group": mesh.get_group("tp")},
            "new group": lambda: {"process_group": md.new_group([0, 1, 2, 3])},
            "flat": lambda: {"device_mesh": mesh["dp", "tp"].flatten(name="all")},
            "turned": lambda: {
                "device_mesh": md.DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("all",))
            },
        }
        arguments = given[how]()
        with pytest.raises(AxisTypeError) as caught:
            md.DDP(net, **arguments)
        assert tensor.tolist() == before
        md.DDP(net, process_group=mesh.get_group("dp"))  # as the error says
        return str(caught.value)

    name = {"trained": "weight", "frozen": "bias", "buffer": "shift"}[what]
    for rank, text in enumerate(in_mesh(body)):
        assert text.startswith(
            f"DDP cannot replicate {name}: it is annotated as varying over 'tp'\n"
            f"  where:    rank {rank}, "
        )
        assert "  expected: a tensor that is equal on all ranks along 'tp'\n" in text
        assert "only axes along which the model is replicated" in text


def test_a_group_that_is_set_later_is_looked_at_too() -> None:
    def body(mesh: md.DeviceMesh) -> str:
        ddp = md.DDP(layer(), device_mesh=mesh["dp"])
        varying(ddp.module.weight, "tp")
        with pytest.raises(AxisTypeError) as caught:
            ddp._update_process_group(mesh["tp"])
        assert ddp.process_group.size() == 2 and ddp.device_mesh == mesh["dp"]
        return str(caught.value)

    assert in_mesh(body)[0].startswith(
        "DDP cannot replicate weight: it is annotated as varying over 'tp'"
    )


def test_shards_along_an_axis_of_one_rank_and_of_another_mesh_are_none() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        other = md.init_device_mesh("cpu", (4, 1), mesh_dim_names=("tp", "pp"))
        net = layer()
        varying(net.weight, "pp")
        md.DDP(net)
        net = layer()
        varying(net.weight, "tp")
        md.DDP(net, device_mesh=mesh["dp"])  # `other` has its "tp" there, this mesh does not
        net = layer()
        varying(net.weight, "ep")  # of no mesh
        md.DDP(net, device_mesh=other["tp"])
        net.weight.data.fill_(md.get_rank())
        varying(net.weight, "tp")
        md.DDP._set_params_and_buffers_to_ignore_for_model(net, ["weight"])
        assert net.weight.item() == md.get_rank()

    in_mesh(body)


def test_a_parameter_that_is_annotated_again_stays_the_wrappers() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        net = layer()
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        varying(net.weight, "tp")
        x = varying(torch.full((1, 1), 1.0 + mesh.get_local_rank("dp")))
        with md.typed(mesh):
            lax.psum(ddp(x).sum(), "tp").backward()
        return kinds(net.weight), net.weight.grad.item()

    assert in_mesh(body) == [("V:tp R:dp", 1.5)] * 4
