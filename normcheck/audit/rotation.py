"""The choice of mutants, regimes, ops and dtypes that run together: all by turns, the same on every machine."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from hashlib import sha256

from normcheck.audit.mutants.mutant import Mutant
from normcheck.audit.mutants.regimes import Regime
from normcheck.audit.mutants.under import cells

SAMPLED = 6
"""The number of mutants that run under each regime in an audit of everything."""

LEFT_OUT = frozenset({
    *("mB02@one_n:3", "mB02@several_rows:512"),
    "P09@one_n:4097",
    *("P14@late_rows", "X10@dy_strided", "dx-c1-n-1@one_n:1"),
    *("mA02@one_n:1", "mA05@no_bias", "mA09@one_n:1", "mB06@one_n:1024"),
    "dx-c1-accumulated-io@long_rows",
})  # fmt: skip
"""Pairs that would be in the sample. Those of the first two lines are known to survive quick; docs/audit.md says why.
Those of the next two are no faults: all cases of a core run to find that no output differs from the clean kernel's,
a seventh of the whole audit. The last is killed, after minutes: it adds up 53,248 columns one by one."""


@dataclass(frozen=True)
class Pair:
    """A mutant under a regime, in one op and dtype."""

    mutant: Mutant
    regime: Regime
    op: str
    dtype: str

    @property
    def id(self) -> str:
        """The id of the mutant under the regime."""
        return f"{self.mutant.id}@{self.regime.id}"


def by_turns(mutant: Mutant, dtypes: Container[str]) -> tuple[tuple[str, str], ...]:
    """Each op of a mutant in one of its dtypes, of those in ``dtypes``.

    A hash of the id chooses the dtype of the first op; the next op has the next dtype. So a mutant of three ops meets
    three dtypes, and over all mutants each dtype is about as frequent as the others.
    """
    own = [dtype for dtype in mutant.dtypes if dtype in dtypes]
    first = int.from_bytes(sha256(mutant.id.encode()).digest())
    return tuple((op, own[(first + number) % len(own)]) for number, op in enumerate(mutant.ops) if own)


def pairs(
    regimes: Sequence[Regime],
    mutants: Sequence[Mutant],
    ops: set[str],
    dtypes: set[str],
    *,
    every_cell: bool = False,
) -> tuple[Pair, ...]:
    """Each mutant under each regime: in one of its cells, chosen by a hash of the ids, or in every cell.

    Only cells in ``ops`` and ``dtypes`` count. A mutant that makes no sense under a regime has one pair, whose trial
    reports the reason.
    """
    chosen: list[Pair] = []
    for regime in regimes:
        for mutant in mutants:
            own = cells(regime, mutant) or ((mutant.ops[0], mutant.dtypes[0]),)
            ranked = [(op, dtype) for op, dtype in own if op in ops and dtype in dtypes]
            ranked.sort(key=lambda cell: _rank(regime, mutant, *cell))
            chosen += [Pair(mutant, regime, *cell) for cell in (ranked if every_cell else ranked[:1])]
    return tuple(chosen)


def sample(every: Sequence[Pair]) -> tuple[Pair, ...]:
    """``SAMPLED`` pairs of each regime, chosen by a hash of their ids from the pairs that make sense.

    Pairs that are known to survive are left out; an audit of their regime has them.
    """
    chosen: list[Pair] = []
    for regime in {pair.regime.id: pair.regime for pair in every}.values():
        own = [
            pair for pair in every if pair.regime is regime and cells(regime, pair.mutant) and pair.id not in LEFT_OUT
        ]
        chosen += sorted(own, key=lambda pair: _rank(regime, pair.mutant))[:SAMPLED]
    return tuple(chosen)


def _rank(regime: Regime, mutant: Mutant, *cell: str) -> bytes:
    return sha256(" ".join((regime.id, mutant.id, *cell)).encode()).digest()
