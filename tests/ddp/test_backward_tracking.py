"""Which backwards are averaged: a table of cases, beside the answers of torch's own wrapper.

Every case runs on two ranks in the third step and later ones, when buckets are laid as gradients
come: rank 0 has inputs 1, 10, ..., rank 1 twice as much. A probe is a backward of ``ddp.module``,
or of parameters alone, that does not go through the wrapper.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshdist as md
from tests.pool import Pool

SIZES = {"small": 1, "large": 20_000}
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "differences_from_torch.md"


class Box:
    """No tensor, nor a list, a dict or a dataclass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Net(nn.Module):
    """The gradient of every weight is ``x``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(size) for _ in range(4))
        self.kind = "tensor"

    def forward(self, x: torch.Tensor) -> Any:
        parts = [self.part(x, index) for index in range(4)]
        total = parts[0] + parts[1] + parts[2] + parts[3]
        return Box(total) if self.kind == "box" else total

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if self.kind != "checkpoints":
            return x * self.weights[index].sum()
        return checkpoint(lambda one: one * self.weights[index].sum(), x, use_reentrant=True)


class Trial:
    """One model in a wrapper, and what came of it."""

    def __init__(self, wrap: type[nn.Module], size: int, num_before: int = 3) -> None:
        self.rank = md.get_rank()
        self.net = Net(size)
        self.ddp = wrap(self.net)
        self.seen: list[Any] = []
        for _ in range(num_before):
            self.step(1.0)
        self.seen.clear()

    def x(self, x: float) -> torch.Tensor:
        return torch.tensor(x * (1 + self.rank), requires_grad=True)

    def loss(self, x: float) -> torch.Tensor:
        """A forward through the wrapper."""
        out = self.ddp(self.x(x))
        return out.tensor if isinstance(out, Box) else out

    def local(self, x: float) -> torch.Tensor:
        """A forward beside it."""
        out = self.net(torch.tensor(x))
        return out.tensor if isinstance(out, Box) else out

    def penalty(self, x: float = 5.0) -> torch.Tensor:
        return sum(weight.sum() for weight in self.net.weights) * self.x(x).detach()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.ddp.zero_grad()
        loss.backward(**options)
        self.note()

    def note(self) -> None:
        found = {round(one.item(), 3) for p in self.net.parameters() for one in p.grad.unique()}
        self.seen.append(found.pop() if len(found) == 1 else found)

    def step(self, x: float) -> None:
        self.backward(self.loss(x))


Case = Callable[[Trial], None]
CASES: dict[str, tuple[Case, Any, Any, int]] = {}
"""What happens; torch's gradients on both ranks, or None where it raises; ours, and warnings."""


def case(
    text: str, torchs: list[Any] | None, ours: list[Any] | None = None, *, num_warnings: int = 0
) -> Callable[[Case], Case]:
    def note(function: Case) -> Case:
        CASES[text] = function, torchs, torchs if ours is None else ours, num_warnings
        return function

    return note


EVERY = [[1.5, 15.0], [1.5, 15.0]]


@case("rank 0 probes before the first forward", [[5.0, 1.5, 15.0], [1.5, 15.0]])
def probe_first(trial: Trial) -> None:
    other = Trial(type(trial.ddp), trial.net.weights[0].numel(), 0)
    if other.rank == 0:
        other.backward(other.local(5.0))
    other.step(1.0)
    other.step(10.0)
    trial.seen = other.seen


@case(
    "rank 0 probes between two steps",
    [[1.5, 5.0, 15.0, 150.0, 1500.0], [1.5, 15.0, 150.0, 1500.0]],
)
def probe_between(trial: Trial) -> None:
    trial.step(1.0)
    if trial.rank == 0:
        trial.backward(trial.local(5.0))
    for x in (10.0, 100.0, 1000.0):
        trial.step(x)


@case("all ranks probe between two steps", [[5.0, 1.5, 15.0], [10.0, 1.5, 15.0]])
def probes_of_all(trial: Trial) -> None:
    trial.backward(trial.local(5.0 * (1 + trial.rank)))
    trial.step(1.0)
    trial.step(10.0)


@case("rank 0 probes under `no_sync()`", [[5.0, 1.5, 15.0], [1.5, 15.0]])
def probe_unsynchronised(trial: Trial) -> None:
    with trial.ddp.no_sync():
        if trial.rank == 0:
            trial.backward(trial.local(5.0))
    trial.step(1.0)
    trial.step(10.0)


