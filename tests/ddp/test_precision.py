"""Low precision inside, full precision outside: against the same casts made by hand."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.ddp.precision import CastParameters, MixedPrecision
from meshdist.errors import KindError

LOW = [torch.bfloat16, torch.float16]


class Seen(nn.Linear):
    """Notes in which dtypes it runs, and that nothing behind it changes them."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes |= {x.dtype, self.weight.dtype, self.bias.dtype}
        return super().forward(x)


class Net(nn.Module):
    """Two layers, checkpointed if asked, and a weight that is used twice."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Seen(4, 4)
        self.second = Seen(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.tied):
            if self.reentrant is None:
                x = torch.tanh(layer(x))
            else:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.unsqueeze(0))[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied weights": Net,
    "checkpoints": lambda: Net(reentrant=False),
    "reentrant checkpoints": lambda: Net(reentrant=True),
    "attention": Attention,
    "recurrent": Recurrent,
}


def x_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator)


def train(name: str, config: Any, num_steps: int) -> list[list[torch.Tensor]]:
    model = md.DDP(MODELS[name](), mixed_precision=config)
    seen = []
    for step in range(num_steps):
        model.zero_grad()
        out = model(x_of(md.get_rank(), step).requires_grad_())
        assert out.dtype is (config.param_dtype or torch.float32)
        out.float().square().sum().backward()
        assert all(p.dtype is p.grad.dtype is torch.float32 for p in model.parameters())
        seen.append([p.grad.clone() for p in model.parameters()])
    return seen


def oracle(name: str, config: Any, num_ranks: int, num_steps: int) -> list[list[torch.Tensor]]:
    """The model converted as a whole; gradients averaged in full precision."""
    seen = []
    for step in range(num_steps):
        low = [MODELS[name]().to(config.param_dtype) for _ in range(num_ranks)]
        for rank, model in enumerate(low):
            x = x_of(rank, step).to(config.param_dtype or torch.float32)
            model(x.requires_grad_()).float().square().sum().backward()
        replicas = zip(*(model.parameters() for model in low), strict=True)
        seen.append([sum(p.grad.float() for p in several) / num_ranks for several in replicas])
    return seen


@pytest.mark.parametrize("name", [*MODELS])
@pytest.mark.parametrize("dtype", LOW)
def test_forward_and_backward_run_in_low_precision(name: str, dtype: torch.dtype) -> None:
    config = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
    expected = oracle(name, config, 2, 3)
    for seen in md.simulate(train, 2, (name, config, 3)):
        for mine, right in zip(seen, expected, strict=True):
            for grad, other in zip(mine, right, strict=True):
                # Several uses of a tied weight add up in another order of rounding.
                torch.testing.assert_close(grad, other, rtol=2e-2, atol=2e-2)
                assert grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_gradients_are_sent_in_the_dtype_asked_for(
    dtype: torch.dtype, reduce_dtype: torch.dtype | None
) -> None:
    def program() -> list[Any]:
        config = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce_dtype)
        model = md.DDP(nn.Linear(2, 1), mixed_precision=config)
        for _ in range(2):
            model(torch.ones(1, 2) + md.get_rank()).sum().backward()
        return [{bucket.sent.dtype for bucket in model.reducer.buckets}]

    assert md.simulate(program, 2) == [[{reduce_dtype or dtype}]] * 2


def test_reduce_dtype_alone_rounds_what_is_sent_and_leaves_the_computing() -> None:
    def program() -> list[Any]:
        net = Net()
        model = md.DDP(net, mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
        local = copy.deepcopy(net)
        x = x_of(0, 0)  # equal on both ranks, so that the average changes nothing
        model(x).square().sum().backward()
        local(x).square().sum().backward()
        assert net.first.dtypes == {torch.float32}
        for mine, other in zip(model.parameters(), local.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad.bfloat16().float())
            assert not torch.equal(mine.grad, other.grad)
        return []

    md.simulate(program, 2)


def test_a_configuration_without_dtypes_changes_nothing() -> None:
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            md.simulate(train, 1, ("attention", MixedPrecision(), 1))[0][0],
            oracle("attention", MixedPrecision(), 1, 1)[0],
            strict=True,
        )
    )


def test_torchs_configuration_does_the_same() -> None:
    fields = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ours = md.simulate(train, 2, ("tied weights", MixedPrecision(**fields), 2))
    theirs = md.simulate(train, 2, ("tied weights", _MixedPrecision(**fields), 2))
    for mine, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_buffers_have_their_dtype_from_the_construction_on() -> None:
    def program() -> list[Any]:
        norm = nn.BatchNorm1d(2)
        model = md.DDP(norm, mixed_precision=MixedPrecision(buffer_dtype=torch.float64))
        assert norm.running_mean.dtype is torch.float64
        assert norm.num_batches_tracked.dtype is torch.int64
        return [model.module.weight.dtype]

    assert md.simulate(program, 2) == [[torch.float32]] * 2


def test_ignored_parameters_and_buffers_stay_as_they_are() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cast = nn.Linear(2, 2)
            self.kept = nn.Linear(2, 2)
            self.register_buffer("low", torch.ones(1))
            self.register_buffer("full", torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dtypes.append([self.cast.weight.dtype, self.kept.weight.dtype])
            return self.cast(x).float() + self.kept(x.float())

    dtypes: list[Any] = []

    def program() -> list[Any]:
        module = Two()
        names = ["kept.weight", "kept.bias", "full"]
        md.DDP._set_params_and_buffers_to_ignore_for_model(module, names)
        config = MixedPrecision(torch.bfloat16, buffer_dtype=torch.float16)
        model = md.DDP(module, mixed_precision=config)
        model(torch.ones(1, 2)).sum().backward()
        return [module.low.dtype, module.full.dtype]

    assert md.simulate(program, 2) == [[torch.float16, torch.float32]] * 2
    assert dtypes == [[torch.bfloat16, torch.float32]] * 2


# -- parameters are themselves outside of a forward -----------------------------------------------


class Raises(nn.Module):
    """A part that raises, deep inside, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 2, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        x = self.inner[0](self.lstm(x)[0])
        if fails:
            self.inner(x, x, x)  # too many arguments
        return self.inner[1](x)


