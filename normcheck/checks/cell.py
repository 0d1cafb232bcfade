"""The cell that a case runs on, and the setting (device, time limit) that it runs under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from normcheck.cases.claims import Claims, claims_of
from normcheck.cases.op import Op
from normcheck.impls.implementation import Implementation
from normcheck.result import CellKey


@dataclass(frozen=True)
class Cell:
    """Op x implementation x dtype. ``spec`` is how the command line names the implementation.

    ``layouts``: those of the cases that are asked for; () for all that the implementation declares. ``loaded``: the
    options that name a user's files, if a loader has written what ``spec`` names, which goes when the run ends.
    ``configuration``: the one that its session has autotuners take, ``[KERNEL:]NUMBER`` and what it is in brackets.
    """

    op: Op
    implementation: Implementation
    dtype: str
    spec: str
    layouts: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()
    configuration: str = ""

    @property
    def claims(self) -> Claims:
        """What its cases may have. Only for a cell that ``attempt.why_not`` has nothing against."""
        return claims_of(self.op, self.implementation, self.dtype, self.layouts)

    @property
    def named(self) -> tuple[str, ...]:
        """The words that name its implementation, and its configuration, to ``normcheck repro``."""
        return (*(self.loaded or (self.spec,)), *("--configs", self.asked) * bool(self.asked))

    @property
    def asked(self) -> str:
        """The configuration for ``Session.configure``."""
        return self.configuration.partition(" ")[0]

    @property
    def key(self) -> CellKey:
        """The name of the cell, on any device."""
        return CellKey(self.op.name, self.implementation.name, self.dtype)


class Setting(Protocol):
    """The device, the time limit and the judge of a case; the plan of a run has them."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""

    @property
    def timeout(self) -> float:
        """Seconds after which a case is stopped."""

    @property
    def first_calls(self) -> float:
        """How many times as long the first call of each kind in a process may take."""

    @property
    def judge(self) -> str:
        """One of ``oracle.judging.JUDGES``."""

    @property
    def within(self) -> tuple[str, ...]:
        """The contexts in which each case is called again if it is right."""

    @property
    def held_to(self) -> tuple[str, ...]:
        """The contexts that must be tried: if the kernel prevents one of them, that is a finding."""

    @property
    def asked(self) -> bool:
        """Whether somebody asked for these contexts."""