@case("all ranks probe, and `zero_grad()` does not come: sums are averaged", [[10.25], [10.25]])
def probe_is_added(trial: Trial) -> None:
    trial.ddp.zero_grad()
    trial.local(5.0 + 7.5 * trial.rank).backward()
    trial.loss(1.0).backward()
    trial.note()


@case(
    "all ranks probe between a forward and its backward",
    [[7.5, 1.0, 15.0], [7.5, 2.0, 15.0]],
    [[5.0, 1.5, 15.0], [10.0, 1.5, 15.0]],
    num_warnings=2,
)
def probe_within(trial: Trial) -> None:
    loss = trial.loss(1.0)
    trial.backward(trial.local(5.0 * (1 + trial.rank)))
    trial.backward(loss)
    trial.step(10.0)


@case(
    "a penalty on weights alone, between a forward and its backward",
    [[7.5, 1.0, 15.0], [7.5, 2.0, 15.0]],
    [[5.0, 1.5, 15.0], [10.0, 1.5, 15.0]],
    num_warnings=2,
)
def penalty_within(trial: Trial) -> None:
    loss = trial.loss(1.0)
    trial.backward(trial.penalty())
    trial.backward(loss)
    trial.step(10.0)


@case("a penalty on weights alone, between two steps", [[5.0, 1.5], [10.0, 1.5]])
def penalty_between(trial: Trial) -> None:
    trial.backward(trial.penalty())
    trial.step(1.0)


@case("a penalty on weights in the loss", [[9.0, 15.0], [9.0, 15.0]])
def penalty_in_the_loss(trial: Trial) -> None:
    trial.backward(trial.loss(1.0) + trial.penalty())
    trial.step(10.0)


@case(
    "a forward without a backward, and then a probe",
    [[7.5, 1.5], [7.5, 1.5]],
    [[5.0, 1.5], [10.0, 1.5]],
    num_warnings=2,
)
def probe_behind_a_forward(trial: Trial) -> None:
    trial.loss(1.0)
    trial.backward(trial.local(5.0 * (1 + trial.rank)))
    trial.step(1.0)


@case("a forward under `no_grad()`, and then a probe of rank 0", [[5.0, 1.5], [1.5]])
def probe_behind_an_evaluation(trial: Trial) -> None:
    with torch.no_grad():
        trial.loss(1.0)
    if trial.rank == 0:
        trial.backward(trial.local(5.0))
    trial.step(1.0)


@case("`torch.autograd.grad` of the outputs between forward and backward", EVERY)
def grad_within(trial: Trial) -> None:
    loss = trial.loss(1.0)
    grads = torch.autograd.grad(loss, list(trial.net.parameters()), retain_graph=True)
    assert grads[0].unique().tolist() == [1.0 + trial.rank]
    trial.backward(loss)
    trial.step(10.0)


@case(
    "two forwards, and then the backward of each",
    [[1.5, 10.0, 15.0], [1.5, 20.0, 15.0]],
    [[1.5, 15.0, 15.0], [1.5, 15.0, 15.0]],
)
def two_forwards(trial: Trial) -> None:
    losses = trial.loss(1.0), trial.loss(10.0)
    for loss in losses:
        trial.backward(loss)
    trial.step(10.0)


@case("two forwards, and one backward of the sum", [[16.5, 15.0], [16.5, 15.0]])
def two_forwards_one_backward(trial: Trial) -> None:
    trial.backward(trial.loss(1.0) + trial.loss(10.0))
    trial.step(10.0)


@case(
    "a second backward on a retained graph",
    [[1.5, 1.0, 15.0], [1.5, 2.0, 15.0]],
    [[1.5, 1.5, 15.0], [1.5, 1.5, 15.0]],
)
def retained_graph(trial: Trial) -> None:
    loss = trial.loss(1.0)
    trial.backward(loss, retain_graph=True)
    trial.backward(loss)
    trial.step(10.0)


@case("a backward of a forward under `no_sync()`", [[1.0, 15.0], [2.0, 15.0]])
def not_synchronised(trial: Trial) -> None:
    with trial.ddp.no_sync():
        loss = trial.loss(1.0)
    trial.backward(loss)
    trial.step(10.0)


@case(
    "a synchronised forward, one under `no_sync()`, and the backward of each",
    [[1.5, 10.0], [1.5, 20.0]],
)
def synchronised_first(trial: Trial) -> None:
    loss = trial.loss(1.0)
    with trial.ddp.no_sync():
        other = trial.loss(10.0)
    trial.backward(loss)
    trial.backward(other)


