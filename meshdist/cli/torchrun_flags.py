"""torchrun's flags: those that place the processes, their output, and those that its agent needs.

As with torchrun, ``PET_NAME`` in the environment is the default of ``--name``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
from functools import partial
from typing import Any

from ..launching.rank_environment import JobPlace, LaunchError
from ..launching.streams import Output
from ..runtime.hosts import num_cores


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to a million")


_TORCHRUN = "start it by torchrun instead: programs of meshdist run unchanged under it"
_OF_LINES = ("", "lines are not chosen", "--log-dir keeps all of them in files, for grep")
_ELSEWHERE = {
    "max-restarts": (
        "0",
        "restarts need an elastic agent, which this launcher is not",
        "torchrun --max-restarts, under which programs of meshdist run unchanged; or start the "
        "command again, from the program's last checkpoint",
    ),
    "rdzv-conf": (
        "",
        "the launchers of several hosts do not meet: the ranks do",
        "init_process_group(timeout=...) is how long ranks wait for each other",
    ),
    "event-log-handler": ("null", "events are those of torchrun's elastic agent", _TORCHRUN),
    "logs-specs": ("", "it names a class of torchrun's elastic agent", _TORCHRUN),
    "numa-binding": ("", "the ranks of this launcher are bound to no cores", _TORCHRUN),
    "virtual-local-rank": (False, "LOCAL_RANK is the rank's number on its host", _TORCHRUN),
    "duplicate-stdout-filters": _OF_LINES,
    "duplicate-stderr-filters": _OF_LINES,
}
"""By name of a flag: the one value that is served, why no other is, and what to use instead."""


def add_torchrun_flags(parser: argparse.ArgumentParser, *, short: bool) -> None:
    """Add the flags of torchrun; with short, -n for the number of processes."""
    add = partial(_add, parser)
    text = (
        "processes to start on this host: a number, cpu (as many as cores), gpu or xpu (as many as "
        "there are), auto (accelerators, else cores); default: 1"
    )
    add("nproc-per-node N", text, *(["-n"] if short else []), default="1")
    add("nnodes M", "hosts in the job, each with its own launcher (default: 1)", default="1")
    add("node-rank K", "number of this host, from 0 (default: 0)", type=int, default=0)
    text = "name or address of host 0, where rank 0 serves the store; needed with several hosts"
    add("master-addr ADDRESS", text)
    text = "port of that store (default: a free one on a single host, else 29500)"
    add("master-port PORT", text, type=int)
    add("local-addr ADDRESS", "of host 0: the same as --master-addr")
    add("rdzv-endpoint HOST:PORT", "--master-addr and --master-port in one", default="")
    add("role NAME", "the ranks' ROLE_NAME (default: default)", default="default")
    text = "the signals that end the job, with commas between (default: SIGINT,SIGTERM,SIGHUP)"
    add("signals-to-handle NAMES", text)
    text = "seconds between asking ranks to end and killing them (default: 2 to 3.5)"
    add("shutdown-timeout S", text, type=_seconds)
    add("standalone", "one host, at a free port whatever else is given", **_SWITCH)
    text = "static, or on one host c10d, which is the same there (default: static)"
    add("rdzv-backend static|c10d", text, default="static")
    add("module", "start a module, found as `python -m` finds it, not a script", "-m", **_SWITCH)
    add("no-python", "start a program that is not Python", **_SWITCH)
    add("run-path", "start a script, whatever --module and --no-python say", **_SWITCH)
    add("log-dir DIR", "keep the ranks' output in files of a new folder in DIR, and show it")
    add(
        "redirects STREAMS",
        "output to files alone: 1 stdout, 2 stderr, 3 both, or 0:3,1:1 ...",
        "-r",
    )
    add("tee STREAMS", "output to files and to the console: as for --redirects", "-t")
    add("local-ranks-filter RANKS", "show the output of these local ranks alone, as in 0,2")
    add("rdzv-id NAME", "how the name of the folder in --log-dir begins (default: none)")
    text = "has no effect: the ranks are new interpreters, and watched without polling"
    add("start-method", text, choices=("spawn", "fork", "forkserver"))
    add("monitor-interval", text, type=float)
    for name, (served, _, _) in _ELSEWHERE.items():
        add(name, argparse.SUPPRESS, default=served, **(_SWITCH if served is False else {}))


_SWITCH: dict[str, Any] = {"action": "store_true"}


def _add(
    parser: argparse.ArgumentParser, usage: str, text: str, *letters: str, **options: Any
) -> None:
    """Add the flag ``usage``, as "nnodes M", in both spellings; PET_NNODES gives its default."""
    name, _, metavar = usage.partition(" ")
    spellings = dict.fromkeys((*letters, f"--{name}", f"--{name.replace('-', '_')}"))
    default = os.environ.get(f"PET_{name.replace('-', '_').upper()}", options.pop("default", None))
    if "action" in options:
        default = default not in (None, False, "", "0")
    if metavar:
        options["metavar"] = metavar
    parser.add_argument(*spellings, default=default, help=text, **options)


# -- what they mean -----------------------------------------------------------------------------


def _refuse_what_is_served_elsewhere(arguments: argparse.Namespace) -> None:
    for name, (served, why, fix) in _ELSEWHERE.items():
        given = getattr(arguments, name.replace("-", "_"))
        if given != served:
            raise LaunchError(
                f"--{name}{'' if given is True else f'={given}'} is not served: {why}",
                expected=f"--{name}={served}, or nothing" if served else f"no --{name}",
                fix=fix,
            )


def launch_settings(arguments: argparse.Namespace, **output: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``run_processes``; ``output`` are more fields of Output."""
    _refuse_what_is_served_elsewhere(arguments)
    nnodes = _number_of_hosts(arguments.nnodes)
    address, port = _place_of_the_store(arguments, nnodes)
    names = arguments.signals_to_handle
    return {
        "nprocs": number_of_processes(arguments.nproc_per_node),
        "place": JobPlace(nnodes, arguments.node_rank, address, port, arguments.role),
        "output": _output(arguments, output),
        "signals": None if names is None else [_signal(name) for name in names.split(",")],
        "stopping_s": arguments.shutdown_timeout,
    }


