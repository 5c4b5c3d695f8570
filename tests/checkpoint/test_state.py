"""A program's whole state: what goes on after a load is what would have gone on without it."""

from __future__ import annotations

import copy
import math
import random
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshdist as md
from meshdist.errors import KindError
from tests.pool import Pool

NUM_STEPS = 5


def model_of(mesh: md.DeviceMesh | None, dropout: float = 0.0) -> nn.Module:
    md.seed(3)
    model = nn.Sequential(
        nn.Linear(6, 300), nn.GELU(), nn.Dropout(dropout), nn.Linear(300, 3)
    ).double()
    if mesh is None:
        return model
    md.parallelize(model, mesh["tp"], {"0": "column", "2": "own_draws", "3": "row"})
    return md.DDP(model, device_mesh=mesh["dp"])


class Run:
    """A training program: a model, AdamW, a schedule, a sampler, and what they have done."""

    def __init__(self, mesh: md.DeviceMesh | None, dropout: float = 0.0) -> None:
        self.model = model_of(mesh, dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(2 * NUM_STEPS * 12, 9, generator=generator, dtype=torch.float64)
        data = TensorDataset(numbers[:, :6], numbers[:, 6:])
        axis: Any = 1 if mesh is None else mesh["dp"]
        rank = 0 if mesh is None else None
        self.sampler = md.distributed.DistributedSampler(data, axis, rank, seed=5)
        size = 1 if mesh is None else mesh["dp"].size()
        # A loader draws a number as it begins, from a generator of its own here.
        self.loader = DataLoader(
            data, 12 // size, sampler=self.sampler, generator=torch.Generator()
        )
        self.batches = iter(self.loader)
        self.state = md.checkpoint.State(
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.sampler,
            schedule=self.schedule,
            step=0,
        )

    def load(self, path: str) -> None:
        md.checkpoint.load(self.state, path)
        self.batches = iter(self.loader)

    def steps(self, count: int) -> Run:
        for _ in range(count):
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
            self.schedule.step()
            self.state.step += 1
        return self


def train(shape: tuple[int, int], load: str | None, save: str | None, dropout: float = 0.0) -> int:
    with md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) as mesh:
        run = Run(mesh, dropout)
        if load is not None:
            run.load(load)
        run.steps(NUM_STEPS)
        if save is not None:
            md.checkpoint.save(run.state, save)
        return int(run.state.step)


