"""run_processes as Python calls it; the command line has tests of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshdist.launching import output
from meshdist.launching.launcher import run_processes
from meshdist.launching.output import Output
from meshdist.launching.rank_environment import JobNode, LaunchError
from tests.few_files import room_for
from tests.inner import MORE_DESCRIPTORS

ROOT = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable, "-S", "-c"]
NODE_RANK = "--node-rank"
SLEEP = [*PYTHON, "import time; time.sleep(60)"]


def show_of(tmp_path: Path) -> list[str]:
    """A command whose ranks each write a file that holds their arguments."""
    code = (
        "import os, sys, pathlib\n"
        f"path = pathlib.Path({str(tmp_path)!r}, os.environ['RANK'])\n"
        "path.write_text(' '.join([os.environ.get('COLOUR', '-'), *sys.argv[1:]]))\n"
    )
    return [*PYTHON, code]


def test_the_command_may_depend_on_the_local_rank(tmp_path: Path) -> None:
    show = show_of(tmp_path)
    env = dict(os.environ, COLOUR="red")
    assert run_processes(lambda local: [*show, f"local={local}"], 3, env=env) == 0
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {str(rank): f"red local={rank}" for rank in range(3)}


def test_the_first_failure_is_repeated_last(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise SystemExit('I am unwell')\n"
        "time.sleep(60)\n"
    )
    assert run_processes([*PYTHON, code], 3) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "I am unwell"
    assert lines[1].startswith("meshdist: rank 1 (pid ")
    assert lines[1].endswith(
        ") failed with exit code 1; stopped 2 other rank(s) on this host. The end of its stderr:"
    )
    assert lines[2:] == ["I am unwell"]


def test_the_cause_is_shown_though_its_process_ends_after_the_others(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = (
        "import atexit, os, sys, time\n"
        "rank = os.environ['RANK']\n"
        "if rank == '2': sys.exit(0)\n"
        "if rank == '3': time.sleep(60)\n"
        "time.sleep(0.3)\n"
        "if rank == '1':\n"
        "    atexit.register(time.sleep, 0.5)\n"
        "    raise ValueError('I was first')\n"
        "time.sleep(0.1)\n"
        "print('Traceback (most recent call last):\\nRuntimeError: Connection closed by peer',\n"
        "    file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    assert run_processes([*PYTHON, code], 4) == 1
    before, _, last = capfd.readouterr().err.rpartition("meshdist: ")
    title, *report = before.splitlines()
    assert title == "meshdist: rank 0 reported:"
    assert report[-1] == "RuntimeError: Connection closed by peer"
    header, *tail = last.splitlines()
    assert header.startswith("rank 1 (pid ")
    assert header.endswith(
        ") failed with exit code 1; rank 0 failed after it; rank 2 had already exited "
        "with code 0; stopped 1 other rank(s) on this host. The end of its stderr:"
    )
    assert tail[-1] == "ValueError: I was first"


def test_ranks_may_end_by_themselves_before_they_are_stopped(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = (
        "import os, time\n"
        "if os.environ['RANK'] == '0': 1 / 0\n"
        "time.sleep(0.8)\n"
        "raise RuntimeError('my own report')\n"
    )
    assert run_processes([*PYTHON, code], 2) == 1
    before, _, last = capfd.readouterr().err.rpartition("meshdist: ")
    assert before.splitlines()[0] == "meshdist: rank 1 reported:"
    assert before.splitlines()[-1] == "RuntimeError: my own report"
    assert last.splitlines()[0].startswith("rank 0 ")
    assert "; rank 1 failed after it. The end" in last
    assert last.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_silent_failure_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_processes([*PYTHON, "import os; os.kill(os.getpid(), 11)"], 1) == 139
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("was ended by SIGSEGV. It wrote nothing to stderr.")


def test_of_long_output_whole_lines_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys\nfor i in range(9999): print('line', i, file=sys.stderr)\nsys.exit(5)"
    assert run_processes([*PYTHON, code], 1) == 5
    lines = capfd.readouterr().err.splitlines()
    assert lines[:9999] == [f"line {i}" for i in range(9999)]
    again = lines[10000:]
    assert again == [f"line {i}" for i in range(9999 - len(again), 9999)]
    assert 1000 < len(again) < 9999


def test_of_a_long_line_the_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_processes([*PYTHON, "raise RuntimeError('x' * 300_000 + 'end')"], 1) == 1
    *_, summary, again = capfd.readouterr().err.splitlines()
    assert summary.endswith("The end of its stderr:")
    assert again.strip("x") == "end" and len(again) < 33_000


def test_lines_of_different_ranks_are_not_mixed(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys\n"
        "for _ in range(200):\n"
        "    for letter in 'abcdefgh\\n': sys.stderr.write(letter); sys.stderr.flush()\n"
    )
    assert run_processes([*PYTHON, code], 3) == 0
    lines = capfd.readouterr().err.splitlines()
    # A line that was held up for long is shown in part: on a busy machine one may be.
    assert sum(line == "abcdefgh" for line in lines) > 590


def test_a_line_without_an_end_is_shown_while_the_rank_waits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = "import sys, time; sys.stderr.write('prompt> '); sys.stderr.flush(); time.sleep(60)"
    shown: list[str] = []

    def command(local_rank: int) -> list[str]:
        return [*PYTHON, code if local_rank == 0 else "import time; time.sleep(0.7); 1 / 0"]

    def look() -> None:
        deadline = time.monotonic() + 5
        while not shown and time.monotonic() < deadline:
            time.sleep(0.01)
            shown.extend(filter(None, [capfd.readouterr().err]))

    thread = threading.Thread(target=look)
    thread.start()
    assert run_processes(command, 2) == 1
    thread.join()
    assert shown[0] == "prompt> "


def test_prefixed_lines_stay_whole(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, time\n"
        "for part in ['a', 'b\\n10%\\r', '20%\\r', '\\nlast']:\n"
        "    sys.stdout.write(part); sys.stdout.flush(); time.sleep(0.02)\n"
        "print('!', file=sys.stderr)\n"
    )
    assert run_processes([*PYTHON, code], 2, output=Output(prefix=True)) == 0
    out, err = capfd.readouterr()
    shown = out.replace("\r\n", "\n").replace("\r", "\n")
    for rank in range(2):
        mine = [line[9:] for line in shown.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == ["ab", "10%", "20%", "last"]
    assert len(shown.splitlines()) == 8
    assert sorted(err.splitlines()) == ["[rank 0] !", "[rank 1] !"]


def children() -> set[str]:
    """The processes that threads of this one have started and not reaped."""
    return {
        pid
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text().split()
    }


def test_it_works_in_a_thread_and_leaves_the_process_as_it_was() -> None:
    before = children()
    handlers = [signal.getsignal(number) for number in (2, 15, 1)]
    open_files = sorted(os.listdir("/proc/self/fd")) if sys.platform == "linux" else []
    codes: list[int] = []
    command = [*PYTHON, "import sys; sys.exit(3)"]
    thread = threading.Thread(target=lambda: codes.append(run_processes(command, 2)))
    thread.start()
    thread.join(30)
    codes.append(run_processes([*PYTHON, ""], 2))
    assert codes == [3, 0]
    assert [signal.getsignal(number) for number in (2, 15, 1)] == handlers
    if open_files:
        assert sorted(os.listdir("/proc/self/fd")) == open_files
    assert children() == before


def test_a_program_that_cannot_be_started_stops_what_has_been(tmp_path: Path) -> None:
    show = show_of(tmp_path)
    before = children()
    with pytest.raises(LaunchError) as caught:
        run_processes(lambda local: ["/no/such/program", "x y"] if local else SLEEP, 2)
    assert str(caught.value).splitlines() == [
        "cannot start '/no/such/program': No such file or directory",
        "  where:    rank 1, the command: /no/such/program 'x y'",
        "  expected: a program that can be executed",
        "  fix:      check its path and its permissions",
    ]
    assert children() == before
    assert run_processes(show, 1) == 0


def test_a_launcher_that_may_open_too_few_files_raises_its_limit_or_says_so(
    tmp_path: Path,
) -> None:
    before, files = children(), Output(tee=3, log_dir=str(tmp_path))
    with room_for(6, num_hard=23):
        assert run_processes([*PYTHON, ""], 5) == 0
    for to, num_needed in ((Output(), 23), (files, 33)):
        with room_for(num_needed):
            assert run_processes([*PYTHON, ""], 5, output=to) == 0
        with room_for(num_needed - 1), pytest.raises(LaunchError) as caught:
            run_processes(SLEEP, 5, output=to)
        summary, fix = str(caught.value).splitlines()
        left = f"{num_needed - 1} more files can be opened of about {num_needed} needed"
        assert summary.startswith(f"cannot start 5 processes: {left}; the limit is ")
        assert fix == f"  fix:      {MORE_DESCRIPTORS}"
    assert children() == before


@pytest.mark.parametrize(
    ("arguments", "summary", "where"),
    [
        ({"command": []}, "no command to start", None),
        ({"nprocs": 0}, "cannot start 0 processes", "-n (nprocs)"),
        ({"node": JobNode(0)}, "a job cannot run on 0 hosts", "--nnodes"),
        (
            {"node": JobNode(1, 1)},
            "host number 1 does not exist in a job on 1 host(s)",
            NODE_RANK,
        ),
        (
            {"node": JobNode(1, -1)},
            "host number -1 does not exist in a job on 1 host(s)",
            NODE_RANK,
        ),
        ({"node": JobNode(2)}, "a job on 2 hosts needs the address of host 0", "--master-addr"),
        ({"node": JobNode(master_port=65536)}, "65536 is not a port", "--master-port"),
    ],
)
def test_what_cannot_be_started_is_rejected(
    arguments: dict[str, object], summary: str, where: str | None
) -> None:
    with pytest.raises(LaunchError) as caught:
        run_processes(**({"command": SLEEP, "nprocs": 1} | arguments))  # type: ignore[arg-type]
    first, *rest = str(caught.value).splitlines()
    assert first == summary
    assert any(line.startswith("  expected: ") for line in rest)
    if where is not None:
        assert rest[0] == f"  where:    {where}"


def test_the_launcher_says_where_the_store_can_be_reached(
    capfd: pytest.CaptureFixture[str],
) -> None:
    nothing = [*PYTHON, ""]

    def said(*place: Any) -> str:  # nnodes, node_rank, master_addr, master_port
        assert run_processes(nothing, 1, node=JobNode(*place)) == 0
        return capfd.readouterr().err

    assert said() == said(1, 0, "localhost") == ""
    two = said(2, 0, "host0")
    assert "listens on every interface of this host, port 29500 (other hosts connect" in two
    assert "to host0)" in two
    assert "there is no password" in two
    assert "listens on 127.0.0.1, port 1234;" in said(2, 0, "127.0.0.1", 1234)
    assert said(2, 1, "host0") == ""


EQUAL = """
import os, time
rank = int(os.environ["RANK"])
def fail():
    raise RuntimeError(f"rank {rank}: ranks 0-3 disagree" if rank else "rank 0: no data")
