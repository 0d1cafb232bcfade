"""Compiling ahead: other processes of the same kernel call it at the shapes that come next.

What they compile lies in the compiler's own cache on disk when the cell's own process asks for it. Nothing that happens
to these processes touches the verdict.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch

from normcheck.cases.planned import Planned
from normcheck.checks.cell import Cell
from normcheck.errors import Broken
from normcheck.gate.configurations import InTurn
from normcheck.gate.plan import Plan
from normcheck.isolation.process import Worker
from normcheck.isolation.session import ProcessSession
from normcheck.planner.planner import Planner
from normcheck.runner.session import session_of

MOST = 4
"""Processes that compile ahead for one cell: each has a context on the GPU, and with so many its own process has as
much to judge as they compile."""

_LEAST_BYTES = 8 << 30
"""Of a GPU's memory, which must be free: a kernel whose registers spill holds up to so much in each process."""

_ANSWER_SECONDS = 5.0  # within which the rest of an answer comes that has begun to


def spare(cores: int, cells: int) -> int:
    """How many processes may compile ahead for each of so many ``cells`` side by side.

    A core of its own is kept for the cell: its kernel's process and its judge take turns.
    """
    return max(0, min(MOST, cores // cells - 1))


class Ahead:
    """The processes that compile ahead for one cell, while its ``core`` runs; ``look`` starts them.

    ``is_possible``: whether they run, or may do so. ``asked``: how many cases they were asked to run. Each takes its
    configuration ``in_turn``.
    """

    def __init__(self, cell: Cell, plan: Plan, core: Planner, in_turn: InTurn) -> None:
        self._cell, self._device, self.core, self._in_turn = cell, plan.device, core, in_turn
        session = session_of(cell.implementation)
        self._session = session if isinstance(session, ProcessSession) else None
        self._left = spare(len(os.sched_getaffinity(0)), plan.workers)  # that may be started yet
        self._helpers: list[_Helper] = []
        self.asked = 0
        self.is_possible = self._session is not None and self._left > 0

    def look(self) -> None:
        """Take the answers that are there, and ask for the next shapes. Never waits for a process, never raises."""
        if not self.is_possible or self._session is None:
            return
        if not self.core.is_priced:
            self._end()
            return
        for helper in list(self._helpers):
            try:
                self._go_on(helper)
            except (Broken, OSError):
                self._lose(helper)
            if not self.is_possible:
                return
        one_runs = all(helper.knows_its_kernel for helper in self._helpers)  # one that cannot run tells enough
        if self._left and one_runs and not _is_full(self._device):
            self._left -= 1
            with suppress(Broken, OSError):
                self._helpers.append(_Helper(self._session.another()))
        self.is_possible = bool(self._helpers or self._left)

    def _go_on(self, helper: _Helper) -> None:
        """Raises Broken or OSError if the process is of no use any more."""
        if helper.has_answered:
            asked, well = helper.answer(self._cell)
            if asked is not None:
                self.core.compiled(asked, well=well)
        if not helper.is_idle:
            return
        if self.core.prices.warming_is_idle or _is_full(self._device):
            self.stop()
            return
        shape = self.core.ahead()
        if shape is not None:
            self.asked += 1
            helper.ask(shape, self._device, self._in_turn.of(shape.case))

    def _lose(self, helper: _Helper) -> None:
        """End one that died, or has answered nonsense; if it could not even begin, no other will."""
        if not helper.knows_its_kernel:
            self._left = 0
        if helper.asked is not None:
            self.core.compiled(helper.asked, well=False)
        self._helpers.remove(helper)
        helper.end()

    def stop(self) -> None:
        """End the processes, for good."""
        self._end()
        self.is_possible = False

    def _end(self) -> None:
        """End the processes; as many may be started again, if building turns out to be dear once more."""
        helpers, self._helpers = self._helpers, []
        self._left += len(helpers)
        if helpers:
            self.core.prices.forget_warmed()
        for helper in helpers:
            helper.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.stop()


def _is_full(device: str) -> bool:
    """Whether a GPU has little memory left, which is better kept for the processes that are judged."""
    return device == "cuda" and torch.cuda.mem_get_info()[0] < _LEAST_BYTES


class _Helper:
    """One such process. ``asked``: the case that it runs now."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker  # it has been asked to import the kernel
        self.asked: Planned | None = None
        self._answers = 0

    @property
    def knows_its_kernel(self) -> bool:
        """Whether it has imported its file, and found the kernel there."""
        return self._answers > 1

    @property
    def has_answered(self) -> bool:
        """Whether ``answer`` need not wait."""
        return not self.is_idle and self._worker.has_answered

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a case."""
        return self.knows_its_kernel and self.asked is None

    def answer(self, cell: Cell) -> tuple[Planned | None, bool]:
        """The case that it has run, None if it had not begun, and whether it went well. Raises Broken, OSError."""
        answer = self._worker.receive(_ANSWER_SECONDS, "compiling ahead")
        well = "broken" not in answer and "refused" not in answer
        if "usage" in answer or not (well or self.asked is not None):
            raise Broken("crash", "", "a process that compiles ahead cannot begin")
        self._answers += 1
        if self._answers == 1:
            self._worker.send({"do": "choose", "name": cell.implementation.name, "op": cell.op.name})
        asked, self.asked = self.asked, None
        return asked, well

    def ask(self, planned: Planned, device: str, configuration: str) -> None:
        """Have it run this case, with this configuration. Raises OSError."""
        self.asked = planned
        message = {"do": "warm", "case": str(planned.case), "device": device}
        self._worker.send({**message, "configuration": configuration} if configuration else message)

    def end(self) -> None:
        """Kill it."""
        with suppress(OSError):
            self._worker.kill()
