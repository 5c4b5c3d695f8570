"""A sample of what the library promises, over two hosts: collectives, DDP, a lost rank, the demo.

All of the collectives' suite, and the demo under both launchers, run over them in ``make soak``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.dtypes import dtype_name
from tests.faults.outcomes import named_ranks
from tests.operations.cases import judge, perform_all, sample
from tests.pool import Failure
from tests.two_hosts import TwoHosts, places_on

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "train_lm.py"
TINY = (
    "--mesh=dp=2,tp=2 --check --layers=2 --width=32 --heads=4 --context=16 --batch=4 --lr=1e-2 "
    "--sample=8 --steps=3"
)
LAUNCHERS = {
    "torchrun": (
        "from torch.distributed.run import main; main()",
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host-a:29400",
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host-a:29400",
    ),
    "meshdist": (
        "from meshdist.cli.main import main; sys.exit(main())",
        "meshdist run -n 2 --nnodes 2 --node-rank 0 --master-addr host-a",
        "meshdist run -n 2 --nnodes 2 --node-rank 1 --master-addr host-a",
    ),
}


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_collectives(backend: str | None, two_hosts: TwoHosts) -> None:
    cases = sample(4, 2)
    found = two_hosts.run(perform_all, 4, cases, backend=backend, timeout_s=120.0)
    judge("two hosts", cases, found)


def test_a_wrapper_averages_over_hosts(two_hosts: TwoHosts) -> None:
    def program() -> list[list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
        wrapped, plain = md.DDP(model), [one.detach().clone() for one in model.parameters()]
        batch = torch.arange(12.0).reshape(4, 3)
        wrapped(batch[md.get_rank()]).sum().backward()
        hidden = batch @ plain[0].T + plain[1]
        expected = hidden.mean(0)  # of the last layer's weight: the inputs' mean
        found = model[1].weight.grad
        assert isinstance(found, torch.Tensor)
        return [found.flatten().tolist(), expected.tolist()]

    for found, expected in two_hosts.run(program, 4):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_rank_that_is_killed_on_the_other_host_is_named(two_hosts: TwoHosts) -> None:
    def program() -> str:
        md.all_reduce(torch.ones(1000))
        if md.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(md.MeshdistError) as caught:
            md.all_reduce(torch.ones(1000))
        return str(caught.value)

    *others, lost = two_hosts.outcomes(program, 4, backend=None, timeout_s=60.0)
    assert isinstance(lost, Failure)
    for text in others:
        assert not isinstance(text, Failure), text.exception
        assert "rank 3" in text


# -- calls that differ ----------------------------------------------------------------------------

Call = Callable[[Any], Any]
X, N = torch.ones(4), 4  # on four ranks


def lists_of(group: Any) -> list[torch.Tensor] | None:
    return [X.clone() for _ in range(N)] if group.rank() == 0 else None


def objects_of(group: Any) -> list[Any] | None:
    return [None] * N if group.rank() == 0 else None


BY_OPERATION: dict[str, Call] = {
    "all_reduce": lambda g: md.all_reduce(X.clone(), group=g),
    "all_reduce_coalesced": lambda g: md.all_reduce_coalesced([X.clone()], group=g),
    "reduce": lambda g: md.reduce(X.clone(), 0, group=g),
    "reduce_scatter_single": lambda g: md.reduce_scatter_single(X.clone(), X.repeat(N), group=g),
    "reduce_scatter": lambda g: md.reduce_scatter(X.clone(), [X] * N, group=g),
    "broadcast": lambda g: md.broadcast(X.clone(), 0, group=g),
    "all_gather_single": lambda g: md.all_gather_single(X.repeat(N), X, group=g),
    "all_gather": lambda g: md.all_gather([X.clone() for _ in range(N)], X, group=g),
    "all_gather_coalesced": lambda g: md.all_gather_coalesced(
        [[X.clone()] for _ in range(N)], [X], group=g
    ),
    "gather": lambda g: md.gather(X, lists_of(g), 0, group=g),
    "scatter": lambda g: md.scatter(X.clone(), lists_of(g), 0, group=g),
    "all_to_all": lambda g: md.all_to_all([X.clone() for _ in range(N)], [X] * N, group=g),
    "all_to_all_single": lambda g: md.all_to_all_single(X.clone(), X, group=g),
    "barrier": lambda g: md.barrier(g),
    "all_reduce_multigpu": lambda g: md.all_reduce_multigpu([X.clone()], group=g),
    "reduce_multigpu": lambda g: md.reduce_multigpu([X.clone()], 0, group=g),
    "broadcast_multigpu": lambda g: md.broadcast_multigpu([X.clone()], 0, group=g),
    "all_gather_multigpu": lambda g: md.all_gather_multigpu(
        [[X.clone() for _ in range(N)]], [X], group=g
    ),
    "all_gather_object": lambda g: md.all_gather_object([None] * N, "a", group=g),
    "gather_object": lambda g: md.gather_object("a", objects_of(g), 0, group=g),
    "broadcast_object_list": lambda g: md.broadcast_object_list(["a"], 0, group=g),
    "scatter_object_list": lambda g: md.scatter_object_list([None], ["a"] * N, 0, group=g),
}
OPS = {
    name: getattr(md.ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
BY_OP: dict[str, Call] = {
    f"{name})": lambda g, op=op: md.all_reduce(X.int(), op, group=g)
    for name, op in {**OPS, "PREMUL_SUM": md.ReduceOp.premul_sum(2)}.items()
}
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e5m2, torch.float8_e4m3fn),
)
BY_DTYPE: dict[str, Call] = {
    f" {dtype_name(dtype)}": lambda g, dtype=dtype: md.broadcast(torch.ones(4).to(dtype), 0, g)
    for dtype in DTYPES
}
BY_SIZE: dict[str, Call] = {
    f"({size},)": lambda g, size=size: md.all_reduce(torch.ones(size), group=g)
    for size in (0, 1, 3, 4, 1000, 100_000)
}
TABLES = {"operations": BY_OPERATION, "ops": BY_OP, "dtypes": BY_DTYPE, "sizes": BY_SIZE}


def met(table: str, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """How this rank learns that the hosts have called the first and the second of each pair."""
    found = []
    for pair in pairs:
        group = md.new_group(timeout=timedelta(seconds=30))
        md.all_reduce(torch.ones(4), group=group)
        try:
            TABLES[table][pair[md.get_rank() // 2]](group)
            for _ in range(20):
                md.all_reduce(torch.ones(4), group=group)
            md.destroy_process_group(group)
            found.append(("silence", ""))
        except md.MeshdistError as error:
            found.append((type(error).__name__, str(error)))
    return found


def complaint(pair: tuple[str, str], told: Sequence[Any], may_end: bool) -> str:
    """What is wrong with how the ranks have learned of one pair; "" for nothing.

    Args:
        told: by rank, the class and the text of its error; None where its process has ended.
        may_end: whether the calls may send messages of different sizes, at which torch's Gloo ends
            the process that is sent more than it expects.
    """
    alive = [one for one in told if one is not None]
    texts = {
        "\n".join(line for line in text.splitlines() if "raised on rank" not in line)
        for _, text in alive
    }
    if len(alive) < len(told):
        is_told = all(kind in ("MismatchError", "BackendError") for kind, _ in alive)
        return "" if may_end and is_told else f"{pair}: a process has ended: {told}"
    kinds = {kind for kind, _ in told}
    if kinds != {"MismatchError"} or len(texts) > 1:
        return f"{pair}: {told}"
    found = texts.pop().partition("found: ")[2].partition("fix: ")[0]
    return "" if all(name in found for name in pair) else f"{pair}: {found}"


def check_pairs(
    table: str, pairs: list[tuple[str, str]], backend: str | None, hosts: TwoHosts, may_end: bool
) -> None:
    """All pairs in one world; each in its own where a process may end."""
    wrong = []
    for batch in [[pair] for pair in pairs] if may_end else [pairs]:
        outcomes = hosts.outcomes(met, 4, table, batch, backend=backend, timeout_s=300.0)
        lists = [[None] if isinstance(one, Failure) else one for one in outcomes]
        told_of = zip(batch, zip(*lists, strict=True), strict=True)
        wrong += filter(None, (complaint(pair, told, may_end) for pair, told in told_of))
    assert not wrong, f"{len(wrong)} of {len(pairs)} pairs\n" + "\n".join(wrong[:5])


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_calls_that_differ_are_named(backend: str | None, two_hosts: TwoHosts) -> None:
    check_pairs("ops", [("SUM)", "MAX)"), ("MIN)", "PREMUL_SUM)")], backend, two_hosts, False)
    check_pairs("dtypes", [(" float32", " int32")], backend, two_hosts, False)


@pytest.mark.soak
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("backend", [None, "gloo"])
def test_all_pairs_that_differ_are_named(
    backend: str | None, table: str, two_hosts: TwoHosts
) -> None:
    pairs = list(combinations(TABLES[table], 2))
    check_pairs(table, pairs, backend, two_hosts, may_end=table != "ops")


# -- programs -------------------------------------------------------------------------------------


def test_the_demo(two_hosts: TwoHosts) -> None:
    first, *others = two_hosts.start(
        DEMO, places_on("AABB"), *TINY.split(), hosts="AABB", has_teardown=False
    )
    assert [one.returncode for one in (first, *others)] == [0] * 4, first.stderr
    assert "loss" in first.stdout, first.stdout


def launched(launcher: str, words: str, hosts: TwoHosts) -> list[subprocess.CompletedProcess[str]]:
    """How the launchers of both hosts end, each told in words what to start on two ranks."""
    text, *lines = LAUNCHERS[launcher]
    program = f"import os, sys\nsys.argv = os.environ['LINE'].split()\n{text}"
    environments = [{"LINE": f"{line} {words}"} for line in lines]
    return hosts.start(program, environments, hosts="AB", timeout_s=120.0, has_teardown=False)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_demo_is_launched_on_each_host(launcher: str, two_hosts: TwoHosts) -> None:
    first, second = launched(launcher, f"{DEMO} {TINY}", two_hosts)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "loss" in first.stdout, first.stdout


AVERAGED_AND_LOST = """
import os, signal, socket
import torch, meshdist as md
md.init_process_group()
rank, model = md.get_rank(), torch.nn.Linear(3, 1)
md.DDP(model)(torch.arange(12.0).reshape(4, 3)[rank]).sum().backward()
print(f"{rank} on {socket.gethostname()}: {model.weight.grad.tolist()}", flush=True)
md.barrier()
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
md.all_reduce(torch.ones(1000))
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_wrapper_and_a_lost_rank_under_a_launcher(
    launcher: str, two_hosts: TwoHosts, tmp_path: Path
) -> None:
    """Gradients are averaged over hosts; both launchers end, and tell which rank was lost."""
    path = tmp_path / "averaged_and_lost.py"
    path.write_text(AVERAGED_AND_LOST)
    first, second = launched(launcher, str(path), two_hosts)
    for ended, host, ranks in ((first, "host-a", (0, 1)), (second, "host-b", (2, 3))):
        for rank in ranks:
            assert f"{rank} on {host}: [[4.5, 5.5, 6.5]]" in ended.stdout, ended.stdout
        assert ended.returncode not in (0, None), ended.stderr
    assert "BackendError: " in first.stderr, first.stderr
    assert 3 in named_ranks(first.stderr), first.stderr
    assert re.search(r"rank +(: )?3 ", second.stderr), second.stderr


