"""What users do every day, written once: for our wrapper, for torch's, and for one device.

Each program takes ``wrap``, which wraps a module with torch's options, the rank and the number of
ranks, and returns what must be equal. The data of rank r are the rows r, r + size, ... of a batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Tree = Any
Wrap = Callable[..., Any]
Program = Callable[[Wrap, int, int], Tree]

PROGRAMS: dict[str, Program] = {}
NUM_STEPS = 3


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def grads_of(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def state_of(module: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in module.state_dict().values()]


def batch_of(step: int, num_features: int = 4, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(size, num_features, generator=generator, dtype=torch.float64)


def mlp(**_: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train(model: Any, rank: int, size: int, **kwargs: Any) -> Tree:
    """A few steps of momentum: the gradients of each, and the weights after."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad(**kwargs)
        model(batch_of(step)[rank::size]).square().mean().backward()
        seen.append(grads_of(model))
        optimizer.step()
    return seen, state_of(model)


def with_options(**options: Any) -> Program:
    return lambda wrap, rank, size: train(wrap(mlp(), **options), rank, size)


for _name, _options in {
    "defaults": {},
    "a_small_cap": {"bucket_cap_mb": 1e-4},
    "a_list_of_caps": {"bucket_cap_mb_list": [1e-4, 2e-4, 1]},
    "a_list_over_a_cap": {"bucket_cap_mb": 3, "bucket_cap_mb_list": [1e-4]},
    "views": {"gradient_as_bucket_view": True},
    "copies": {"gradient_as_bucket_view": False},
    "batched_copies": {"gradient_as_bucket_view": False, "batched_grad_copy": True},
    "a_static_graph": {"static_graph": True},
    "unused_parameters_looked_for_in_vain": {"find_unused_parameters": True},
    "no_synchronisation_at_first": {"init_sync": False},
}.items():
    PROGRAMS[_name] = with_options(**_options)


# -- which parameters are used --------------------------------------------------------------------


class Parts(nn.Module):
    """Uses those of its layers that it is told to."""

    def __init__(self, num: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num)).double()

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x


def run_parts(model: Any, rank: int, size: int, plans: list[list[list[int]]]) -> Tree:
    """``plans[step][rank]``: which layers are used."""
    seen = []
    for step, by_rank in enumerate(plans):
        model.zero_grad()
        model(batch_of(step)[rank::size], by_rank[rank % 2]).square().mean().backward()
        seen.append(grads_of(model))
    return seen


