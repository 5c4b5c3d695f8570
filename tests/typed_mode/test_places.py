"""Where types could get lost, place by place: each has its rule."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune

import meshdist as md
from meshdist import lax
from meshdist.errors import (
    AxisTypeError,
    KindError,
    MeshdistError,
    MeshError,
    NotInGroupError,
    VaryingNumberWarning,
)
from tests.typed_mode.typed_cases import F64, in_mesh, kinds, refusal, varying


def v(*shape: int) -> torch.Tensor:
    return varying(torch.ones(shape or (3,)))


def unreduced(*shape: int) -> torch.Tensor:
    return md.annotate(torch.ones(shape or (3,)), unreduced="dp")


def inside(body: Callable[[], Any], shape: tuple[int, ...] = (2,)) -> Any:
    """What ``body`` gives inside a context, on rank 0."""

    def program(mesh: md.DeviceMesh) -> Any:
        with md.typed(mesh):
            return body()

    return in_mesh(program, shape=shape)[0]


# -- results, and where their types live ----------------------------------------------------------


def test_all_results_take_the_join() -> None:
    def body() -> Any:
        md.seed(0)  # for the weights of the LSTM
        w = torch.ones(3, 3)
        x = v(3, 3)
        results: dict[str, Any] = {
            "operator": w + x,
            "from the right": 1 - x,
            "function": torch.atan2(w, x),
            "method": w.matmul(x),
            "list": torch.cat([w, x]),
            "keyword": F.linear(w, weight=x),
            "index": w[varying(torch.tensor([0, 1]))],
            "several": x.max(0).indices,
            "views": x.chunk(3)[2],
            "property": x.T,
            "data": x.data,
            "to": x.to(torch.float64),
            "iteration": next(iter(x)),
            "comparison": w == x,
            "torch.ops": torch.ops.aten.add(w, x),
            "tensors in torch.tensor": torch.tensor([1.0, 2.0]) * x[0, 0],
            "einsum": torch.einsum("ij,jk->ik", w, x),
            "lstm": nn.LSTM(3, 2)(x)[1][0],
            "copy": copy.deepcopy(x),
        }
        return {name: kinds(one) for name, one in results.items()}

    found = inside(body)
    assert {name for name, one in found.items() if one != "V:dp"} == set()


def test_what_reads_shapes_alone_ignores_types() -> None:
    def body() -> Any:
        w, x = torch.ones(3), v(3)
        return [
            kinds(one)
            for one in (
                *(w.view_as(x), w.expand_as(x), w.type_as(x), w.to(x), w.reshape_as(x)),
                *(torch.zeros_like(x), x.new_zeros(2), torch.empty_like(x), x.new_tensor([1.0])),
                torch.full_like(x, 2.0),
            )
        ]

    assert set(inside(body)) == {""}
    assert inside(lambda: kinds(v(3).view_as(torch.ones(3)))) == "V:dp"


def test_a_type_is_pickled_and_follows_modules_and_dies_with_copies_of_parameters() -> None:
    x = varying(nn.Parameter(torch.ones(3)), "tp")
    assert kinds(pickle.loads(pickle.dumps(x))) == "V:tp"
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    assert kinds(torch.load(file, weights_only=True)["x"]) == "V:tp"
    layer = nn.Linear(3, 3)
    varying(layer.weight, "tp")
    assert kinds(layer.double().weight) == "V:tp"
    state = {name: one.clone() for name, one in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert kinds(layer.weight) == "V:tp"

    def body(mesh: md.DeviceMesh) -> None:  # what a lost mark ends in
        for lose in (
            copy.deepcopy,
            lambda one: one.load_state_dict(state, assign=True) and one,
        ):
            with md.untyped():
                lost = lose(layer)
            assert kinds(lost.weight) == ""
            with pytest.raises(
                AxisTypeError, match="psum over axis 'tp' cannot take a value that is inv"
            ):
                lax.psum(lost(torch.ones(2, 3).double()), "tp")
        lax.psum(lost(torch.ones(2, 3).double()), "tp")

    assert "md.annotate(batch, varying='tp')" in refusal(AxisTypeError, body)


def test_parametrizations_keep_the_marks_that_torch_lets_them() -> None:
    """torch registers the same parameter where there is one original; of several, new ones."""

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    def body(mesh: md.DeviceMesh) -> Any:
        found = {}
        for name, register, originals in (
            ("one", lambda m: parametrize.register_parametrization(m, "weight", Doubled()), 1),
            ("several", nn.utils.parametrizations.weight_norm, 2),
            ("mask", lambda m: prune.identity(m, "weight"), 1),
        ):
            for where, context in (("inside", md.typed), ("outside", nullcontext)):
                layer = nn.Linear(3, 3, bias=False)
                varying(layer.weight, "tp")
                with context(mesh) if context is md.typed else context():
                    try:
                        register(layer)
                    except AxisTypeError as error:
                        found[name, where] = str(error)
                        continue
                parameters = list(layer.parameters())
                assert len(parameters) == originals
                with md.typed(mesh):
                    found[name, where] = [kinds(one) for one in parameters]
        return found

    marked = ["V:tp"]
    found = in_mesh(body)[0]
    text = found.pop(("several", "outside"))
    assert text.startswith(
        "a parametrization cannot keep the annotation of a parameter that it replaces by several\n"
    )
    assert "original: float32[3, 3]{V:tp}" in text
    assert "register it inside `with md.typed(mesh):`" in text
    assert found == {
        ("one", "inside"): marked,
        ("one", "outside"): marked,
        ("several", "inside"): marked * 2,
        ("mask", "inside"): marked,
        ("mask", "outside"): marked,
    }


def test_a_parameter_made_of_a_marked_tensor_is_marked_but_not_with_a_wrappers_axes() -> None:
    x = md.annotate(torch.ones(3), varying="tp", reduced="dp")
    assert kinds(nn.Parameter(x)) == "V:tp R:dp"
    assert str(md.typeof(nn.Parameter(md.annotate(torch.ones(3), "f@tp")))) == "float32[3@tp]"
    assert kinds(nn.Parameter(torch.ones(3))) == kinds(nn.Parameter()) == ""

    def body(mesh: md.DeviceMesh) -> str:
        wrapped = md.DDP(nn.Linear(3, 3), device_mesh=mesh["dp"])
        assert kinds(wrapped.module.weight) == "R:dp"
        return kinds(nn.Parameter(wrapped.module.weight))

    assert in_mesh(body)[0] == ""


def test_hand_sliced_weights_that_nobody_annotated_end_in_an_error() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        weight = nn.Parameter(torch.ones(4, 2).chunk(2)[mesh.get_local_rank("tp")].clone())
        lax.psum(F.linear(torch.ones(2, 2), weight), "tp")

    assert "cannot take a value that is invariant over it" in refusal(AxisTypeError, body)


def test_what_torchscript_made_is_not_taken_for_invariant() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(lambda x: x * 2 + 1, torch.ones(3))

    def body(mesh: md.DeviceMesh) -> None:
        scripted(v() * torch.ones(3, requires_grad=True)).sum()

    text = refusal(AxisTypeError, body)
    assert text.startswith(
        "sum cannot infer the type of an operand: md.typed did not see how it was computed\n"
    )


# -- linear operations on unreduced values --------------------------------------------------------


def test_linear_operations_pass_unreduced_values() -> None:
    def body() -> Any:
        u, w = unreduced(3, 3), torch.full((3, 3), 2.0)
        u2 = u.clone()
        u2 += u
        u2.mul_(2).div_(w)
        return {
            kinds(one)
            for one in (
                *(u + u, u - u, -u, u * 2, 0.5 * u, u * w, w @ u, u / w, u / 3, u.sum(), u.mean(0)),
                *(u.T, u.reshape(-1), u[0], u[torch.tensor([0])], torch.cat([u, u]), u.clone()),
                *(u.double(), u.to(torch.float64), sum([u, u]), F.linear(u, w), u2),
                *(torch.addmm(u, u, w), torch.add(u, u, alpha=2), torch.stack([u, u])),
                torch.einsum("ij,jk->ik", u, w),
            )
        }

    assert inside(body) == {"U:dp"}
    assert inside(lambda: kinds(unreduced() * md.annotate(torch.ones(3), reduced="dp"))) == "U:dp"


@pytest.mark.parametrize(
    "call",
    [
        lambda u: u + 1,
        lambda u: u + torch.ones(3),
        lambda u: 1 - u,
        lambda u: u * u,
        lambda u: u * v(),
        lambda u: u + v(),
        lambda u: 1 / u,
        lambda u: torch.ones(3) / u,
        lambda u: u.div(2.0, rounding_mode="floor"),
        lambda u: u == 1,
        lambda u: u.abs(),
        lambda u: u.max(),
        lambda u: F.linear(u, torch.ones(3, 3), torch.ones(3)),
        lambda u: torch.where(u > 0, u, u),
        lambda u: torch.zeros(3).copy_(u),
        lambda u: torch.cat([u, torch.ones(3)]),
        lambda u: u.sum().item(),
        lambda u: (md.seed(0), F.dropout(u)),
        lambda u: u.to(torch.int64),
        lambda u: u.sum(dtype=torch.int32),
    ],
)
def test_all_else_rejects_them(call: Callable[[torch.Tensor], Any]) -> None:
    text = refusal(AxisTypeError, lambda mesh: call(unreduced()))
    assert "unreduced over 'dp'" in text or "add_ cannot" in text or "copy_ cannot" in text
    assert "U:dp" in text
    assert "lax.psum" in text


def test_casts_beside_unreduced_and_reduced_values_are_to_reduced() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.tensor(2.0, dtype=F64, requires_grad=True)
        rank = 1.0 + mesh.get_local_rank("dp")
        with md.typed(mesh):
            u = lax.pcast(varying(torch.tensor(rank, dtype=F64)), "dp", to="unreduced")
            (lax.psum(u * w, "dp") ** 2).backward()
            first, w.grad = w.grad, None
            r = md.annotate(torch.tensor(3.0, dtype=F64, requires_grad=True), reduced="dp")
            y = r * w  # reduced
            lax.psum((y * rank_of(rank)).sin(), "dp").backward()
        return first.item(), w.grad.item(), r.grad.item()

    def rank_of(rank: float) -> torch.Tensor:
        return varying(torch.tensor(rank, dtype=F64))

    found = in_mesh(body, shape=(2,))
    slopes = [rank * np.cos(6 * rank) for rank in (1.0, 2.0)]
    assert [one[0] for one in found] == [2 * 6 * 3] * 2  # (w (1 + 2))^2
    assert [one[1] for one in found] == pytest.approx([3 * sum(slopes)] * 2)
    assert [one[2] for one in found] == pytest.approx([2 * slope for slope in slopes])


# -- errors inside operators ----------------------------------------------------------------------


def test_an_error_in_an_operator_is_not_lost() -> None:
    """torch's operators take a TypeError for "not implemented", and ``==`` then gives False."""

    def body(mesh: md.DeviceMesh) -> Any:
        found = []
        with md.typed(mesh):
            for call in (
                lambda: unreduced() + 1,
                lambda: unreduced() == unreduced(),
                lambda: sum([unreduced(), torch.ones(3)]),
            ):
                with pytest.raises(AxisTypeError, match="unreduced over 'dp'") as caught:
                    call()
                error = caught.value
                assert isinstance(error, MeshdistError)
                again = pickle.loads(pickle.dumps(error))
                found.append((type(again) is AxisTypeError, str(again) == str(error)))
                assert isinstance(again, TypeError)
        return found

    assert in_mesh(body)[0] == [(True, True)] * 3