def test_parameters_are_themselves_again_after_a_forward_that_raised() -> None:
    def program() -> None:
        module = Raises()
        before = {name: id(p) for name, p in module.named_parameters()}
        flat = [id(weight) for weight in module.lstm._flat_weights]
        model = md.DDP(module, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        for fails in (True, False, True):
            if fails:
                with pytest.raises(TypeError):
                    model(torch.ones(1, 1, 2), fails)
            else:
                model(torch.ones(1, 1, 2), fails).sum().backward()
            assert {name: id(p) for name, p in module.named_parameters()} == before
            assert [id(weight) for weight in module.lstm._flat_weights] == flat
            assert {p.dtype for p in module.parameters()} == {torch.float32}

    md.simulate(program, 1)


def test_a_tied_weight_is_cast_once_a_forward() -> None:
    module = Net()
    cast = CastParameters(module, MixedPrecision(torch.bfloat16), frozenset())
    seen: list[int] = []
    for layer in (module.first, module.tied):
        layer.register_forward_pre_hook(lambda layer, _: seen.append(id(layer.weight)))
    module(cast.cast_inputs(torch.ones(1, 4)))
    assert len(seen) == 2 and len({*seen}) == 1 and seen[0] != id(module.first.weight)
    cast.close()
    assert module(torch.ones(1, 4)).dtype is torch.float32


def test_a_part_that_runs_alone_is_cast_too() -> None:
    module = Net()
    CastParameters(module, MixedPrecision(torch.bfloat16), frozenset())
    assert module.second(torch.ones(1, 4).bfloat16()).dtype is torch.bfloat16
    assert module.second.weight.dtype is torch.float32


def test_inputs_of_any_tree_are_cast_but_for_integers() -> None:
    cast = CastParameters(nn.Linear(1, 1), MixedPrecision(torch.bfloat16), frozenset())
    given = ([torch.ones(1), "text"], {"index": torch.ones(1, dtype=torch.int64), "none": None})
    (inputs, named) = cast.cast_inputs(given)
    assert inputs[0].dtype is torch.bfloat16 and inputs[1] == "text"
    assert named["index"].dtype is torch.int64 and named["none"] is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_hooks_of_its_own_alone(copied: Callable[[nn.Module], Any]) -> None:
    def num_hooks(module: nn.Module) -> int:
        return sum(
            len(one._forward_pre_hooks) + len(one._forward_hooks) for one in module.modules()
        )

    def program() -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        first = md.DDP(net, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        model = copied(copied(first))
        assert 0 < num_hooks(model.module) == num_hooks(net)
        assert model(torch.ones(1, 2)).dtype is torch.bfloat16
        module = model.module
        del model
        assert num_hooks(module) == 0
        assert module(torch.ones(1, 2)).dtype is torch.float32
        assert first(torch.ones(1, 2)).dtype is torch.bfloat16

    md.simulate(program, 2)


def test_a_wrapper_that_is_gone_leaves_the_module_in_full_precision() -> None:
    def program() -> torch.dtype:
        module = nn.Linear(2, 1)
        model = md.DDP(module, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        assert model(torch.ones(1, 2)).dtype is torch.bfloat16
        del model
        return module(torch.ones(1, 2)).dtype

    assert md.simulate(program, 1) == [torch.float32]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            MixedPrecision(param_dtype=torch.int8),
            "a MixedPrecision with a floating-point dtype, or None, as param_dtype\n",
        ),
        # Type: ignore[arg-type].
        (
            MixedPrecision(reduce_dtype="bf16"),
            "a MixedPrecision with a floating-point dtype, or None, as reduce_dtype\n",
        ),
        (
            torch.bfloat16,
            "mixed_precision is torch.bfloat16\n"
            "  expected: a MixedPrecision with a floating-point dtype",
        ),
        ("bf16", "mixed_precision is 'bf16'\n  expected: a MixedPrecision with a floating"),
    ],
)
def test_what_is_no_configuration_is_rejected(config: Any, text: str) -> None:
    def program() -> None:
        md.DDP(nn.Linear(1, 1), mixed_precision=config)

    with pytest.raises(KindError) as error:
        md.simulate(program, 1)
    assert text in str(error.value)
    assert (
        "  fix:      pass for example md.distributed.MixedPrecision(param_dtype=torch.bfloat16)"
        in str(error.value)
    )
