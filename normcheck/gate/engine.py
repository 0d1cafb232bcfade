"""Who judges the cells of a run: this machine, or whoever else has the same three methods (``normcheck.cluster``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, Self

from normcheck.checks.attempt import why_not
from normcheck.checks.cell import Cell
from normcheck.errors import ImportFailed, UsageError, error_text, is_of_memory, itself_failed, one_line
from normcheck.files import digest
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import Plan
from normcheck.gate.prepare import prepared
from normcheck.gate.sanity import sensible
from normcheck.gate.sweep import Progress, run_cell
from normcheck.gate.tally import uncounted
from normcheck.gate.workers import likely_cells, patience, start_judge, workers_of
from normcheck.impls import discovery, source_location
from normcheck.isolation import forkserver
from normcheck.isolation.pool import Pool, Start, spread
from normcheck.isolation.settling import keep_freed_memory
from normcheck.result import ELSEWHERE, IMPORT, JUDGE_DIED, MEMORY, Verdict
from normcheck.runner.device import device_for
from normcheck.runner.environment import environment, machine
from normcheck.runner.session import session_of


class CellProgress(Protocol):
    """Told how far a cell of the plan is."""

    def __call__(self, index: int, cases: int, worst: float) -> None:
        """The cell ``index`` has run so many ``cases``, and has this ``worst`` ratio."""


class Engine(Protocol):
    """Judges the cells of a plan, while it is open: ``engine_of`` in ``cli/job.py`` opens one."""

    def planned(self, options: VerifyOptions) -> Plan:
        """The plan that ``options`` ask for, ready to run. Raises UsageError."""

    def environment(self, device: str) -> Mapping[str, str]:
        """The machine and the versions of its libraries, by name."""

    def verdicts(self, plan: Plan, options: VerifyOptions, progress: CellProgress) -> Iterator[tuple[int, Verdict]]:
        """(index, verdict) of every cell of ``plan``, in the order in which they are finished."""


class ThisMachine:
    """One cell after another in this process, or side by side in several of its own.

    It is a context: at its end the processes end that judge, whatever they do.
    """

    _begun: _Judges | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._begun is not None:  # the plan was not run
            self._begun.end()
        self._begun = None

    def planned(self, options: VerifyOptions) -> Plan:
        """The plan that ``options`` ask for; on return everything is ready to run it. Raises UsageError.

        The processes that judge are started beside, if the options tell how many there will be.
        """
        keep_freed_memory()
        device = device_for(options.device, apart=options.isolation)
        cells = likely_cells(options, device)
        workers = workers_of(options, cells, device)
        self._begun = _Judges(device, workers, cells) if workers > 1 else None
        return prepared(options)

    def environment(self, device: str) -> Mapping[str, str]:
        """This machine and the versions of its libraries."""
        return environment(device)

    def verdicts(self, plan: Plan, options: VerifyOptions, progress: CellProgress) -> Iterator[tuple[int, Verdict]]:
        """(index, verdict) of every cell."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.cells != len(plan.cells):
            begun.end()
            begun = None
        workers = begun.workers if begun is not None else workers_of(options, len(plan.cells), plan.device)
        if workers == 1:
            with ExitStack() as started:
                for index, cell in enumerate(plan.cells):
                    progress(index, 0, 0.0)
                    for following in plan.cells[index + 1 : index + 2]:
                        _start_ahead(following, plan, started)
                    yield index, verdict_of(cell, plan, partial(progress, index))
            return
        dear = plan.profile.dear.in_turn(len(plan.cells) / workers)
        alike = replace(
            plan,
            cells=(),
            profile=replace(plan.profile, dear=dear),
            timeout=plan.timeout * patience(workers),
            workers=workers,
        )
        order = Order(plan)
        found = spread(
            _run_job,
            [(cell, alike) for cell in plan.cells],
            workers=workers,
            start=partial(start_judge, plan.device, workers),
            first=_first(plan.device),
            died=_judge_died,
            apart=lambda job: False,
            choose=lambda waiting, running: order.next([cell for cell, _ in waiting], [cell for cell, _ in running]),
            begun=None if begun is None else begun.pool,
        )
        for index, verdict in found:
            order.add(verdict)
            yield index, verdict


class _Judges:
    """The processes that will judge so many ``cells``, which import what they need from now on.

    Who asks again how many fit a GPU finds less memory, as they have begun to use it.
    """

    def __init__(self, device: str, workers: int, cells: int) -> None:
        self.workers, self.cells = workers, cells
        self.pool = Pool(workers, partial(start_judge, device, workers), _first(device))
        self.pool.begin()

    def end(self) -> None:
        """End them, of which nobody needs any."""
        self.pool.end()


