"""A debugger on one rank: its commands come from a terminal of the test's, a file or a text."""

from __future__ import annotations

import bdb
import logging
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from tests.pool import Pool

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
        assert "rank 1 of 2 has stopped; type continue to let all ranks go on" in shown
        # Python 3.13 stops in the line of the call, Python before it in the next line.
        assert re.search(r"> \S+script.py\(1[01]\)<module>\(\)\n-> (md.br|secret)", shown)
        terminal.type("p secret")
        assert "\n41\n" in terminal.read_until("(Pdb, rank 1) ")
        terminal.type("secret = 1")
        terminal.read_until("(Pdb, rank 1) ")
        time.sleep(2.5)  # longer than the timeout of the group that the program uses next
        terminal.type("next")
        terminal.read_until("(Pdb, rank 1) ")
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
    words = ("first", "second", "third")
    commands.write_text("".join(f"p '{word}', step, md.get_rank()\nc\n" for word in words))
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
    found = re.findall(r"\('(\w+)', (\d), (\d)\)", done.stdout)
    assert sorted(found) == [("first", "3", "0"), ("second", "4", "0"), ("third", "4", "1")]


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


QUITTING = """
import meshdist as md
md.init_process_group("gloo")
try:
    md.breakpoint(rank=1)
    print("not reached")
finally:
    print(f"rank {md.get_rank()} leaves", flush=True)
"""


@pytest.mark.parametrize(
    ("commands", "found"),
    [
        ("q\n", "rank 1 ended by BdbQuit"),
        ("", "rank 1 ended by BdbQuit"),  # the end of the input
        ("import os; os._exit(3)\n", "rank 1 has ended"),
    ],
)
def test_ranks_raise_if_the_debugged_rank_ends(tmp_path: Path, commands: str, found: str) -> None:
    done = quitting(tmp_path, input=commands)
    assert done.returncode == (3 if "_exit" in commands else 1)
    assert "BackendError: barrier on the world failed" in done.stderr
    assert re.search(rf"\n  found: (.*\n)? +{re.escape(found)}", done.stderr), done.stderr


def test_every_rank_raises_if_the_debugged_rank_has_no_input(tmp_path: Path) -> None:
    done = quitting(tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "rank 1 leaves" in done.stdout
    text = (
        "breakpoint() cannot stop rank 1: its process has no standard input\n"
        "where:    rank 1, process {}\n"
        "expected: a terminal, or a file or pipe with the debugger's commands\n"
        "fix:      start the program from a terminal (under mpiexec only rank 0 has an input), "
        "or pass commands: meshdist run -n 4 script.py < commands"
    )
    shown = re.sub(r"process \d+", "process {}", re.sub(r"\n +", "\n", done.stderr))
    assert shown.count(f"WorldError: {text}") == 2, done.stderr  # each rank's report


def quitting(tmp_path: Path, **stdin: Any) -> subprocess.CompletedProcess[str]:
    """Run the script whose rank 0 stops waiting for the debugged rank 1."""
    script = tmp_path / "script.py"
    script.write_text(QUITTING)
    done = subprocess.run(
        [*RUN, str(script)],
        **stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    assert "rank 0 leaves" in done.stdout
    assert "reached" not in done.stdout.replace('-> print("not reached")', "")
    return done


def test_the_others_wait_no_longer_than_timeout_s(pool: Pool) -> None:
    def program(comes: bool) -> str:
        if md.get_rank() == 1:
            if comes:
                with streams(Scripted("import time; time.sleep(2.0)", "q")):
                    try:
                        md.breakpoint(1)
                        time.sleep(0.0)  # where it stops
                    except bdb.BdbQuit:
                        return ""
            else:
                time.sleep(2.0)
            return ""
        with pytest.raises(md.CollectiveTimeoutError) as failure:
            md.breakpoint(rank=1, timeout_s=0.5)
        return str(failure.value)

    for comes, place in ((True, "interaction|readline|<module>"), (False, "program")):
        text = pool.run(program, 2, comes)[0]
        assert re.match(r"barrier on the world timed out .* 0\.5 s", text), text
        assert re.search(r"where:    rank 0, .*barrier\(\) at \S+test_breakpoints.py:\d+", text)
        assert re.search(rf"rank 1: .*; now at .* in ({place})", text), text


def test_ranks_that_wait_for_the_debugger_log_no_wait(pool: Pool) -> None:
    def program() -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("meshdist.waits").addHandler(handler)
        md.barrier()
        with streams(Scripted("import time; time.sleep(1.5)", "c")):
            md.breakpoint()
        if md.get_rank() == 0:
            time.sleep(1.5)  # a wait of the program's own
        md.barrier()
        logging.getLogger("meshdist.waits").removeHandler(handler)
        return lines

    told = pool.run(program, 2, env={"MESHDIST_STALL_WARNING_S": "0.3"})[1]
    assert len(told) == 1 and "barrier() at " in told[0] and "in program\n" in told[0], told


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
    assert f"rank {rank} of 3 has stopped" in shown
    assert f"({40 + rank}, 0)" in shown
    assert re.search(r"-> (md.breakpoint\(rank\)|order.append)", shown)
    assert [r for r in results if r >= 40] == [40 + r for r in range(3) if r != rank]
    assert sorted(order) == [0, 1, 2]


def test_steps_go_through_the_program_and_let_the_others_run() -> None:
    def program() -> int:
        x = torch.ones(1)
        md.breakpoint()
        md.all_reduce(x)
        y = int(x) * 10
        return y

    steps = ["n"] * (1 + (sys.version_info >= (3, 13)))
    results, shown = simulate(program, 2, *steps, "p x", "s", "p y", "c")
    assert results == [20, 20]
    assert re.findall(r"-> (.*)", shown)[-3:] == [
        "md.all_reduce(x)",
        "y = int(x) * 10",
        "return y",
    ]
    assert "tensor([2.])" in shown
    assert "20" in shown
    assert sys.gettrace() is None or "pdb" not in repr(sys.gettrace())


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

    with pytest.raises(md.DeadlockError, match=r"rank 0: waits in .*barrier\(\)"):
        simulate(program, 2)


def test_wrong_arguments() -> None:
    def program() -> None:
        with pytest.raises(md.ArgumentError, match="rank is 2\n  expected: an integer from 0 to 1"):
            md.breakpoint(2)
        with pytest.raises(md.KindError, match="integer\n  found:    'a', a str"):
            md.breakpoint("a")  # type: ignore[arg-type]
        with pytest.raises(md.KindError, match="skip must be an integer"):
            md.breakpoint(0, 1.5)  # type: ignore[arg-type]
        with pytest.raises(md.ArgumentError, match="skip is -1\n  expected: an integer of 0"):
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
