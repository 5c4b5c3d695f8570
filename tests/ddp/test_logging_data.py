"""What a wrapper tells about itself: torch's fields, with torch's values where no time is told."""

from __future__ import annotations

import copy
import gc
import json
import logging
import re
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.ddp import logging_data
from meshdist.ddp.logging_data import Timing, has_sync_batch_norm
from tests.pool import Pool, places

TIMES = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)
MOMENTS = (
    "forward_compute_time_start",
    "backward_compute_time_start",
    "backward_compute_time_end",
    "backward_comm_time_start",
    "backward_comm_time_end",
)
AFTER_AN_ITERATION = {*TIMES, *MOMENTS, *(f"avg_{name}" for name in TIMES)} | {
    "unused_parameter_size",
    "num_buckets_reduced",
    "prev_iteration_grad_ready_order_indices",
    "has_rebuilt_buckets",
}
REBUILT = {"rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"}


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 3)
        self.third = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor, is_third_used: bool = True) -> torch.Tensor:
        y = self.second(self.first(x)).sum()
        return y + self.third(x).sum() if is_third_used else y


def step(model: nn.Module, *args: Any) -> None:
    model(torch.ones(1, 2), *args).sum().backward()


# -- torch's own wrapper is the second opinion ----------------------------------------------------

BESIDE_TORCH = """
import json
import warnings
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import meshdist as md

warnings.simplefilter("ignore")
torch.distributed.init_process_group("gloo")
md.init_process_group()  # adopts torch's world


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(4, 300, dtype=torch.float64)
        self.low = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.rest = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, is_used=True):
        y = self.wide(x.double()).sum() + self.low(x.bfloat16()).sum()
        return y + self.norm(self.rest(x)).sum() if is_used else y


CASES = [
    (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), {}, [()] * 5),
    (Mixed, {"bucket_cap_mb": 2, "broadcast_buffers": False}, [()] * 4),
    (Mixed, {"static_graph": True, "gradient_as_bucket_view": True}, [(False,)] * 4),
    (Mixed, {"find_unused_parameters": True}, [(), (), (False,), (), ()]),
]
for make, options, calls in CASES:
    told = []
    for kind in (DistributedDataParallel, md.DDP):
        torch.manual_seed(0)
        model = kind(make(), **{"gradient_as_bucket_view": False} | options)
        told.append([model._get_ddp_logging_data()])
        for call in calls:
            model(torch.ones(2, 4), *call).sum().backward()
            told[-1].append(model._get_ddp_logging_data())
        del model
    print(json.dumps(told))
md.destroy_process_group()
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def beside_torch(pool: Pool) -> list[list[list[dict[str, Any]]]]:
    """What torch's wrapper and ours tell after each step, for each case."""
    (done,) = pool.start(BESIDE_TORCH, places(1), has_teardown=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[set[str], set[str], set[str]]:
    """What torch tells alone, what we tell alone, and what differs and is no time."""
    both = theirs.keys() & ours.keys()
    differing = {name for name in both if theirs[name] != ours[name] and "_time" not in name}
    return {*theirs} - both, {*ours} - both, differing


def test_torch_tells_the_same_of_a_plain_model(beside_torch: Any) -> None:
    made, first, second, third, *_ = map(compare, *beside_torch[0])
    assert made == first == (set(), set(), set())
    assert second == third == (set(), {"can_set_static_graph"}, set())


def test_torch_tells_the_same_of_dtypes_and_sizes(beside_torch: Any) -> None:
    theirs, ours = beside_torch[1]
    made, first, second, third, _ = map(compare, theirs, ours)
    assert made == first == (set(), set(), set())
    assert second == (set(), {"can_set_static_graph"}, set())
    # Within a bucket large gradients lie before small ones here.
    assert third[:2] == (set(), {"can_set_static_graph"})
    assert third[2] <= {"rebuilt_per_bucket_param_indices", "rebuilt_bucket_sizes"}
    sizes = [sorted(one[-1]["rebuilt_bucket_sizes"].split(", ")) for one in (theirs, ours)]
    assert sizes[0] == sizes[1]
    assert ours[0]["dtypes"] == "c10::BFloat16, double, float"
    assert (ours[0]["bucket_cap_bytes"], ours[0]["broadcast_buffers"]) == (2 << 20, 0)


def test_torch_tells_the_same_of_a_static_graph(beside_torch: Any) -> None:
    theirs, ours = beside_torch[2]
    assert compare(theirs[0], ours[0]) == (set(), set(), set())
    theirs, ours = theirs[-1], ours[-1]
    # Torch's arrivals are those of the second backward, since the first one only counts.
    assert compare(theirs, ours)[:2] == (set(), {"can_set_static_graph"})
    assert ours["static_graph"] == theirs["static_graph"] == 1
    assert ours["unused_parameter_size"] == theirs["unused_parameter_size"] == 4 * (16 + 4 + 4 + 4)


def test_torch_tells_the_same_of_unused_parameters(beside_torch: Any) -> None:
    theirs, ours = beside_torch[3]
    assert compare(theirs[0], ours[0]) == (set(), set(), set())
    for one, other in zip(theirs[1:], ours[1:], strict=True):
        # Torch lays its buckets once here, and is silent about a static graph.
        alone, added, differing = compare(one, other)
        assert alone == set() and added <= {"can_set_static_graph", *REBUILT}
        assert differing <= {"has_rebuilt_buckets"}
    assert [one.get("unused_parameter_size") for one in ours] == [None, None, 0, 0, 112, 0]
    assert [one.get("can_set_static_graph") for one in ours] == [None, None, 1, 1, 0, 0]


# -- when the model is wrapped --------------------------------------------------------------------


def test_facts_of_each_rank() -> None:
    def program() -> dict[str, Any]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        return md.DDP(Parts(), device_mesh=mesh["dp"])._get_ddp_logging_data()

    told = md.simulate(program, 4)
    assert [(one["rank"], one["world_size"]) for one in told] == [(0, 2), (1, 2)] * 2
    assert told[0] | {"rank": 1} == told[1]
    expected = {
        "module_name": "Parts",
        "backend_name": "simulated",
        "num_parameter_tensors": 5,
        "total_parameter_size_bytes": 4 * (4 + 2 + 6 + 3 + 2),
        "dtypes": "float",
        "device_ids": "",
        "output_device": -1,
        "broadcast_buffers": 1,
        "find_unused_parameters": 0,
        "gradient_as_bucket_view": 1,
        "is_multi_device_module": 0,
        "has_sync_bn": 0,
        "bucket_cap_bytes": 25 << 20,
        "bucket_sizes": "68",
        "iteration": 0,
    }
    assert {name: told[0][name] for name in expected} == expected
    assert not any(name.startswith(("gloo_", "nccl_")) for name in told[0])


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "master_addr": "MASTER_ADDR",
        "master_port": "MASTER_PORT",
        "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
        "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    }

    def program() -> list[str]:
        told = md.DDP(Parts())._get_ddp_logging_data()
        return [told[name] for name in names]

    for variable in names.values():
        monkeypatch.delenv(variable, raising=False)
    assert md.simulate(program, 1) == [["N/A"] * 4]
    for variable in names.values():
        monkeypatch.setenv(variable, f"the {variable}")
    assert md.simulate(program, 1) == [[f"the {variable}" for variable in names.values()]]


@pytest.mark.parametrize(
    ("wire", "names"),
    [
        (
            "nccl",
            "nccl_socket_ifname nccl_blocking_wait nccl_async_error_handling nccl_debug "
            "nccl_nthreads nccl_ib_timeout",
        ),
        ("gloo", "gloo_socket_ifname gloo_device_transport gloo_num_threads"),
        ("shm", ""),
    ],
)
def test_variables_of_the_wire(wire: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NTHREADS", "64")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def program() -> dict[str, Any]:
        model = md.DDP(Parts())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model.process_group), "wire_name", lambda *_: wire)
            model.logger.use_group(model.reducer.layout)
        return model._get_ddp_logging_data()

    (told,) = md.simulate(program, 1)
    ours = {name: told[name] for name in told if name.startswith(("gloo_", "nccl_"))}
    assert ours.keys() == {*names.split()}
    assert told["backend_name"] == wire
    if wire == "nccl":
        assert ours["nccl_nthreads"] == "64"
    if wire == "gloo":
        assert (ours["gloo_socket_ifname"], ours["gloo_num_threads"]) == ("N/A", 2)


