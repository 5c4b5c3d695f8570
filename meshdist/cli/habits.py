"""The flags that users of other launchers type by habit.

They are served where this launcher does the same, else answered with what does it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ..error_text import explain

__all__ = ["add_habits"]

_SERVED = {
    "nproc_per_node": ("-np", "--np", "--nproc", "--num-processes", "--num-gpus"),
    "nnodes": ("--num-nodes", "--num-machines"),
    "node_rank": ("--machine-rank",),
    "master_addr": ("--main-process-ip",),
    "master_port": ("--main-process-port",),
}
"""By what they set: of mpiexec, DeepSpeed and accelerate, in either spelling."""

_BY_MPIEXEC = "add --launcher mpi, and hand it on: --mpi-args='{flag} ...'"
_VARIABLES = "variables of the environment reach the ranks as they are: NAME=VALUE {run}"
_ANSWERED: dict[str, tuple[str, str]] = {}
for _whose, _instead, _flags in (
    ("mpiexec's", _BY_MPIEXEC, "-H -host --host -hostfile --hostfile --machinefile"),
    ("mpiexec's", _BY_MPIEXEC, "-mca --mca -map-by --map-by -bind-to --bind-to"),
    ("mpiexec's", _BY_MPIEXEC, "-ppn -npernode --npernode"),
    ("mpiexec's, and needless here", "leave it out", "-oversubscribe --oversubscribe"),
    ("mpiexec's, and needless here", "leave it out", "--allow-run-as-root"),
    ("mpiexec's", _VARIABLES, "-x -genv -env"),
    ("mpiexec's", "--prefix begins each line with its rank", "-tag-output --tag-output -l"),
    ("DeepSpeed's", "CUDA_VISIBLE_DEVICES=0,1 {run}", "--include --exclude"),
    ("accelerate's", "say -n, --nnodes, --node-rank, --master-addr", "--config-file"),
    ("accelerate's", "leave it out: -n says how many ranks there are", "--multi-gpu --cpu"),
    ("not known", "init_process_group('gloo'), in the program, chooses it", "--backend"),
):
    _ANSWERED.update(dict.fromkeys(_flags.split(), (_whose, _instead)))
"""By flag: whose it is, and what to type instead."""
_RUN = "meshdist run -n 4 script.py"


def add_habits(parser: argparse.ArgumentParser) -> None:
    """Add the flags of other launchers to a parser that has torchrun's; help does not list them."""
    for target, names in _SERVED.items():
        spellings = [*names, *(_with_underscores(name) for name in names)]
        kind = int if target in ("node_rank", "master_port") else str
        parser.add_argument(
            *dict.fromkeys(spellings),
            dest=target,
            type=kind,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    for name in _ANSWERED:
        spelled = dict.fromkeys((name, _with_underscores(name)))
        parser.add_argument(*spelled, action=_Answer, nargs="?", help=argparse.SUPPRESS)


def _with_underscores(name: str) -> str:
    dashes = len(name) - len(name.lstrip("-"))
    return name[:dashes] + name[dashes:].replace("-", "_")


class _Answer(argparse.Action):
    """Ends the command with what to type instead of the flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        whose, instead = _ANSWERED[self.option_strings[0]]
        fix = instead.format(flag=option_string, run=_RUN)
        parser.exit(2, f"{parser.prog}: {explain(f'{option_string} is {whose}', fix=fix)}\n")
