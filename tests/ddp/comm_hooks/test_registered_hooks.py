"""A hook is checked when it is registered and when it answers; its callbacks run in order."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshdist as md
from meshdist.ddp.comm_hooks.registered_hooks import hook_name
from meshdist.errors import ArgumentError, GradientError, KindError, MeshdistError
from tests.ddp.models import Fragile, Two
from tests.pool import Pool

FutureOfTensor = torch.futures.Future[torch.Tensor]


def average(state: Any, bucket: md.GradBucket) -> FutureOfTensor:
    work = md.all_reduce(bucket.buffer(), md.ReduceOp.AVG, group=bucket.group(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def wrapped(hook: Any, state: Any = None, size: int = 1, **options: Any) -> md.DDP:
    torch.manual_seed(0)
    layers = [nn.Linear(1, 1, bias=False) for _ in range(size)]
    model = md.DDP(nn.Sequential(*layers), **options)
    model.register_comm_hook(state, hook)
    return model


def step(model: md.DDP) -> list[float]:
    """The gradients of one step whose input is the rank's number and 1."""
    model.zero_grad()
    model(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()
    return [parameter.grad.item() for parameter in model.parameters()]


def done_with(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


# -- what a hook is given, and may give back ------------------------------------------------------


def test_a_hook_sees_each_bucket_in_order() -> None:
    def program() -> list[Any]:
        seen: list[Any] = []

        def look(state: Any, bucket: md.GradBucket) -> FutureOfTensor:
            places = (bucket.index(), bucket.is_last(), bucket.buffer().tolist())
            seen.append((*places, state, bucket.group() is md.group.WORLD))
            return average(state, bucket)

        model = wrapped(look, "state", size=2, bucket_cap_mb=1e-6)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        return [step(model), *seen]

    for rank, (grads, *seen) in enumerate(md.simulate(program, 2)):
        assert grads == [1.5, 1.5]
        own = [1.0 + rank]  # not divided
        assert seen == [(0, False, own, "state", True), (1, True, own, "state", True)]


@pytest.mark.parametrize(
    "give",
    [
        lambda tensor: tensor,
        lambda tensor: [tensor],
        lambda tensor: (tensor,),
        lambda tensor: tensor.clone(),
        lambda tensor: tensor.clone().view(-1, 1),
        lambda tensor: tensor.expand(3, 1)[1],
    ],
)
def test_the_averages_may_lie_elsewhere(give: Callable[[torch.Tensor], Any]) -> None:
    def program() -> list[float]:
        def hook(state: Any, bucket: md.GradBucket) -> Any:
            return average(state, bucket).then(lambda done: give(done.value()))

        return step(wrapped(hook))

    assert md.simulate(program, 2) == [[1.5]] * 2


def test_averages_in_the_dtype_of_the_buffer_that_was_set() -> None:
    def program() -> list[float]:
        def hook(state: Any, bucket: md.GradBucket) -> Any:
            bucket.set_buffer(bucket.buffer().half())
            return average(state, bucket)

        return step(wrapped(hook))

    assert md.simulate(program, 2) == [[1.5]] * 2


def test_a_future_made_by_hand_that_a_callback_completes() -> None:
    def program() -> list[float]:
        def hook(state: Any, bucket: md.GradBucket) -> Any:
            made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            average(state, bucket).then(lambda done: made.set_result(done.value()))
            return made

        return step(wrapped(hook))

    assert md.simulate(program, 2) == [[1.5]] * 2


def test_the_hooks_of_torchs_documentation() -> None:
    def encode_and_decode(state: Any, bucket: md.GradBucket) -> FutureOfTensor:
        encoded = bucket.buffer() / 8
        future = dist.all_reduce(encoded, group=md.group.WORLD, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 8)

    def by_the_groups_own_method(group: Any, bucket: md.GradBucket) -> FutureOfTensor:
        return group.allreduce([bucket.buffer().div_(group.size())]).get_future()

    def without_operations(state: Any, bucket: md.GradBucket) -> FutureOfTensor:
        future = done_with(torch.ones_like(bucket.buffer()))
        return future.then(lambda done: done.value() + torch.ones_like(done.value()))

    def program() -> list[Any]:
        hooks = (encode_and_decode, by_the_groups_own_method, without_operations)
        return [step(wrapped(hook)) for hook in hooks]

    assert md.simulate(program, 2) == [[[3.0], [1.5], [2.0]]] * 2


def test_gradients_that_stay_outside_of_the_buckets() -> None:
    def program() -> list[float]:
        model = wrapped(average, gradient_as_bucket_view=False)
        return [*step(model), *step(model)]

    assert md.simulate(program, 2) == [[1.5, 1.5]] * 2


def test_none_as_state_is_the_wrappers_group_and_a_mesh_stays_what_it_is() -> None:
    def program() -> bool:
        seen = []

        def look(state: Any, bucket: md.GradBucket) -> FutureOfTensor:
            seen.append(state)
            return average(state, bucket)

        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        step(wrapped(look, device_mesh=mesh["dp"]))
        step(wrapped(look, mesh["tp"], device_mesh=mesh["dp"]))
        return seen[0] is mesh.get_group("dp") and seen[1] == mesh["tp"]

    assert md.simulate(program, 4) == [True] * 4


def test_a_mesh_as_state_is_a_group_for_ours() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return step(wrapped(md.comm_hooks.fp16_compress_hook, mesh["tp"], device_mesh=mesh["dp"]))

    assert md.simulate(program, 4) == [[1.5], [1.5], [3.5], [3.5]]


def test_any_object_that_can_be_called() -> None:
    class Hook:
        def __call__(self, state: Any, bucket: md.GradBucket) -> Any:
            return average(state, bucket)

    def program() -> list[Any]:
        last = functools.partial(lambda state, bucket, *, more: average(state, bucket), more=1)
        return [step(wrapped(hook)) for hook in (Hook(), last, lambda *both: average(*both))]

    assert md.simulate(program, 2) == [[[1.5]] * 3] * 2
    assert hook_name(Hook()).endswith("Hook") and hook_name(average) == "average"
    assert hook_name(functools.partial(average)) == "average"


# -- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_callbacks_run_where_the_backward_waits_in_the_order_of_the_buckets(
    backend: str, pool: Pool
) -> None:
    def program() -> list[Any]:
        told: list[Any] = []

        def hook(state: Any, bucket: md.GradBucket) -> Any:
            def note(done: Any) -> torch.Tensor:
                told.append((bucket.index(), threading.get_ident() == here))
                md.all_reduce(torch.ones(1 + bucket.index()), group=bucket.group())
                return done.value()

            told.append(f"start {bucket.index()}")
            return average(state, bucket).then(note)

        here = threading.get_ident()
        step(wrapped(hook, size=3, bucket_cap_mb=1e-6))
        return told

    starts = ["start 0", "start 1", "start 2"]
    assert pool.run(program, 2, backend=backend) == [[*starts, (0, True), (1, True), (2, True)]] * 2


# -- what is rejected at registration --------------------------------------------------------------


def of_an_int(state: Any, bucket: int) -> FutureOfTensor:
    raise NotImplementedError


def to_an_int(state: Any, bucket: md.GradBucket) -> int:
    raise NotImplementedError


def of_nothing() -> None:
    raise NotImplementedError


SIGNATURE = "hook(state, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]"


@pytest.mark.parametrize(
    ("hook", "kind", "lines"),
    [
        (
            3,
            KindError,
            [
                "the communication hook is of type int",
                "  where:    rank 0",
                f"  expected: a function: {SIGNATURE}",
                "  fix:      pass the state first, then the hook: register_comm_hook(state, hook)",
            ],
        ),
        (
            of_nothing,
            KindError,
            [
                "communication hook of_nothing does not accept the arguments (state, bucket)",
                "  where:    rank 0",
                f"  expected: {SIGNATURE}",
                "  found:    of_nothing() -> None",
                f"  fix:      define it as {SIGNATURE}",
            ],
        ),
        (
            of_an_int,
            ArgumentError,
            [
                "communication hook of_an_int: bucket is not annotated as a GradBucket",
                "  where:    rank 0",
                f"  expected: {SIGNATURE}",
                "  found:    int",
                "  fix:      annotate it as meshdist.distributed.GradBucket or "
                "torch.distributed.GradBucket, or remove the annotation",
            ],
        ),
        (
            to_an_int,
            ArgumentError,
            [
                "communication hook to_an_int is not annotated to return a Future of a tensor",
                "  where:    rank 0",
                f"  expected: {SIGNATURE}",
                "  found:    int",
                "  fix:      annotate it as torch.futures.Future[torch.Tensor], or remove "
                "the annotation",
            ],
        ),
    ],
)
def test_what_cannot_be_a_hook(hook: Any, kind: type[MeshdistError], lines: list[str]) -> None:
    def program() -> str:
        with pytest.raises(kind) as found:
            wrapped(hook)
        return str(found.value)

    assert md.simulate(program, 1) == ["\n".join(lines)]


@pytest.mark.parametrize(
    ("hook", "state"),
    [
        (md.comm_hooks.powerSGD_hook, "PowerSGDState"),
        (md.comm_hooks.batched_powerSGD_hook, "PowerSGDState"),
        (md.comm_hooks.post_localSGD_hook, "PostLocalSGDState"),
    ],
)
def test_a_hook_that_wants_a_state_is_not_taken_without(hook: Any, state: str) -> None:
    def program() -> str:
        with pytest.raises(KindError) as found:
            md.DDP(nn.Linear(1, 1)).register_comm_hook(None, hook)
        return str(found.value)

    (text,) = md.simulate(program, 1)
    assert text.startswith(f"communication hook {hook.__name__} requires a state\n")
    assert f"expected: a {state}\n  found:    None\n" in text


def test_annotations_that_fit() -> None:
    def as_torch_writes_them(
        state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return average(state, bucket)  # type: ignore[arg-type]

    def of_names_that_are_only_checked(
        state: Unknown,  # type: ignore[name-defined]  # noqa: F821
        bucket: elsewhere.GradBucket,  # type: ignore[name-defined]  # noqa: F821
    ) -> Future[torch.Tensor]:  # type: ignore[name-defined]  # noqa: F821
        return average(state, bucket)

    def program() -> list[Any]:
        return [
            step(wrapped(hook)) for hook in (as_torch_writes_them, of_names_that_are_only_checked)
        ]

    assert md.simulate(program, 2) == [[[1.5], [1.5]]] * 2


def test_a_second_hook_and_a_late_one_are_rejected() -> None:
    def program() -> list[str]:
        told = []
        model = wrapped(average)
        late = md.DDP(nn.Linear(1, 1, bias=False))
        step(late)
        for one in (model, late):
            with pytest.raises(ArgumentError) as found:
                one.register_comm_hook(None, average)
            told.append(str(found.value))
        assert isinstance(found.value, RuntimeError)  # as torch's
        assert step(model) == [1.5]
        return told

    assert md.simulate(program, 2)[1] == [
        "a communication hook is already registered\n"
        "  where:    rank 1, in the world\n"
        "  expected: register_comm_hook() at most once per wrapper\n"
        "  found:    hook average\n"
        "  fix:      call both in one hook, or wrap the model again",
        "cannot register a communication hook after the first backward\n"
        "  where:    rank 1, in the world\n"
        "  expected: register_comm_hook() before gradients are first averaged\n"
        "  fix:      register it right after you wrap the model",
    ]


# -- what is rejected of its answers ---------------------------------------------------------------


def test_a_hook_that_returns_no_future() -> None:
    def program() -> str:
        def hook(state: Any, bucket: md.GradBucket) -> Any:
            return bucket.buffer()

        with pytest.raises(KindError) as found:
            step(wrapped(hook))
        return str(found.value)

    name = "test_a_hook_that_returns_no_future.<locals>.program.<locals>.hook"
    assert md.simulate(program, 2)[1] == (
        f"communication hook {name} did not return a Future\n"
        f"  where:    rank 1, hook {name}, <GradBucket 0: 1 gradients, 1 float32> in the "
        "world\n"
        "  expected: a torch.futures.Future of the averaged tensor\n"
        "  found:    an object of type Tensor\n"
        "  fix:      return work.get_future().then(lambda done: done.value()[0])"
    )


LIKE_IT = "return bucket.buffer(), or a tensor like it, from the last callback"


@pytest.mark.parametrize(
    ("value", "summary", "found", "fix"),
    [
        (
            "x",
            "returned a Future of a value that is not a tensor",
            "an object of type str",
            "return the averaged tensor from the last callback",
        ),
        (torch.ones(2), "returned a tensor of a different shape", "shape (2,)", LIKE_IT),
        (
            torch.ones(1).to_sparse(),
            "returned a tensor of a different shape",
            "shape (1,), layout sparse_coo",
            LIKE_IT,
        ),
        (torch.ones(1).double(), "returned a tensor of a different dtype", "float64", LIKE_IT),
        (torch.ones(1, device="meta"), "returned a tensor on a different device", "meta", LIKE_IT),
    ],
)
def test_a_future_of_something_else(value: Any, summary: str, found: str, fix: str) -> None:
    def program() -> list[str]:
        def hook(state: Any, bucket: md.GradBucket) -> Any:
            return done_with(value)

        model = wrapped(hook)
        with pytest.raises(MeshdistError) as error:
            step(model)
        with pytest.raises(GradientError) as later:
            step(model)
        assert str(error.value).splitlines()[0] in str(later.value)
        return str(error.value).splitlines()

    told, *where = md.simulate(program, 1)[0]
    assert told.startswith("communication hook ") and told.endswith(summary)
    assert "hook, <GradBucket 0: 1 gradients, 1 float32> in the world" in where[0]
    assert where[1].endswith("1 elements, float32, on cpu")
    assert where[2:] == [f"  found:    {found}", f"  fix:      {fix}"]


@pytest.mark.parametrize("place", ["hook", "callback"])
def test_what_a_hook_raises_is_raised_by_the_backward(place: str) -> None:
    def program() -> list[str]:
        def fail(done: Any = None) -> torch.Tensor:
            raise ArithmeticError("too much")

        def hook(state: Any, bucket: md.GradBucket) -> Any:
            return fail() if place == "hook" else average(state, bucket).then(fail)

        model = wrapped(hook)
        with pytest.raises(ArithmeticError) as found:
            step(model)
        with pytest.raises(GradientError) as later:
            step(model)
        return [str(found.value), str(later.value).splitlines()[2].strip()]

    assert md.simulate(program, 2) == [["too much", "found:    too much"]] * 2


def hook_whose_future_stays_empty(state: Any, bucket: md.GradBucket) -> FutureOfTensor:
    never: FutureOfTensor = torch.futures.Future()
    average(state, bucket).then(lambda done: never.set_result(1 / 0))
    return never


def test_a_future_that_nothing_completes(pool: Pool) -> None:
    def program() -> str:
        torch.manual_seed(0)
        group = md.new_group([0, 1], timeout=timedelta(seconds=0.2))
        with pytest.raises(md.CollectiveTimeoutError) as found:
            step(wrapped(hook_whose_future_stays_empty, process_group=group))
        return str(found.value)

    (told, _), (simulated, _) = pool.run(program, 2), md.simulate(program, 2)
    assert told.splitlines()[2:] == [
        "  expected: a Future completed by a callback of the hook's collectives, or by "
        "another thread within 0.2 s",
        "  found:    all collectives that the hook started are complete",
        "  fix:      return the Future that then() returns, which passes on a callback's "
        "error, instead of calling set_result() in the callback",
    ]
    for text in (told, simulated):
        assert text.startswith(
            "communication hook hook_whose_future_stays_empty returned a Future that was "
            "never completed\n"
            "  where:    rank 0, hook hook_whose_future_stays_empty, <GradBucket 0"
        )


def test_a_future_that_another_thread_completes(pool: Pool) -> None:
    def program() -> list[float]:
        def hook(state: Any, bucket: md.GradBucket) -> Any:
            later: FutureOfTensor = torch.futures.Future()
            threading.Timer(0.05, lambda: later.set_result(bucket.buffer().zero_())).start()
            return later

        return step(wrapped(hook))

    assert pool.run(program, 2) == [[0.0]] * 2


# -- flags, which travel by themselves ------------------------------------------------------------


@pytest.mark.parametrize("backend", ["simulated", "shm", "gloo"])
def test_a_backward_that_raises_on_one_rank_is_told_on_all(backend: str, pool: Pool) -> None:
    def program() -> list[Any]:
        model = md.DDP(Fragile(), bucket_cap_mb=1e-6)
        model.register_comm_hook(None, md.comm_hooks.fp16_compress_hook)
        x, told = torch.ones(1, 1), []
        for fails in (False, md.get_rank() == 1, False):
            model.zero_grad()
            try:
                model(x, fails).sum().backward()
                model.check_gradients()
            except ArithmeticError:
                told.append("its own")
                with pytest.raises(GradientError) as found:
                    model.check_gradients()
                told.append(found.value.found)
            except GradientError as error:
                told.append(error.found)
            else:
                told.append([one.grad.item() for one in model.parameters()])
        return told

    runs = {
        "simulated": lambda: md.simulate(program, 2),
        "shm": lambda: pool.run(program, 2, backend="shm"),
        "gloo": lambda: pool.run(program, 2),
    }
    cut = "rank 1: an exception was raised inside backward()"
    good = [1.0, 1.0]
    assert runs[backend]() == [[good, cut, good], [good, "its own", cut, good]]


def test_a_parameter_without_a_gradient_is_told_on_all() -> None:
    def program() -> list[str]:
        model = md.DDP(Two())
        model.register_comm_hook(None, average)
        model(torch.ones(1, 1), "left" if md.get_rank() == 1 else "both").backward()
        with pytest.raises(GradientError) as found:
            model.check_gradients()
        return [found.value.found]

    assert md.simulate(program, 2) == [["rank 1: right.weight (index 1)"]] * 2


# -- copies ---------------------------------------------------------------------------------------


def test_a_copy_has_no_hook() -> None:
    def program() -> tuple[list[float], list[float], int]:
        seen: list[int] = []

        def counting(state: Any, bucket: md.GradBucket) -> Any:
            seen.append(bucket.index())
            return average(state, bucket)

        model = wrapped(counting)
        other = copy.deepcopy(model)
        grads = step(other), step(model)
        other_again = copy.deepcopy(model)
        other_again.register_comm_hook(None, average)
        assert step(other_again) == [1.5]
        return (*grads, len(seen))

    assert md.simulate(program, 2) == [([1.5], [1.5], 1)] * 2