def _first(device: str) -> Start:
    """What each process that judges begins with: it asks for the root of its kernels' processes."""
    return partial(forkserver.ask_early, device, forkserver.door())


class Order:
    """Which of the cells of ``plan`` begins, whenever a worker is free.

    First, as long as nothing is known, those that build nothing: while all processes start, others would have less of
    their time. Then each implementation has as large a share of those that run as of all, and its cells of one op come
    one after the other: else most compile at the same time, and many the same. At the end the longest begin first, so
    that all end together: the seconds are those that the plan expects, or that the latest cell of the implementation
    has taken.
    """

    def __init__(self, plan: Plan) -> None:
        self._expected = plan.expected_seconds
        self._latest: dict[str, float] = {}
        known = discovery.implementations().items()
        self._plain = {name for name, found in known if not any(i.builds for i in found)}
        self._all = Counter(cell.implementation.name for cell in plan.cells)

    def add(self, verdict: Verdict) -> None:
        """Learn from a cell that is finished."""
        self._latest[verdict.implementation] = verdict.seconds

    def next(self, waiting: Sequence[Cell], running: Sequence[Cell]) -> int:
        """The place among those ``waiting`` of the one that begins beside those ``running``."""
        nothing_known = not self._latest and not self._expected
        at_the_end = len(waiting) <= len(running) + 1
        of_one = Counter(cell.implementation.name for cell in running)
        of_op = Counter((cell.implementation.name, cell.op.name) for cell in running)

        def key(place: int) -> tuple[float, ...]:
            cell = waiting[place]
            name, seconds = cell.implementation.name, self._seconds(cell)
            if at_the_end or nothing_known:
                return nothing_known and name in self._plain, seconds
            return -of_op[name, cell.op.name], -of_one[name] / self._all[name], seconds

        return max(range(len(waiting)), key=key)

    def _seconds(self, cell: Cell) -> float:
        return self._expected.get(cell.key, self._latest.get(cell.implementation.name, math.inf))


def _start_ahead(cell: Cell, plan: Plan, started: ExitStack) -> None:
    """Start the process of the next cell while the present cell is judged; ``started`` ends it if nobody else does."""
    with suppress(ImportFailed):  # the cell meets it again
        if cell.key in plan.elsewhere or why_not(cell, plan.device):
            return
        session = session_of(cell.implementation)
        started.push(session)
        with suppress(OSError):  # the cell meets the error again, and reports it
            session.start()


def _run_job(job: tuple[Cell, Plan]) -> Verdict:
    return verdict_of(*job, lambda cases, worst: None)


def _judge_died(job: tuple[Cell, Plan]) -> Verdict:
    return judge_died(*job)


def judge_died(cell: Cell, plan: Plan) -> Verdict:
    """The verdict of a cell whose judge died twice: no finding, since nothing is known of the kernel."""
    return uncounted(cell, plan.device, "error", detail=JUDGE_DIED)


def verdict_of(cell: Cell, plan: Plan, progress: Progress) -> Verdict:
    """The verdict of a cell. A fault of normcheck itself makes it an ``error``, and the other cells go on.

    A verdict that contradicts itself is an ``error`` as well: normcheck may have been edited. So is that of a file that
    changed meanwhile, since some of its cases were of the one version, and some of the other.
    """
    if cell.key in plan.elsewhere:
        return uncounted(cell, plan.device, "skip", detail=ELSEWHERE)
    file = source_location.of(cell.implementation).file
    source = digest(file)
    try:
        where = machine(plan.device)
        verdict = replace(sensible(run_cell(cell, plan, progress)), source=source, machine=where)
    except ImportFailed as failed:
        return replace(uncounted(cell, plan.device, "error", detail=str(failed)), error=IMPORT)
    except UsageError:
        raise
    except Exception as error:
        if is_of_memory(error):
            detail = one_line(error_text(error), 240)
            return replace(uncounted(cell, plan.device, "error", detail=detail), error=MEMORY)
        return uncounted(cell, plan.device, "error", detail=itself_failed(error))
    if digest(file) == source:
        return verdict
    detail = f"{source_location.relative(file)} changed while it was judged: expected one version of it; run again"
    return uncounted(cell, plan.device, "error", detail=detail)
