"""torch.compile: the same gradients whatever is compiled, and overlap where blocks are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import meshdist as md
from tests.inner import flat_sums
from tests.pool import Pool

# torch 2.13 warns so of any compiled block that follows another.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

NUM_STEPS = 3  # the buckets are rebuilt before the second
COMPILES_ITS_OWN = torch.__version__ >= (2, 14)  # forwards of torch's own classes, too


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class Row(nn.Sequential):
    """A block whose class has a forward of its own, as the page on DDP writes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def wrapped(what: str, backend: Any) -> nn.Module:
    """A replica of which ``what`` is compiled; each of its parameters has a bucket of its own."""
    net = Net()
    if what in ("rows", "sequences"):
        kind = Row if what == "rows" else nn.Sequential
        net.blocks = nn.Sequential(*(kind(block.layer, nn.Tanh()) for block in net.blocks))
    if what in ("blocks", "rows", "sequences"):
        for block in net.blocks:
            block.compile(backend=backend)
    if what == "module":
        net.compile(backend=backend)
    model = md.DDP(net, bucket_cap_mb=1e-6)
    if what == "wrapper":
        return torch.compile(model, backend=backend)
    return model


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def gradients(
    model: nn.Module,
    step: Callable[[nn.Module, torch.Tensor], None] = backward,
    num_steps: int = NUM_STEPS,
) -> list[torch.Tensor]:
    found = []
    for number in range(num_steps):
        model.zero_grad()
        step(model, torch.ones(2, 3) * (1 + number + md.get_rank()))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """On rank 0 an R for each reduction that starts; compiled backwards are for the backend."""
    import torch._dynamo

    told: list[str] = []
    all_reduce = flat_sums.all_reduce

    def telling(*args: Any, **kwargs: Any) -> Any:
        if md.get_rank() == 0:
            told.append("R")
        return all_reduce(*args, **kwargs)

    monkeypatch.setattr(flat_sums, "all_reduce", telling)
    torch._dynamo.reset()
    yield told
    torch._dynamo.reset()


def telling_backend(events: list[str]) -> Any:
    """A backend that tells on rank 0 of each compiled backward, by a B."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compile_backward(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: torch.Tensor) -> Any:
            if md.get_rank() == 0:
                events.append("B")
            return graph(*args)

        return make_boxed_func(run)

    return aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=compile_backward
    )


@pytest.mark.parametrize(
    ("what", "first", "order"),
    [
        ("blocks", "BBRRRR", "BRRBRR"),
        ("rows", "BBRRRR", "BRRBRR"),
        ("sequences", *(("BBRRRR", "BRRBRR") if COMPILES_ITS_OWN else ("RRRR", "RRRR"))),
        ("module", "BRRRR", "BRRRR"),
        ("wrapper", "BRRRR", "BRRRR"),
        ("nothing", "RRRR", "RRRR"),
    ],
)
def test_reductions_start_behind_each_compiled_backward_but_the_first(
    events: list[str], what: str, first: str, order: str
) -> None:
    def program() -> list[torch.Tensor]:
        return gradients(wrapped(what, telling_backend(events)))

    found = md.simulate(program, 2)
    assert "".join(events) == first + order * (NUM_STEPS - 1)
    expected = md.simulate(lambda: gradients(md.DDP(Net())), 2)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


MIB = 2**20


class Wide(nn.Module):
    """Four layers of 1 MiB each, torch.compile's smallest bucket."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            run = partial(checkpoint, layer, use_reentrant=False) if self.recomputes else layer
            x = torch.tanh(run(x))
        return x


def wide(what: str, backend: Any, **options: Any) -> nn.Module:
    """A replica of ``Wide``, compiled inside or outside of its wrapper, or not at all."""
    net = Wide(recomputes=options.pop("recomputes", False))
    if what == "module":
        net.compile(backend=backend)
    model = md.DDP(net, **{"bucket_cap_mb": 1, **options})
    return torch.compile(model, backend=backend) if what == "wrapper" else model


def wide_step(model: nn.Module, x: torch.Tensor) -> None:
    model(x[:, :1].expand(2, 512)).square().mean().backward()


@pytest.mark.parametrize("what", ["module", "wrapper"])
def test_graphs_are_split_at_buckets(events: list[str], what: str) -> None:
    def program() -> None:
        gradients(wide(what, telling_backend(events)), wide_step)

    md.simulate(program, 2)
    steps = "".join(events).split("BBBB")
    assert len(steps) == 2 and not steps[0]  # the first step is only observed
    overlapped = steps[1].lstrip("R")
    assert overlapped.startswith("BR") and overlapped.count("BR") == 4 * (NUM_STEPS - 1)


