"""Mistakes that raise no error: what each does instead (tests/misuse_rows.json lists them)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import meshdist as md
from tests.pool import Pool


def mesh_of_all(name: str = "tp") -> md.DeviceMesh:
    return md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=(name,))


def two_layers() -> nn.Sequential:
    md.seed(0)
    return nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False)).double()


# -- data parallelism -----------------------------------------------------------------------------


def test_a_parameter_outside_the_wrapped_module_has_local_gradients() -> None:
    def program() -> tuple[float, float]:
        torch.manual_seed(0)
        model, scale = md.DDP(nn.Linear(1, 1, bias=False)), nn.Parameter(torch.ones(1))
        (scale * model(torch.full((1, 1), 1.0 + md.get_rank()))).sum().backward()
        assert scale.grad is not None
        weight: Any = model.module.weight
        return weight.grad.item(), scale.grad.item()

    (mean, first), (same, second) = md.simulate(program, 2)
    assert mean == same and second == pytest.approx(2 * first)


def test_unannotated_shards_along_the_only_axis_become_the_first_ranks() -> None:
    def program() -> list[float]:
        shard = nn.Linear(1, 1, bias=False)
        nn.init.constant_(shard.weight, float(md.get_rank()))
        weights: list[float] = (
            md.DDP(shard, device_mesh=mesh_of_all()).module.weight.flatten().tolist()
        )
        return weights

    assert md.simulate(program, 2) == [[0.0], [0.0]]


def test_torchs_clip_of_shards_uses_each_ranks_norm() -> None:
    def program() -> tuple[float, float]:
        mesh = mesh_of_all()
        shard = nn.Parameter(torch.zeros(1))
        shard.grad = torch.full((1,), 3.0 + md.get_rank())
        md.annotate(shard, "f@tp", mesh=mesh)
        return (
            nn.utils.clip_grad_norm_([shard], 100.0).item(),
            md.clip_grad_norm_([shard], 100.0, mesh=mesh).item(),
        )

    assert md.simulate(program, 2) == [(3.0, 5.0), (4.0, 5.0)]


@pytest.mark.parametrize("mistake", ["drop_last", "data"])
def test_samplers_with_different_arguments_skip_or_repeat_samples(mistake: str) -> None:
    def program() -> list[int]:
        is_first = md.get_rank() == 0
        data: Any = range(7) if is_first or mistake != "data" else range(11)
        drop_last = is_first and mistake == "drop_last"
        return list(md.DistributedSampler(data, shuffle=False, drop_last=drop_last))

    first, second = md.simulate(program, 2)
    assert len(first) != len(second)


# -- einsum ---------------------------------------------------------------------------------------


def test_a_name_in_one_operand_is_summed_there() -> None:
    def program() -> bool:
        x, y = torch.arange(8.0).view(2, 2, 2), torch.arange(4.0).view(2, 2)
        found = md.einsum("b s d, e f -> b s f", x, y, mesh=mesh_of_all())
        return torch.equal(found, torch.einsum("bsd,ef->bsf", x, y))

    assert md.simulate(program, 2) == [True, True]


def test_a_sliced_shard_whose_axis_is_omitted_counts_as_the_global_array(pool: Pool) -> None:
    def program() -> list[float]:
        x = torch.arange(4.0).chunk(2)[md.get_rank()]
        return md.einsum("d, d ->", x, torch.ones(2), mesh=mesh_of_all()).flatten().tolist()

    assert pool.run(program, 2) == [[1.0], [5.0]]


# -- tensor parallelism ---------------------------------------------------------------------------

SPLIT = {"0": "column", "1": "row"}


def test_code_that_reads_a_split_weight_gets_this_ranks_part() -> None:
    def program() -> tuple[int, ...]:
        split: Any = md.parallelize(two_layers(), mesh_of_all(), SPLIT)
        return tuple(functional.linear(torch.ones(2).double(), split[0].weight).shape)

    assert md.simulate(program, 2) == [(2,), (2,)]


def test_a_softmax_between_column_and_row_sees_one_ranks_features() -> None:
    def program() -> bool:
        model = nn.Sequential(nn.Linear(2, 4), nn.Softmax(-1), nn.Linear(4, 2)).double()
        md.seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        x = torch.ones(1, 2).double()
        expected = model(x)
        split = md.parallelize(model, mesh_of_all(), {"0": "column", "2": "row"})
        return torch.allclose(split(x), expected)

    assert md.simulate(program, 2) == [False, False]


def test_different_samples_along_the_axis_mix() -> None:
    def program() -> tuple[bool, list[float]]:
        model = two_layers()
        x = torch.ones(1, 2).double() + md.get_rank()
        expected = model(x)
        found = md.parallelize(model, mesh_of_all(), SPLIT)(x)
        return torch.allclose(found, expected), found.flatten().tolist()

    (right, first), (also_right, second) = md.simulate(program, 2)
    assert not right and not also_right and first == second


def test_a_forward_on_some_ranks_is_an_error_of_the_next_call() -> None:
    def program() -> None:
        split = md.parallelize(two_layers(), mesh_of_all(), SPLIT)
        if md.get_rank() == 0:
            split(torch.ones(1, 2).double())
        md.barrier()

    with pytest.raises((md.MismatchError, md.DeadlockError)):
        md.simulate(program, 2)


def test_dropout_on_a_split_sequence_repeats_its_mask() -> None:
    def program(differ_over: tuple[str, ...]) -> list[float]:
        md.seed(0, differ_over=differ_over, mesh=mesh_of_all())
        return functional.dropout(torch.ones(64)).tolist()

    first, second = md.simulate(program, 2, ((),))
    assert first == second
    first, second = md.simulate(program, 2, (("tp",),))
    assert first != second


def test_a_parameter_on_a_split_sequence_has_one_ranks_part_of_its_gradient() -> None:
    def program(is_annotated: bool) -> float:
        mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        net: Any = nn.Linear(1, 1)
        nn.init.ones_(net.weight)
        if is_annotated:
            md.annotate(net, {"weight": "o i {R:tp}", "bias": "o {R:tp}"}, mesh=mesh)
        model = md.DDP(net, device_mesh=mesh["dp"])
        model(torch.tensor([[1.0], [2.0]])[md.get_rank()]).sum().backward()
        return float(net.weight.grad)

    assert md.simulate(program, 2, (False,)) == [1.0, 2.0]
    assert md.simulate(program, 2, (True,)) == [3.0, 3.0]


def test_the_state_of_another_rank_loads_into_a_split_model() -> None:
    def program() -> bool:
        split: Any = md.parallelize(two_layers(), mesh_of_all(), SPLIT)
        states: list[Any] = [None, None]
        md.all_gather_object(states, split.state_dict())
        split.load_state_dict(states[0])
        return torch.equal(split[0].weight, states[md.get_rank()]["0.weight"])

    assert md.simulate(program, 2) == [True, False]


# -- attention ------------------------------------------------------------------------------------


def attention_of_a_wrong_program(mistake: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each of two ranks computes, and the rows of one process."""
    order = torch.arange(8, dtype=torch.float64)

    def attended(positions: torch.Tensor, own: Any) -> list[torch.Tensor]:
        # The score of a query and a key is the cosine of the distance of their positions.
        q = torch.stack([positions.cos(), positions.sin()], -1).view(1, 1, -1, 2)
        return [q, q, order[own].view(1, 1, -1, 1).expand(-1, -1, -1, 2)]

    def program() -> tuple[torch.Tensor, torch.Tensor]:
        axis = mesh_of_all("cp")["cp"]
        layout = "contiguous" if mistake == "layout" else "zigzag"
        own = md.attention.positions(8, axis, layout)
        positions = order[:4] if mistake == "positions" else order[own]
        y = md.attention.context_parallel(
            *attended(positions, own), axis, causal=True, layout="zigzag"
        )
        whole = functional.scaled_dot_product_attention(
            *attended(order, slice(None)), is_causal=True
        )
        return y, whole[:, :, own]

    return md.simulate(program, 2)