time.sleep(0.2)
fail()
"""


def test_equal_reports_appear_once(capfd: pytest.CaptureFixture[str]) -> None:
    code = EQUAL.replace("time.sleep(0.2)", "time.sleep(0.2 if rank else 0.6)")
    assert run_processes([*PYTHON, code], 4) == 1
    text = capfd.readouterr().err
    assert text.count("Traceback") == 2
    assert text.splitlines()[0] == "meshdist: rank 0 reported:"
    header = text[text.index("meshdist: rank", 12) :].splitlines()[0]
    assert "reported the same; rank 0 failed after it. The end of its stderr:" in header
    assert text.count("disagree") == 1


# What the ranks of a mesh write where the program is wrong on all of them alike.
ALIKE = """
import os, time
rank = int(os.environ["RANK"])
place = f"rank {rank} (dp={rank // 2}, tp={rank % 2})"
time.sleep(0.2)
if rank == 4:
    place = "rank 9 (dp=4, tp=1)"  # not its own
raise ValueError(f"no shard of the whole\\n  where:    {place}; f@dp d")
"""


def test_one_mistake_on_ranks_of_a_mesh_is_one_report(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_processes([*PYTHON, ALIKE], 4) == 1
    text = capfd.readouterr().err
    assert text.count("Traceback") == 1
    header = text.splitlines()[0]
    assert "reported the same. The end of its stderr:" in header
    assert run_processes([*PYTHON, ALIKE], 5) == 1
    assert capfd.readouterr().err.count("Traceback") == 2  # rank 4 speaks of another rank


# What the members of a group write that disagree: each its own call, at its own line.
TOGETHER = """
import os, time
rank = int(os.environ["RANK"])
def call(operation):
    raise ValueError(f"collective mismatch: ranks made different calls as call 1\\n"
        f"  where:    the world, ranks 0-3; rank {first} detected it before it sent any data\\n"
        f"            raised on rank {rank}, call 1 on the world: {operation}\\n"
        "  found:    rank 0: send\\n            ranks 1-3: recv\\n"
        "  fix:      call the same collectives in the same order")
