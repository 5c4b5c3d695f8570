"""md.accumulate_gradients: microbatches against one backward, what is kept, what is rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist import lax
from meshdist.ddp import accumulation
from meshdist.errors import ArgumentError, AxisTypeError, KindError, MeshError, MismatchError
from tests.inner import flat_sums
from tests.typed_mode.typed_cases import F64, in_mesh, kinds, varying


def model(dtype: torch.dtype = F64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def batch() -> torch.Tensor:
    return torch.randn(16, 3, dtype=F64, generator=torch.Generator().manual_seed(1))


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).pow(3).mean()


def count_sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of elements of each all-reduce that the room makes, on all ranks."""
    sizes: list[int] = []

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(x.numel())
        return md.all_reduce(x, *args, **kwargs)

    for room in (accumulation, flat_sums):
        monkeypatch.setattr(room, "all_reduce", counted)
    return sizes


@pytest.mark.parametrize("is_around", [True, False], ids=["around", "inside"])
def test_microbatches_have_the_gradients_of_the_whole_batch(
    is_around: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = count_sums(monkeypatch)
    reference = model()
    (loss_of(reference, batch()) + 0.1 * reference[0].weight.sum()).backward()

    def body(mesh: md.DeviceMesh) -> float:
        net = model()
        mine = [varying(x.clone()) for x in batch().chunk(4)[mesh.get_local_rank("dp")].chunk(2)]

        def steps() -> None:
            for x in mine:
                term = 0.1 * net[0].weight.sum()
                (lax.pmean(loss_of(net, x) + term, "dp") / 2).backward()
                assert kinds(net[0].weight) == "R:dp"
                assert kinds(net[0].weight.grad) == "U:dp"

        if is_around:
            with md.accumulate_gradients(net.parameters(), mesh["dp"]), md.typed(mesh):
                steps()
        else:
            with md.typed(mesh):
                with md.accumulate_gradients(net.parameters(), "dp"):
                    steps()
                assert kinds(net[0].weight) == kinds(net[0].weight.grad) == ""
                torch.optim.SGD(net.parameters(), lr=0.0).step()
        return max(
            (a.grad - b.grad).abs().max().item()
            for a, b in zip(net.parameters(), reference.parameters(), strict=True)
        )

    assert max(in_mesh(body, shape=(4,))) < 1e-14
    assert sizes == [4] * 4 + [15 + 5 + 10 + 2] * 4  # what there is to send, and one bucket


def test_without_types_it_sums_what_lies_in_grad() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        weight = torch.ones(2, requires_grad=True)
        with mesh, md.accumulate_gradients(weight, ("dp", "tp")):
            for _ in range(2):
                (weight * (1.0 + md.get_rank())).sum().backward()
        return weight.grad.tolist()

    assert in_mesh(body) == [[20.0, 20.0]] * 4


def test_gradients_that_were_there_are_added_to() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        old, new, none = (torch.zeros(2, requires_grad=True) for _ in range(3))
        old.grad = before = torch.full((2,), 5.0)
        untouched = torch.zeros(2, requires_grad=True)
        untouched.grad = kept = torch.full((2,), 7.0)
        with mesh, md.accumulate_gradients([old, new, none, untouched, old], "dp"):
            assert old.grad is None and untouched.grad is None
            (old + new).sum().backward()
        assert old.grad is before and untouched.grad is kept
        return old.grad.tolist(), new.grad.tolist(), none.grad, untouched.grad.tolist()

    assert in_mesh(body, shape=(3,)) == [([8.0, 8.0], [3.0, 3.0], None, [7.0, 7.0])] * 3


def test_a_gradient_that_some_ranks_lack_is_one_everywhere() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
        with mesh, md.accumulate_gradients([first, second], "dp"):
            if md.get_rank() == 1:
                (first * 4).sum().backward()
        return first.grad.tolist(), second.grad

    assert in_mesh(body, shape=(2,)) == [([4.0, 4.0], None)] * 2


def test_sparse_gradients_stay_sparse_and_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = count_sums(monkeypatch)

    def body(mesh: md.DeviceMesh) -> Any:
        table = nn.Embedding(1000, 2, sparse=True)
        mixed = nn.Parameter(torch.zeros(4, 2))
        rank = md.get_rank()
        with mesh:
            for _ in range(2):
                with md.accumulate_gradients([table.weight, mixed], "dp"):
                    if rank:
                        table(torch.tensor([rank, 7])).sum().backward()
                    (
                        nn.functional.embedding(torch.tensor(1), mixed, sparse=rank == 2)
                    ).sum().backward()
        grad = table.weight.grad
        assert grad.layout is torch.sparse_coo
        assert grad.coalesce().indices().tolist() == [[1, 2, 7]]
        return grad.to_dense()[[1, 2, 7], 0].tolist(), mixed.grad.tolist()

    expected = [2.0, 2.0, 4.0], [[0.0, 0.0], [6.0, 6.0], [0.0, 0.0], [0.0, 0.0]]
    assert in_mesh(body, shape=(3,)) == [expected] * 3
    assert max(sizes) == 8


def test_buckets_are_of_one_dtype_and_no_larger_than_they_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = count_sums(monkeypatch)
    monkeypatch.setattr(accumulation, "BUCKET_BYTES", 64)

    def body(mesh: md.DeviceMesh) -> Any:
        leaves = [torch.zeros(8, requires_grad=True) for _ in range(3)]
        leaves.append(torch.zeros(2, 3, dtype=F64).t().requires_grad_())
        with mesh, md.accumulate_gradients(leaves, "dp"):
            sum((place + 1) * leaf.sum().double() for place, leaf in enumerate(leaves)).backward()
        assert leaves[3].grad.stride() == leaves[3].stride()
        versions = [leaf.grad._version for leaf in leaves]
        leaves[0].grad.mul_(1.0)  # what was saved of the others is as it was
        assert [leaf.grad._version for leaf in leaves[1:]] == versions[1:]
        return [leaf.grad.flatten()[0].item() for leaf in leaves]

    assert in_mesh(body, shape=(2,)) == [[2.0, 4.0, 6.0, 8.0]] * 2
    assert sorted(sizes) == [4] * 2 + [6] * 2 + [8] * 2 + [16] * 2


def test_a_body_that_raises_leaves_gradients_and_types_as_they_were() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        weight = md.annotate(torch.ones(2, requires_grad=True), varying="tp")
        weight.grad = before = torch.full((2,), 5.0)

        def step() -> None:
            with md.typed(mesh), md.accumulate_gradients([weight], "dp"):
                lax.pmean((weight * varying(torch.ones(2))).sum(), ("dp", "tp")).backward()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            step()
        assert weight.grad is before
        return weight.grad.tolist(), kinds(weight)

    assert in_mesh(body) == [([5.0, 5.0], "V:tp")] * 4


def test_an_end_that_raises_leaves_gradients_and_types_as_they_were() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        leaves = [torch.ones(2, requires_grad=True) for _ in range(1 + md.get_rank())]
        with pytest.raises(MismatchError), mesh, md.accumulate_gradients(leaves, "dp"):
            leaves[0].sum().backward()
        return leaves[0].grad, kinds(leaves[0])

    assert in_mesh(body, shape=(2,)) == [(None, "")] * 2


def test_an_optimizer_inside_is_rejected() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)
        with md.typed(mesh), md.accumulate_gradients(weight, "dp"):
            lax.pmean((weight * varying(torch.ones(2))).sum(), "dp").backward()
            with pytest.raises(
                AxisTypeError, match="cannot apply an unreduced gradient to a parameter"
            ):
                optimizer.step()

    in_mesh(body)


