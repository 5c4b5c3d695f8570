"""Casts that contexts insert: how many, how long they live, what travels together, and when."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.distributed import DebugLevel, set_debug_level

import meshdist as md
from meshdist import lax
from meshdist.errors import GradientError
from meshdist.typed_mode import casts
from meshdist.typed_mode.casts import LeafGroups
from meshdist.typed_mode.context import find_context
from tests.typed_mode.typed_cases import F64, in_mesh


def on_line(body: Callable[[md.DeviceMesh], Any]) -> list[Any]:
    """Call ``body(mesh)`` on two simulated ranks of a mesh (dp,)."""
    return in_mesh(body, shape=(2,))


def mine(mesh: md.DeviceMesh, *shape: int) -> torch.Tensor:
    """Data that vary."""
    rank = mesh.get_local_rank("dp")
    return md.annotate(torch.full(shape, 1.0 + rank, dtype=F64), varying="dp")


def num_casts() -> int:
    return find_context().casts.count


# -- kept casts -----------------------------------------------------------------------------------


def test_three_uses_of_an_activation_are_one_cast() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(3, dtype=F64, requires_grad=True)
        with md.typed(mesh):
            h = (w * 2).sin()
            y = sum((h * mine(mesh, 3) ** n).sum() for n in range(3))
            lax.psum(y, "dp").backward()
            return num_casts(), w.grad.tolist()

    expected = 2 * torch.cos(torch.tensor(2.0, dtype=F64)) * (1 + 1 + 1 + 1 + 2 + 4)
    for count, grad in on_line(body):
        assert count == 1
        torch.testing.assert_close(torch.tensor(grad, dtype=F64), expected.expand(3))


def test_a_tensor_that_was_changed_is_cast_anew() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(3, dtype=F64, requires_grad=True)
        x = mine(mesh, 3)
        with md.typed(mesh):
            h = w * 2
            first = (h + x).sum()
            h.add_(1)
            second = (h * x).sum()
            lax.psum(first + second, "dp").backward()
            return num_casts(), w.grad.tolist()

    assert on_line(body) == [(2, [10.0] * 3)] * 2  # 2 * (1 + 1) + 2 * (1 + 2)


def test_a_tensor_that_has_got_other_data_is_cast_anew() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(3, dtype=F64, requires_grad=True)
        x = mine(mesh, 3)
        with md.typed(mesh):
            w * x
            w.data = torch.full((3,), 5.0, dtype=F64)
            first = lax.psum((w * x).sum(), "dp")
            with md.untyped():
                w.data = torch.full((2,), 7.0, dtype=F64)
            return first.item(), lax.psum((w * x[:2]).sum(), "dp").item()

    assert on_line(body) == [(45.0, 42.0)] * 2


def test_a_tensor_that_was_cut_from_its_history_is_cast_anew() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(3, dtype=F64, requires_grad=True)
        x = mine(mesh, 3)
        with md.typed(mesh):
            h = w * 2
            h * x
            h.detach_().requires_grad_()
            lax.psum((h * x).sum(), "dp").backward()
        return h.grad.tolist(), w.grad

    assert on_line(body) == [([3.0] * 3, None)] * 2


def test_a_cast_lives_as_long_as_its_tensor() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(3, dtype=F64, requires_grad=True)
        with md.typed(mesh):
            h = w * 2
            y = (h + mine(mesh, 3)).detach()
            gc.collect()
            kept = find_context().casts.num_cached
            died: list[int] = []
            ref = weakref.ref(h, lambda _: died.append(1))
            del h
            del y
            return kept, len(died), find_context().casts.num_cached, ref()

    assert on_line(body) == [(1, 1, 0, None)] * 2


def test_leaves_are_forgotten_when_a_backward_ends() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(3, dtype=F64, requires_grad=True)
        kept = []
        with md.typed(mesh):
            for _ in range(2):
                loss = lax.psum((w * mine(mesh, 3)).sum(), "dp")
                kept.append(find_context().casts.num_cached)
                loss.backward()
                kept.append(find_context().casts.num_cached)
            loss = lax.psum((w * mine(mesh, 3)).sum(), "dp")
            torch.autograd.grad(loss, w)
            kept.append(find_context().casts.num_cached)
        return kept, w.grad.tolist()

    assert on_line(body) == [([1, 0, 1, 0, 0], [6.0] * 3)] * 2


def test_nothing_is_cast_without_gradients() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(3, dtype=F64, requires_grad=True)
        with md.typed(mesh):
            plain = torch.ones(3, dtype=F64) * mine(mesh, 3)
            with torch.no_grad():
                none = w * mine(mesh, 3)
            with torch.inference_mode():
                inference = w * mine(mesh, 3)
            return num_casts(), [str(md.typeof(one)) for one in (plain, none, inference)]

    assert on_line(body)[0] == (0, ["float64[3]{V:dp}"] * 3)


def test_an_inference_tensor_as_a_leaf() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        with torch.inference_mode():
            w = torch.ones(3, dtype=F64, requires_grad=True)
        with md.typed(mesh):
            lax.psum((w + mine(mesh, 3)).sum() + (w - mine(mesh, 3)).sum(), "dp").backward()
        return w.grad.tolist()

    assert on_line(body) == [[4.0] * 3] * 2


def test_an_alias_shares_memory_and_lets_nobody_write() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(3, dtype=F64, requires_grad=True)
        texts = []
        with md.typed(mesh):
            h = w * 2
            alias, _ = torch.broadcast_tensors(h, mine(mesh, 3))
            assert alias.data_ptr() == h.data_ptr()
            assert alias._version == h._version
            for write in (lambda: alias.add_(1), lambda: alias[0].mul_(2)):
                with pytest.raises(RuntimeError) as caught:
                    write()
                texts.append("created inside a custom Function" in str(caught.value))
        return texts

    assert on_line(body) == [[True, True]] * 2


# -- buckets --------------------------------------------------------------------------------------


def steps(
    mesh: md.DeviceMesh, model: nn.Module, count: int, call: Any = None, after: Any = None
) -> list[int]:
    """The numbers of casts in each of some steps."""
    found = []
    for _ in range(count):
        model.zero_grad()
        with md.typed(mesh):
            out = (call or model)(mine(mesh, 2, 3))
            lax.pmean(out.sum(), "dp").backward()
            found.append(num_casts())
        if after is not None:
            after()
    return found


def layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = pairwise(widths)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairs)).double()


def test_leaves_that_were_cast_one_after_the_other_are_cast_together() -> None:
    assert on_line(lambda mesh: steps(mesh, layers(3, 4, 5, 1), 3)) == [[6, 1, 1]] * 2


def test_two_models_that_alternate_keep_their_buckets() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        first, second = layers(3, 4, 1), layers(3, 5, 1)
        return [steps(mesh, one, 1)[0] for _ in range(3) for one in (first, second)]

    assert on_line(body) == [[4, 4, 1, 1, 1, 1]] * 2


def test_buckets_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "BUCKET_BYTES", 8 * 20)
    # 12 and 4 elements; 20; 5 and 5 and 1: what does not fit begins a bucket
    assert on_line(lambda mesh: steps(mesh, layers(3, 4, 5, 1), 2)) == [[6, 3]] * 2


def test_buckets_are_of_one_dtype_and_type() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        model = layers(3, 4, 5, 1)
        model[1].float()
        md.annotate(model[2].bias, reduced="dp")

        def call(x: torch.Tensor) -> torch.Tensor:
            return model[2](model[1](model[0](x).float()).double())

        return steps(mesh, model, 2, call)

    # float64 and float32; the reduced bias needs no cast
    assert on_line(body) == [[5, 2]] * 2


def test_members_that_died_or_were_frozen_are_left_out() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        model = layers(3, 4, 5, 1)
        counts = steps(mesh, model, 2)
        model[1].weight.requires_grad_(False)
        model[1] = nn.Linear(4, 5).double()
        counts += steps(mesh, model, 2)
        return counts, gap_to_whole(mesh, model)

    for counts, gap in on_line(body):
        assert counts == [6, 1, 3, 2]  # a bucket of four; two new ones, alone and then together
        assert gap < 1e-14


class Held(nn.Module):
    """A layer in a reference cycle: it dies where the garbage collector runs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, dtype=F64))
        self.__dict__["itself"] = self