def test_tokens_in_another_layout_attend_to_later_tokens() -> None:
    for found, wanted in attention_of_a_wrong_program(""):
        torch.testing.assert_close(found, wanted)
    (first, of_first), (second, _) = attention_of_a_wrong_program("layout")
    torch.testing.assert_close(first[:, :, :2], of_first[:, :, :2])
    assert (first[:, :, 2:] > of_first[:, :, 2:] + 0.5).all()  # values grow with the position
    assert second.shape == first.shape


def test_positions_that_begin_at_0_on_every_rank_change_the_attention() -> None:
    (first, of_first), (second, of_second) = attention_of_a_wrong_program("positions")
    torch.testing.assert_close(first[:, :, :2], of_first[:, :, :2])
    assert (first - of_first).abs().max() > 0.1
    assert (second - of_second).abs().max() > 0.1


# -- shared tensors -------------------------------------------------------------------------------


def test_a_shared_tensor_can_be_read_before_it_is_written() -> None:
    assert md.simulate(lambda: tuple(md.shared_empty((2,)).shape), 2) == [(2,), (2,)]


# -- gradients of collectives ---------------------------------------------------------------------


def test_a_cast_that_is_missing_before_a_sum_leaves_local_gradients() -> None:
    def program(is_cast: bool) -> float:
        mesh = mesh_of_all()
        weight = torch.ones((), requires_grad=True)
        used = md.lax.pvary(weight, "tp", mesh=mesh) if is_cast else weight
        md.lax.psum(used * (1.0 + md.get_rank()), "tp", mesh=mesh).backward()
        assert weight.grad is not None
        return weight.grad.item()

    assert md.simulate(program, 2, (False,)) == [1.0, 2.0]
    assert md.simulate(program, 2, (True,)) == [3.0, 3.0]