def test_which_models_have_synchronised_norms() -> None:
    class Own(nn.SyncBatchNorm):
        pass

    assert has_sync_batch_norm(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    assert has_sync_batch_norm(md.SyncBatchNorm(2))
    assert has_sync_batch_norm(nn.Sequential(Own(2)))
    assert not has_sync_batch_norm(nn.Sequential(nn.BatchNorm1d(2)))


def test_another_group_and_a_copy() -> None:
    def program() -> Any:
        model = md.DDP(Parts())
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        for _ in range(3):
            step(model)
        before = model._get_ddp_logging_data()
        model._update_process_group(mesh["dp"])
        other = copy.deepcopy(model)
        step(other)
        assert other.logger is not model.logger
        after = model._get_ddp_logging_data()
        return before["world_size"], after["world_size"], after["rank"], after["iteration"]

    assert [told[:2] for told in md.simulate(program, 4)] == [(4, 2)] * 4
    assert [told[2:] for told in md.simulate(program, 4)] == [(0, 2), (1, 2)] * 2


def test_uneven_inputs_are_told() -> None:
    def program() -> list[bool]:
        model = md.DDP(Parts())
        told = ["join_uneven_inputs" in model._get_ddp_logging_data()]
        with model.join():
            step(model)
        return [*told, "join_uneven_inputs" in model._get_ddp_logging_data()]

    assert md.simulate(program, 2) == [[False, True]] * 2


# -- iterations -----------------------------------------------------------------------------------


def test_which_iterations_are_sampled() -> None:
    def program() -> list[int]:
        model = md.DDP(Parts())
        model._set_ddp_runtime_logging_sample_rate(3)
        seen = []
        for number in range(20):
            if number == 5:  # these are no iterations, as for torch
                with model.no_sync():
                    step(model)
                with torch.no_grad():
                    model(torch.ones(1, 2))
            step(model)
            seen.append(model._get_ddp_logging_data()["iteration"])
        return seen

    told = [*range(11), 10, 12, 12, 12, 15, 15, 15, 18, 18]
    assert md.simulate(program, 2) == [told] * 2


def test_every_hundredth_is_sampled_by_default() -> None:
    def program() -> list[int]:
        model = md.DDP(nn.Linear(2, 1))
        seen = []
        for _ in range(102):
            step(model)
            seen.append(model._get_ddp_logging_data()["iteration"])
        return seen

    assert md.simulate(program, 1) == [[*range(11), *[10] * 89, 100, 100]]


@pytest.mark.parametrize("rate", [0, -3])
def test_a_rate_below_one_is_refused(rate: int) -> None:
    def program() -> Any:
        model = md.DDP(Parts())
        with pytest.raises(ValueError, match=f"the sample rate is {rate}\n") as caught:
            model._set_ddp_runtime_logging_sample_rate(rate)
        return caught.value

    (error,) = md.simulate(program, 1)
    assert isinstance(error, md.ArgumentError)
    assert error.expected == "1 or more: iterations whose number it divides are measured"
    assert error.fix == "pass 1 to measure every iteration"


@pytest.mark.parametrize("rate", [1.5, "3", True, None])
def test_a_rate_that_is_no_number_is_refused(rate: Any) -> None:
    def program() -> Any:
        model = md.DDP(Parts())
        with pytest.raises(TypeError, match="the sample rate must be a whole number") as caught:
            model._set_ddp_runtime_logging_sample_rate(rate)
        return caught.value

    (error,) = md.simulate(program, 1)
    assert isinstance(error, md.KindError)
    assert error.found == f"{rate!r}, a {type(rate).__name__}"


def test_times_follow_each_other_and_are_averaged() -> None:
    class Slow(nn.Module):
        """0.02 s forward, 0.03 s backward."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            x = self.layers[0](x)
            x.register_hook(lambda _: time.sleep(0.03))
            return self.layers[2](self.layers[1](x))

    def program() -> list[dict[str, Any]]:
        model = md.DDP(Slow(), bucket_cap_mb=0.1)
        told = []
        for _ in range(5):
            model(torch.ones(1, 200)).sum().backward()
            told.append(model._get_ddp_logging_data())
        return told

    for seen in md.simulate(program, 2):
        assert not AFTER_AN_ITERATION & seen[0].keys()
        assert seen[1].keys() >= AFTER_AN_ITERATION
        assert not REBUILT & seen[1].keys() and seen[2].keys() >= REBUILT
        for one in seen[1:]:
            assert one["forward_compute_time"] >= 20e6
            assert one["backward_compute_time"] >= 30e6
            order = [one[name] for name in MOMENTS[:3]]
            assert order == sorted(order)
            assert one["backward_comm_time_start"] < one["backward_comm_time_end"]
        for name in TIMES:
            mean = sum(one[name] for one in seen[1:]) / 4
            assert abs(seen[-1][f"avg_{name}"] - mean) <= 4  # each step rounds
        # The first backward is watched: all is sent behind it. Then the last layers go early.
        assert seen[1]["backward_compute_comm_overlap_time"] == 0
        for one in seen[2:]:
            assert one["backward_compute_comm_overlap_time"] >= 30e6
            assert one["backward_compute_comm_overlap_time"] <= one["backward_compute_time"]
            assert one["backward_compute_comm_overlap_time"] <= one["backward_comm_time"]


def test_buckets_and_the_order_of_gradients() -> None:
    def program() -> dict[str, Any]:
        model = md.DDP(Parts(), bucket_cap_mb=3e-5)  # 31 bytes
        for _ in range(3):
            step(model)
        return model._get_ddp_logging_data()

    for told in md.simulate(program, 2):
        order = [int(one) for one in told["prev_iteration_grad_ready_order_indices"].split(", ")]
        buckets = [
            [int(index) for index in one.split(" ")]
            for one in told["rebuilt_per_bucket_param_indices"].split(", ")
        ]
        sizes = [16, 8, 24, 12, 8]
        assert sorted(order) == [0, 1, 2, 3, 4]
        assert [index for bucket in buckets for index in bucket] == order
        assert told["num_buckets_reduced"] == len(buckets) > 1
        expected = ", ".join(str(sum(sizes[index] for index in bucket)) for bucket in buckets)
        assert told["rebuilt_bucket_sizes"] == expected
        assert told["has_rebuilt_buckets"] == 1
        assert order.index(3) < order.index(1)  # the second layer's come before the first one's


def test_what_is_unused_here() -> None:
    def program() -> list[tuple[Any, ...]]:
        model = md.DDP(Parts(), find_unused_parameters=True)
        told = []
        for is_used in (True, md.get_rank() == 0, True, True):
            step(model, is_used)
            one = model._get_ddp_logging_data()
            order = one.get("prev_iteration_grad_ready_order_indices", "")
            told.append((one.get("unused_parameter_size"), "4" in order))
        return told

    first, second = md.simulate(program, 2)
    assert first == [(None, False), (0, True), (0, True), (0, True)]
    assert second == [(None, False), (0, True), (8, False), (0, True)]


@pytest.mark.parametrize("uses", ["same", "varies", "varies late"])
def test_whether_the_graph_is_static(uses: str) -> None:
    def program() -> tuple[int, int]:
        model = md.DDP(Parts(), find_unused_parameters=True)
        for number in range(14):
            is_used = {"same": False, "varies": number != 3, "varies late": number != 12}[uses]
            step(model, is_used)
        told = model._get_ddp_logging_data()
        model._set_ddp_runtime_logging_sample_rate(1)
        for _ in range(2):
            step(model, uses != "same")
        return told["can_set_static_graph"], model._get_ddp_logging_data()["can_set_static_graph"]

    expected = {"same": (1, 1), "varies": (0, 0), "varies late": (1, 0)}[uses]
    assert md.simulate(program, 2) == [expected] * 2


def test_a_forward_without_a_backward_has_its_own_time_alone() -> None:
    def program() -> dict[str, Any]:
        model = md.DDP(nn.Linear(2, 1))
        model(torch.ones(1, 2))
        step(model)
        return model._get_ddp_logging_data()

    (told,) = md.simulate(program, 1)
    assert told["forward_compute_time"] > 0 and told["iteration"] == 1
    assert [told[name] for name in TIMES[1:]] == [0, 0, 0]
    assert told.keys().isdisjoint(MOMENTS[1:])


def test_what_is_not_sampled_has_nothing_to_note_on() -> None:
    def program() -> int:
        made = 0

        class Counted(Timing):
            def __init__(self, *args: Any, **options: Any) -> None:
                nonlocal made
                made += 1
                super().__init__(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logging_data, "Timing", Counted)
            model = md.DDP(nn.Linear(2, 1))
            for _ in range(50):
                step(model)
        return made

    assert md.simulate(program, 1) == [10]


def test_old_buckets_are_let_go() -> None:
    def program() -> bool:
        model = md.DDP(Parts())
        old = weakref.ref(model.reducer.buckets[0])
        step(model)
        assert old() is not None
        step(model)
        gc.collect()
        return old() is None

    assert md.simulate(program, 1) == [True]


# -- what else is told ----------------------------------------------------------------------------


def test_a_promise_of_a_static_graph() -> None:
    def program() -> list[int | None]:
        model = md.DDP(Parts())
        before = model._get_ddp_logging_data().get("static_graph")
        model._set_static_graph()
        return [before, model._get_ddp_logging_data()["static_graph"]]

    assert md.simulate(program, 1) == [[None, 1]]


def test_the_error_that_the_wrapper_raised() -> None:
    def program() -> Any:
        model = md.DDP(Parts())
        step(model)
        assert "has_error" not in model._get_ddp_logging_data()
        step(model, False)
        with pytest.raises(md.errors.GradientError) as caught:
            step(model)
        return str(caught.value), model._get_ddp_logging_data()

    for text, told in md.simulate(program, 2):
        assert "parameters got no gradient" in text
        assert (told["has_error"], told["error"]) == (1, text)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")  # once in a process
def test_an_error_inside_the_backward() -> None:
    def program() -> Any:
        model = md.DDP(nn.Linear(2, 1))
        with pytest.raises(md.errors.GradientError) as caught:
            model(torch.ones(1, 2)).sum().backward(create_graph=True)
        return str(caught.value) == model._get_ddp_logging_data()["error"]

    assert md.simulate(program, 1) == [True]


def test_a_communication_hook() -> None:
    class Averaging:
        def __call__(self, state: object, bucket: Any) -> Any:
            return md.comm_hooks.allreduce_hook(state, bucket)

    def program(hook: Any) -> Any:
        model = md.DDP(nn.Linear(2, 1))
        before = model._get_ddp_logging_data()
        model.register_comm_hook(None, hook)
        for _ in range(3):
            step(model)
        told = model._get_ddp_logging_data()
        return before.get("comm_hook"), told["comm_hook"], told["backward_comm_time"] > 0

    assert (
        md.simulate(program, 2, (md.comm_hooks.allreduce_hook,))
        == [(None, "allreduce_hook", True)] * 2
    )
    (told,) = md.simulate(program, 1, (Averaging(),))
    assert told == (None, Averaging.__qualname__, True)


def test_a_hook_that_is_refused() -> None:
    def program() -> Any:
        model = md.DDP(nn.Linear(2, 1))
        with pytest.raises(md.errors.MeshdistError) as caught:
            model.register_comm_hook(None, 7)
        told = model._get_ddp_logging_data()
        return told["error"] == str(caught.value), "comm_hook" in told

    assert md.simulate(program, 1) == [(True, False)]


def test_data_are_a_copy() -> None:
    def program() -> int:
        model = md.DDP(nn.Linear(2, 1))
        model._get_ddp_logging_data()["rank"] = 7
        return model._get_ddp_logging_data()["rank"]

    assert md.simulate(program, 1) == [0]


# -- the log --------------------------------------------------------------------------------------


def lines_at(level: str, caplog: pytest.LogCaptureFixture, num_steps: int) -> list[str]:
    def program() -> None:
        model = md.DDP(nn.Linear(2, 1))
        for _ in range(num_steps):
            step(model)

    md.set_debug_level(md.DebugLevel.__members__[level])
    with caplog.at_level(logging.INFO, logger="meshdist.ddp"):
        md.simulate(program, 1)
    return [record.getMessage() for record in caplog.records if record.name == "meshdist.ddp"]


def test_nothing_is_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_at("OFF", caplog, 3) == []


def test_at_info_facts_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_at("INFO", caplog, 3)
    head, *fields = line.splitlines()
    assert head == "[rank 0]: DDP is made with"
    assert fields == sorted(fields) and len(fields) == 21
    assert "module_name: Linear" in fields and "total_parameter_size_bytes: 12" in fields


def test_at_detail_sampled_iterations_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    first, *rest = lines_at("DETAIL", caplog, 14)
    assert first.startswith("[rank 0]: DDP is made with\n")
    assert len(rest) == 10
    pattern = (
        r"\[rank 0 of 1, iteration (\d+)\]: training Linear, unused_parameter_size 0; on average, "
        r"in ns: forward \d+, backward \d+, communication \d+, overlap \d+"
    )
    matches = [re.fullmatch(pattern, line) for line in rest]
    assert [match and int(match[1]) for match in matches] == [*range(1, 11)]


# -- accelerators ---------------------------------------------------------------------------------


class Accelerator:
    """Has the names of ``torch.cuda``; its events are 1.5 ms apart."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.awaited: list[int] = []

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.accelerator.num_recorded += 1
        self.place = self.accelerator.num_recorded

    def synchronize(self) -> None:
        self.accelerator.awaited.append(self.place)

    def elapsed_time(self, later: Event) -> float:
        assert later.place in self.accelerator.awaited
        return 1.5 * (later.place - self.place)


def test_a_device_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda _: accelerator)
    timing = Timing(torch.device("cuda", 1))
    for name in (
        "forward_compute_time_start",
        "forward_compute_time_end",
        "backward_compute_time_start",
    ):
        timing.mark(name)
    timing.backward_begins()
    for name in ("backward_comm_time_start", "backward_compute_time_end", "backward_comm_time_end"):
        timing.mark(name)
    assert accelerator.awaited == []  # nothing waits for the device before it is asked
    assert [timing.times()[name] for name in TIMES] == [1_500_000, 3_000_000, 3_000_000, 1_500_000]
    assert all(moment > 1e18 for moment in timing.moments().values())  # the host's clock


def test_a_model_on_several_devices_has_no_times() -> None:
    timing = Timing(torch.device("cpu"), is_timed=False)
    timing.mark("forward_compute_time_start")
    timing.mark("forward_compute_time_end")
    assert [*timing.times().values()] == [0, 0, 0, 0] and timing.moments() == {}


def test_nothing_is_told_while_a_graph_is_captured() -> None:
    def program() -> list[Any]:
        model = md.DDP(nn.Linear(2, 1))
        step(model)
        step(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logging_data, "is_capturing", lambda _: True)
            model.logger.iteration_begins(model.reducer.layout)
        return [model.logger._timing, model._get_ddp_logging_data()["iteration"]]

    assert md.simulate(program, 1) == [[None, 1]]