@pytest.mark.parametrize(
    "is_dropped_inside",
    [pytest.param(False, id="behind"), pytest.param(True, id="inside", marks=pytest.mark.soak)],
)
def test_leaves_that_die_at_other_moments_on_other_ranks_change_nothing(
    is_dropped_inside: bool,
) -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        first, last = (nn.Parameter(torch.ones(3, dtype=F64)) for _ in range(2))
        x, found = mine(mesh, 3), []
        for step in range(casts.UNUSED_BACKWARDS + 3):
            first.grad = last.grad = None
            held = Held(step)
            with md.typed(mesh):
                lax.psum((first * x + held.weight * x + last * x).sum(), "dp").backward()
                counts = num_casts()
                if is_dropped_inside:
                    del held
                    if mesh.get_local_rank("dp") == 0:
                        gc.collect()
            held = None
            if mesh.get_local_rank("dp") == 0:
                gc.collect()
            found.append((counts, first.grad.tolist(), last.grad.tolist()))
        buckets = mesh.caches.of(LeafGroups)
        return found, len(buckets.find_bucket(first, "V:dp").slots)

    gc.disable()
    try:
        for found, num_places in on_line(body):
            assert [counts for counts, *_ in found] == [3] + [2] * (len(found) - 1)
            assert all(grads == [[3.0] * 3] * 2 for _, *grads in found)
            assert num_places == 2  # that of the first one that died is no longer there
    finally:
        gc.enable()


