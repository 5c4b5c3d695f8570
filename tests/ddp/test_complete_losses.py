"""A loss that ranks made together, under a wrapper that takes the mean: divided once too often.

The oracle is one device's gradient of the objective that the program has written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist import lax
from meshdist.errors import GradientError
from tests.pool import Pool

Loss = Callable[[torch.Tensor], torch.Tensor]

SUMMARY = (
    "DistributedDataParallel averages the gradients of a loss that was already reduced over "
    "its ranks: they are divided by the number of ranks once too often\n"
)


def by_pmean(y: torch.Tensor) -> torch.Tensor:
    return lax.pmean(y.square().mean(), "dp")


def by_psum(y: torch.Tensor) -> torch.Tensor:
    return lax.psum(y.square().sum(), "dp")


def by_tokens(y: torch.Tensor) -> torch.Tensor:
    return lax.psum(y.square().sum(), "dp") / lax.psum(torch.tensor(float(y.numel())), "dp")


def by_pmax(y: torch.Tensor) -> torch.Tensor:
    return lax.pmax(y.square().mean(), "dp")


def by_gather(y: torch.Tensor) -> torch.Tensor:
    return lax.all_gather(y, "dp", tiled=True, to="invarying").square().mean()


def by_broadcast(y: torch.Tensor) -> torch.Tensor:
    return lax.pbroadcast(y, "dp", 0).square().mean()


def by_a_term(y: torch.Tensor) -> torch.Tensor:
    """A term of statistics over all ranks beside the own loss."""
    return y.square().mean() + lax.pmean(y.mean(), "dp") ** 2


COMPLETE: list[Loss] = [by_pmean, by_psum, by_tokens, by_pmax, by_gather, by_broadcast, by_a_term]


def samples() -> torch.Tensor:
    """This rank's two samples."""
    return torch.arange(2 * md.get_world_size(), dtype=torch.float64).view(-1, 2)[md.get_rank()]


def layer() -> nn.Module:
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(net.weight)
    return net


def trained(loss_of: Loss, steps: int = 1, **how: Any) -> float:
    """The gradient of the weight, of one step or the last of several."""
    with md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("dp",)) as mesh:
        model = md.DDP(layer(), device_mesh=mesh["dp"], **how)
        for _ in range(steps):
            model.zero_grad()
            loss_of(model(samples().view(2, 1))).backward()
        return model.module.weight.grad.item()