first = 2
time.sleep(0.2)
if rank == 0:
    call("send")
call("recv")
"""


def test_an_error_that_ranks_raise_together_is_one_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_processes([*PYTHON, TOGETHER.replace("0.2", "0 if rank == 0 else 0.3")], 4) == 1
    header, *lines = capfd.readouterr().err.splitlines()
    assert header.startswith("meshdist: rank 0 (pid ")
    assert "; ranks 1-3 reported the same. The end of its stderr:" in header
    assert lines[0] == "Traceback (most recent call last):"
    at = lines.index("            raised on rank 0, call 1 on the world: send")
    assert lines[at + 1] == "            raised on ranks 1-3, call 1 on the world: recv"
    assert [line for line in lines if line.startswith("Traceback")] == lines[:1]
    assert run_processes([*PYTHON, TOGETHER.replace("first = 2", "first = rank % 2")], 4) == 1
    assert capfd.readouterr().err.count("Traceback") == 2  # two texts: two errors


def test_reports_of_ranks_that_are_long_in_ending_are_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "REPORT_S", 0.6)
    code = ALIKE.replace("import os", "import atexit, os, sys").replace(
        "0.2", "0.2)\natexit.register(time.sleep, 1.5"
    )
    assert run_processes([*PYTHON, code], 4) == 1
    title, *_, last = capfd.readouterr().err.splitlines()
    assert title == "meshdist: ranks 0-3 reported:"
    assert "reported the same. Its report is above." in last
    code = code.replace("0.2)\n", "0.2)\natexit.register(print, 'Goodbye', file=sys.stderr)\n")
    assert run_processes([*PYTHON, code], 1) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines.count("Goodbye") == 2  # more came behind it: the end is shown once more
    assert lines[-1] == "Goodbye"


def test_a_traceback_that_is_caught_is_shown_in_one_piece(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = (
        "import sys, time, traceback\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError:\n"
        "    for line in traceback.format_exc().splitlines():\n"
        "        print(line, file=sys.stderr, flush=True); time.sleep(0.02)\n"
        "time.sleep(3.3)\n"
    )
    assert run_processes([*PYTHON, code], 3) == 0
    text = capfd.readouterr().err
    titles = re.findall(r"meshdist: (ranks? .*) reported:\n", text)
    reports = re.sub(r"meshdist: .*\n", "", text).split("Traceback (most recent call last):\n")
    assert reports[0] == ""
    assert len(set(reports[1:])) == 1
    assert titles == ["ranks 0-2"] or len(reports) > 2  # on a busy machine one may come later


PRINTS_IN_PIECES = """
import os, sys
for i in range(150):
    print("rank", os.environ["RANK"], "line", i)