def number_of_processes(text: str) -> int:
    """Return the number that ``--nproc-per-node=text`` means; raise LaunchError if it is none."""
    if re.fullmatch(r"-?\d+", text, re.ASCII):
        return int(text)
    if text == "cpu":
        return num_cores()
    expected = "a number, or cpu, gpu, xpu (or torch's name of another accelerator), or auto"
    try:
        import torch

        if text == "auto":
            return torch.accelerator.device_count() or num_cores()
        found: int = torch.get_device_module({"gpu": "cuda"}.get(text, text)).device_count()
    except (ImportError, RuntimeError, AttributeError):
        raise LaunchError(
            f"{text!r} is no number of processes",
            where="--nproc-per-node, or -n",
            expected=expected,
            fix="meshdist run -n 4 script.py",
        ) from None
    if found == 0:
        raise LaunchError(
            f"there is no {text} on this host that torch can use",
            where="--nproc-per-node, or -n",
            expected=expected,
            fix="-n auto starts a process for each core where there is no accelerator",
        )
    return found


def _number_of_hosts(text: str) -> int:
    least, _, most = text.partition(":")
    if not re.fullmatch(r"-?\d+(:-?\d+)?", text, re.ASCII):
        raise LaunchError(
            f"{text!r} is no number of hosts",
            where="--nnodes",
            expected="a number, as in --nnodes=2 or --nnodes=2:2",
            fix="leave it out where the job runs on one host",
        )
    if most and int(least) != int(most):
        raise LaunchError(
            f"--nnodes={text} is not served: hosts that come and go need an elastic agent, which "
            "this launcher is not",
            expected="a number, as in --nnodes=2 or --nnodes=2:2",
            fix=_TORCHRUN,
        )
    return int(least)


def _place_of_the_store(
    arguments: argparse.Namespace, nnodes: int
) -> tuple[str | None, int | None]:
    local_addr = arguments.local_addr if arguments.node_rank == 0 else None
    if arguments.standalone:
        if nnodes != 1:
            raise LaunchError(
                f"--standalone is for one host, and --nnodes says {nnodes}",
                fix="leave one of them out",
            )
        return local_addr, None
    backend = arguments.rdzv_backend
    if backend != "static" and (backend != "c10d" or nnodes != 1):
        raise LaunchError(
            f"--rdzv-backend={backend} on {nnodes} host(s) is not served: hosts that number "
            "themselves need an elastic agent, which this launcher is not",
            expected="static, where each host is given its number; on one host also c10d",
            fix="--rdzv-backend=static, with --node-rank=K and --master-addr=HOST0; or "
            f"{_TORCHRUN}",
        )
    if not arguments.rdzv_endpoint:
        return arguments.master_addr or local_addr, arguments.master_port
    parts = re.fullmatch(r"(\[[^\]]+\]|[^:\s]+)(?::(\d+))?", arguments.rdzv_endpoint, re.ASCII)
    if parts is None:
        raise LaunchError(
            f"{arguments.rdzv_endpoint!r} is no endpoint",
            where="--rdzv-endpoint",
            expected="HOST or HOST:PORT, with brackets around an address of IPv6",
        )
    host, port = parts.groups()
    return host.strip("[]"), arguments.master_port if port is None else int(port)


def _output(arguments: argparse.Namespace, more: dict[str, Any]) -> Output:
    redirects, tee, ranks = arguments.redirects, arguments.tee, arguments.local_ranks_filter
    if arguments.log_dir and redirects is None and tee is None:
        tee = "3"
    if ranks and not re.fullmatch(r"\d+(,\d+)*", ranks, re.ASCII):
        raise LaunchError(
            f"{ranks!r} names no local ranks",
            where="--local-ranks-filter",
            expected="numbers with commas between, as in 0,2",
        )
    return Output(
        **more,
        shown=frozenset(map(int, ranks.split(","))) if ranks else None,
        redirects=_streams("--redirects", redirects or "0"),
        tee=_streams("--tee", tee or "0"),
        log_dir=arguments.log_dir,
        job=arguments.rdzv_id or "none",
    )


def _streams(flag: str, text: str) -> int | dict[int, int]:
    if re.fullmatch(r"[0-3]", text):
        return int(text)
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text, re.ASCII):
        pairs = (pair.split(":") for pair in text.split(","))
        return {int(rank): int(streams) for rank, streams in pairs}
    raise LaunchError(
        f"{text!r} names no streams",
        where=flag,
        expected="0 none, 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:3,1:2",
    )


def _signal(name: str) -> signal.Signals:
    found = signal.Signals.__members__.get(name.strip())
    if found in (None, signal.SIGKILL, signal.SIGSTOP):
        raise LaunchError(
            f"{name.strip()!r} is no signal that a program can handle",
            where="--signals-to-handle",
            expected="names with commas between, as in SIGTERM,SIGINT,SIGUSR1",
        )
    assert found is not None
    return found