def warned(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def objective(loss_of: Loss, size: int) -> float:
    """One device's gradient at weight 1, of all ranks' samples."""
    whole = torch.arange(2.0 * size, dtype=torch.float64)
    ranks = whole.view(size, 2)
    return {
        by_pmean: 2 * whole.square().mean(),
        by_psum: 2 * whole.square().sum(),
        by_tokens: 2 * whole.square().mean(),
        by_pmax: 2 * ranks[-1].square().mean(),
        by_gather: 2 * whole.square().mean(),
        by_broadcast: 2 * ranks[0].square().mean(),
        by_a_term: 2 * whole.square().mean() + 2 * whole.mean() ** 2,
    }[loss_of].item()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("loss_of", COMPLETE)
def test_a_loss_that_ranks_made_together_is_warned_of_with_its_line(
    loss_of: Loss, size: int
) -> None:
    found, texts = warned(lambda: md.simulate(trained, size, (loss_of, 3)))
    assert len(texts) == (size if size > 1 else 0)  # once on each rank, in three steps
    code = loss_of.__code__
    lines = [
        f"along axis 'dp' of DeviceMesh(dp={size}), {__file__}:{code.co_firstlineno + ahead}\n"
        for ahead in (1, 2)
    ]
    for text in texts:
        assert text.startswith(SUMMARY)
        assert any(line in text for line in lines)
        assert "  expected: the loss of this rank's own samples" in text
        assert "y = lax.pvary(lax.pmean(x, axis), axis)" in text
    if loss_of is not by_a_term:
        torch.testing.assert_close(found, [objective(loss_of, size) / size] * size)


def cast(loss_of: Loss) -> Loss:
    """The fix of the warning: the result is cast where it enters the loss."""
    if loss_of is by_a_term:
        return lambda y: y.square().mean() + lax.pvary(lax.pmean(y.mean(), "dp"), "dp") ** 2
    return lambda y: lax.pvary(loss_of(y), "dp")


@pytest.mark.parametrize("loss_of", COMPLETE)
def test_what_the_warning_proposes_is_right_and_not_warned_of(loss_of: Loss) -> None:
    found, texts = warned(lambda: md.simulate(trained, 3, (cast(loss_of), 2)))
    assert texts == []
    torch.testing.assert_close(found, [objective(loss_of, 3)] * 3)
    if loss_of in (by_pmean, by_tokens):  # the other way: the own loss, the reduced one for the log
        own, texts = warned(lambda: md.simulate(trained, 3, (logged, 2)))
        assert texts == []
        torch.testing.assert_close(own, found)


def logged(y: torch.Tensor) -> torch.Tensor:
    loss = y.square().mean()
    lax.pmean(loss.detach(), "dp")
    lax.pmean(loss, "dp").item()  # with its graph, and no backward
    return loss


@pytest.mark.parametrize(("backend", "size"), [("shm", 3), ("gloo", 2)])
def test_on_processes(pool: Pool, backend: str, size: int) -> None:
    def program() -> Any:
        return warned(lambda: trained(by_pmean, 2)), warned(lambda: trained(cast(by_pmean)))

    for (found, texts), (again, none) in pool.run(program, size, backend=backend):
        assert [text.startswith(SUMMARY) for text in texts] == [True]
        assert none == []
        torch.testing.assert_close(found * size, again)


class Centred(nn.Module):
    """A layer of which the model itself takes a mean over all ranks."""

    def __init__(self, is_cast: bool = True) -> None:
        super().__init__()
        self.layer = layer()
        self.is_cast = is_cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        mean = lax.pmean(y.mean(), "dp")
        return y - (lax.pvary(mean, "dp") if self.is_cast else mean)


@pytest.mark.parametrize("size", [2, 3])
def test_statistics_over_all_ranks_inside_of_the_model(size: int) -> None:
    def program(is_cast: bool) -> float:
        with md.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)) as mesh:
            model = md.DDP(Centred(is_cast), device_mesh=mesh)
            for _ in range(3):
                model.zero_grad()
                model(samples().view(2, 1)).pow(2).mul(samples().view(2, 1)).mean().backward()
            return model.module.layer.weight.grad.item()

    whole = torch.arange(2.0 * size, dtype=torch.float64)
    right = 2 * ((whole - whole.mean()).square() * whole).mean().item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loss is also taken for one of all ranks
        with pytest.raises(GradientError, match="the gradient that reaches psum over axis 'dp'"):
            md.simulate(program, size, (False,))
    found, texts = warned(lambda: md.simulate(program, size, (True,)))  # the fix of the error
    assert texts == []
    torch.testing.assert_close(found, [right] * size)


# -- what is right, and not warned of -------------------------------------------------------------


def statistics_in_the_model() -> None:
    with md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) as mesh:
        md.DDP(Centred(), device_mesh=mesh)(samples().view(2, 1)).square().mean().backward()


def a_gather_that_sums_its_gradient() -> None:
    loss = trained(lambda y: lax.all_gather(y, "dp", tiled=True).square().mean())
    assert loss == objective(by_gather, 2)


def another_axis() -> None:
    with md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")) as mesh:
        model = md.DDP(layer(), device_mesh=mesh["dp"])
        lax.pmean(model(samples().view(2, 1)).mean(), "tp").backward()


def another_model() -> None:
    with md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) as mesh:
        model, by_hand = md.DDP(layer(), device_mesh=mesh), layer()
        model(samples().view(2, 1)).mean().backward()
        weight = lax.pvary(by_hand.weight, "dp")
        lax.pmean((samples().view(2, 1) @ weight).mean(), "dp").backward()
        model(samples().view(2, 1)).mean().backward()


def a_hook_of_the_programs() -> None:
    def total(group: Any, bucket: Any) -> Any:
        work = md.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    with md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) as mesh:
        model = md.DDP(layer(), device_mesh=mesh)
        model.register_comm_hook(mesh, total)
        by_pmean(model(samples().view(2, 1))).backward()
        assert model.module.weight.grad.item() == objective(by_pmean, 2)