@program
def unused_by_rank_and_step(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(Parts(), find_unused_parameters=True, bucket_cap_mb=1e-4)
    plans = [[[0, 1], [2, 1]], [[3], [3]], [[0, 1, 2, 3], [0]], [[0], [1]], [[2, 0], [0, 2]]]
    return run_parts(model, rank, size, plans)


@program
def unused_with_copies(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(Parts(), find_unused_parameters=True, gradient_as_bucket_view=False)
    return run_parts(model, rank, size, [[[0, 1], [2, 1]], [[3], [3]], [[1], [0]]])


@program
def a_static_graph_with_unused_parameters(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(Parts(), static_graph=True)
    return run_parts(model, rank, size, [[[0, 2], [0, 2]]] * 4)


@program
def a_static_graph_by_its_method(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(Parts())
    model._set_static_graph()
    return run_parts(model, rank, size, [[[3, 2, 3], [3, 2, 3]]] * 4)


@program
def unused_parameters_are_not_sent(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(
        Parts(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=1e-4,
    )
    return run_parts(model, rank, size, [[[0, 2], [0, 2]]] * 4)


class Undefined(torch.autograd.Function):
    """Its backward has a gradient for the weight only where it is told so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, is_defined: bool) -> torch.Tensor:
        ctx.is_defined, ctx.like = is_defined, weight
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        defined = torch.ones_like(ctx.like) * grad.sum() if ctx.is_defined else None
        return grad, defined, None


class MayBeUndefined(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4).double()
        self.weight = nn.Parameter(torch.ones(num, dtype=torch.float64) / num)

    def forward(self, x: torch.Tensor, is_defined: bool = False) -> torch.Tensor:
        return Undefined.apply(self.inner(x), self.weight, is_defined)


def undefined(num: int, by_step: list[tuple[bool, bool]], **options: Any) -> Program:
    """``by_step``: on which of two ranks the gradient is defined."""

    def one(wrap: Wrap, rank: int, size: int) -> Tree:
        model = wrap(MayBeUndefined(num), **options)
        seen = []
        for step, by_rank in enumerate(by_step):
            model.zero_grad()
            x = batch_of(step)[rank::size]
            model(x, by_rank[rank % 2]).square().mean().backward()
            seen.append(grads_of(model))
        return seen

    return one


_MIXED = [(True, True), (False, True), (True, True), (False, False), (True, False)]
for _num, _size in ((1, "small"), (20_000, "large")):
    PROGRAMS[f"{_size}_undefined_by_rank_and_step"] = undefined(
        _num, _MIXED, find_unused_parameters=True
    )
    PROGRAMS[f"{_size}_undefined_in_a_static_graph"] = undefined(
        _num, [(False, True)] * 4, static_graph=True
    )
    PROGRAMS[f"{_size}_undefined_everywhere"] = undefined(
        _num, [(False, False)] * 4, find_unused_parameters=True
    )


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4).double()
        self.left = nn.Linear(4, 2).double()
        self.right = nn.Linear(4, 2).double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body(x)
        return {"left": self.left(x), "right": self.right(x)}


def left_out_with(**options: Any) -> Program:
    def one(wrap: Wrap, rank: int, size: int) -> Tree:
        model = wrap(TwoOutputs(), **options)
        seen = []
        for step in range(NUM_STEPS):
            model.zero_grad()
            model(batch_of(step)[rank::size])["left"].square().mean().backward()
            seen.append(grads_of(model))
        return seen

    return one


PROGRAMS["an_output_that_the_loss_leaves_out"] = left_out_with(find_unused_parameters=True)
PROGRAMS["an_output_that_the_loss_leaves_out_static"] = left_out_with(static_graph=True)


class NamedOutput(NamedTuple):
    value: torch.Tensor
    number: torch.Tensor


@dataclass
class DataOutput:
    value: torch.Tensor
    note: str
    unused: torch.Tensor | None = None


class Outputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = mlp()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        if self.kind == "namedtuple":
            return NamedOutput(y, torch.tensor(3))
        if self.kind == "dataclass":
            return DataOutput(y, "kept", unused=y * 2)
        return {"list": [(y, None), {"deep": (y.detach(), "text")}], "number": 2.5}


def take_value(outputs: Any) -> torch.Tensor:
    return outputs["list"][0][0] if isinstance(outputs, dict) else outputs.value


def outputs_of(kind: str, **options: Any) -> Program:
    def one(wrap: Wrap, rank: int, size: int) -> Tree:
        model = wrap(Outputs(kind), **options)
        seen = []
        for step in range(NUM_STEPS):
            model.zero_grad()
            outputs = model(batch_of(step)[rank::size])
            wanted = {"namedtuple": NamedOutput, "dataclass": DataOutput, "nested": dict}[kind]
            assert type(outputs) is wanted
            take_value(outputs).square().mean().backward()
            seen.append(grads_of(model))
        return seen

    return one


for _kind in ("namedtuple", "dataclass", "nested"):
    PROGRAMS[f"{_kind}_outputs"] = outputs_of(_kind)
    PROGRAMS[f"{_kind}_outputs_looked_through"] = outputs_of(_kind, find_unused_parameters=True)
    PROGRAMS[f"{_kind}_outputs_of_a_static_graph"] = outputs_of(_kind, static_graph=True)


# -- when it synchronises -------------------------------------------------------------------------


@program
def accumulation_under_no_sync(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    seen = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        with model.no_sync():
            for part in range(2):
                model(batch_of(3 * step + part)[rank::size]).square().mean().backward()
        seen.append(grads_of(model))
        model(batch_of(3 * step + 2)[rank::size]).square().mean().backward()
        seen.append(grads_of(model))
    return seen


@program
def accumulation_by_an_attribute(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    seen = []
    for micro in range(6):
        model.require_backward_grad_sync = micro % 3 == 2
        model(batch_of(micro)[rank::size]).square().mean().backward()
        seen.append(grads_of(model))
        if micro % 3 == 2:
            model.zero_grad()
    return seen


@program
def a_forward_outside_of_no_sync(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    loss = model(batch_of(0)[rank::size]).square().mean()
    with model.no_sync():
        loss.backward()
    return grads_of(model)


@program
def a_backward_outside_of_no_sync(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    with model.no_sync():
        loss = model(batch_of(0)[rank::size]).square().mean()
    loss.backward()
    return grads_of(model)


@program
def no_sync_that_an_exception_leaves(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    try:
        with model.no_sync():
            raise ValueError("here")
    except ValueError:
        pass
    return model.require_backward_grad_sync, train(model, rank, size)


@program
def zeroed_gradients(wrap: Wrap, rank: int, size: int) -> Tree:
    return train(wrap(mlp(), gradient_as_bucket_view=True), rank, size, set_to_none=False)


@program
def two_forwards_before_a_backward(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    seen = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        first = model(batch_of(step)[rank::size])
        second = model(batch_of(step + 10)[rank::size])
        (first * second).mean().backward()
        seen.append(grads_of(model))
    return seen


@program
def two_forwards_with_batch_norm_before_a_backward(wrap: Wrap, rank: int, size: int) -> Tree:
    """As a discriminator that looks at real and at made samples."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double())
    seen = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        real, made = (model(batch_of(2 * step + one)[rank::size]) for one in range(2))
        (real.square().mean() - made.mean()).backward()
        seen.append(grads_of(model))
    return seen, state_of(model)


@program
def evaluation_between_steps(wrap: Wrap, rank: int, size: int) -> Tree:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    model = wrap(module)
    seen: list[Any] = []
    for step in range(NUM_STEPS):
        model.train()
        torch.manual_seed(rank)
        model.zero_grad()
        model(batch_of(step)[rank::size]).square().mean().backward()
        seen.append(grads_of(model))
        with torch.no_grad():
            seen.append(model.eval()(batch_of(step)).clone())
        with torch.inference_mode():
            seen.append(model(batch_of(step)).sum().item())
    return seen, state_of(model)


@program
def a_whole_evaluation_first(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    with torch.no_grad():
        value = model.eval()(batch_of(0)).clone()
    return value, train(model.train(), rank, size)


# -- buffers and ignored names --------------------------------------------------------------------


def buffers_with(**options: Any) -> Program:
    def one(wrap: Wrap, rank: int, size: int) -> Tree:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), **options)
        model.module[1].running_mean += rank
        return train(model, rank, size), model.broadcast_buffers, model.forward_sync_buffers

    return one


for _name, _options in {
    "buffers": {},
    "buffers_once": {"forward_sync_buffers": False},
    "buffers_alone": {"broadcast_buffers": False},
    "buffers_by_the_older_name": {"broadcast_buffers": True},
}.items():
    PROGRAMS[_name] = buffers_with(**_options)


@program
def ignored_parameters_and_buffers(wrap: Wrap, rank: int, size: int) -> Tree:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    wrap.type._set_params_and_buffers_to_ignore_for_model(
        module, ["2.weight", "1.running_mean", "1.running_var"]
    )
    with torch.no_grad():
        module[2].weight += rank
        module[1].running_mean += rank
    model = wrap(module)
    kept = [tuple(p.shape) for p in wrap.type._get_data_parallel_params(module)]
    return train(model, rank, size), kept, sorted(model.parameters_to_ignore)


# -- parameters and outputs of other kinds --------------------------------------------------------


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.weight).abs() * self.scale


@program
def complex_parameters(wrap: Wrap, rank: int, size: int) -> Tree:
    return train(wrap(Complex()), rank, size)


@program
def channels_last_parameters(wrap: Wrap, rank: int, size: int) -> Tree:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    model = wrap(module.to(memory_format=torch.channels_last), gradient_as_bucket_view=True)
    seen = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        x = batch_of(step, 3 * 6 * 6).reshape(8, 3, 6, 6)[rank::size]
        model(x.to(memory_format=torch.channels_last)).square().mean().backward()
        assert model.module[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
        seen.append(grads_of(model))
    return seen


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_half = nn.Linear(4, 4).half()
        self.of_single = nn.Linear(4, 4)
        self.of_double = nn.Linear(4, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_double(self.of_single(self.of_half(x.half()).float()).double())


@program
def mixed_dtypes(wrap: Wrap, rank: int, size: int) -> Tree:
    return train(wrap(MixedDtypes(), bucket_cap_mb=1e-4), rank, size)


class Tied(nn.Module):
    """Shared weights, and weights in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode = nn.Linear(4, 4, bias=False).double()
        self.decode = nn.Linear(4, 4, bias=False).double()
        self.decode.weight = self.encode.weight
        self.scales = nn.ParameterList(torch.ones(4, dtype=torch.float64) for _ in range(2))
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4, dtype=torch.float64))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.encode(x)) * self.scales[0] + self.shifts["a"]
        return self.decode(x) * self.scales[1]


@program
def tied_weights_and_lists(wrap: Wrap, rank: int, size: int) -> Tree:
    return train(wrap(Tied()), rank, size)


class MakesTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(4, dtype=x.dtype, requires_grad=True)
        mask = torch.arange(4, dtype=x.dtype)
        return self.inner(x + bias) * mask


@program
def tensors_made_in_the_forward(wrap: Wrap, rank: int, size: int) -> Tree:
    return train(wrap(MakesTensors()), rank, size)


@program
def tensors_made_in_the_forward_of_a_static_graph(wrap: Wrap, rank: int, size: int) -> Tree:
    return train(wrap(MakesTensors(), static_graph=True), rank, size)


@program
def inputs_without_rows(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    seen = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        rows = 0 if rank == 1 else 4
        model(batch_of(step)[:rows]).square().sum().backward()
        seen.append(grads_of(model))
    return seen


class EmptyOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x)
        return y, y[:0]


@program
def outputs_without_elements(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(EmptyOutput())
    full, empty = model(batch_of(0)[rank::size])
    (full.square().mean() + empty.sum()).backward()
    return grads_of(model), empty.shape


@program
def outputs_changed_in_place(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    seen = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        y = model(batch_of(step)[rank::size])
        y += 1
        y.square_().mean().backward()
        seen.append(grads_of(model))
    return seen


@program
def a_frozen_body(wrap: Wrap, rank: int, size: int) -> Tree:
    module = mlp()
    module[0].requires_grad_(False)
    return train(wrap(module), rank, size)


@program
def frozen_after_wrapping(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp(), find_unused_parameters=True)
    seen = []
    for step in range(4):
        model.module[0].requires_grad_(step in (0, 3))
        model.zero_grad()
        model(batch_of(step)[rank::size]).square().mean().backward()
        seen.append(grads_of(model))
    return seen


# -- hooks of modules, functional calls, copies ---------------------------------------------------


@program
def hooks_of_modules(wrap: Wrap, rank: int, size: int) -> Tree:
    module = mlp()
    calls: list[str] = []
    module[0].register_forward_hook(lambda *_: calls.append("forward"))
    module[2].register_forward_pre_hook(lambda *_: calls.append("forward begins"))
    module[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    model = wrap(module)
    model.register_forward_pre_hook(lambda *_: calls.append("wrapper begins"))
    model.register_forward_hook(lambda *_: calls.append("wrapper"))
    model.register_full_backward_hook(lambda *_: calls.append("wrapper's backward"))
    seen = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        model(batch_of(step)[rank::size].requires_grad_()).square().mean().backward()
        seen.append(grads_of(model))
    return seen, calls


@program
def hooks_of_parameters(wrap: Wrap, rank: int, size: int) -> Tree:
    module = mlp()
    module[0].weight.register_hook(lambda grad: grad * 3)
    return train(wrap(module), rank, size)


@program
def a_functional_call(wrap: Wrap, rank: int, size: int) -> Tree:
    """Other tensors take the place of the parameters: gradients go there, and stay local."""
    model = wrap(mlp())
    others = {name: p.detach() * 2 for name, p in model.named_parameters()}
    for tensor in others.values():
        tensor.requires_grad_()
    loss = torch.func.functional_call(model, others, batch_of(0)[rank::size]).square().mean()
    local = torch.autograd.grad(loss, list(others.values()))
    return local, train(model, rank, size)


@program
def a_functional_call_of_the_module(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    others = {name: p.detach() * 2 for name, p in model.module.named_parameters()}
    value = torch.func.functional_call(model.module, others, batch_of(0))
    return value, train(model, rank, size)


@program
def averaged_copies(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    of_module = torch.optim.swa_utils.AveragedModel(model.module, multi_avg_fn=decay)
    by_hand = copy.deepcopy(model.module).requires_grad_(False)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(batch_of(step)[rank::size]).square().mean().backward()
        optimizer.step()
        of_module.update_parameters(model.module)
        for mine, theirs in zip(by_hand.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.5)
    with torch.no_grad():
        return of_module(batch_of(0)), state_of(of_module), by_hand(batch_of(0))


@program
def an_averaged_copy_of_the_wrapper(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(batch_of(step)[rank::size]).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    with torch.no_grad():
        return averaged(batch_of(0)), state_of(averaged), list(averaged.state_dict())


# -- optimizers and scalers -----------------------------------------------------------------------


@program
def clipping(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(batch_of(step)[rank::size]).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
    return norms, state_of(model)


@program
def closures_of_lbfgs(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        # What the line search looks at must be equal on all ranks: so are the data here.
        loss = model(batch_of(0)).square().mean()
        loss.backward()
        losses.append(loss.detach().clone())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return losses, state_of(model)


@program
def autocast_and_a_scaler(wrap: Wrap, rank: int, size: int) -> Tree:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen: list[Any] = []
    for step in range(4):
        optimizer.zero_grad()
        x = batch_of(step)[rank::size].float()
        if step == 2 and rank == 0:
            x = x * float("inf")  # on one rank: all of them skip this step
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        if step == 1:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), state_of(model)))
    return seen


@program
def a_learning_rate_schedule_and_adam(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=step != 1)
        model(batch_of(step)[rank::size]).square().mean().backward()
        optimizer.step()
        schedule.step()
    return state_of(model)


@program
def weights_that_are_loaded_midway(wrap: Wrap, rank: int, size: int) -> Tree:
    model = wrap(mlp())
    first = train(model, rank, size)
    saved = copy.deepcopy(model.state_dict())
    train(model, rank, size)
    model.load_state_dict(saved)
    return first, train(model, rank, size), list(saved)


# -- checkpoints ----------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Layers each of which runs inside a checkpoint where ``inside`` names it."""

    def __init__(self, plan: list[int], inside: set[int], use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()
        self.plan, self.inside, self.use_reentrant = plan, inside, use_reentrant

    def forward(self, x: torch.Tensor, step: int = 0) -> torch.Tensor:
        for place, index in enumerate(self.plan):
            layer = self.layers[index]
            if place in self.inside:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
            else:
                x = layer(x)
            x = torch.tanh(x)
        return x


def checkpointed(plan: list[int], inside: set[int], use_reentrant: bool, **options: Any) -> Program:
    def one(wrap: Wrap, rank: int, size: int) -> Tree:
        model = wrap(Checkpointed(plan, inside, use_reentrant), **options)
        seen = []
        for step in range(4):
            model.zero_grad()
            model(batch_of(step)[rank::size].requires_grad_()).square().mean().backward()
            seen.append(grads_of(model))
        return seen

    return one


for _kind, _plan, _inside in (
    ("once", [0, 1, 2], {1}),
    ("of_unused", [0, 1], {1}),
    ("twice", [0, 1, 1, 2], {1, 2}),
    ("and_a_shared_weight", [0, 1, 0, 2], {1, 2}),
    ("twice_and_a_shared_weight", [0, 1, 0, 1, 2], {0, 1, 2, 3}),
):
    for _use_reentrant in (False, True):
        for _static in (False, True):
            _how = "reentrant" if _use_reentrant else "modern"
            _options = {"static_graph": True} if _static else {}
            if _kind == "of_unused" and not _static:
                _options = {"find_unused_parameters": True}
            PROGRAMS[f"{_how}_checkpoints_{_kind}{'_static' if _static else ''}"] = checkpointed(
                _plan, _inside, _use_reentrant, **_options
            )


def dynamic(is_shared: bool, use_reentrant: bool) -> Program:
    """Other layers in each step; with ``is_shared`` some twice, inside of checkpoints and out."""

    def one(wrap: Wrap, rank: int, size: int) -> Tree:
        model = wrap(Checkpointed([], set(), use_reentrant), find_unused_parameters=True)
        plans = [[0, 1], [1, 2], [2], [0, 1, 2]]
        if is_shared:
            plans = [[0, 1, 0], [1, 1], [2, 0], [0, 2, 0]]
        seen = []
        for step, plan in enumerate(plans):
            model.module.plan, model.module.inside = plan, {0, len(plan) - 1}
            model.zero_grad()
            model(batch_of(step)[rank::size].requires_grad_()).square().mean().backward()
            seen.append(grads_of(model))
        return seen

    return one


for _use_reentrant in (False, True):
    _how = "reentrant" if _use_reentrant else "modern"
    PROGRAMS[f"{_how}_checkpoints_of_a_dynamic_module"] = dynamic(False, _use_reentrant)
    PROGRAMS[f"{_how}_checkpoints_of_dynamic_sharing"] = dynamic(True, _use_reentrant)


# -- delayed parameters ---------------------------------------------------------------------------


def delayed_with(names: set[str]) -> Program:
    def one(wrap: Wrap, rank: int, size: int) -> Tree:
        module = mlp().float()
        options: dict[str, Any] = {}
        if names:
            delayed = [(name, p) for name, p in module.named_parameters() if name in names]
            options["delay_all_reduce_named_params"] = delayed
            options["param_to_hook_all_reduce"] = module[0].weight
        model = wrap(module, **options)
        seen = []
        for step in range(NUM_STEPS):
            model.zero_grad()
            model(batch_of(step)[rank::size].float()).square().mean().backward()
            wrap.settle()
            seen.append(grads_of(model))
        return seen

    return one


PROGRAMS["nothing_is_delayed"] = delayed_with(set())
PROGRAMS["the_head_is_delayed"] = delayed_with({"2.weight", "2.bias"})
PROGRAMS["everything_is_delayed"] = delayed_with({"0.weight", "0.bias", "2.weight", "2.bias"})


def run_quietly(function: Program, wrap: Wrap, rank: int, size: int) -> Tree:
    """Run a program, with torch's own warnings of what it deprecates left aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(wrap, rank, size)
