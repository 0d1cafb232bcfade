"""Compiling ahead: another process of the same kernel calls it at the shapes that come next.

What it compiles lies in the compiler's own cache on disk when the cell's own process asks for it. Nothing that happens
to this process touches the verdict.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import Self

from normcheck.cases.core import Planned
from normcheck.checks.cell import Cell
from normcheck.errors import Broken
from normcheck.gate.coverage import CoreRun
from normcheck.gate.plan import Plan
from normcheck.isolation.process import Worker
from normcheck.isolation.session import ProcessSession
from normcheck.runner.session import session_of

_PROCESSES = 2  # of a cell that are busy at a time: its kernel's or its judge, and the one that compiles ahead
_ANSWER_SECONDS = 5.0  # within which the rest of an answer comes that has begun to


class Ahead:
    """The process that compiles ahead for one cell, while its ``core`` runs; ``look`` starts it.

    ``is_possible``: whether it runs, or may do so. ``asked``: how many cases it was asked to run.
    """

    def __init__(self, cell: Cell, plan: Plan, core: CoreRun) -> None:
        self._cell, self._device, self.core = cell, plan.device, core
        session = session_of(cell.implementation)
        self._session = session if isinstance(session, ProcessSession) else None
        self._worker: Worker | None = None
        self._asked: Planned | None = None
        self._steps = 0  # answers that have come
        self.asked = 0  # cases that it was asked to run
        cores = len(os.sched_getaffinity(0))
        self.is_possible = self._session is not None and cores >= _PROCESSES * plan.workers

    def look(self) -> None:
        """Take the answer if there is one, and ask for the next shape. Never waits for the process, never raises."""
        if not self.is_possible or self._session is None:
            return
        if not self.core.is_short:
            self._end()
            return
        try:
            if self._worker is None:
                self._worker = self._session.another()
            elif self._asked is None and self._steps > 1:
                self._ask()
            elif self._worker.has_answered:
                self._take()
        except (Broken, OSError):
            self.stop()

    def _take(self) -> None:
        assert self._worker is not None
        answer = self._worker.receive(_ANSWER_SECONDS, "compiling ahead")
        self._steps += 1
        if "usage" in answer or (self._asked is None and "broken" in answer):
            self.stop()
        elif self._steps == 1:
            name = {"name": self._cell.implementation.name, "op": self._cell.op.name}
            self._worker.send({"do": "choose", **name})
        else:
            if self._asked is not None:
                self.core.compiled(self._asked, well="broken" not in answer and "refused" not in answer)
            self._ask()

    def _ask(self) -> None:
        assert self._worker is not None
        if self.core.costs.warming_is_idle:
            self.stop()
            return
        self._asked = self.core.ahead()
        if self._asked is not None:
            self.asked += 1
            self._worker.send({"do": "warm", "case": str(self._asked.case), "device": self._device})

    def stop(self) -> None:
        """End the process, for good."""
        self._end()
        self.is_possible = False

    def _end(self) -> None:
        worker, self._worker, self._asked, self._steps = self._worker, None, None, 0
        if worker is not None:
            self.core.alone()
            with suppress(OSError):
                worker.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.stop()