def test_jaxs_way_of_the_same() -> None:
    """A parameter is cast to reduced once; its gradients are partial sums, reduced at the end."""
    reference = model()
    loss_of(reference, batch()).backward()

    def body(mesh: md.DeviceMesh) -> float:
        net = model()
        names = [name for name, _ in net.named_parameters()]
        total: list[Any] = [0.0] * len(names)
        mine = batch().chunk(4)[mesh.get_local_rank("dp")].chunk(2)
        with md.typed(mesh):
            cast = [lax.pcast(one, "dp", to="reduced") for one in net.parameters()]
            for x in mine:
                given = dict(zip(names, cast, strict=True))
                out = torch.func.functional_call(net, given, (varying(x.clone()),))
                loss = lax.pmean(out.pow(3).mean(), "dp") / 2
                grads = torch.autograd.grad(loss, cast)
                total = [
                    a + b if isinstance(a, torch.Tensor) else b
                    for a, b in zip(total, grads, strict=True)
                ]
            assert kinds(total[0]) == "U:dp"
            whole = [lax.psum(one, "dp") for one in total]
            assert kinds(whole[0]) == ""
        return max(
            (a - b.grad).abs().max().item()
            for a, b in zip(whole, reference.parameters(), strict=True)
        )

    assert max(in_mesh(body, shape=(4,))) < 1e-14


