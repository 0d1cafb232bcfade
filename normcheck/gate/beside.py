"""Cases of a cell that idle cores take: the next ones of its order run in further processes of the same kernel.

Which cases a cell has, in which order they are judged and what the planner is told follows from the order alone: a
result that is there before its turn waits for it, and one whose turn does not come is thrown away.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from normcheck.cases.planned import Planned
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import died, run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.plan import Plan
from normcheck.isolation.session import ProcessSession
from normcheck.oracle import judging
from normcheck.oracle.conventions import Convention
from normcheck.runner.session import session_of

MOST = 4
"""Further processes of one kernel: what judges them is one process."""

_SLOW = 0.5
"""The share of its time, at least, for which a cell waits for its kernel: judging is one process, which others delay.
An interpreted kernel has 0.6 of it, torch's own 0.25."""

_LEAST_SECONDS = 0.5
"""Within which nothing is known of that."""

_WAITING = 2  # cases for each of them, so that none is idle while the oldest result is waited for


@dataclass(frozen=True)
class Done:
    """What came of a case that ran before its turn. ``conventions``: those that its judge knew of."""

    result: Result
    seconds: float
    conventions: tuple[Convention, ...] | None


class Beside:
    """The further processes of one cell; ``look`` starts them, ``result`` has what they did.

    None on a GPU, nor if building is dear: further processes would build the same. A kernel whose calls are fast waits
    for its judge, and not the other way round.
    """

    def __init__(self, cell: Cell, plan: Plan) -> None:
        self._cell, self._plan = cell, plan
        session = session_of(cell.implementation)
        self._session = session if isinstance(session, ProcessSession) else None
        self._count = min(MOST, len(os.sched_getaffinity(0)) // plan.workers)
        self._is_possible = plan.device == "cpu" and plan.shard[1] == 1 and self._session is not None
        self._threads: ThreadPoolExecutor | None = None
        self._own = threading.local()
        self._sessions: list[ProcessSession] = []
        self._running: dict[Planned, Future[Done]] = {}
        self._begun = time.perf_counter()
        self._waited = 0.0 if self._session is None else self._session.waited_seconds

    def look(self, present: Planned, ask: Ask, room: int, following: Callable[[int], list[Planned]]) -> None:
        """Hand out what comes after the ``present`` case, of which ``room`` cases may run. Never waits.

        ``ask``: of what is known of the kernel by now; ``following``: so many of the cases that come next.
        """
        if not self._is_possible or self._count < 2 or not self._is_slow:
            return
        coming = following(min(room, _WAITING * self._count))
        for planned in self._running.keys() - {present, *coming}:
            self._running.pop(planned).cancel()
        if self._threads is None and coming:
            self._threads = ThreadPoolExecutor(self._count, initializer=self._begin)
        for planned in coming:
            if self._threads is not None and planned not in self._running:
                self._running[planned] = self._threads.submit(self._done, planned, ask)

    @property
    def _is_slow(self) -> bool:
        """Whether further processes help; once there are some, they do."""
        assert self._session is not None
        if self._threads is not None:
            return True
        seconds, waited = time.perf_counter() - self._begun, self._session.waited_seconds - self._waited
        return seconds > _LEAST_SECONDS and waited > _SLOW * seconds

    def result(self, planned: Planned, conventions: tuple[Convention, ...] | None) -> Done | None:
        """What came of a case; None if no process runs it, or if more is known of the kernel by now.

        After a case that ended its process there are no more.
        """
        running = self._running.pop(planned, None)
        if running is None:
            return None
        done = running.result()
        if died(done.result):
            self.stop()
        return done if done.conventions == conventions else None

    def stop(self) -> None:
        """End the processes, for good."""
        self._is_possible = False
        if self._threads is None:
            return
        threads, self._threads = self._threads, None
        for running in self._running.values():
            running.cancel()
        self._running.clear()
        with ExitStack() as ended:
            for session in self._sessions:
                ended.push(session)  # a thread that was between two calls has started its process again
                session.restart()
            threads.shutdown(cancel_futures=True)
        for session in self._sessions:
            if self._session is not None:
                self._session.count_calls_of(session)

    def _begin(self) -> None:
        """Give a new thread a process of its own."""
        implementation = pickle.loads(pickle.dumps(self._cell.implementation))
        self._own.cell = replace(self._cell, implementation=implementation)
        session = session_of(implementation)
        assert isinstance(session, ProcessSession)
        self._sessions.append(session)

    def _done(self, planned: Planned, ask: Ask) -> Done:
        begun, compiling = time.perf_counter(), judging.compiling_seconds()
        result = run_case(self._own.cell, planned.case, self._plan, replace(ask, depth=planned.probe))
        seconds = time.perf_counter() - begun - (judging.compiling_seconds() - compiling)
        return Done(result, seconds, ask.conventions)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.stop()