# -- writes in place ------------------------------------------------------------------------------


def test_a_tensor_that_nobody_else_relies_on_may_be_widened() -> None:
    def body() -> Any:
        found = []
        b = torch.zeros(3)
        b.add_(v())
        found.append(b)
        b = torch.zeros(2, 3)
        b[0] = v()
        found.append(b)
        b = torch.empty(3)
        torch.add(v(), 1, out=b)
        found.append(b)
        x = v()  # never narrows
        x.copy_(torch.ones(3))
        found.append(x)
        y = v()
        torch.add(torch.ones(3), 1, out=y)
        found.append(y)
        z = varying(torch.zeros(3), "tp")
        z += v()
        found.append(z)
        h = v() * torch.ones(3, requires_grad=True)
        h.add_(torch.ones(3, requires_grad=True))
        found.append(h)
        return [kinds(one) for one in found]

    assert inside(body, shape=(2, 2)) == ["V:dp"] * 5 + ["V:dp,tp", "V:dp"]


@pytest.mark.parametrize(
    ("write", "why", "is_parameter"),
    [
        (lambda b: (b[0], b.add_(v(2, 3))), "whose memory other tensors share", False),
        (lambda b: b[0].copy_(v()), "a view of another tensor", False),
        (lambda b: (b.detach(), b.add_(v(2, 3))), "whose memory other tensors share", False),
        (lambda b: (b.numpy(), b.add_(v(2, 3))), "whose memory other tensors share", False),
        (
            lambda b: torch.no_grad()(lambda: nn.Parameter(b).add_(v(2, 3)))(),
            "requires a gradient",
            True,
        ),
        (
            lambda b: (b * torch.ones(3, requires_grad=True)).add_(v(2, 3)),
            "requires a gradient",
            False,
        ),
        (
            lambda b: torch.add(v(2, 3), 1, out=b.view(3, 2).view(2, 3)),
            "a view of another tensor",
            False,
        ),
        (lambda b: b[0].__setitem__(0, v()[0]), "a view of another tensor", False),
    ],
)
def test_else_it_may_not(
    write: Callable[[torch.Tensor], Any], why: str, is_parameter: bool
) -> None:
    text = refusal(AxisTypeError, lambda mesh: write(torch.zeros(2, 3)))
    assert "cannot change its target from invariant to varying over 'dp'\n" in text
    assert why in text
    assert ("md.annotate(target, varying='dp')" in text) == is_parameter
    assert ("lax.pvary(buf, 'dp')" in text) != is_parameter


