"""A debugger on one rank: its commands come from a terminal of the test's, a file or a text."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from tests.load import is_within
from tests.pool import Failure, Pool

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import time
import torch
import meshdist as md
from datetime import timedelta

md.init_process_group("gloo")
hasty = md.new_group(timeout=timedelta(seconds=2))
secret = 40 + md.get_rank()
md.breakpoint(rank=1)
secret += 100
x = torch.ones(1)
md.all_reduce(x, group=hasty)
print(f"rank {md.get_rank()} ends with {secret} and {int(x)}", flush=True)
md.destroy_process_group()
"""


# -- processes ----------------------------------------------------------------------------------


class Terminal:
    """A terminal with a person at it, who waits for a text before typing the next."""

    def __init__(self, command: list[str]) -> None:
        self.fd, theirs = pty.openpty()
        self.seen = ""
        env = dict(os.environ, PYTHONPATH=str(ROOT))
        try:
            self.job = subprocess.Popen(
                command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
            )
        finally:
            os.close(theirs)

    def read_until(self, text: str, seconds: float = 40.0) -> str:
        """Return what is shown up to and with ``text``."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            left = end - time.monotonic()
            assert left > 0, f"{text!r} did not appear in {self.seen!r}"
            if select.select([self.fd], [], [], left)[0]:
                try:
                    data = os.read(self.fd, 4096)
                except OSError:  # how the end looks
                    data = b""
                assert data, f"{text!r} did not appear in {self.seen!r}"
                self.seen += data.decode().replace("\r\n", "\n")
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode() + b"\n")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.job.poll() is None:
            self.job.terminate()  # meshdist run ends its ranks with itself
        self.job.wait(20)
        os.close(self.fd)


RUN = [sys.executable, "-m", "meshdist", "run", "-n", "2"]


def test_a_person_at_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Terminal([*RUN, str(script)]) as terminal:
        shown = terminal.read_until("(Pdb, rank 1) ")
        assert "rank 1 of 2 is here; type continue to let go" in shown
        assert re.search(r"> \S+script.py\(10\)<module>\(\)\n-> md.breakpoint\(rank=1\)", shown)
        terminal.type("p secret")
        assert "\n41\n" in terminal.read_until("(Pdb, rank 1) ")
        terminal.type("secret = 1")
        terminal.read_until("(Pdb, rank 1) ")
        terminal.type("next")
        assert "-> secret += 100" in terminal.read_until("(Pdb, rank 1) ")
        time.sleep(2.5)  # longer than the verb may take in which the other rank now waits
        terminal.type("c")
        rest = terminal.read_until("ends with") + terminal.read_until("ends with")
        rest += terminal.read_until(" 2", 10)
        assert terminal.job.wait(30) == 0
    assert "rank 0 ends with 140 and 2" in rest or "rank 1 ends with 101 and 2" in rest


@pytest.mark.soak
def test_spawned_ranks_find_the_terminal_of_who_spawned_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import meshdist as md\n"
        "def program():\n"
        "    md.init_process_group('gloo')\n"
        "    secret = 7 * md.get_rank()\n"
        "    md.breakpoint(rank=1)\n"
        "    return secret\n"
        "if __name__ == '__main__':\n"
        "    print('answers', md.spawn(program, nprocs=2))\n"
    )
    with Terminal([sys.executable, str(script)]) as terminal:
        terminal.read_until("(Pdb, rank 1) ")
        terminal.type("secret += 1")
        terminal.read_until("(Pdb, rank 1) ")
        terminal.type("c")
        terminal.read_until("answers [0, ")
        assert terminal.job.wait(30) == 0


@pytest.mark.soak
def test_commands_from_a_file(tmp_path: Path) -> None:
    script, commands = tmp_path / "script.py", tmp_path / "commands"
    script.write_text(
        "import meshdist as md\n"
        "md.init_process_group('gloo')\n"
        "for step in range(5):\n"
        "    md.breakpoint(skip=3)\n"
        "    md.breakpoint(rank=1, skip=4)\n"
        "md.destroy_process_group()\n"
    )
    commands.write_text("p 'first', step\nc\np 'second', step\nc\np 'third', step\nc\n")
    with commands.open() as stdin:
        done = subprocess.run(
            [*RUN, str(script)],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            env=dict(os.environ, PYTHONPATH=str(ROOT)),
        )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"\('\w+', \d\)|rank \d\)", done.stdout) == [
        "rank 0)",
        "('first', 3)",
        "rank 0)",
        "rank 0)",
        "('second', 4)",
        "rank 0)",
        "rank 1)",
        "('third', 4)",
        "rank 1)",
    ]


class Scripted:
    """Commands in place of a terminal."""

    def __init__(self, *commands: str) -> None:
        self.commands = list(commands)
        self.shown = ""

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self.commands.pop(0) + "\n" if self.commands else ""

    def write(self, text: str) -> int:
        self.shown += text
        return len(text)

    def flush(self) -> None:
        pass


class streams:
    """Puts a console in the place of the standard streams."""

    def __init__(self, console: Scripted) -> None:
        self.console = console

    def __enter__(self) -> None:
        self.before = sys.stdin, sys.stdout
        sys.stdin = sys.stdout = self.console  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        sys.stdin, sys.stdout = self.before


def test_quit_ends_it_on_all_ranks(pool: Pool) -> None:
    def program() -> str:
        console = Scripted("quit")
        with streams(console):
            md.breakpoint(rank=1)
        return console.shown

    waiting, quit_ = pool.outcomes(program, 2)
    assert isinstance(waiting, Failure)
    assert isinstance(waiting.exception, md.AbortedError)
    assert "the debugger on rank 1 was quit" in str(waiting.exception)
    assert "fix:      leave it with continue to let the program go on" in str(waiting.exception)
    assert isinstance(quit_, Failure)
    assert type(quit_.exception).__name__ == "BdbQuit"


def test_the_others_wait_no_longer_than_told(pool: Pool) -> None:
    def program(comes: bool) -> str:
        if md.get_rank() == 1:
            if not comes:
                md.barrier(md.new_group([1]))
                time.sleep(1.0)
            else:
                console = Scripted("import time; time.sleep(1.0)", "c")
                with streams(console):
                    md.breakpoint(1)
            return ""
        with pytest.raises(md.CollectiveTimeoutError) as failure:
            md.breakpoint(rank=1, timeout_s=0.5)
        return str(failure.value)

    text = pool.run(program, 2, True)[0]
    assert "rank 1 did not leave breakpoint() within 0.5 s" in text
    assert re.search(r"where:    rank 0, breakpoint\(rank=1\) at \S+test_breakpoints.py:\d+", text)
    assert "found:    rank 1 is in the debugger" in text
    assert "fix:      give a longer timeout_s, or leave the debugger earlier" in text
    absent = pool.run(program, 2, False)[0]
    assert "found:    rank 1 has not come: last call 1 on group of rank 1: barrier()" in absent


def test_no_timeout_runs_down_meanwhile(pool: Pool) -> None:
    limit = timedelta(seconds=1)

    def program(pause: str) -> tuple[float, Any]:
        me = md.get_rank()
        waits = md.new_group([0, 1], timeout=limit)
        receives = md.new_group([0, 2], timeout=limit)
        polls = md.new_group([0, 3], timeout=limit)
        md.barrier()
        x = torch.full((1,), 1.0 + me)
        begin = time.monotonic()
        if me == 0:
            if pause:
                with streams(Scripted(f"import time; time.sleep({pause})", "c")):
                    md.breakpoint(0)
            else:
                time.sleep(3.0)
            try:
                md.all_reduce(x, group=waits)
                md.send(x, dst=2, group=receives)
                md.monitored_barrier(polls)
                md.new_group([0, 3], timeout=limit)
            except md.MeshdistError as error:
                return 0.0, error.summary
        try:
            if me == 1:
                md.all_reduce(x, group=waits)
            elif me == 2:
                md.recv(x, src=0, group=receives)
            elif me == 3:
                md.monitored_barrier(polls)
                md.new_group([0, 3], timeout=limit)
        except md.CollectiveTimeoutError as error:
            return time.monotonic() - begin, error.summary
        took = time.monotonic() - begin
        if pause and me:
            md.breakpoint(0)  # the others come to it, too, if later
        return took, x.item()

    answers = pool.run(program, 4, "2.5")
    assert [answer for _, answer in answers] == [3.0, 3.0, 3.0, 4.0]
    assert all(took > 2.0 and is_within(took, 8.0) for took, _ in answers), answers
    answers = pool.run(program, 4, "")
    assert all(took > 0.9 and is_within(took, 2.5) for took, _ in answers[1:]), answers
    assert [text for _, text in answers[1:]] == [
        "all_reduce on group of ranks 0-1 was not finished within 1 s",
        "recv on group of ranks 0, 2 was not finished within 1 s",
        "rank 3 successfully reached monitoredBarrier, but received errors while waiting for "
        "send/recv from rank 0",
    ]


def test_without_a_terminal(pool: Pool) -> None:
    def program() -> str:
        # Whoever runs these tests may sit at a terminal.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("meshdist.worlds.breakpoints._terminals_above", list)
            with pytest.raises((md.WorldError, md.AbortedError)) as failure:
                md.breakpoint()
        return str(failure.value)

    here, other = pool.run(program, 2)
    assert here.startswith("there is no terminal for a debugger\n")
    assert "give it commands: meshdist run ... < commands" in here
    summary, where, *rest = other.splitlines()
    assert summary == "rank 0 could not open a debugger"
    assert where.startswith("  where:    rank 1, breakpoint(rank=0) at ")
    assert rest == [
        "  found:    rank 0 has no terminal, and no standard input",
        "  fix:      start the program from a terminal, or give it commands: "
        "meshdist run ... < commands",
    ]


# -- simulated ranks ----------------------------------------------------------------------------


def simulate(program: Any, ranks: int, *commands: str) -> tuple[list[Any], str]:
    """Run simulated ranks whose debugger takes ``commands``; return results and what it showed."""
    console = Scripted(*commands)
    with streams(console):
        return md.simulate(program, ranks), console.shown


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_simulated_ranks_wait(rank: int) -> None:
    order: list[int] = []

    def program() -> int:
        secret = 40 + md.get_rank()
        md.breakpoint(rank)
        order.append(md.get_rank())
        return secret

    results, shown = simulate(program, 3, "p secret, len(order)", "secret = 5", "c")
    assert f"rank {rank} of 3 is here" in shown
    assert f"({40 + rank}, 0)" in shown
    assert "-> md.breakpoint(rank)" in shown
    assert [r for r in results if r >= 40] == [40 + r for r in range(3) if r != rank]
    assert sorted(order) == [0, 1, 2]


def test_steps_go_through_the_program_and_let_the_others_run() -> None:
    def program() -> int:
        x = torch.ones(1)
        md.breakpoint()
        md.all_reduce(x)
        y = int(x) * 10
        return y

    results, shown = simulate(program, 2, "n", "n", "p x", "s", "p y", "c")
    assert results == [20, 20]
    assert re.findall(r"-> (.*)", shown) == [
        "md.breakpoint()",
        "md.all_reduce(x)",
        "y = int(x) * 10",
        "return y",
    ]
    assert "tensor([2.])" in shown
    assert "20" in shown
    assert sys.gettrace() is None or "pdb" not in repr(sys.gettrace())


def test_nothing_but_the_program_is_stopped_at(monkeypatch: pytest.MonkeyPatch) -> None:
    # What Python calls by itself while the debugger gets ready: finalizers do, at any time.
    settrace = sys.settrace
    monkeypatch.setattr(sys, "settrace", lambda trace: settrace(trace))

    def program() -> int:
        md.breakpoint()
        return 1

    results, shown = simulate(program, 1, "c")
    assert results == [1]
    assert re.findall(r"-> (.*)", shown) == ["md.breakpoint()"]


def test_breakpoints_set_in_the_debugger_stop_later() -> None:
    def program() -> int:
        total = 0
        md.breakpoint()
        for step in range(3):
            total += step  # here
        return total

    line = program.__code__.co_firstlineno + 4
    results, shown = simulate(program, 1, f"b {line}, step == 2", "c", "p step, total", "cl 1", "c")
    assert results == [3]
    assert "(2, 1)" in shown


def test_skip_counts_the_passes_of_one_line() -> None:
    def program() -> None:
        for step in range(4):
            md.breakpoint(skip=2)
            if step == 3:
                md.breakpoint()

    _, shown = simulate(program, 2, "p step", "c", "p step", "c", "p step", "c")
    assert re.findall(r"rank 0\) (\d)", shown) == ["2", "3", "3"]


def test_one_breakpoint_after_the_other_on_different_ranks() -> None:
    def program() -> None:
        for turn in range(4):
            md.breakpoint(rank=turn % 2)

    _, shown = simulate(program, 2, *["p turn", "c"] * 4)
    seen = re.findall(r"rank (\d)\) (\d)", shown)
    assert seen == [("0", "0"), ("1", "1"), ("0", "2"), ("1", "3")]


def test_quit_ends_a_simulation() -> None:
    def program() -> None:
        md.breakpoint()

    with pytest.raises(BaseException) as failure:  # noqa: PT011 - BdbQuit
        simulate(program, 2, "q")
    assert type(failure.value).__name__ == "BdbQuit"


def test_a_rank_that_does_not_come() -> None:
    def program() -> None:
        if md.get_rank() == 0:
            md.breakpoint(rank=1)

    with pytest.raises(md.DeadlockError, match=r"rank 0: waits in breakpoint\(rank=1\), called at"):
        simulate(program, 2)


def test_wrong_arguments() -> None:
    def program() -> None:
        with pytest.raises(md.ArgumentError, match="breakpoint: rank is 2\n  expected: 0 to 1"):
            md.breakpoint(2)
        with pytest.raises(md.KindError, match="whole number\n  found:    'a', a str"):
            md.breakpoint("a")  # type: ignore[arg-type]
        with pytest.raises(md.KindError, match="skip must be a whole number"):
            md.breakpoint(0, 1.5)  # type: ignore[arg-type]
        with pytest.raises(md.ArgumentError, match="skip is -1\n  expected: 0 or more"):
            md.breakpoint(0, -1)
        with pytest.raises(md.KindError, match="timeout_s must be a number"):
            md.breakpoint(timeout_s="long")  # type: ignore[arg-type]
        with pytest.raises(md.ArgumentError, match="timeout must be positive"):
            md.breakpoint(timeout_s=0)
        with pytest.raises(md.ArgumentError, match="timeout is too long"):
            md.breakpoint(timeout_s=float("inf"))

    md.simulate(program, 2)


def test_without_a_world() -> None:
    with pytest.raises(md.NotInitializedError):
        md.breakpoint()


def test_the_name_does_not_come_by_a_star() -> None:
    assert "breakpoint" not in md.__all__
    names: dict[str, Any] = {}
    exec("from meshdist import *", names)
    assert "breakpoint" not in names
