"""What an audit of the gate finds, as plain frozen data: planted faults killed or not, correct kernels accused or not.

Reports read this and nothing else of an audit. A cell is mutant x op x dtype; the score counts mutants, and a mutant
counts as killed only if every cell of it that was run was killed. A mutant under a regime, whose fault is there in some
calls only, is one more mutant, with an id of its own, and has a score of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

KILLED, SURVIVED, NOT_EXERCISED, ERROR = "killed", "survived", "not_exercised", "error"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one cell of a mutant.

    ``status``: killed, survived, not_exercised (with a ``reason``, always) or error (normcheck itself failed, and
    ``reason`` says how). ``kind``, ``output``, ``case``: of the finding that killed it. The case of a
    mutant's first cell was shrunk.
    ``cases`` were run in ``seconds``. ``what`` and ``source`` are the mutant's; ``promised``: this profile promises to
    kill it. ``regime``: in which calls the fault is there, "" for all.
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


@dataclass(frozen=True, kw_only=True)
class Score:
    """Mutants by what became of them, their ids in the order of the outcomes."""

    killed: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    not_exercised: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def run(self) -> int:
        """How many were run, also those that normcheck failed to judge."""
        return len(self.killed) + len(self.survivors) + len(self.errors)


@dataclass(frozen=True, kw_only=True)
class Control:
    """What became of one cell of a correct kernel: ``accused`` is a false alarm, whose finding the other fields hold.

    ``reason``: why it was not run, or how normcheck itself failed (``error``); empty for a cell that was judged.
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
    """A whole audit. ``recipe``: the fixed tolerance that judged in the gate's place, empty for the gate itself."""

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
        """Of the mutants whose fault is there in all calls.

        Killed: in every cell that was run, by a recipe in any. Survived: in a cell or more, of a recipe in all that
        were run. Not exercised: no cell was run.
        """
        return self._score_of("")

    @property
    def regimes(self) -> dict[str, Score]:
        """Regime -> of the mutants under it."""
        return {name: self._score_of(name) for name in dict.fromkeys(cell.regime for cell in self.outcomes) if name}

    def _score_of(self, regime: str) -> Score:
        own = {id: self.status_of(cells) for id, cells in self.mutants.items() if cells[0].regime == regime}
        killed, survivors, skipped, errors = (
            tuple(id for id, found in own.items() if found == status)
            for status in (KILLED, SURVIVED, NOT_EXERCISED, ERROR)
        )
        return Score(killed=killed, survivors=survivors, not_exercised=skipped, errors=errors)

    def status_of(self, cells: tuple[Outcome, ...]) -> str:
        """The status of a mutant from those of its cells: the worst of those that were run, of a recipe the best."""
        statuses = {cell.status for cell in cells}
        order = (KILLED, SURVIVED, ERROR) if self.recipe else (SURVIVED, ERROR, KILLED)
        return next((status for status in order if status in statuses), NOT_EXERCISED)

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
        """Of the cells of mutants that were run; 0 where none was."""
        return statistics.median(outcome.seconds for outcome in self.exercised) if self.exercised else 0.0