"""


@pytest.mark.parametrize("kind", ["stdout", "stderr"])
def test_lines_that_python_writes_in_pieces_are_whole(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = PRINTS_IN_PIECES.replace("i)", f"i, file=sys.{kind})")
    assert run_processes([sys.executable, "-S", "-u", "-c", code], 4) == 0
    out, err = capfd.readouterr()
    lines = (out + err).splitlines()
    assert sorted(lines) == sorted(f"rank {r} line {i}" for r in range(4) for i in range(150))


def test_a_traceback_that_much_follows_does_not_hold_it_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(output, "LONGEST_REPORT_S", 0.3)
    code = (
        "import sys, time, traceback\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: traceback.print_exc()\n"
        "for i in range(30): print('step', i, file=sys.stderr, flush=True); time.sleep(0.05)\n"
        "time.sleep(60)\n"
    )
    seen: list[str] = []

    def look() -> None:
        deadline = time.monotonic() + 20
        while "step 29" not in "".join(seen) and time.monotonic() < deadline:
            time.sleep(0.05)
            seen.append(capfd.readouterr().err)
        os.kill(int(pid.read_text()), signal.SIGKILL)

    pid = tmp_path / "pid"
    thread = threading.Thread(target=look)
    thread.start()
    begin = f"import os, pathlib\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
    assert run_processes([*PYTHON, begin + code], 1) == 137
    thread.join()
    text = "".join(seen)
    assert text.startswith("Traceback") and "ZeroDivisionError" in text
    assert "step 29" in text


def test_a_line_of_many_bytes_passes(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; sys.stdout.write('x' * 3_000_000); sys.stdout.flush()"
    assert run_processes([*PYTHON, code], 2) == 0
    assert capfd.readouterr().out.count("x") == 6_000_000


def test_a_hidden_ranks_report_is_shown_only_where_it_is_the_cause(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = (
        "import os, time\n"
        "rank = int(os.environ['RANK'])\n"
        "time.sleep(0.4 * rank)\n"
        "raise ValueError(rank)\n"
    )
    assert run_processes([*PYTHON, code], 3, output=Output(ranks={1})) == 1
    err = capfd.readouterr().err
    assert ("ValueError: 0" in err, "ValueError: 1" in err, "ValueError: 2" in err) == (
        True,
        True,
        False,
    )


ENDING = """
import os, signal, sys, time
import meshdist as md
md.init_process_group("gloo")
md.barrier()
how = sys.argv[1]
if md.get_rank() == 1 and how == "raise":
    raise ValueError("no data")
if md.get_rank() == 1 and how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how.startswith("SIG"):
    print("waits", flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("how", ["end", "raise", "killed", "SIGINT", "SIGTERM", "SIGKILL"])
def test_the_directory_in_which_the_ranks_met_is_removed(tmp_path: Path, how: str) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "temporary"
    script.write_text(ENDING)
    folder.mkdir()
    job = subprocess.Popen(
        [sys.executable, "-m", "meshdist", "run", "-n", "2", str(script), how],
        env=dict(os.environ, PYTHONPATH=str(ROOT), TMPDIR=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        if how.startswith("SIG"):
            assert job.stdout is not None
            assert job.stdout.readline() == b"waits\n"
            assert any(path.name.startswith("store at") for path in folder.glob("*/*"))
            job.send_signal(signal.Signals[how])
        job.wait(60)
        end = time.monotonic() + 30
        while any(folder.iterdir()) and time.monotonic() < end:  # its guard outlives a killed job
            time.sleep(0.05)
        assert list(folder.iterdir()) == []
    finally:
        job.kill()
        job.communicate()
