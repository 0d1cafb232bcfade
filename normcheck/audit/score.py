"""The results of an audit, as plain frozen data: planted faults killed or not, correct kernels accused or not.

Reports read this and nothing else of an audit. A cell is mutant x op x dtype. The score counts mutants: a mutant counts
as killed only if every cell of it that ran was killed. A mutant under a regime has its fault only in some calls. It is
one more mutant, with its own id, and counts in the score of its regime.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

KILLED, SURVIVED, NOT_EXERCISED, ERROR = "killed", "survived", "not_exercised", "error"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one cell of a mutant.

    ``status``: killed, survived, not_exercised (always with a ``reason``) or error (normcheck itself failed, for the
    ``reason`` given). ``kind``, ``output``, ``case``: those of the finding that killed it; the case of a mutant's first
    cell was shrunk. ``cases`` ran in ``seconds``. ``what`` and ``source`` are the mutant's. ``promised``: this profile
    promises to kill it. ``regime``: the calls that have the fault, "" for all.

    ``asked``: it was killed by a wrong value, and the diagnosis was asked about it. ``explanation`` is what it named,
    "" if nothing, and ``rightly`` whether that is so.
    """

    id: str
    op: str
    dtype: str
    status: str
    kind: str = ""
    output: str = ""
    cases: int = 0
    seconds: float = 0.0
    case: str = ""
    reason: str = ""
    what: str = ""
    source: str = ""
    promised: bool = True
    regime: str = ""
    asked: bool = False
    explanation: str = ""
    rightly: bool = False


@dataclass(frozen=True, kw_only=True)
class Score:
    """Mutant ids by status, each in the order of the outcomes."""

    killed: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    not_exercised: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def run(self) -> int:
        """The number of mutants that were run, with those that normcheck failed to judge."""
        return len(self.killed) + len(self.survivors) + len(self.errors)


@dataclass(frozen=True, kw_only=True)
class Control:
    """The result of one cell of a correct kernel. ``accused``: a false alarm, with its finding in the other fields.

    ``reason``: why the cell was not run, or how normcheck itself failed (``error``); empty if it was judged.
    """

    name: str
    op: str
    dtype: str
    accused: bool
    kind: str = ""
    output: str = ""
    case: str = ""
    message: str = ""
    cases: int = 0
    seconds: float = 0.0
    reason: str = ""
    error: bool = False


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A whole audit. ``recipe``: the recipe that judged in the gate's place; empty if the gate itself judged."""

    argv: tuple[str, ...]
    seed: int
    profile: str
    recipe: str
    seconds: float
    environment: Mapping[str, str]
    outcomes: tuple[Outcome, ...]
    controls: tuple[Control, ...]
    exit_code: int
    complete: bool = True

    @property
    def mutants(self) -> dict[str, tuple[Outcome, ...]]:
        """Mutant id -> its cells, in the order of the outcomes."""
        cells: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            cells.setdefault(outcome.id, []).append(outcome)
        return {id: tuple(own) for id, own in cells.items()}

    @property
    def score(self) -> Score:
        """The score of the mutants that have their fault in all calls.

        The gate must kill a mutant in every cell that was run; a recipe need only kill it in one. Otherwise the mutant
        survived. Not exercised: no cell was run.
        """
        return self._score_of("")

    @property
    def regimes(self) -> dict[str, Score]:
        """Regime -> the score of the mutants under it."""
        return {name: self._score_of(name) for name in dict.fromkeys(cell.regime for cell in self.outcomes) if name}

    def _score_of(self, regime: str) -> Score:
        own = {id: self.status_of(cells) for id, cells in self.mutants.items() if cells[0].regime == regime}
        killed, survivors, skipped, errors = (
            tuple(id for id, status in own.items() if status == wanted)
            for wanted in (KILLED, SURVIVED, NOT_EXERCISED, ERROR)
        )
        return Score(killed=killed, survivors=survivors, not_exercised=skipped, errors=errors)

    def status_of(self, cells: tuple[Outcome, ...]) -> str:
        """The status of a mutant: the worst status of its cells that were run, or the best if a recipe judged them."""
        statuses = {cell.status for cell in cells}
        order = (KILLED, SURVIVED, ERROR) if self.recipe else (SURVIVED, ERROR, KILLED)
        return next((status for status in order if status in statuses), NOT_EXERCISED)

    @property
    def asked(self) -> tuple[Outcome, ...]:
        """The cells of which the diagnosis was asked what is wrong."""
        return tuple(outcome for outcome in self.outcomes if outcome.asked)

    @property
    def explained(self) -> tuple[Outcome, ...]:
        """Those of which it named the right fault."""
        return tuple(outcome for outcome in self.asked if outcome.rightly)

    @property
    def misled(self) -> tuple[Outcome, ...]:
        """Those of which it named a wrong one."""
        return tuple(outcome for outcome in self.asked if outcome.explanation and not outcome.rightly)

    @property
    def exercised(self) -> tuple[Outcome, ...]:
        """The cells of mutants that were run and judged."""
        return tuple(outcome for outcome in self.outcomes if outcome.status in (KILLED, SURVIVED))

    @property
    def accused(self) -> tuple[Control, ...]:
        """The false alarms."""
        return tuple(control for control in self.controls if control.accused)

    @property
    def errors(self) -> tuple[Outcome | Control, ...]:
        """The cells that normcheck failed to judge."""
        return (
            *(outcome for outcome in self.outcomes if outcome.status == ERROR),
            *(control for control in self.controls if control.error),
        )

    @property
    def broken_promises(self) -> tuple[Outcome, ...]:
        """Cells that survived although the profile promises to kill them."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == SURVIVED and outcome.promised)

    @property
    def median_seconds(self) -> float:
        """The median time of the cells of mutants that were run, in seconds; 0 if there are none."""
        return statistics.median(outcome.seconds for outcome in self.exercised) if self.exercised else 0.0
