"""What is known of torch's functions: complete where torch can be asked, and right by example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshdist.typed_mode.function_rules import (
    LINEARITY,
    OPERATIONS,
    Kind,
    draws,
    written_tensors,
)

Tensor = torch.Tensor


# Tagged by torch, but they choose a kernel, make a state, or take a softmax.
NO_DRAWS = "_cudnn_init_dropout_state", "_fused_sdp_choice", "_nested_tensor_softmax_with_shape"


def seeded_functions() -> list[Any]:
    """Every function of torch that is tagged as drawing from a generator."""
    found = []
    # ``dir(torch.ops.aten)`` has those alone that something has asked for before.
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and packet not in NO_DRAWS:
            function = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
                found.append(function)
    return found


def test_what_draws_is_known_to_draw() -> None:
    assert len(seeded_functions()) > 80
    unknown = [one for one in seeded_functions() if OPERATIONS[one].kind is not Kind.DRAW]
    assert unknown == []


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (torch.add, Kind.ORDINARY),
        (Tensor.add_, Kind.ORDINARY),
        (torch.ops.aten.add.Tensor, Kind.ORDINARY),
        (Tensor.shape.__get__, Kind.SIZE),
        (Tensor.dtype.__get__, Kind.FREE),
        (Tensor.register_hook, Kind.HOOK),
        (torch.nonzero, Kind.ROWS),
        (Tensor.requires_grad.__set__, Kind.FREE),
        (Tensor.T.__get__, Kind.ORDINARY),
        (Tensor.data.__get__, Kind.ORDINARY),
        (Tensor.data.__set__, Kind.SET_DATA),
        (Tensor.grad.__get__, Kind.GET_GRAD),
        (Tensor.grad.__set__, Kind.SET_GRAD),
        (Tensor.item, Kind.NUMBER),
        (Tensor.__bool__, Kind.NUMBER),
        (Tensor.numpy, Kind.NUMBER),
        (F.dropout, Kind.DRAW),
        (torch.rand, Kind.DRAW),
        (Tensor.normal_, Kind.DRAW),
        (torch._foreach_add, Kind.ITEMS),
        (torch._fused_adamw_, Kind.ITEMS),
        (Tensor.backward, Kind.BACKWARD),
        (torch.autograd.backward, Kind.BACKWARD),
        (torch.autograd.grad, Kind.GRADIENT),
    ],
)
def test_kinds(function: Any, kind: Kind) -> None:
    assert OPERATIONS[function].kind is kind


def test_a_name_means_what_torch_means_by_it_only_in_torch() -> None:
    def rand(x: Tensor) -> Tensor:
        return x

    assert OPERATIONS[rand].kind is Kind.ORDINARY
    assert rand not in OPERATIONS  # functions made in functions are not kept


def test_linear_functions_are_linear() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    assert OPERATIONS[torch.cumsum].linearity == ""  # it is linear, but not in the closed table
    by_rule = {
        "first": [
            *(torch.neg, torch.sum, torch.mean, torch.transpose, Tensor.flip, Tensor.float),
            *(torch.diag, torch.tril, torch.roll, torch.trace),
        ],
        "multiply": [torch.mul, torch.matmul, torch.mm, torch.kron, torch.inner, torch.outer],
        "add": [torch.add, torch.sub],
    }
    more: dict[str, tuple[Any, ...]] = {
        "transpose": (0, 1),
        "flip": (0,),
        "roll": (1,),
        "outer": (),
    }
    for rule, functions in by_rule.items():
        for function in functions:
            name = function.__name__
            assert OPERATIONS[function].linearity == rule, name
            x, y, z = (one[0] for one in (a, b, c)) if name == "outer" else (a, b, c)
            rest = more.get(name, ())
            if rule == "first":
                torch.testing.assert_close(
                    function(x + y, *rest), function(x, *rest) + function(y, *rest)
                )
            elif rule == "multiply":
                torch.testing.assert_close(function(x + y, z), function(x, z) + function(y, z))
                torch.testing.assert_close(function(z, x + y), function(z, x) + function(z, y))
            else:
                sums = function(x + y, z + a[: len(z)] if z.dim() > 1 else z + a[0])
                other = a if z.dim() > 1 else a[0]
                torch.testing.assert_close(sums, function(x, z) + function(y, other))


def test_names_in_the_table_of_linear_functions_exist() -> None:
    places = (torch, Tensor, F, torch.ops.aten)
    missing = [
        name
        for name in LINEARITY
        if not any(hasattr(place, name) for place in places)
        and name not in ("__itruediv__", "__neg__")
    ]
    assert missing == []


def test_what_is_written() -> None:
    x, y = torch.ones(2), torch.ones(2)
    mean, var = torch.zeros(2), torch.ones(2)
    for function, args, kwargs, written in [
        (Tensor.add, (x, y), {}, []),
        (Tensor.add_, (x, y), {}, [x]),
        (Tensor.__iadd__, (x, y), {}, [x]),
        (Tensor.__int__, (x,), {}, []),
        (Tensor.__setitem__, (x, 0, y), {}, [x]),
        (torch.add, (x, y), {"out": mean}, [mean]),
        (torch.max, (x, 0), {"out": (mean, var)}, [mean, var]),
        (torch.ops.aten.add_.Tensor, (x, y), {}, [x]),
        (F.batch_norm, (x, mean, var), {"training": True}, [mean, var]),
        (F.batch_norm, (x, mean, var), {}, []),
        (F.instance_norm, (x, mean, var), {}, [mean, var]),
        (F.embedding, (x, y), {"max_norm": 1.0}, [y]),
        (F.embedding, (x, y), {}, []),
        (F.relu_, (x,), {}, [x]),
    ]:
        found = written_tensors(OPERATIONS[function], args, kwargs)
        assert list(map(id, found)) == list(map(id, written)), function


def test_a_dropout_of_nothing_draws_nothing() -> None:
    x = torch.ones(2)
    for function, args, kwargs, is_drawn in [
        (F.dropout, (x,), {}, True),
        (F.dropout, (x, 0.0), {}, False),
        (F.dropout, (x, 0.5, False), {}, False),
        (F.dropout, (x,), {"p": 0.0}, False),
        (F.alpha_dropout, (x,), {}, False),
        (F.alpha_dropout, (x,), {"training": True}, True),
        (F.rrelu, (x,), {}, False),
        (F.scaled_dot_product_attention, (x, x, x), {}, False),
        (F.scaled_dot_product_attention, (x, x, x), {"dropout_p": 0.1}, True),
        (torch.rand, (2,), {}, True),
        (torch.lstm, (x, (x,), [x], True, 1, 0.0, True, False, False), {}, False),
    ]:
        assert draws(OPERATIONS[function], args, kwargs) is is_drawn, (function, args)
