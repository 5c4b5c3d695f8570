"""What a rank of a case does: its calls, the fault that befalls it, and what it notes of both.

A note is one line of JSON in the pipe to the case's host, which sends signals and judges later.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import meshdist as md
from tests.faults.calls import Calls, WrongNumbers
from tests.faults.cases import AFTER, BEFORE, INSIDE, MISCALLS, SIGNALLED, Case
from tests.faults.programs import Step
from tests.inner import mpi_library

__all__ = ["Rank", "Struck"]

NOTE_BYTES = 4000  # less than a pipe takes at once, so that notes of several ranks do not mix


class Struck(Exception):
    """What the program raises of its own, as its fault."""


class Left(BaseException):
    """Takes the rank out of its program to its end."""


@dataclass
class Rank:
    """One rank of a case, in a process of its own.

    Args:
        case: whose rank it is.
        rank: its number.
        notes: the descriptor of the pipe.
        address: where the ranks meet, as an ``init_method``; "" for the environment's.
    """

    case: Case
    rank: int
    notes: int
    address: str

    def run(self) -> None:
        """Run the program to its end, as the main program of this process."""
        self.is_struck = False
        self.calls = Calls(
            self.case.program,
            self.rank,
            timedelta(seconds=self.case.timeout_s),
            self._start_world,
            self._forgive,
        )
        try:
            self._go_through()
        except Left:
            pass
        except BaseException as error:
            self._note_error(error)
            if not isinstance(error, md.MeshdistError) or self.case.after_error == "raise":
                raise
            if md.is_initialized():
                md.destroy_process_group()
        self.note("end")

    def note(self, what: str, **more: Any) -> None:
        """Write one note."""
        text = json.dumps({"what": what, "rank": self.rank, "at": time.monotonic(), **more})
        os.write(self.notes, text.encode() + b"\n")

    def _note_error(self, error: BaseException) -> None:
        fields = {name: getattr(error, name, None) for name in ("summary", "where", "found")}
        self.note(
            "error",
            kind=type(error).__name__,
            is_ours=isinstance(error, md.MeshdistError),
            is_wrong=isinstance(error, WrongNumbers),
            is_fault=isinstance(error, (Struck, KeyboardInterrupt, SystemExit)),
            text=str(error)[: NOTE_BYTES // 3],
            fields={name: str(text)[: NOTE_BYTES // 6] for name, text in fields.items() if text},
            place="".join(traceback.format_tb(error.__traceback__)[-3:])[-NOTE_BYTES // 6 :],
        )

    def _forgive(self, number: int, error: WrongNumbers) -> bool:
        """Go on with numbers that are wrong for a moment, until calls of two hosts are compared."""
        case = self.case
        members = case.program.members(case.program.steps[number], self.rank)
        if number < case.fault.step or not case.is_compared_late(members):
            return False
        self.note("wrong", step=number, text=str(error)[: NOTE_BYTES // 3])
        return True

    def _start_world(self) -> None:
        case, limit = self.case, timedelta(seconds=self.case.timeout_s)
        if case.backend == "mpi":
            # Its parent is the host of the case. mpiexec's number stands in the job's name.
            mpiexec = int(re.findall(r"\d+", os.environ["PMIX_NAMESPACE"])[-2])
            mpi_library.launching_process = lambda: mpiexec
        backend = None if case.hosts else case.backend
        if case.backend == "mpi" or not self.address:
            md.init_process_group(backend, timeout=limit)
        else:
            where = {"rank": self.rank, "world_size": case.size}
            md.init_process_group(backend, self.address, timeout=limit, **where)

    def _go_through(self) -> None:
        program, fault, late = self.case.program, self.case.fault, self.case.late
        is_mine = fault.kind and fault.rank == self.rank
        signal.signal(signal.SIGUSR1, self._raise_in_handler)
        for number, step in enumerate(program.steps):
            self._finish(number)
            if not program.takes_part(step, self.rank):
                continue
            if step.group not in self.calls.handles and number:
                continue  # the handle was dropped
            if step.call == "reinit":
                self._finish(len(program.steps) + 10)  # a Work does not outlive its world
            strikes = is_mine and number == fault.step
            if strikes and fault.moment == BEFORE and self._strike(step):
                continue
            if late and late.rank == self.rank and late.step == number and not late.is_stopped:
                time.sleep(late.pause_s)
            if strikes and fault.moment == INSIDE:
                self._strike_later(step)
            self.note("begin", step=number)
            if self.calls.start(number, self._changed(step) if strikes else step):
                self.note("done", step=number)
            elif strikes and fault.kind == "dropped Work":
                self.note("struck")
                self.calls.drop(-1)
            if strikes and fault.moment == AFTER:
                self._strike(step)
        self._finish(len(program.steps) + 10)
        self.note("through")
        self._end()

    def _finish(self, now: int) -> None:
        for number in self.calls.finish(now):
            self.note("done", step=number)

    def _end(self) -> None:
        if "barrier" in self.case.ending:
            md.barrier()
        if "destroy" in self.case.ending:
            md.destroy_process_group()

    # -- the fault --------------------------------------------------------------------------------

    def _changed(self, step: Step) -> Step:
        """The step as the rank that is struck calls it."""
        kind = self.case.fault.kind
        if kind in MISCALLS:
            self.note("struck")
        if kind == "other count":
            return replace(step, count=step.count + 1)
        if kind == "other dtype":
            return replace(step, dtype="int16")
        if kind == "other collective":
            return replace(step, call="barrier")
        return replace(step, is_async=True, patience=50) if kind == "dropped Work" else step

    def _strike(self, step: Step) -> bool:
        """Do what the fault says, here and now; whether the step is left out."""
        kind = self.case.fault.kind
        if kind in MISCALLS or kind == "dropped Work":
            return False
        self.note("struck")
        if kind == "pause":
            self.note("pause")
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind.startswith("SIG"):
            if "STOP" in kind:
                self.note("stop")
            os.kill(os.getpid(), getattr(signal, kind.split(",")[0]))
        else:
            return self._leave(kind, step)
        return False

    def _leave(self, kind: str, step: Step) -> bool:
        if kind.startswith("destroy"):
            md.destroy_process_group()
            kind = kind.partition(", ")[2]
        if kind.startswith("os._exit"):
            os._exit(int(kind[-2]))
        if kind == "sys.exit":
            sys.exit(0)
        if kind == "raise":
            raise Struck("the program has a fault")
        if kind in ("return", ""):
            raise Left
        if kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "abort":
            self._abort(step)
        elif kind == "dropped group":
            self.calls.drop(step.group)
        elif kind == "thread dies":
            self._in_a_thread_that_dies()
        return kind in ("skipped call", "dropped group", "thread dies")

    def _abort(self, step: Step) -> None:
        group = self.calls.handles.get(step.group) or md.group.WORLD
        assert isinstance(group, md.ProcessGroup)
        group.abort("enough")

    def _in_a_thread_that_dies(self) -> None:
        def die() -> None:
            raise Struck("this thread has a fault")

        thread = threading.Thread(target=die)
        thread.start()
        thread.join()

    def _strike_later(self, step: Step) -> None:
        """Let the fault strike in a moment: by the host's signal, or from another thread."""
        fault = self.case.fault
        if fault.kind in SIGNALLED:
            self.note("strike")
            return
        act: Callable[..., Any] = {"abort": self._abort}.get(fault.kind, self._exit_now)
        threading.Timer(fault.delay_s, self._act_later, (act, step)).start()

    def _act_later(self, act: Callable[..., Any], step: Step) -> None:
        self.note("struck")
        act(step)

    def _exit_now(self, step: Step) -> None:
        os._exit(int(self.case.fault.kind[-2]))

    def _raise_in_handler(self, number: int, frame: Any) -> None:
        raise Struck("a handler has a fault")
