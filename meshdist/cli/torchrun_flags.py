"""Parse torchrun's flags for processes and their output.

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
from ..launching.rank_environment import JobNode, LaunchError
from ..runtime.hosts import num_cores


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"must be a number of seconds between 0 and 1,000,000, not {text!r}"
    )


_UNSERVED = (
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr", "max-restarts"),
    *("monitor-interval", "start-method", "run-path", "event-log-handler", "logs-specs"),
    *("numa-binding", "virtual-local-rank", "duplicate-stdout-filters", "duplicate-stderr-filters"),
)
"""Flags of torchrun that raise an error here; most belong to its elastic agent."""


def add_torchrun_flags(parser: argparse.ArgumentParser, *, short: bool) -> None:
    """Add the flags of torchrun; with short, -n for the number of processes."""
    add = partial(_add, parser)
    text = (
        "processes to start on this host: a number, cpu (one per core), gpu or xpu (one per "
        "device), or auto (one per accelerator, else one per core); default: 1"
    )
    add("nproc-per-node N", text, *(["-n"] if short else []), default="1")
    text = "hosts in the job, each with its own launcher (default: 1)"
    add("nnodes M", text, type=int, default=1)
    add("node-rank K", "number of this host, from 0 (default: 0)", type=int, default=0)
    text = "name or address of host 0, where rank 0 hosts the store; required with several hosts"
    add("master-addr ADDRESS", text)
    text = "port of that store (default: a free one on a single host, else 29500)"
    add("master-port PORT", text, type=int)
    add("role NAME", "the ranks' ROLE_NAME (default: default)", default="default")
    text = "comma-separated signals that end the job (default: SIGINT,SIGTERM,SIGHUP)"
    add("signals-to-handle NAMES", text)
    text = "seconds between asking ranks to end and killing them (default: 2 to 3.5)"
    add("shutdown-timeout S", text, type=_seconds)
    add(
        "standalone",
        "run on one host with a free port; ignore --master-addr and --master-port",
        **_SWITCH,
    )
    add("module", "start a module, as `python -m` does, instead of a script", "-m", **_SWITCH)
    add("no-python", "start a program that is not Python", **_SWITCH)
    add("log-dir DIR", "write the ranks' output to files in a new folder in DIR, and show it")
    add(
        "redirects STREAMS",
        "write output only to files: 1 stdout, 2 stderr, 3 both, or 0:3,1:1 ...",
        "-r",
    )
    add("tee STREAMS", "write output to files and to the console; values as for --redirects", "-t")
    add("local-ranks-filter RANKS", "show only the output of these local ranks, for example 0,2")
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


# -- parsed values ------------------------------------------------------------------------------


def _raise_for_unserved(arguments: argparse.Namespace) -> None:
    given = [name for name in _UNSERVED if getattr(arguments, name.replace("-", "_")) is not None]
    if given:
        raise LaunchError(
            f"this launcher does not support torchrun's {' and '.join(f'--{it}' for it in given)}",
            expected="-n, and with several hosts --nnodes, --node-rank, --master-addr, "
            "--master-port; see --help",
            fix="remove it, or start the program with torchrun, where it runs unchanged",
        )


def launch_settings(arguments: argparse.Namespace, **output: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``run_processes``; ``output`` has further Output fields."""
    _raise_for_unserved(arguments)
    nnodes, address, port = arguments.nnodes, arguments.master_addr, arguments.master_port
    if arguments.standalone:
        if nnodes != 1:
            raise LaunchError(
                f"--standalone cannot be combined with --nnodes {nnodes}",
                fix="remove one of them",
            )
        address = port = None
    names = arguments.signals_to_handle
    return {
        "nprocs": number_of_processes(arguments.nproc_per_node),
        "node": JobNode(nnodes, arguments.node_rank, address, port, arguments.role),
        "output": _output(arguments, output),
        "signals": None if names is None else [_signal(name) for name in names.split(",")],
        "stopping_s": arguments.shutdown_timeout,
    }


def number_of_processes(text: str) -> int:
    """Return the processes of ``--nproc-per-node=text``; raise LaunchError if invalid."""
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
            f"{text!r} is not a number of processes",
            where="--nproc-per-node, or -n",
            expected=expected,
            fix="meshdist run -n 4 script.py",
        ) from None
    if found == 0:
        raise LaunchError(
            f"torch cannot use any {text} on this host",
            where="--nproc-per-node, or -n",
            expected=expected,
            fix="pass a number, or -n auto, which starts one process per core without accelerators",
        )
    return found


def _output(arguments: argparse.Namespace, more: dict[str, Any]) -> Output:
    redirects, tee, ranks = arguments.redirects, arguments.tee, arguments.local_ranks_filter
    if arguments.log_dir and redirects is None and tee is None:
        tee = "3"
    if ranks and not re.fullmatch(r"\d+(,\d+)*", ranks, re.ASCII):
        raise LaunchError(
            f"{ranks!r} is not a list of local ranks",
            where="--local-ranks-filter",
            expected="comma-separated local ranks",
            fix="pass for example --local-ranks-filter 0,2",
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
        f"{text!r} is not a choice of streams",
        where=flag,
        expected="0 (none), 1 (stdout), 2 (stderr) or 3 (both); or one of these by local rank",
        fix=f"pass for example {flag} 3, or {flag} 0:3,1:2",
    )


def _signal(name: str) -> signal.Signals:
    found = signal.Signals.__members__.get(name.strip())
    if found in (None, signal.SIGKILL, signal.SIGSTOP):
        raise LaunchError(
            f"{name.strip()!r} is not a signal that a program can handle",
            where="--signals-to-handle",
            expected="comma-separated signal names",
            fix="pass for example --signals-to-handle SIGTERM,SIGINT,SIGUSR1",
        )
    assert found is not None
    return found
