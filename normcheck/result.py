"""The results of a run as plain frozen data: findings, verdicts of cells, the run. Reports read nothing else.

The fields stand in the order of the JSON report, which is written and read by these types (``reports/document.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from normcheck.circumstances import Configured, InContext, Ran
from normcheck.json_types import Count, Flag, Number, Only, Whole, one_of

KINDS = (
    "mismatch",
    "non_finite",
    "missing",
    "shape",
    "dtype",
    "unwritten",
    "input_modified",
    "out_of_bounds_read",
    "out_of_bounds_write",
    "not_repeatable",
    "exception",
    "crash",
    "timeout",
    "context",
)
"""Every ``Finding.kind``."""

CONTEXT = "context"
"""The ``Finding.kind`` of what is right in eager mode and wrong in the context that ``Finding.check`` names."""

OTHER_ROWS, EARLIER_CALLS, LATER_CALLS = "among other rows", "after other calls", "before other calls"
"""The ``Finding.check`` of what is ``not_repeatable``, if it is known what the bits depend on; else it is ""."""

OUTPUTS = ("y", "q", "scale", "residual_out", "mean", "rstd", "bitmask", "dx", "dresidual", "dgate", "dw", "db")
"""Every output that an op may have, in the order of reports: y first."""

SUMS = ("dw", "db")
"""Outputs that are sums over rows."""

IMPORT, ASLEEP, MEMORY = "import", "asleep", "memory"
"""Why a cell could not be judged, if not by a failure of normcheck: see ``Verdict``."""

JUDGE_DIED = "the process that judged it ended"
"""Why a cell is an error whose judge died twice: nothing is known of its kernel."""

ELSEWHERE = "another shard judges it"
"""Why a cell is skipped that is not of this shard: the ``detail`` of its verdict."""


@dataclass(frozen=True)
class CellKey:
    """The identity of a cell: op, implementation and dtype, and the device if it matters, else ""."""

    op: str
    implementation: str
    dtype: str
    device: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Its names in the order of reports, without an empty device."""
        words = (self.op, self.implementation, self.dtype)
        return (*words, self.device) if self.device else words

    def on(self, device: str) -> CellKey:
        """The key of the same cell on ``device``."""
        return CellKey(self.op, self.implementation, self.dtype, device)

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the wrong elements of an output lie.

    ``grid``: the share of wrong elements in each of at most 8 x 48 cells, which divide the output (a vector has one row
    of cells). ``rows``, ``columns``: the size of the output. ``summary``: in words, such as ``only column 128 of 129``.
    ``ratios``: the largest error / bound in each of the cells, to three digits; () of an output that is too large.
    """

    rows: Count
    columns: Count
    grid: tuple[tuple[Number, ...], ...]
    summary: str
    ratios: tuple[tuple[Number, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of a bound, and its value at one element."""

    name: str
    value: Number


