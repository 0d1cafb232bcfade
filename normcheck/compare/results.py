"""What a comparison of two implementations showed, as plain data for its reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from normcheck.result import CellKey, Finding

SAME, DIFFER, OUTSIDE, SKIP, ERROR = "same", "differ", "outside", "skip", "error"
"""Statuses of a pair: the same bits; other bits, all inside the bounds; a side is outside; no case ran; normcheck
failed."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """One side of an output. ``ratio``: its worst error over its bound, of all checks, end to end and by stages.

    The others are of its error against fp64, end to end, over the elements that are finite on both sides and have a
    bound: the mean and the largest, and the mean over the bound. None if there is no such element, as of codes, whose
    right value is an interval. ``nearer``: of the elements that differ, those in which this side is the nearer one.
    """

    ratio: float | None
    nearer: int
    mean_abs: float | None
    max_abs: float | None
    mean_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class OutputPair:
    """One output of both sides: ``differing`` of ``elements`` differ, in ``cases`` cases.

    ``signs``: the zeros whose sign differs, which do not count as differing. ``ulps``: the largest difference in ulps
    of the output's format, infinite between a number and a NaN, None for a bitmask. ``of_bound``: the largest
    difference over the bound, the wider one of the two; None if it has none. ``case``: the case line of the largest
    difference, over the bound if there is one; "" if nothing differs.
    """

    output: str
    elements: int
    differing: int
    signs: int
    cases: int
    ulps: float | None
    of_bound: float | None
    case: str
    a: Errors
    b: Errors


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a pair. ``outside``: the number of cases in which something is wrong; ``failure``: the first fault to
    look at, of the case that tells most. ``refused``: reason -> cases that it does not take.
    """

    implementation: str
    outside: int = 0
    failure: Finding | None = None
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Which rounding differs: ``axis``, and what A and B do of it; "" if no known one explains ``differing`` cases.

    ``explained``: the cases in which the axis makes a difference, and moves what differs. ``backward``: those in which
    it makes one, but gradients alone differ, also where it does not move them. If there are others, ``other`` is the
    smallest, and no known rounding explains it. ``case``: the smallest that shows the axis: a side is outside what the
    form of the other allows. ``several``: axes that differ together, so that none of them explains it alone.
    """

    differing: int
    several: tuple[str, ...] = ()
    axis: str = ""
    a: str = ""
    b: str = ""
    case: str = ""
    explained: int = 0
    backward: int = 0
    other: str = ""

    @property
    def named(self) -> bool:
        """Whether the axis explains every case in which the main output differs."""
        return bool(self.axis) and not self.other


@dataclass(frozen=True, kw_only=True)
class PairInContext:
    """A context in which both sides were called. ``status``: SAME; DIFFER; or SKIP, if it was not tried.

    ``detail``: what differs, or why it was not tried; ``case``: the case line, "" if none was called.
    """

    context: str
    status: str
    detail: str = ""
    case: str = ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Both sides of an op and dtype on ``cases`` cases. ``status``: one of those above; ``detail`` says why it is SKIP
    or ERROR, or why not all cases were run.

    ``reproduce``: a line to paste for each side, of the case with the largest difference; () if nothing differs.
    ``unlike``: the outputs that are of another dtype or size, so they have not the same bits. ``rounding``: which one
    differs, None unless it was asked and something does. ``contexts``: those that were asked for.
    """

    op: str
    dtype: str
    device: str
    status: str
    a: Side
    b: Side
    cases: int = 0
    seconds: float = 0.0
    detail: str = ""
    outputs: tuple[OutputPair, ...] = ()
    unlike: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reproduce: tuple[str, ...] = ()
    rounding: Rounding | None = None
    contexts: tuple[PairInContext, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether a bit differs, in eager mode or in a context, or an output is of another kind."""
        return self.status == DIFFER or bool(self.unlike) or any(one.status == DIFFER for one in self.contexts)

    @property
    def name(self) -> str:
        """The op, the two implementations and the dtype, in words."""
        who = self.a.implementation
        who += f" / {self.b.implementation}" if self.b.implementation != who else ""
        return f"{self.op} {who} {self.dtype}"

    def key(self, side: Side) -> CellKey:
        """The cell of one side."""
        return CellKey(self.op, side.implementation, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Everything that one ``normcheck compare`` showed.

    ``specs``: how the command line names A and B. ``interpreter``: that of B, "" if it is this one. ``environments``:
    the machine and the versions, of A and of B.
    """

    argv: tuple[str, ...]
    specs: tuple[str, str]
    interpreter: str
    environments: tuple[Mapping[str, str], Mapping[str, str]]
    seed: int
    profile: str
    seconds: float
    exit_code: int
    complete: bool
    pairs: tuple[Pair, ...]

    @property
    def facts(self) -> dict[str, tuple[str, str]]:
        """Name -> the two versions or descriptions, if they differ; "" if one is unknown."""
        a, b = self.environments
        both = {name: (a.get(name, ""), b.get(name, "")) for name in dict.fromkeys((*a, *b))}
        return {name: values for name, values in both.items() if values[0] != values[1]}

    @property
    def compared(self) -> tuple[Pair, ...]:
        """The pairs of which a case ran."""
        return tuple(pair for pair in self.pairs if pair.cases)