def no_backward_of_the_wrapper() -> None:
    with md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) as mesh:
        model = md.DDP(layer(), device_mesh=mesh)
        with model.no_sync():
            by_pmean(model(samples().view(2, 1))).backward()


@pytest.mark.parametrize(
    "program",
    [
        statistics_in_the_model,
        a_gather_that_sums_its_gradient,
        another_axis,
        another_model,
        a_hook_of_the_programs,
        no_backward_of_the_wrapper,
    ],
)
def test_what_is_right_is_not_warned_of(program: Callable[[], None]) -> None:
    assert warned(lambda: md.simulate(program, 2))[1] == []


def test_one_of_several_axes_is_warned_of_and_so_is_a_backward_behind_types() -> None:
    def of_two_axes() -> None:
        with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")) as mesh:
            by_pmean(md.DDP(layer(), device_mesh=mesh)(samples().view(2, 1))).backward()

    def behind_types() -> None:
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = md.DDP(layer(), device_mesh=mesh)
        with md.typed(mesh):
            loss = by_pmean(model(md.annotate(samples().view(2, 1), varying="dp")))
        loss.backward()

    def with_a_term_in_types() -> float:
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = md.DDP(layer(), device_mesh=mesh)
        with md.typed(mesh):
            by_a_term(model(md.annotate(samples().view(2, 1), varying="dp"))).backward()
        return model.module.weight.grad.item()

    for program in (of_two_axes, behind_types):
        texts = warned(lambda program=program: md.simulate(program, 4))[1]
        assert [text.startswith(SUMMARY) for text in texts] == [True] * 4
    found, texts = warned(lambda: md.simulate(with_a_term_in_types, 4))
    assert texts == []  # the cast that types insert sums
    torch.testing.assert_close(found, [objective(by_a_term, 4)] * 4)


# -- gradients that are averaged, or divided, by hand ---------------------------------------------


def test_averages_that_are_averaged_again_stay_and_sums_grow() -> None:
    def program(by: str) -> float:
        model = md.DDP(layer())
        loss = model(samples().view(2, 1)).square().mean()
        (loss / md.get_world_size() if by == "loss" else loss).backward()
        grad = model.module.weight.grad
        if by == "AVG":
            md.all_reduce(grad, md.ReduceOp.AVG)
        if by == "SUM":
            md.all_reduce(grad)
        return grad.item()

    right = objective(by_pmean, 3)
    for by, factor in (("", 1.0), ("AVG", 1.0), ("SUM", 3.0), ("loss", 1 / 3)):
        torch.testing.assert_close(md.simulate(program, 3, (by,)), [right * factor] * 3)


def test_gathers_with_and_without_a_wrapper() -> None:
    """The same loss on every rank, of what all have, by each gather."""

    def in_place(y: torch.Tensor) -> torch.Tensor:
        blocks = [torch.empty_like(y) for _ in range(md.get_world_size())]
        md.all_gather(blocks, y.detach())
        blocks[md.get_rank()] = y
        return torch.cat(blocks)

    def program(how: str, is_wrapped: bool) -> float:
        mesh = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("dp",))
        net = layer()
        model = md.DDP(net, device_mesh=mesh) if is_wrapped else net
        with mesh:
            y = model(samples().view(2, 1))
            whole = (
                in_place(y) if how == "in place" else lax.all_gather(y, "dp", tiled=True, to=how)
            )
            whole.square().mean().backward()
            grad = net.weight.grad
            return (grad if is_wrapped else lax.psum(grad, "dp")).item()

    right = objective(by_gather, 3)
    for how, is_wrapped, factor in (
        ("varying", True, 1.0),
        ("varying", False, 3.0),
        ("invarying", False, 1.0),
        ("in place", True, 1 / 3),
        ("in place", False, 1.0),
    ):
        found = md.simulate(program, 3, (how, is_wrapped))
        torch.testing.assert_close(found, [right * factor] * 3, msg=f"{how}, {is_wrapped}")