@dataclass(frozen=True, kw_only=True)
class Larger:
    """A larger case that fails like the smallest one, and where the same output is wrong in it."""

    case: str
    where: Where


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A known fault that predicts all that a kernel returned, and is the only one that does.

    ``name`` is for programs; ``words`` say what the kernel does. It predicts ``elements`` elements of all outputs in
    ``cases`` cases, each to within its bound; ``others``: how many other known faults do not. ``only``: what these
    cases have in common ("N=64, no bias"), if it does not explain others; "" if they have nothing.
    """

    name: str
    words: str
    cases: Count
    elements: Count
    others: Count
    only: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault that one case showed.

    ``output``: y, mean, rstd, bitmask, dx, dw or db, or "" if the fault is not about one output. ``check``: which of
    the checks of this output failed, in words ("end to end", "among other rows"). ``actual`` to
    ``ratio`` describe the worst element, at ``index``: ``error`` and ``bound`` are absolute, ``ratio`` is error / bound
    (above 1 is wrong). ``max_ulp``: this error in units in the last place of the output's dtype. ``terms``: the
    parts of the bound at the worst element, largest first. ``also``: other wrong outputs of the same case. ``line``:
    the innermost line of the traceback in the file that defines the implementation, or of a wrong gradient the line of
    its backward in that file. ``cause``: the error in the kernel
    and its remedy in one line, "" if it is not known for sure. ``explain``: the command that shows this bound, term by
    term, "" if there is none. ``larger``: a case that shows a pattern which the smallest hides. ``explanation``: a
    known fault that explains all of it, None if none does, or several do. ``configuration``: which one of a kernel's
    autotuner is wrong, as ``--configs`` takes it, "" if the fault is not one of a configuration alone.
    """

    kind: Annotated[str, one_of(*KINDS)]
    output: str
    case: str
    index: tuple[Count, ...] | None = None
    actual: Number | None = None
    expected: Number | None = None
    error: Number | None = None
    bound: Number | None = None
    ratio: Number | None = None
    max_ulp: Number | None = None
    mismatched: Count | None = None
    numel: Count | None = None
    message: str
    reproduce: str
    check: str = ""
    terms: tuple[Term, ...] = ()
    where: Where | None = None
    also: tuple[str, ...] = ()
    advice: str = ""
    traceback: tuple[str, ...] = ()
    line: Count | None = None
    cause: str = ""
    explain: str = ""
    larger: Larger | None = None
    explanation: Explanation | None = None
    configuration: str = ""


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The largest ratio that an output reached in a cell, whether it passed or not, and the case that reached it."""

    ratio: Number
    max_abs: Number
    max_ulp: Number
    case: str


@dataclass(frozen=True, kw_only=True)
class Uncheckable:
    """``count`` of ``total`` elements had no finite bound, so they cannot fail. ``share``: count / total, or 0."""

    count: Count
    total: Count
    share: Number = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", self.count / self.total if self.total else 0.0)


@dataclass(frozen=True, kw_only=True)
class Vacuity:
    """How much of an output could be all zeros and still pass, over the cases that counted it.

    For ``zeros`` of ``total`` elements with a finite bound, a zero is within the bound. ``empty`` of ``checks`` pass an
    output of zeros alone, so they check nothing. ``share``: zeros / total, or 0.
    """

    zeros: Count
    total: Count
    share: Number = field(init=False, default=0.0)
    empty: Count
    checks: Count

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", self.zeros / self.total if self.total else 0.0)


@dataclass(frozen=True, kw_only=True)
class Steadiness:
    """In ``differ`` of ``cases`` cases an output had other bits when it was computed again."""

    differ: Count
    cases: Count


def three_digits(ratio: float) -> float:
    """``ratio`` to three digits, or to four above 1 where three would be 1, the limit between right and wrong."""
    rounded = float(f"{ratio:.3g}")
    return max(rounded, 1.001) if ratio > 1 else rounded


MOST_REFUSED = 1 / 3
"""The share of what it declares that an implementation may refuse and still count as having run."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of its core a cell has run: the cases that a cell must have run to pass.

    ``run`` of ``planned`` cases of the core were run; for a cell that failed, both count up to the failure. ``missed``:
    what no case has reached, in words, () if the core is finished. ``limit``: what kept that out, the number of
    "cases" that are allowed, the "time", or "data" that the kernel refused; "" if nothing is missed, or if it is not
    known. ``left_out``: what this core leaves out, and why.
    ``refused``: the share of the declared sizes and layouts that the implementation refuses. ``building``: the seconds
    that first calls took longer than repeated ones, for compiling and planning.
    """

    planned: Count
    run: Count
    missed: tuple[str, ...] = ()
    left_out: str = ""
    refused: Number = 0.0
    building: Number = 0.0
    limit: Annotated[str, one_of("", "cases", "time", "data")] = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a cell: op x implementation x dtype on a device.

    ``status``: pass, thin (nothing is wrong, but a part of what a pass requires was not checked; ``detail`` names it),
    fail, skip (always with a ``detail``) or error (normcheck could not judge; ``error``: because of an "import" that
    failed, or a kernel that was "asleep"; "" if normcheck itself failed). ``core``: how much of the core was run,
    None if a single case was run. ``shapes``: how many different (M, N) the judged ``cases`` had; of joined shards the
    number of the one that has most, so there are at least so many; None in a report that did not count them.
    ``skipped``: reason -> how many cases the implementation or its library refused. ``backward_refused``: reason -> how
    many cases were checked except for their gradients. ``model``: what the implementation declares. ``notes``: what a
    reader of a pass must know. ``known``: why a failed cell was expected to fail, or "". ``failed_at``: the number of
    the first case that failed, from 0 in the order of the sweep; -1 for a case of the database.

    By output: ``vacuity``: how much of it could be zeros; ``repeats``: whether another run of a case gave the same
    bits; ``invariance``: whether a row had the same bits among other rows, and dw and db with padding rows (dy = 0)
    wherever they stand; ``undeclared``: if the declaration widens a bound or leaves out a check, the worst element
    under the bounds of an implementation that declares nothing.

    ``spread``: for each axis of the sweep the largest ratio of any output, to three digits, at each of its values. Axes
    are ``M`` and ``N`` (a value is the power of two at or below), ``eps`` (the power of ten), ``rows``, ``dy`` and
    ``layout``. ``limits``: M or N -> the least size that the kernel itself refuses, with a message of its own.
    ``sizes``: each that is required, such as N=16384 -> how many of its cases were judged. ``contexts``: name -> how
    the cell did in it; what could not be tried makes no cell thin. ``ran``: what cases of several sizes launched.
    ``configurations``: None if the kernel has no autotuner with several, or they were not asked for.

    ``file``, ``line``: where the implementation's forward is defined, "" and None if that is not known. A file inside
    the current directory is relative to it. ``source``: the SHA-256 of that file as it was judged. ``machine``: which
    ``host`` judged it, on a GPU with its model (``gpu``), ``uuid`` and ``driver``.
    """

    op: str
    implementation: str
    dtype: str
    device: str
    status: Annotated[str, one_of("pass", "thin", "fail", "skip", "error")]
    detail: str = ""
    cases: Count = 0
    seconds: Number = 0.0
    worst: Mapping[str, Worst] = field(default_factory=dict)
    not_returned: tuple[str, ...] = ()
    failure: Finding | None = None
    uncheckable: Mapping[str, Uncheckable] = field(default_factory=dict)
    skipped: Mapping[str, Count] = field(default_factory=dict)
    model: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    vacuity: Mapping[str, Vacuity] = field(default_factory=dict)
    repeats: Mapping[str, Steadiness] = field(default_factory=dict)
    invariance: Mapping[str, Steadiness] = field(default_factory=dict)
    known: str = ""
    failed_at: Annotated[int, Only("an integer >= -1", least=-1, most=10**18 - 1)] | None = None
    file: str = ""
    line: Count | None = None
    backward_refused: Mapping[str, Count] = field(default_factory=dict)
    undeclared: Mapping[str, Worst] = field(default_factory=dict)
    core: Coverage | None = None
    shapes: Count | None = None
    error: Annotated[str, one_of("", IMPORT, ASLEEP, MEMORY)] = ""
    spread: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    source: str = ""
    machine: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, Count] = field(default_factory=dict)
    sizes: Mapping[str, Count] = field(default_factory=dict)
    contexts: Mapping[str, InContext] = field(default_factory=dict)
    ran: tuple[Ran, ...] = ()
    configurations: Configured | None = None

    @classmethod
    def of(cls, key: CellKey, status: str, *, detail: str = "", seconds: float = 0.0) -> Verdict:
        """The verdict of the cell ``key``, which has its device, before any case is counted."""
        return cls(
            op=key.op,
            implementation=key.implementation,
            dtype=key.dtype,
            device=key.device,
            status=status,
            detail=detail,
            seconds=seconds,
            shapes=0,
        )

    @property
    def key(self) -> CellKey:
        """The key of the cell, without its device."""
        return CellKey(self.op, self.implementation, self.dtype)

    @property
    def elsewhere(self) -> bool:
        """Whether another shard judges the cell."""
        return self.status == "skip" and self.detail == ELSEWHERE

    @property
    def no_backward(self) -> bool:
        """Whether the backward refused every case, so that no gradient was checked."""
        return bool(self.backward_refused) and sum(self.backward_refused.values()) == self.cases


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """A whole run of ``verify``: the command, the machine and every verdict. ``seconds`` is wall time.

    ``budget``: what one cell may cost, ``max_examples`` cases and ``seconds``. ``shard``: ``K/N`` if the run is one of
    N jobs that share the cases, else "". ``required``: implementations that had to run, NAME:CASES with the cases that
    each cell of it had to judge, or NAME:N=SIZE with a size that it had to take. ``part``: whether the run leaves out
    cells of the project's gate.
    """

    argv: tuple[str, ...]
    seed: Whole
    profile: str
    seconds: Number
    environment: Mapping[str, str]
    status: Annotated[str, one_of("pass", "fail", "error", "nothing")]
    exit_code: Count
    verdicts: tuple[Verdict, ...]
    messages: tuple[str, ...] = ()
    complete: Flag = True
    budget: Mapping[str, Number] = field(default_factory=dict)
    shard: str = ""
    required: tuple[str, ...] = ()
    part: Flag = False