def gap_to_whole(mesh: md.DeviceMesh, model: nn.Module) -> float:
    grads = [one.grad for one in model.parameters()]
    model.zero_grad()
    whole = torch.cat([torch.full((2, 3), 1.0 + rank, dtype=F64) for rank in range(mesh.size())])
    (model(whole).sum() / mesh.size()).backward()
    pairs = zip(grads, model.parameters(), strict=True)
    return max((a - b.grad).abs().max().item() for a, b in pairs)


def test_what_no_rank_uses_has_no_gradient_and_what_one_rank_uses_has() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        ws = [nn.Parameter(torch.ones(2, dtype=F64)) for _ in range(3)]
        x = mine(mesh, 2)
        for step in range(2):
            for w in ws:
                w.grad = None
            with md.typed(mesh):
                y = [w * x for w in ws]
                used = [y[0], y[1]] if mesh.get_local_rank("dp") == 0 or not step else [y[0]]
                if not step:
                    used.append(y[2])
                lax.psum(sum(one.sum() for one in used), "dp").backward()
        return [None if w.grad is None else w.grad.tolist() for w in ws]

    assert on_line(body) == [[[3.0, 3.0], [1.0, 1.0], None]] * 2


def test_sparse_gradients_travel_alone() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        torch.manual_seed(0)
        table = nn.Embedding(6, 2, sparse=True).double()
        head = nn.Linear(2, 1).double()
        tokens = md.annotate(torch.tensor([1, 2 + md.get_rank()]), varying="dp")
        counts = []
        for _ in range(2):
            table.zero_grad()
            head.zero_grad()
            with md.typed(mesh):
                lax.psum(head(table(tokens)).sum(), "dp").backward()
                counts.append(num_casts())
        grad = table.weight.grad
        whole = grad.to_dense() / head.weight.detach()
        return counts, grad.layout is torch.sparse_coo, whole[:, 0].round().tolist()

    assert on_line(body) == [([3, 2], True, [0.0, 2.0, 1.0, 1.0, 0.0, 0.0])] * 2


def test_hooks_and_functions_of_autograd_see_ordinary_gradients() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        model = layers(3, 4, 1)
        steps(mesh, model, 1)
        seen: dict[str, float] = {}
        for name, one in model.named_parameters():
            one.register_hook(lambda grad, name=name: seen.update({name: grad.sum().item()}))
        steps(mesh, model, 1)
        by_hook = [seen[name] for name, _ in model.named_parameters()]
        by_grad = [one.grad.sum().item() for one in model.parameters()]
        with md.typed(mesh):
            loss = lax.pmean(model(mine(mesh, 2, 3)).sum(), "dp")
            asked = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            by_call = [one.sum().item() for one in asked]
            types = {str(md.typeof(one)).partition("]")[2] for one in asked}
            sum((one**2).sum() for one in asked).backward()
        return by_hook == by_grad == by_call, types

    assert on_line(body) == [(True, {""})] * 2


def test_gradients_are_ddps_bit_for_bit() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        model, wrapped = layers(3, 4, 5, 1), md.DDP(layers(3, 4, 5, 1), device_mesh=mesh)
        torch.manual_seed(md.get_rank())
        x = torch.randn(4, 3, dtype=F64)
        equal = []
        for _ in range(3):
            model.zero_grad()
            wrapped.zero_grad()
            wrapped(x).square().mean().backward()
            with md.typed(mesh):
                batch = md.annotate(x.clone(), varying="dp")
                lax.pmean(model(batch).square().mean(), "dp").backward()
            pairs = zip(model.parameters(), wrapped.parameters(), strict=True)
            equal.append(all(torch.equal(a.grad, b.grad) for a, b in pairs))
        return equal

    assert on_line(body) == [[True] * 3] * 2