def test_a_write_that_would_change_axes_in_two_ways_names_those_of_the_first() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        target = torch.zeros(2, 3)[0]
        target.copy_(md.annotate(torch.ones(3), reduced="tp", varying="dp"))

    text = refusal(AxisTypeError, body)
    assert text.startswith("copy_ cannot change its target from invariant to varying over 'dp'\n")
    assert "a target of type {V:dp R:tp}" in text
    assert "fix:      cast it first: buf = lax.pvary(buf, 'dp')" in text
    text = refusal(
        AxisTypeError,
        lambda mesh: torch.zeros(2, 3)[0].copy_(md.annotate(torch.ones(3), reduced="tp")),
    )
    assert "from invariant to reduced over 'tp'\n" in text
    assert "buf = lax.pcast(buf, 'tp', to='reduced')" in text


def test_batch_norms_estimates_follow_their_batches() -> None:
    def body() -> Any:
        norm = nn.BatchNorm1d(3)
        norm(v(4, 3))
        first = kinds(norm.running_mean), kinds(norm.num_batches_tracked)
        other = nn.BatchNorm1d(3)
        other.eval()
        return *first, kinds(other(v(4, 3))), kinds(other.running_mean)

    assert inside(body) == ("V:dp", "", "V:dp", "")
    text = refusal(
        AxisTypeError,
        lambda mesh: F.embedding(
            varying(torch.tensor([0])), nn.Parameter(torch.ones(2, 3)), max_norm=1.0
        ),
    )
    assert text.startswith("embedding cannot change its target")


