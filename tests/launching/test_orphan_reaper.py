"""The family of a launch is found whole, and nobody else is."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO
from unittest import mock

import pytest

from meshdist.launching.child_processes import Guard
from meshdist.launching.orphan_reaper import MARK, ProcessTree, mark_value
from tests.inner import Deadline, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

OURS = f"ours-{os.getpid()}"  # a worker that runs other tests of this file has other names
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
# Starts SLEEP in a session of its own, without any environment; tells its number; waits or ends.
PARENT = """
import subprocess, sys, time
env = {} if "bare" in sys.argv else None
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"],
                         start_new_session=True, env=env)
print(child.pid, flush=True)
time.sleep(0 if "leave" in sys.argv else 60)
"""

Start = Callable[..., subprocess.Popen[str]]


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []
    found: list[int] = []

    def start(command: list[str], mark: str | None = None) -> subprocess.Popen[str]:
        env = dict(os.environ) | ({} if mark is None else {MARK: mark})
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    start.found = found  # type: ignore[attr-defined]
    yield start
    for pid in found:
        if is_alive(pid):
            os.kill(pid, 9)
    for process in started:
        process.kill()
        process.communicate()


def child_of(process: subprocess.Popen[str], start: Start) -> int:
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    start.found.append(pid)  # type: ignore[attr-defined]
    return pid


def test_the_mark_is_inherited_beyond_sessions_and_parents(start: Start) -> None:
    parent = start([sys.executable, "-c", PARENT, "leave"], f"/{OURS}")
    orphan = child_of(parent, start)
    assert parent.wait(10) == 0
    start(SLEEP, "/other")
    start(SLEEP)
    process_tree = ProcessTree(OURS)
    assert process_tree.members() == [orphan]
    process_tree.kill()
    assert process_tree.members() == []
    assert not is_alive(orphan)


def test_a_started_process_counts_with_its_children_even_without_the_mark(start: Start) -> None:
    stranger = start(SLEEP)
    parent = start([sys.executable, "-c", PARENT, "bare"])
    child = child_of(parent, start)
    process_tree = ProcessTree(OURS)
    assert process_tree.members() == []
    process_tree.add(parent.pid)
    assert process_tree.members() == sorted([parent.pid, child])
    process_tree.kill()
    assert parent.wait(10) == -9
    assert wait_until(lambda: not is_alive(child), Deadline(10))
    assert is_alive(stranger.pid)


def test_the_session_of_a_started_process_counts_when_parents_have_gone(start: Start) -> None:
    # A leader that hides its mark starts a parent, which leaves a child without any environment.
    code = (
        "import subprocess, sys, time\n"
        "quiet = [sys.executable, '-S', '-c', 'import time; time.sleep(60)']\n"
        "code = f'import subprocess; print(subprocess.Popen({quiet!r}, env={{}}).pid)'\n"
        "subprocess.run([sys.executable, '-c', code])\n"
        "time.sleep(60)\n"
    )
    leader = start([sys.executable, "-c", f"import os; os.setsid()\n{code}"])
    orphan = child_of(leader, start)
    process_tree = ProcessTree(OURS)
    process_tree.add(leader.pid)
    deadline = time.monotonic() + 5
    while len(process_tree.members()) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_tree.members() == sorted([leader.pid, orphan])


def test_a_number_that_now_belongs_to_somebody_else_does_not_count(start: Start) -> None:
    stranger = start(SLEEP)
    path, process_tree, open_file = f"/proc/{stranger.pid}/stat", ProcessTree(OURS), open
    name, _, text = Path(path).read_text().rpartition(")")
    fields = text.split()
    fields[19] = str(int(fields[19]) - 1)  # of a process that started earlier
    earlier = f"{name}) {' '.join(fields)}".encode()

    def open_earlier(file: str, *how: str) -> IO[bytes]:
        return io.BytesIO(earlier) if file == path else open_file(file, *how)

    with mock.patch("builtins.open", open_earlier):
        process_tree.add(stranger.pid)
        assert process_tree.members() == [stranger.pid]
    assert process_tree.members() == []


def test_a_launch_inside_a_launch_belongs_to_both(start: Start) -> None:
    inner = start(SLEEP, mark_value(mark_value(None, f"outer{OURS}"), f"inner{OURS}"))
    deadline = time.monotonic() + 5
    while not ProcessTree(f"inner{OURS}").members() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ProcessTree(f"outer{OURS}").members() == [inner.pid]
    assert ProcessTree(f"inner{OURS}").members() == [inner.pid]
    assert ProcessTree("inn").members() == []


def test_a_dismissed_guard_harms_nobody(start: Start) -> None:
    process = start(SLEEP, f"/{OURS}")
    guard = Guard(OURS)
    guard.adopt(process.pid)
    guard.dismiss()
    time.sleep(0.2)
    assert process.poll() is None


def test_the_guard_acts_when_its_owner_is_killed(start: Start) -> None:
    owner = start(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            f"sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
            "from meshdist.launching.child_processes import Guard\n"
            f"guard = Guard({OURS!r})\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],\n"
            f"                         env=dict(os.environ, {MARK}='/{OURS}'))\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(60)\n",
        ]
    )
    child = child_of(owner, start)
    owner.kill()
    deadline = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)