def test_a_value_that_is_reduced_twice_is_summed_twice() -> None:
    def program() -> float:
        with mesh_of_all():
            return float(md.lax.psum(md.lax.psum(torch.ones(()), "tp"), "tp"))

    assert md.simulate(program, 2) == [4.0, 4.0]


def test_own_draws_on_complete_features_let_replicas_drift() -> None:
    def program(style: str) -> list[float]:
        mesh, model = mesh_of_all(), nn.Sequential(*two_layers(), nn.Dropout(0.5), nn.LayerNorm(2))
        md.parallelize(model.double(), mesh["tp"], {"0": "column", "1": "row", "2": style})
        md.seed(1)
        model(torch.ones(4, 2).double()).square().sum().backward()
        bias: Any = model[3].bias
        gradient: list[float] = bias.grad.tolist()
        return gradient

    first, second = md.simulate(program, 2, args=("own_draws",))
    assert first != second
    first, second = md.simulate(program, 2, args=("whole_draws",))
    assert first == second


def test_initialization_after_the_split_draws_parts() -> None:
    def program(is_mistaken: bool) -> torch.Tensor:
        mesh = mesh_of_all()
        model = md.parallelize(two_layers(), mesh["tp"], {"0": "column", "1": "row"})
        md.seed(1)

        def init(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

        if is_mistaken:
            model.apply(init)
        else:
            md.tensor_parallel.apply(model, init)
        weight: Any = model[0].weight
        whole: torch.Tensor = md.unshard(weight.detach(), like=weight)
        return whole

    whole = md.simulate(program, 2, args=(False,))[0]
    mistaken = md.simulate(program, 2, args=(True,))[0]
    assert torch.equal(mistaken[:2], mistaken[2:]) and not torch.equal(whole[:2], whole[2:])