# -- numbers --------------------------------------------------------------------------------------

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "bool": bool,
    "float": float,
    "int": int,
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "index": lambda x: [1, 2][x.long()],
    "contains": lambda x: 1.0 in x,
    "equal": lambda x: torch.equal(x, torch.tensor(1.0)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_number_of_a_varying_value_warns_once_a_place(read: Callable[[Any], Any]) -> None:
    def body() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                read(v()[0])  # here
            read(torch.tensor(1.0))
        return [(one.category, str(one.message), one.filename, one.lineno) for one in caught]

    (found,) = inside(body, shape=(1,))
    category, text, file, _ = found
    assert category is VaryingNumberWarning
    assert "of a value that varies over 'dp' returns a different number on each rank\n" in text
    assert "lax.pmean(x, 'dp')" in text
    assert file.endswith("test_places.py")


def test_of_sizes_it_says_first_how_they_are_read() -> None:
    def body() -> Any:
        counts = varying(torch.tensor([3, 1]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            counts.tolist()
            v().tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with md.untyped():
                return [str(one.message) for one in caught], counts.tolist()

    (text, other), sizes = inside(body)
    way = "read it in `with md.untyped():`, where it may differ; or make it equal first"
    assert text.partition("fix:")[2].strip().startswith(way)
    assert other.partition("fix:")[2].strip().startswith("make it equal first")
    assert sizes == [3, 1]


def test_printing_and_shapes_warn_of_nothing() -> None:
    def body() -> Any:
        x = v()
        return f"{x} {x[0]!r}", len(x), x.shape, x.size(0), x.numel()

    assert inside(body)[1:] == (3, (3,), 3, 3)


# -- transforms, subclasses, compiled code --------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "transform",
    [
        lambda x: torch.func.vmap(lambda one: one * 2)(x),
        lambda x: torch.func.grad(lambda one: one.sum())(x),
        lambda x: torch.func.grad(lambda one: (one * x).sum())(torch.ones(3)),
        lambda x: torch.func.jvp(lambda one: one * 2, (x,), (torch.ones(3),)),
        lambda x: torch.func.vmap(lambda one: lax.psum(one, "dp"))(x),
    ],
    ids=["vmap", "grad", "closure", "jvp", "operation"],
)
def test_transforms_of_torch_func_take_invariant_values_alone(transform: Any) -> None:
    text = refusal(AxisTypeError, lambda mesh: transform(v()))
    assert "cannot take an operand that is not invariant inside a torch.func transform\n" in text
    assert "float32[3]{V:dp}" in text


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_transforms_of_invariant_values(level: str) -> None:
    md.set_debug_level(md.DebugLevel.__members__[level])

    def body() -> Any:
        w = torch.arange(3.0)
        grad = torch.func.grad(lambda one: (one**2).sum())(w)
        batch = torch.func.vmap(lambda one: one * 2)(w)
        return grad.tolist(), batch.tolist(), kinds(grad * v())

    assert inside(body) == ([0.0, 2.0, 4.0], [0.0, 2.0, 4.0], "V:dp")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_derivatives_pass_casts() -> None:
    def body() -> Any:
        with forward_ad.dual_level():
            w = forward_ad.make_dual(torch.ones(3, requires_grad=True), torch.full((3,), 2.0))
            y = (w * v()).sum()
            return kinds(y), forward_ad.unpack_dual(y).tangent.detach()

    found = inside(body, shape=(1,))
    assert found[0] == "V:dp"
    assert found[1].item() == 6.0


def test_subclasses_are_rejected() -> None:
    class Odd(torch.Tensor):
        pass

    for call in (lambda x: x.sin(), lambda x: torch.ones(3) + x, lambda x: torch.cat([x])):
        text = refusal(KindError, lambda mesh, call=call: call(torch.ones(3).as_subclass(Odd)))
        assert " cannot take an operand of type Odd, a subclass of Tensor\n" in text
        assert "with md.untyped():" in text


def test_compiled_code_runs_operation_by_operation() -> None:
    calls = []

    def backend(graph: Any, _: Any) -> Any:
        calls.append(graph)
        return graph.forward

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).sin() + 1

    compiled = torch.compile(function, backend=backend)
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    outside = compiled(x, w)
    assert len(calls) == 1

    def body(mesh: md.DeviceMesh) -> Any:
        own = torch.ones(3, requires_grad=True)
        with md.typed(mesh):
            y = compiled(varying(torch.ones(3)), own)
            lax.psum(y.sum(), "dp").backward()
            return kinds(y), y.detach(), own.grad

    ((found, y, grad),) = in_mesh(body, shape=(1,))
    assert found == "V:dp"
    assert torch.equal(y, outside.detach())
    assert torch.allclose(grad, torch.cos(torch.ones(3)))
    assert len(calls) == 1


def test_a_full_graph_ends_in_torchs_error() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)

    def body(mesh: md.DeviceMesh) -> str:
        with md.typed(mesh), pytest.raises(RuntimeError) as caught:
            compiled(v())
        return type(caught.value).__module__

    (module,) = in_mesh(body, shape=(1,))
    assert module.startswith(("torch", "builtins"))


