"""What a sweep finds, as plain frozen data. Reports and the gate read this and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
)
"""Every kind that a finding may have."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the wrong elements of an output lie.

    ``grid``: share of wrong elements, at most 8 x 48 cells over the output's rows and columns (one row for a vector);
    ``rows``, ``columns``: the output's own; ``summary``: what a person would say, such as ``only column 128 of 129``.
    """

    rows: int
    columns: int
    grid: tuple[tuple[float, ...], ...]
    summary: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing wrong on one case.

    ``output``: y, mean, rstd, bitmask, dx, dw or db, or "" where it is not about one output. ``check``: which of the
    checks of this output failed, in words ("end to end", "given the kernel's own statistics"). ``actual`` ...
    ``ratio``: of the worst element at ``index``; ``error`` and ``bound`` are absolute, ``ratio`` is error / bound
    (above 1 is wrong), ``max_ulp`` counts units in the last place of the output's dtype. ``terms``: the parts of the
    bound at the worst element, largest first. ``also``: other outputs that are wrong on the same case. ``line``: the
    innermost line of the traceback in the file where the implementation is defined. ``cause``: what in the kernel makes
    it wrong, and what to do, in one line; "" where that is not known for sure.
    """

    kind: str
    output: str
    case: str
    message: str
    reproduce: str
    check: str = ""
    index: tuple[int, ...] | None = None
    actual: float | None = None
    expected: float | None = None
    error: float | None = None
    bound: float | None = None
    ratio: float | None = None
    max_ulp: float | None = None
    mismatched: int | None = None
    numel: int | None = None
    terms: tuple[tuple[str, float], ...] = ()
    where: Where | None = None
    also: tuple[str, ...] = ()
    traceback: tuple[str, ...] = ()
    advice: str = ""
    line: int | None = None
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The largest ratio that an output reached in a cell, passing or not, and the case where it did."""

    ratio: float
    max_abs: float
    max_ulp: float
    case: str


@dataclass(frozen=True, kw_only=True)
class Uncheckable:
    """Elements whose bound was not finite: counted, never failed. ``share`` is count / total."""

    count: int
    total: int

    @property
    def share(self) -> float:
        """Count over total, 0 where nothing was compared."""
        return self.count / self.total if self.total else 0.0


@dataclass(frozen=True, kw_only=True)
class Vacuity:
    """What zeros in place of an output would have passed, over the cases where that was counted.

    ``zeros`` of ``total`` elements that could be judged; ``empty`` of ``checks`` that would have passed nothing but
    zeros, and so are none.
    """

    zeros: int
    total: int
    empty: int
    checks: int

    @property
    def share(self) -> float:
        """Zeros over total, 0 where nothing was counted."""
        return self.zeros / self.total if self.total else 0.0


@dataclass(frozen=True, kw_only=True)
class Steadiness:
    """In how many of ``cases`` an output's bits were not the same."""

    differ: int
    cases: int


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of its core a cell has run: the cases without which nobody may say that it passes.

    ``planned``: cases of the core, of which ``run`` were run; of a cell that failed, both are those until then.
    ``missed``: what no case has reached, in words, () if the core is finished; ``left_out``: what this core does not
    ask, and why; ``refused``: share of the sizes and layouts that the implementation's declaration promises, but it
    refuses; ``building``: seconds that first calls took beyond what they take again, as compiling and planning do.
    """

    planned: int
    run: int
    missed: tuple[str, ...] = ()
    left_out: str = ""
    refused: float = 0.0
    building: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a cell: op x implementation x dtype on a device.

    ``status``: pass, thin (nothing is wrong, and not all was looked at that a pass stands on; ``detail`` says what),
    fail, skip (with a ``detail``, always) or error (normcheck could not judge). ``core``: what was run of that, None
    for a case alone. ``skipped``: reason
    -> number of cases that this implementation, or its library, refused; ``backward_refused``: likewise of cases that
    were checked, but for their gradients. ``model``: what the implementation declares.
    ``notes``: what a reader of a pass must know. ``known``: why a cell that failed was known to, or "". ``failed_at``:
    the number of the case that failed first, from 0 in the order of the sweep; -1 for one of the database.

    By output: ``vacuity``, what zeros would have passed; ``repeats``, whether another run of a case gave the same bits;
    ``invariance``, whether a row had the same bits among other rows; ``undeclared``, where what is declared widens a
    bound or leaves out a check: the worst under the bounds of an implementation that declares nothing.

    ``file``, ``line``: where the implementation's forward is defined; relative to the current directory where it is
    inside, "" and None where that is not known.
    """

    op: str
    implementation: str
    dtype: str
    device: str
    status: str
    detail: str = ""
    cases: int = 0
    seconds: float = 0.0
    worst: Mapping[str, Worst] = field(default_factory=dict)
    not_returned: tuple[str, ...] = ()
    failure: Finding | None = None
    uncheckable: Mapping[str, Uncheckable] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    model: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    vacuity: Mapping[str, Vacuity] = field(default_factory=dict)
    repeats: Mapping[str, Steadiness] = field(default_factory=dict)
    invariance: Mapping[str, Steadiness] = field(default_factory=dict)
    known: str = ""
    failed_at: int | None = None
    file: str = ""
    line: int | None = None
    backward_refused: Mapping[str, int] = field(default_factory=dict)
    core: Coverage | None = None
    undeclared: Mapping[str, Worst] = field(default_factory=dict)

    @property
    def no_backward(self) -> bool:
        """Whether a backward was called, and refused in every case: then no gradient was checked."""
        return bool(self.backward_refused) and sum(self.backward_refused.values()) == self.cases


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole run of ``verify``: what was asked, where, and every verdict. ``seconds`` is wall time.

    ``budget``: what a cell may cost, ``max_examples`` cases and ``seconds``. ``shard``: ``K/N`` where these are the
    cases of one of N jobs. ``required``: implementations that had to run. ``part``: these
    are not all cells that the project's gate is about.
    """

    argv: tuple[str, ...]
    seed: int
    profile: str
    seconds: float
    environment: Mapping[str, str]
    verdicts: tuple[Verdict, ...]
    status: str
    exit_code: int
    messages: tuple[str, ...] = ()
    complete: bool = True
    budget: Mapping[str, float] = field(default_factory=dict)
    shard: str = ""
    required: tuple[str, ...] = ()
    part: bool = False