# -- what is rejected ------------------------------------------------------------------------------


def rejected(kind: type[Exception], body: Any) -> str:
    def rejects(mesh: md.DeviceMesh) -> str:
        with mesh, pytest.raises(kind) as caught:
            body(mesh)
        return str(caught.value)

    return in_mesh(rejects)[0]


def enter(parameters: Any, axis: Any = "dp") -> None:
    with md.accumulate_gradients(parameters, axis):
        raise AssertionError("it was entered")


def test_a_parameter_that_is_not_invariant_is_rejected() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        enter([torch.ones(2, requires_grad=True), varying(nn.Parameter(torch.ones(3)))])

    text = rejected(AxisTypeError, body)
    assert text.startswith("accumulate_gradients over 'dp' of a parameter that is varying there\n")
    assert "axis 'dp' (size 2)" in text
    assert "test_accumulation.py:" in text
    assert "parameter 1: float32[3]{V:dp}" in text
    assert "do not pass this parameter" in text


def test_a_parameter_is_accumulated_once() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        weight = torch.ones(2, requires_grad=True)
        with md.accumulate_gradients(weight, "tp"):
            try:
                enter(weight, "tp")
            finally:
                weight.grad = None

    text = rejected(AxisTypeError, body)
    assert text.startswith("accumulate_gradients over 'tp' of a parameter that is reduced there\n")


def test_a_parameter_of_ddps_is_rejected() -> None:
    def named(mesh: md.DeviceMesh) -> None:
        ddp = md.DDP(model(), device_mesh=mesh["dp"])
        enter(ddp.parameters())

    text = rejected(AxisTypeError, named)
    assert text.startswith("accumulate_gradients over 'dp' of a parameter that DDP reduces there\n")
    assert "gradients that are reduced once over each axis" in text
    assert "parameter 0: float64[5, 3]{R:dp}" in text
    assert "ddp.no_sync()" in text

    def unnamed(mesh: md.DeviceMesh) -> None:
        ddp = md.DDP(model(), process_group=mesh.get_group("dp"))
        enter(ddp.parameters())

    assert "of a parameter that DDP reduces there" in rejected(AxisTypeError, unnamed)


def test_another_axis_than_ddps_is_free() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        ddp = md.DDP(layer, device_mesh=mesh["dp"])
        x = varying(torch.full((1, 1), 1.0 + md.get_rank()), "dp", "tp")
        for _ in range(3):  # the first averages at its end, later ones in buckets
            layer.weight.grad = None
            with md.typed(mesh), md.accumulate_gradients(layer.parameters(), "tp"):
                lax.psum(ddp(x).sum(), "tp").backward()
                assert kinds(layer.weight.grad) == "U:tp"
        return layer.weight.grad.item(), kinds(layer.weight)

    assert in_mesh(body) == [(5.0, "R:dp")] * 4


def test_bad_arguments_are_rejected() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert "requires parameters" in rejected(KindError, lambda mesh: enter(3))
    assert "a str among them" in rejected(KindError, lambda mesh: enter([leaf, "weight"]))
    text = rejected(ArgumentError, lambda mesh: enter([leaf * 2]))
    assert "requires leaves" in text and "computed by MulBackward0" in text
    frozen = rejected(ArgumentError, lambda mesh: enter([torch.ones(2)]))
    assert "no parameter that requires a gradient" in frozen and "1 tensor without" in frozen
    assert "ep" in rejected(MeshError, lambda mesh: enter(leaf, "ep"))
    with pytest.raises(MeshError, match="there is no current mesh"):
        enter(leaf)