# -- order ----------------------------------------------------------------------------------------


class Noted(Function):
    log: list[int]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        Noted.log.append(ctx.number)
        return grad, None


@pytest.mark.parametrize("seed", range(40))
def test_autograd_runs_nodes_in_the_reverse_order_of_their_making(seed: int) -> None:
    """Else ranks that do other work besides would run their psums in other orders."""
    for rank in range(3):
        shared, own = random.Random(seed), random.Random(seed * 7 + rank + 1)
        pool = [torch.ones(2, requires_grad=True) for _ in range(4)]
        count = 0
        for _ in range(25):
            a, b = shared.choice(pool), shared.choice(pool)
            for _ in range(own.randrange(4)):  # each rank does other extra work
                a = a * 1.0 if own.random() < 0.5 else (a + 0).sin()
            if shared.random() < 0.4:
                pool.append(Noted.apply(a, count))
                count += 1
            else:
                pool.append(a + b * 0.5)
        Noted.log = []
        sum(one.sum() for one in pool[-3:]).backward()
        assert Noted.log == sorted(Noted.log, reverse=True)


# -- at debug level DETAIL ------------------------------------------------------------------------


@pytest.fixture
def detail() -> None:
    set_debug_level(DebugLevel.DETAIL)


def refusals(body: Callable[[md.DeviceMesh], Any]) -> str:
    def rejected(mesh: md.DeviceMesh) -> str:
        with md.typed(mesh), pytest.raises(GradientError) as caught:
            body(mesh)
        return str(caught.value)

    texts = {text.replace("rank 1 (dp=1)", "rank 0 (dp=0)") for text in on_line(rejected)}
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.usefixtures("detail")
def test_operands_losses_and_gradients_that_only_claim_to_be_invariant_are_named() -> None:
    def cast(mesh: md.DeviceMesh) -> None:
        w = torch.full((3,), 1.0 + md.get_rank(), dtype=F64, requires_grad=True)
        w * mine(mesh, 3)

    assert refusals(cast).startswith(
        "an operand of type float64[3], used with varying operands, over"
    )

    def loss(mesh: md.DeviceMesh) -> None:
        w = torch.ones(3, dtype=F64, requires_grad=True)
        (w * (1.0 + md.get_rank())).sum().backward()

    text = refusals(loss)
    assert text.startswith("a loss of type float64[] over")
    assert "annotate the data that differ between ranks" in text

    def gradient(mesh: md.DeviceMesh) -> None:
        w = torch.zeros(3, dtype=F64, requires_grad=True)
        (w * (1.0 + md.get_rank())).sum().backward()

    assert refusals(gradient).startswith("the gradient of a leaf of type float64[3] over")

    def missing(mesh: md.DeviceMesh) -> None:
        w, v = (torch.zeros(3, dtype=F64, requires_grad=True) for _ in range(2))
        ((w * v).sum() if md.get_rank() else (w + 0 * v.detach()).sum() * 0).backward()

    assert refusals(missing).startswith("the gradient of a leaf of type float64[3] over")


@pytest.mark.usefixtures("detail")
@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp")])
def test_the_fix_names_the_axes_along_which_values_differ(axes: tuple[str, ...]) -> None:
    def cast(number: float) -> None:
        w = torch.full((3,), number, requires_grad=True)
        w * md.annotate(torch.ones(3), varying=("dp", "tp"))

    def gradient(number: float) -> None:
        (torch.zeros(3, requires_grad=True) * number).sum().backward()

    named = f"md.annotate(x, varying={axes if len(axes) > 1 else repr(*axes)})"

    def program(how: Callable[[float], None]) -> str:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        number = 1.0 + sum(mesh.get_local_rank(axis) for axis in axes)
        with md.typed(mesh), pytest.raises(GradientError) as caught:
            how(number)
        return str(caught.value)

    for how in (cast, gradient):
        for text in md.simulate(program, 4, args=(how,)):
            assert named in text, text


@pytest.mark.usefixtures("detail")
def test_what_is_right_passes_at_detail() -> None:
    assert on_line(lambda mesh: steps(mesh, layers(3, 4, 1), 2)) == [[4, 1]] * 2