def parameters_in(path: str | Path) -> dict[str, torch.Tensor]:
    found = md.checkpoint.open(path)
    names = [name for name in found.names if name.startswith(("model.", "optimizer."))]
    return {name: found.read(name) for name in names}


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The oracle: ten steps on one device."""
    path = tmp_path_factory.mktemp("ten") / "ten"
    md.checkpoint.save(Run(None).steps(2 * NUM_STEPS).state, path)
    return parameters_in(path)


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("five") / "five")
    md.simulate(train, 4, args=((2, 2), None, path))
    return path


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (3, 2), (2, 3)])
def test_five_steps_on_four_ranks_and_five_on_others_are_ten_on_one(
    shape: tuple[int, int], five_steps: str, ten_steps: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    ten = str(tmp_path / "ten")
    assert set(md.simulate(train, math.prod(shape), args=(shape, five_steps, ten))) == {10}
    found = parameters_in(ten)
    assert found.keys() == ten_steps.keys()
    for name, x in found.items():
        assert torch.allclose(x, ten_steps[name], rtol=1e-12, atol=1e-12), name
    leaves = md.checkpoint.open(ten).leaves
    assert leaves["step"] == leaves["schedule.last_epoch"] == 10
    assert leaves["optimizer.param_groups.0.lr"] == 0.01 * 0.5**3


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_on_processes(
    pool: Pool, backend: str, ten_steps: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    five, ten = str(tmp_path / "five"), str(tmp_path / "ten")
    pool.run(train, 4, (2, 2), None, five, backend=backend)
    pool.run(train, 2, (1, 2), five, ten, backend=backend)
    for name, x in parameters_in(ten).items():
        assert torch.allclose(x, ten_steps[name], rtol=1e-12, atol=1e-12), name


def test_a_bare_model_loads_what_a_split_model_saved(
    five_steps: str, ten_steps: dict[str, torch.Tensor]
) -> None:
    run = Run(None)
    run.load(five_steps)
    run.steps(NUM_STEPS)
    for name, x in run.model.named_parameters():
        assert torch.allclose(x, ten_steps[f"model.{name}"], rtol=1e-12, atol=1e-12)


# -- random generators ----------------------------------------------------------------------------


def draws() -> tuple[list[float], list[float], list[float]]:
    """What a rank draws next, from each generator."""
    numpys = [*np.random.standard_normal(3), *np.random.rand(2)]
    return torch.rand(4).tolist(), numpys, [random.gauss(0, 1), random.random()]


@pytest.mark.parametrize("seed_axes", [(), ("dp",), ("dp", "tp")])
def test_generators_go_on_bit_for_bit_on_as_many_ranks(
    seed_axes: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "one"

    def whole() -> Any:
        with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")):
            md.seed(7, differ_over=seed_axes)
            draws()
            md.checkpoint.save(md.checkpoint.State(), path)
            return draws()

    def again() -> Any:
        with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) as mesh:
            draws()
            md.checkpoint.load(md.checkpoint.State(), path)
            found = draws()
            with md.typed(mesh):
                kinds = "".join(f"{axis} " for axis in seed_axes)
                assert repr(md.typeof(torch.rand(1))) == (
                    f"float32[1]{{V:{kinds.strip().replace(' ', ',')}}}"
                    if seed_axes
                    else "float32[1]"
                )
            return found

    found = md.simulate(whole, 4)
    assert len({str(each) for each in found}) == 2 ** len(seed_axes)
    assert md.simulate(again, 4) == found


def test_a_model_with_dropout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def program(*, loads: bool) -> list[Any]:
        with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) as mesh:
            run = Run(mesh, 0.5)
            md.seed(7, differ_over="dp")
            if loads:
                run.load(str(tmp_path / "five"))
            else:
                run.steps(NUM_STEPS)
                md.checkpoint.save(run.state, tmp_path / "five")
            run.steps(NUM_STEPS)
            return [x.tolist() for x in run.model.parameters()]

    assert md.simulate(program, 4, kwargs={"loads": False}) == md.simulate(
        program, 4, kwargs={"loads": True}
    )


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (4,)])
def test_as_many_ranks_on_another_mesh_differ_along_the_same_axes(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    def save() -> None:
        with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")):
            md.seed(7, differ_over="dp")
            md.checkpoint.save(md.checkpoint.State(), tmp_path / "one")

    def load() -> str:
        with md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)]):
            md.checkpoint.load(md.checkpoint.State(), tmp_path / "one")
            return str(draws())

    md.simulate(save, 4)
    assert len(set(md.simulate(load, 4))) == shape[0]


def test_on_another_mesh_the_seed_is_the_checksum_of_the_first_ranks_state(tmp_path: Path) -> None:
    def save() -> int:
        md.seed(7)
        md.checkpoint.save(md.checkpoint.State(), tmp_path / "one")
        return zlib.crc32(torch.get_rng_state().numpy())

    def load() -> Any:
        md.checkpoint.load(md.checkpoint.State(), tmp_path / "one")
        return torch.initial_seed(), draws()

    def seeded(number: int) -> Any:
        md.seed(number)
        return number, draws()

    number, _ = md.simulate(save, 2)
    assert md.simulate(load, 3) == md.simulate(seeded, 3, (number,))


@pytest.mark.parametrize(
    ("seeds", "num_apart"), [((5, 5, 5, 5), 1), ((1, 2, 3, 4), 3), ((1, 1, 2, 2), 3)]
)
def test_ranks_seeded_without_md_seed_draw_apart_unless_all_drew_alike(
    seeds: tuple[int, ...], num_apart: int, tmp_path: Path
) -> None:
    def save() -> None:
        torch.manual_seed(seeds[md.get_rank()])
        md.checkpoint.save(md.checkpoint.State(), tmp_path / "one")

    def load() -> str:
        md.checkpoint.load(md.checkpoint.State(), tmp_path / "one")
        return str(draws())

    md.simulate(save, 4)
    is_told = len(set(seeds)) == 2
    text = "some ranks drew the same random numbers, seeded without md.seed; after this load"
    with pytest.warns(UserWarning, match=text) if is_told else nullcontext():
        assert len(set(md.simulate(load, 3))) == num_apart


def test_an_axis_that_the_mesh_lacks_is_told(tmp_path: Path) -> None:
    def save() -> None:
        with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")):
            md.seed(7, differ_over="dp")
            md.checkpoint.save(md.checkpoint.State(), tmp_path / "one")

    def load() -> str:
        with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp")):
            md.checkpoint.load(md.checkpoint.State(), tmp_path / "one")
            return str(draws())

    md.simulate(save, 4)
    with pytest.warns(UserWarning, match="differed over dp, which this mesh lacks"):
        assert len(set(md.simulate(load, 4))) == 1


@pytest.mark.parametrize("differs", [(), ("dp",)])
def test_on_other_numbers_ranks_draw_alike_where_they_drew_alike(
    differs: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "one"

    def save() -> None:
        with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")):
            md.seed(7, differ_over=differs)
            md.checkpoint.save(md.checkpoint.State(), path)

    def load() -> Any:
        with md.init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp")) as mesh:
            md.checkpoint.load(md.checkpoint.State(), path)
            with md.typed(mesh):
                kind = repr(md.typeof(torch.rand(2)))
            return kind, draws()

    md.simulate(save, 4)
    found = md.simulate(load, 6)
    assert found == md.simulate(load, 6)
    assert len({str(each) for each in found}) == (3 if differs else 1)
    assert all(found[rank] == found[rank + 1] for rank in (0, 2, 4))
    assert found[0][0] == ("float32[2]{V:dp}" if differs else "float32[2]")


def test_unseeded_ranks_draw_apart_on_other_numbers(tmp_path: Path) -> None:
    """Simulated ranks begin with generators of their own."""
    md.simulate(lambda: md.checkpoint.save(md.checkpoint.State(), tmp_path / "one"), 2)

    def load() -> Any:
        md.checkpoint.load(md.checkpoint.State(), tmp_path / "one")
        return draws()

    assert len({str(each) for each in md.simulate(load, 3)}) == 3


def test_ranks_that_a_program_without_a_mesh_seeded_draw_apart_on_a_mesh_too(
    tmp_path: Path,
) -> None:
    md.simulate(lambda: md.checkpoint.save(md.checkpoint.State(), tmp_path / "one"), 2)

    def load_and_save() -> None:
        md.checkpoint.load(md.checkpoint.State(), tmp_path / "one")
        md.checkpoint.save(md.checkpoint.State(), tmp_path / "two")

    def load() -> Any:
        with md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)):
            md.checkpoint.load(md.checkpoint.State(), tmp_path / "two")
        return draws()

    md.simulate(load_and_save, 3)
    assert len({str(each) for each in md.simulate(load, 2)}) == 2


# -- parts ----------------------------------------------------------------------------------------


def test_an_optimizer_that_has_made_no_step_stays_so(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = md.checkpoint.State(model=model, optimizer=optimizer)
    md.checkpoint.save(state, tmp_path / "none")
    assert not optimizer.state
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    md.checkpoint.load(state, tmp_path / "none")
    assert not optimizer.state


def test_a_parameter_without_a_state_stays_so(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.Adam(model.parameters())
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    md.checkpoint.save(md.checkpoint.State(model=model, optimizer=optimizer), tmp_path / "one")
    fresh = torch.optim.Adam(model.parameters())
    md.checkpoint.load(md.checkpoint.State(model=model, optimizer=fresh), tmp_path / "one")
    assert set(fresh.state) == set(model[0].parameters())
    assert fresh.state[model[0].weight]["step"] == 1


def test_several_optimizers(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def made() -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD([model.weight], lr=0.1, momentum=0.9),
            torch.optim.Adam([model.bias], lr=torch.tensor(0.2)),
        ]

    optimizers = made()
    model(torch.ones(2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    md.checkpoint.save(md.checkpoint.State(model=model, optimizer=optimizers), tmp_path / "one")
    optimizers[0].param_groups[0]["lr"] = 3.0
    fresh = made()
    fresh[1].param_groups[0]["lr"] = torch.tensor(9.0)
    md.checkpoint.load(md.checkpoint.State(model=model, optimizer=fresh), tmp_path / "one")
    assert fresh[0].param_groups[0]["lr"] == 0.1
    assert fresh[1].param_groups[0]["lr"] == torch.tensor(0.2)
    assert torch.equal(
        fresh[0].state[model.weight]["momentum_buffer"],
        optimizers[0].state[model.weight]["momentum_buffer"],
    )


def test_several_models(tmp_path: Path) -> None:
    def program() -> bool:
        with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) as mesh:
            models, optimizers = {}, []
            for name in ("g", "d"):
                md.seed(len(models))
                model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
                md.parallelize(model, mesh["tp"], {"0": "column", "1": "row"})
                models[name] = md.DDP(model, device_mesh=mesh["dp"])
                optimizers.append(torch.optim.AdamW(models[name].parameters()))
                models[name](torch.ones(2, 4)).sum().backward()
                optimizers[-1].step()
            ema = copy.deepcopy(models["g"].module)
            state = md.checkpoint.State(model=models, optimizer=optimizers, ema=ema)
            md.checkpoint.save(state, tmp_path / "one")
            wanted = [x.clone() for x in (*models["d"].parameters(), *ema.parameters())]
            with torch.no_grad():
                for x in (*models["d"].parameters(), *ema.parameters()):
                    x.zero_()
            md.checkpoint.load(state, tmp_path / "one")
            found = [*models["d"].parameters(), *ema.parameters()]
            return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

    assert md.simulate(program, 4) == [True] * 4
    found = md.checkpoint.open(tmp_path / "one")
    assert found.shape("model.d.0.weight") == found.shape("ema.0.weight") == (6, 4)
    assert found.shape("optimizer.state.g.1.weight.exp_avg") == (4, 6)


def test_buffers_are_the_first_ranks(tmp_path: Path) -> None:
    def program() -> float:
        torch.manual_seed(0)
        model = nn.BatchNorm1d(1)
        model.running_mean.fill_(md.get_rank() + 2.0)
        state = md.checkpoint.State(model=model, rng=False)
        md.checkpoint.save(state, tmp_path / "one")
        model.running_mean.zero_()
        md.checkpoint.load(state, tmp_path / "one")
        return model.running_mean.item()

    assert md.simulate(program, 3) == [2.0] * 3


def test_a_compiled_or_wrapped_model_has_the_bare_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    md.checkpoint.save(md.checkpoint.State(model=compiled, rng=False), tmp_path / "one")
    assert md.checkpoint.open(tmp_path / "one").names == ["model.0.bias", "model.0.weight"]


def test_a_module_that_has_more_than_it_wraps_is_saved_whole(tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    average.update_parameters(nn.Linear(2, 2))
    md.checkpoint.save(md.checkpoint.State(ema=average, rng=False), tmp_path / "one")
    found = md.checkpoint.open(tmp_path / "one")
    assert found.names == ["ema.module.bias", "ema.module.weight", "ema.n_averaged"]
    assert found.read("ema.n_averaged").item() == 1


def test_leaves_are_attributes(tmp_path: Path) -> None:
    state = md.checkpoint.State(rng=False, step=1, config={"lr": 0.1}, ema=torch.ones(2))
    state.best = 0.5
    md.checkpoint.save(state, tmp_path / "one")
    other = md.checkpoint.State(rng=False, step=0, config={"lr": 0.0}, ema=torch.zeros(2), best=0)
    assert md.checkpoint.load(other, tmp_path / "one") is other
    assert (other.step, other.config, other.best, other.ema.tolist()) == (
        1,
        {"lr": 0.1},
        0.5,
        [1, 1],
    )
    with pytest.raises(AttributeError, match="no leaf 'nothing'"):
        _ = state.nothing
    with pytest.raises(AttributeError, match="cannot set 'model': pass it to State"):
        state.model = nn.Linear(1, 1)


def test_a_state_without_generators_is_loaded_without_them(tmp_path: Path) -> None:
    md.checkpoint.save(md.checkpoint.State(rng=False, step=3), tmp_path / "one")
    before = torch.get_rng_state()
    state = md.checkpoint.load(md.checkpoint.State(step=0), tmp_path / "one", missing="keep")
    assert state.step == 3
    assert torch.equal(before, torch.get_rng_state())
    only = md.checkpoint.load(md.checkpoint.State(step=0), tmp_path / "one", only="step")
    assert only.step == 3


@pytest.mark.parametrize(
    ("arguments", "summary"),
    [
        ({"model": 3}, "State requires a module, or a dict of modules, as model="),
        (
            {"critic": torch.optim.SGD(nn.Linear(1, 1).parameters())},
            "State requires optimizers as optimizer=, with the models of their parameters",
        ),
        ({"optimizer": 3}, "State requires model= with optimizer="),
        (
            {"model": nn.Linear(1, 1), "optimizer": 3},
            "State requires a torch optimizer, or a list of them, as optimizer=",
        ),
        (
            {"model": nn.Linear(1, 1), "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
            "State: a parameter of the optimizer is not in the model",
        ),
    ],
)
def test_wrong_parts(arguments: dict[str, Any], summary: str, tmp_path: Path) -> None:
    with pytest.raises(KindError) as caught:
        md.checkpoint.save(md.checkpoint.State(**arguments), tmp_path / "one")
    assert caught.value.summary == summary
    assert list(tmp_path.iterdir()) == []


def test_another_bit_generator_of_numpy_is_rejected(tmp_path: Path) -> None:
    former = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(KindError) as caught:
            md.checkpoint.save(md.checkpoint.State(), tmp_path / "one")
    finally:
        np.random.set_bit_generator(former)
    assert caught.value.summary == "State cannot save NumPy's global generator"
    assert caught.value.found == "PCG64"


class Fails:
    """An object whose state one rank cannot take."""

    def state_dict(self) -> dict[str, Any]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if md.get_rank() == 1:
            raise ValueError(f"cannot take {state['number']}")


def test_an_object_that_fails_on_a_rank_fails_on_all(tmp_path: Path) -> None:
    def program() -> str:
        state = md.checkpoint.State(fails=Fails(), rng=False)
        md.checkpoint.save(state, tmp_path / "saved")
        with pytest.raises(md.errors.CheckpointError) as caught:
            md.checkpoint.load(state, tmp_path / "saved")
        assert isinstance(caught.value.__cause__, ValueError) == (md.get_rank() == 1)
        return str(caught.value)

    text = "checkpoint.load: ValueError: cannot take 1\n  where:    rank 1"
    assert md.simulate(program, 3) == [text] * 3
