"""Which mutant is run under which regime, and in which op and dtype: all by turns, the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from normcheck.audit.mutants.mutant import Mutant
from normcheck.audit.mutants.regimes import Regime
from normcheck.audit.mutants.under import cells

SAMPLED = 6
"""Mutants under each regime in an audit of everything."""


@dataclass(frozen=True)
class Pair:
    """A mutant under a regime, in one op and dtype."""

    mutant: Mutant
    regime: Regime
    op: str
    dtype: str


def pairs(
    regimes: Sequence[Regime],
    mutants: Sequence[Mutant],
    ops: set[str],
    dtypes: set[str],
    *,
    every_cell: bool = False,
) -> tuple[Pair, ...]:
    """Each mutant under each regime: in one of its cells, by a hash of their ids, or in every one.

    Only cells in ``ops`` and ``dtypes``. A mutant that makes no sense under a regime is there once, to say so.
    """
    chosen: list[Pair] = []
    for regime in regimes:
        for mutant in mutants:
            own = cells(regime, mutant) or ((mutant.ops[0], mutant.dtypes[0]),)
            there = [(op, dtype) for op, dtype in own if op in ops and dtype in dtypes]
            there.sort(key=lambda cell: _rank(regime, mutant, *cell))
            chosen += [Pair(mutant, regime, *cell) for cell in (there if every_cell else there[:1])]
    return tuple(chosen)


def sample(every: Sequence[Pair]) -> tuple[Pair, ...]:
    """``SAMPLED`` pairs of each regime, of those that make sense, by a hash of their ids."""
    chosen: list[Pair] = []
    for regime in {pair.regime.id: pair.regime for pair in every}.values():
        own = [pair for pair in every if pair.regime is regime and cells(regime, pair.mutant)]
        chosen += sorted(own, key=lambda pair: _rank(regime, pair.mutant))[:SAMPLED]
    return tuple(chosen)


def _rank(regime: Regime, mutant: Mutant, *cell: str) -> bytes:
    return sha256(" ".join((regime.id, mutant.id, *cell)).encode()).digest()