# -- contexts -------------------------------------------------------------------------------------


def test_each_thread_has_its_own_context() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        found: list[str] = []

        def other() -> None:
            x = v()
            found.append(kinds(x + 1))
            with md.typed(mesh):
                found.append(kinds(x + 1))
            found.append(kinds(x + 1))

        with md.typed(mesh):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            found.append(kinds(v() + 1))
        found.append(kinds(v() + 1))
        return found

    assert in_mesh(body, shape=(1,)) == [["", "V:dp", "", "V:dp", ""]]


def test_contexts_nest_over_one_mesh() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        found = []
        with md.typed(mesh) as given:
            with md.typed():
                found.append(kinds(v() + 1))
            found.append(kinds(v() + 1))
            with md.untyped():
                found.append(kinds(v() + 1))
                with md.typed(mesh):
                    found.append(kinds(v() + 1))
                found.append(kinds(v() + 1))
            found.append(kinds(v() + 1))
            assert given is mesh is md.get_current_mesh()
        with mesh, md.typed():
            found.append(kinds(v() + 1))
        with md.untyped():
            found.append(kinds(v() + 1))
        return found

    assert in_mesh(body)[0] == ["V:dp", "V:dp", "", "V:dp", "", "V:dp", "V:dp", ""]

    def other(mesh: md.DeviceMesh) -> None:
        with md.typed(mesh["dp"]):
            pass

    text = refusal(MeshError, other)
    assert text.startswith("md.typed cannot be nested inside md.typed of another mesh\n")
    assert "DeviceMesh(dp=2, tp=2)" in text
    assert "DeviceMesh(dp=2)" in text


def test_meshes_that_no_context_can_have() -> None:
    def text(kind: type[Exception], mesh: Any) -> str:
        with pytest.raises(kind) as caught, md.typed(mesh):
            pass
        return str(caught.value)

    def body() -> Any:
        unnamed = md.DeviceMesh("cpu", [0, 1])
        part = md.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)) if md.get_rank() == 0 else None
        found = [text(MeshError, unnamed), text(KindError, 3), text(MeshError, None)]
        if part is None:
            part = md.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
            found.append(text(NotInGroupError, part))
        return found

    unnamed, number, none, foreign = md.simulate(body, 2)[1]
    assert unnamed.startswith("typed needs a mesh with axis names\n")
    assert number.startswith("typed takes a mesh\n")
    assert none.startswith("typed: there is no current mesh\n")
    assert foreign.startswith("typed on a mesh that does not contain this rank\n")


def test_a_context_ends_with_an_exception() -> None:
    def body(mesh: md.DeviceMesh) -> str:
        with pytest.raises(ZeroDivisionError), md.typed(mesh):
            1 / 0  # noqa: B018
        return kinds(v() + 1)

    assert in_mesh(body)[0] == ""