@case(
    "the same, the backward under `no_sync()` first",
    [[15.0, 1.0], [15.0, 2.0]],
    [[10.0, 1.5], [20.0, 1.5]],
)
def synchronised_last(trial: Trial) -> None:
    loss = trial.loss(1.0)
    with trial.ddp.no_sync():
        other = trial.loss(10.0)
    trial.backward(other)
    trial.backward(loss)


@case("a loss in an object of a class of the program's", EVERY)
def unknown_object(trial: Trial) -> None:
    trial.net.kind = "box"
    trial.step(1.0)
    trial.step(10.0)


@case("the same, and then a probe of rank 0", [[1.5, 5.0, 15.0], [1.5, 15.0]])
def probe_behind_an_unknown_object(trial: Trial) -> None:
    trial.net.kind = "box"
    trial.step(1.0)
    if trial.rank == 0:
        trial.backward(trial.local(5.0))
    trial.step(10.0)


@case("re-entrant checkpoints inside the model", EVERY)
def checkpoints(trial: Trial) -> None:
    trial.net.kind = "checkpoints"
    trial.step(1.0)
    trial.step(10.0)


@case(
    "a backward that raises on all ranks, and then a probe of rank 0", None, [[5.0, 15.0], [15.0]]
)
def probe_behind_a_failure(trial: Trial) -> None:
    loss = trial.loss(1.0)
    handle = trial.net.weights[1].register_hook(lambda _: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    handle.remove()
    if trial.rank == 0:
        trial.backward(trial.local(5.0))
    trial.step(10.0)


def outcomes(wrap: type[nn.Module], size: int) -> dict[str, Any]:
    """For each case the gradients on this rank; or the text of an error."""
    found: dict[str, Any] = {}
    for text, (function, *_) in CASES.items():
        trial = Trial(wrap, size)
        try:
            function(trial)
        except Exception as error:
            found[text] = str(error)
        else:
            found[text] = trial.seen
    return found


def warned(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """What a function returns, and which warnings of backwards that stay local it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = function(*args)
    texts = [str(one.message) for one in caught]
    return found, [text for text in texts if text.startswith("a backward reached parameters")]


def torchs(meeting: str, size: int) -> Any:
    rank, world = md.get_rank(), md.get_world_size()
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
    try:
        return warned(outcomes, nn.parallel.DistributedDataParallel, size)[0]
    finally:
        gc.collect()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    return SIZES[request.param]


@pytest.fixture(scope="module")
def theirs(size: int, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return pool.run(torchs, 2, str(tmp_path_factory.mktemp("torch") / "meeting"), size)


@pytest.mark.parametrize("text", CASES)
def test_torchs_answers_are_those_of_the_table(theirs: Any, text: str) -> None:
    found, expected = [one[text] for one in theirs], CASES[text][1]
    if expected is None:
        assert all(isinstance(one, str) for one in found)
    else:
        assert found == expected


@pytest.mark.parametrize("backend", ["simulated", "shm", "gloo"])
def test_backwards_are_averaged_that_reach_outputs_of_a_synchronised_forward(
    backend: str, size: int, pool: Pool
) -> None:
    if backend == "simulated":  # its ranks are threads, which share what is caught
        found, texts = warned(md.simulate, outcomes, 2, (md.DDP, size))
    else:
        pairs = pool.run(warned, 2, outcomes, md.DDP, size, backend=backend)
        found, texts = [one for one, _ in pairs], [text for _, some in pairs for text in some]
    expected = {text: ours for text, (_, _, ours, _) in CASES.items()}
    assert {text: [one[text] for one in found] for text in CASES} == expected
    assert len(texts) == sum(one[3] for one in CASES.values())


def test_the_table_of_the_page_has_the_cases_that_differ() -> None:
    def shown(gradients: list[list[Any]] | None) -> str:
        if gradients is None:
            return "raises"
        texts = [", ".join(f"{one:g}" for one in some) for some in gradients]
        return texts[0] if texts[0] == texts[1] else "; ".join(texts)

    lines = DOCUMENT.read_text().splitlines()
    start = lines.index("| on two ranks | torch 2.13 | meshdist |") + 2
    rows = [
        f"| {text} | {shown(theirs)} | {shown(ours)}{', with a warning' if num_warnings else ''} |"
        for text, (_, theirs, ours, num_warnings) in CASES.items()
        if theirs != ours or num_warnings
    ]
    assert lines[start : start + len(rows) + 1] == [*rows, ""]


# -- whatever the parameter's size ----------------------------------------------------------------


@pytest.mark.parametrize("keeps", ["none", "zeros", "sums"])
@pytest.mark.parametrize("index", range(4))
def test_a_penalty_on_one_weight_alone_warns_and_is_no_arrival(
    index: int, size: int, keeps: str
) -> None:
    def program() -> tuple[list[Any], list[Any]]:
        trial = Trial(md.DDP, size)
        weight = trial.net.weights[index]
        if keeps != "sums":
            trial.ddp.zero_grad(set_to_none=keeps == "none")
        else:
            trial.ddp.zero_grad()
            trial.loss(0.0).backward()  # views of zeros
        counts = trial.ddp.reducer.reducer_state.expected_gradients.expected[:]
        loss = trial.loss(1.0)
        (weight.sum() * trial.x(5.0).detach()).backward()
        alone = weight.grad[0].item()
        loss.backward()
        assert trial.ddp.reducer.reducer_state.expected_gradients.expected == counts
        return [alone], [p.grad[0].item() for p in trial.net.parameters()]

    found, texts = warned(md.simulate, program, 2)
    with_penalty = [9.0 if place == index else 1.5 for place in range(4)]
    assert found == [([5.0], with_penalty), ([10.0], with_penalty)]
    assert sorted(text.split("rank ")[1][0] for text in texts) == ["0", "1"]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("sets_to_none", [True, False])
def test_a_weight_may_be_used_in_a_penalty_beside_the_outputs_alone(
    index: int, size: int, sets_to_none: bool
) -> None:
    def program() -> list[list[float]]:
        trial = Trial(md.DDP, size)
        weight = trial.net.weights[index]
        seen = []
        for _ in range(3):
            trial.ddp.zero_grad(sets_to_none)
            trial.net.weights[index] = nn.Parameter(torch.zeros_like(weight), requires_grad=False)
            loss = trial.loss(1.0)
            trial.net.weights[index] = weight
            (loss + weight.sum() * trial.x(5.0).detach()).backward()
            seen.append([p.grad[0].item() for p in trial.net.parameters()])
        trial.loss(1.0)  # no gradient is missing
        return seen

    expected = [7.5 if place == index else 1.5 for place in range(4)]
    assert md.simulate(program, 2) == [[expected] * 3] * 2


def test_zeroing_gradients_between_forward_and_backward_warns_of_nothing(size: int) -> None:
    def program() -> list[float]:
        trial = Trial(md.DDP, size)
        for sets_to_none in (True, False, False):
            loss = trial.loss(1.0)
            trial.ddp.zero_grad(sets_to_none)
            loss.backward()
        return [p.grad[0].item() for p in trial.net.parameters()]

    assert md.simulate(program, 2) == [[1.5] * 4] * 2


def test_checkpoints_under_no_sync_warn_of_nothing() -> None:
    """Their re-entrant tasks are parts of a backward that is meant to be local."""

    def program() -> float:
        net = Net(20_000)
        net.kind = "checkpoints"
        model = md.DDP(net)
        x = torch.tensor(1.0 + md.get_rank(), requires_grad=True)
        for _ in range(2):
            model(x).backward()
            net.zero_grad()
        with model.no_sync():
            for _ in range(3):
                model(x).backward()
        return net.weights[0].grad[0].item()  # type: ignore[index]

    assert md.simulate(program, 2) == [3.0, 6.0]  # a warning is an error here


def test_the_warning_names_the_line_and_the_way() -> None:
    def program() -> None:
        trial = Trial(md.DDP, 1)
        loss = trial.loss(1.0)
        trial.penalty().backward()  # here
        trial.penalty().backward()
        loss.backward()

    with pytest.warns(UserWarning, match="a backward reached parameters") as caught:
        md.simulate(program, 1)
    (one,) = caught
    assert Path(__file__).read_text().splitlines()[one.lineno - 1].endswith("# here")
    assert str(one.message) == (
        "a backward reached parameters of a DistributedDataParallel but none of its outputs, "
        "while a forward awaits its own backward: its gradients stay local\n"
        "  where:    rank 0, in the world\n"
        "  expected: a loss computed from the outputs of the synchronized forward\n"
        "  fix:      add terms of parameters alone, such as a penalty, to that loss; if the "
        "local gradient is intended, differentiate before the forward, or with "
        "torch.autograd.grad"
    )


def test_a_second_backward_behind_an_unknown_object_is_averaged() -> None:
    def program() -> list[float]:
        trial = Trial(md.DDP, 1)
        trial.net.kind = "box"
        loss = trial.loss(1.0)
        trial.backward(loss, retain_graph=True)
        trial.backward(loss)
        return trial.seen

    found, texts = warned(md.simulate, program, 2)
    assert (found, texts) == ([[1.5, 1.5]] * 2, [])