OWN_NAME = """
import ctypes, socket, sys
import torch
import meshdist as md
import meshdist.distributed as dist
if ctypes.CDLL(None).unshare(0x04000000):  # the name of this process's host, without the others'
    sys.exit("no namespace")
socket.sethostname({name!r})
md.init_process_group()
x = torch.ones(300_000)
md.all_reduce(x)
found = [None] * md.get_world_size()
dist.all_gather_object(found, md.get_rank())
print(dist.get_backend(), x[-1].item(), found)
md.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["localhost", "a-name-without-address"])
@pytest.mark.parametrize("hosts", ["AB", "BAABA"])
def test_own_names_that_other_hosts_cannot_use(name: str, hosts: str, two_hosts: TwoHosts) -> None:
    """As on Debian, where a host's own name resolves to 127.0.1.1."""
    places = [{**place, "MASTER_ADDR": "10.77.0.1"} for place in places_on(hosts)]
    if hosts[0] == "B":
        places = [{**place, "MASTER_ADDR": "10.77.0.2"} for place in places]
    for done in two_hosts.start(OWN_NAME.format(name=name), places, hosts=hosts):
        assert done.returncode == 0, done.stderr
        size = len(hosts)
        assert done.stdout == f"gloo {float(size)} {list(range(size))}\n"


def test_a_host_that_others_cannot_reach_is_named(two_hosts: TwoHosts) -> None:
    text = OWN_NAME.format(name="host").replace(
        "init_process_group()", "init_process_group(timeout=__import__('datetime').timedelta(0, 8))"
    )
    places = [{**place, "GLOO_SOCKET_IFNAME": "lo"} for place in places_on("AB")]
    for done in two_hosts.start(text, places, hosts="AB"):
        assert done.returncode == 1
        assert (
            "that the other hosts can reach lo, which Gloo uses on this rank; if they cannot, set "
            "GLOO_SOCKET_IFNAME to an interface that they can reach" in done.stderr
        )