def test_a_model_of_a_class_of_torch_is_compiled() -> None:
    def program() -> int:
        torch.manual_seed(0)
        model = md.DDP(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
        (expected,) = gradients(model, num_steps=1)
        from torch._dynamo.testing import CompileCounterWithBackend

        graphs = CompileCounterWithBackend("aot_eager")
        (found,) = gradients(torch.compile(model, backend=graphs), num_steps=1)
        torch.testing.assert_close(found, expected)
        return graphs.frame_count  # type: ignore[no-any-return]

    torch._dynamo.reset()
    assert sum(md.simulate(program, 2)) > 0
    torch._dynamo.reset()


def averaged_in_no_sync(model: nn.Module, x: torch.Tensor) -> None:
    ddp = getattr(model, "_orig_mod", model)
    with ddp.no_sync():
        wide_step(model, 2 * x)
    wide_step(model, x)


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (wide_step, {}),
        (wide_step, {"recomputes": True}),
        (averaged_in_no_sync, {}),
        (wide_step, {"find_unused_parameters": True}),
        (wide_step, {"static_graph": True, "gradient_as_bucket_view": False}),
    ],
)
def test_gradients_of_split_graphs(
    events: list[str], step: Callable[..., None], options: dict[str, Any]
) -> None:
    def program(what: str) -> list[torch.Tensor]:
        return gradients(wide(what, "aot_eager", **options), step, 10)

    eager = md.simulate(program, 2, args=("nothing",))
    for what in ("module", "wrapper"):
        torch._dynamo.reset()
        for pair in zip(md.simulate(program, 2, args=(what,)), eager, strict=True):
            torch.testing.assert_close(*pair)


def test_each_rank_splits_at_its_own_buckets(events: list[str]) -> None:
    """torch keeps what it reads in one place of the process, where simulated ranks take turns."""

    def program() -> int:
        mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        found = []

        class Told(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for _ in range(3):
                    md.barrier()
                    found.append(TorchDDP._get_active_ddp_module().bucket_bytes_cap)
                return x

        net = nn.Sequential(nn.Linear(2, 2), Told())
        model = md.DDP(net, device_mesh=mesh["b"], bucket_cap_mb=2 + md.get_rank())
        model(torch.ones(1, 2)).sum().backward()
        (cap,) = set(found)
        return cap

    assert md.simulate(program, 2) == [2 * MIB, 3 * MIB]
    assert TorchDDP._get_active_ddp_module() is None


def test_an_error_in_a_forward_ends_the_split(events: list[str]) -> None:
    class Raises(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    def program() -> None:
        with pytest.raises(ZeroDivisionError):
            md.DDP(Raises(2, 2))(torch.ones(1, 2))

    md.simulate(program, 2)
    assert TorchDDP._get_active_ddp_module() is None


@pytest.mark.parametrize(
    ("what", "backend"),
    [
        ("wrapper", "shm"),
        ("wrapper", "gloo"),
        ("step with unused parameters", "shm"),
        pytest.param("step", "shm", marks=pytest.mark.soak),
        pytest.param("step", "gloo", marks=pytest.mark.soak),
    ],
)
def test_compiled_training_on_processes(pool: Pool, what: str, backend: str) -> None:
    def program() -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch._dynamo.reset()
            mesh = md.init_device_mesh("cpu", (2,), backend_override={0: backend})
            assert md.get_backend(mesh.get_group()) == backend
            plain = gradients(md.DDP(Net(), device_mesh=mesh))
            if what == "wrapper":
                model = torch.compile(md.DDP(Net(), device_mesh=mesh), backend="aot_eager")
                compiled = gradients(model)
            else:  # torch warns of any graph behind which another begins
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
                unused = "unused" in what
                model = md.DDP(Net(), device_mesh=mesh, find_unused_parameters=unused)
                step = torch.compile(backward, backend="aot_eager")
                compiled = gradients(model, step)
        return all(torch.equal(*pair) for pair in zip(compiled, plain, strict=True))

    assert pool.run(program, 2, timeout_s=120) == [True, True]


def test_compiled_autograd_is_rejected(pool: Pool) -> None:
    def program() -> str:
        from torch._dynamo import compiled_autograd

        torch._dynamo.reset()
        model = md.DDP(nn.Linear(3, 3))
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(md.GradientError) as caught,
        ):
            backward(model, torch.ones(2, 3))
        return str(caught.value)

    for text in pool.run(program, 2, timeout_s=120):
        assert text.startswith(
            "compiled autograd cannot run the backward of a DistributedDataParallel\n"
        )
        assert "fix:      leave torch._dynamo.config.compiled_autograd off" in text
