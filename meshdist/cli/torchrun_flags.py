"""Parse the flags of torchrun that place the processes and their output.

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

from ..launching.output import Output
from ..launching.rank_environment import JobPlace, LaunchError
from ..runtime.hosts import num_cores


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to a million")


_UNSERVED = (
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr", "max-restarts"),
    *("monitor-interval", "start-method", "run-path", "event-log-handler", "logs-specs"),
    *("numa-binding", "virtual-local-rank", "duplicate-stdout-filters", "duplicate-stderr-filters"),
)
"""torchrun's flags that this launcher raises an error for: most are of its elastic agent."""


def add_torchrun_flags(parser: argparse.ArgumentParser, *, short: bool) -> None:
    """Add the flags of torchrun; with short, -n for the number of processes."""
    add = partial(_add, parser)
    text = (
        "processes to start on this host: a number, cpu (as many as cores), gpu or xpu (as many as "
        "there are), auto (accelerators, else cores); default: 1"
    )
    add("nproc-per-node N", text, *(["-n"] if short else []), default="1")
    text = "hosts in the job, each with its own launcher (default: 1)"
    add("nnodes M", text, type=int, default=1)
    add("node-rank K", "number of this host, from 0 (default: 0)", type=int, default=0)
    text = "name or address of host 0, where rank 0 serves the store; needed with several hosts"
    add("master-addr ADDRESS", text)
    text = "port of that store (default: a free one on a single host, else 29500)"
    add("master-port PORT", text, type=int)
    add("role NAME", "the ranks' ROLE_NAME (default: default)", default="default")
    text = "the signals that end the job, with commas between (default: SIGINT,SIGTERM,SIGHUP)"
    add("signals-to-handle NAMES", text)
    text = "seconds between asking ranks to end and killing them (default: 2 to 3.5)"
    add("shutdown-timeout S", text, type=_seconds)
    add("standalone", "one host, at a free port whatever else is given", **_SWITCH)
    add("module", "start a module, found as `python -m` finds it, not a script", "-m", **_SWITCH)
    add("no-python", "start a program that is not Python", **_SWITCH)
    add("log-dir DIR", "keep the ranks' output in files of a new folder in DIR, and show it")
    add(
        "redirects STREAMS",
        "output to files alone: 1 stdout, 2 stderr, 3 both, or 0:3,1:1 ...",
        "-r",
    )
    add("tee STREAMS", "output to files and to the console: as for --redirects", "-t")
    add("local-ranks-filter RANKS", "show the output of these local ranks alone, as in 0,2")
    for name in _UNSERVED:
        add(name, argparse.SUPPRESS, nargs="?", const="")


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


def _raise_for_unserved(arguments: argparse.Namespace) -> None:
    given = [name for name in _UNSERVED if getattr(arguments, name.replace("-", "_")) is not None]
    if given:
        raise LaunchError(
            f"this launcher does not support torchrun's {' and '.join(f'--{it}' for it in given)}",
            expected="-n, and with several hosts --nnodes, --node-rank, --master-addr, "
            "--master-port; see --help",
            fix="leave it out, or start the program with torchrun: it runs there unchanged",
        )


def launch_settings(arguments: argparse.Namespace, **output: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``run_processes``; ``output`` are more fields of Output."""
    _raise_for_unserved(arguments)
    nnodes, address, port = arguments.nnodes, arguments.master_addr, arguments.master_port
    if arguments.standalone:
        if nnodes != 1:
            raise LaunchError(
                f"--standalone is for one host, and --nnodes is {nnodes}",
                fix="leave one of them out",
            )
        address = port = None
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
