"""The sizes that a core chooses among, with their axes and cost, and which of them stands in place of another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from normcheck.cases.axes import OCTAVES, PAIRS, ROWS_OF_CLASS, band_of, key_of, octave_of, row_class
from normcheck.cases.claims import Claims
from normcheck.cases.goals import Sizes
from normcheck.cases.layouts import HEADS
from normcheck.cases.planned import Size

_HEADS_IN_TURN = (64, 128, 256)

_OF_SIZES = tuple((PAIRS.index((one, other)), one, other) for one, other in (("m", "n"), ("band", "octave")))
_CASE_COST_ROWS = 12
"""The fixed cost of a case, in rows of an interpreted kernel."""


@dataclass(frozen=True)
class CoreSizes:
    """The ``sizes`` of a core for these ``claims``; ``seed``: of the run."""

    claims: Claims
    sizes: Sizes
    seed: int

    @cached_property
    def candidates(self) -> Sequence[Size]:
        """Every size, in an order of the seed."""
        pairs = list(self.sizes.every())
        if self.seed:
            random.Random(f"{self.seed} sizes").shuffle(pairs)
        return [self.size(m, n) for m, n in pairs]

    def size(self, m: int, n: int) -> Size:
        """The size of so many rows and columns."""
        width, fit = key_of(n)
        axes: dict[str, Any] = {
            "M": m,
            "N": n,
            "m": row_class(m),
            "n": (width, fit),
            "width": width,
            "fit": fit,
            "whole": n,
            "shape": (m, n),
        }
        axes |= {"band": band_of(m), "octave": octave_of(n), "several": n if m > 1 else 0}
        cost = _CASE_COST_ROWS + (m + m * (n == 1)) + m * n / 4000  # one column shows few faults, so it counts twice
        pairs = [(number, axes[one], axes[other]) for number, one, other in _OF_SIZES]
        together = (*pairs, ("shape", (m, n)), ("several", axes["several"]))
        return Size(M=m, N=n, axes=axes, cost=cost, together=together)

    def known(self, m: int, n: int) -> bool:
        """Whether this core has sizes of the classes of m and n."""
        return row_class(m) in self.sizes.heights and key_of(n) in self.sizes.widths

    def exactly(self, m: int, n: int, number: int) -> Size | None:
        """The size (m, n), or one like it if this core has declared sizes, or no others of its classes."""
        allowed = self.claims.admits("M", m) and self.claims.admits("N", n)
        if self.claims.shapes or not (self.known(m, n) and allowed and self.claims.fits(HEADS, n)):
            return self.like(m, n, number)
        return self.size(m, n)

    def like(self, m: int, n: int, number: int) -> Size | None:
        """The size in place of (m, n) in the case of this ``number``; None if all sizes of its class were refused."""
        if self.claims.shapes:
            return self.candidates[number % len(self.candidates)] if m and self.candidates else None
        if self.claims.columns > 1:  # no N but its multiples
            n = min((own for widths in self.sizes.widths.values() for own in widths), key=lambda own: abs(own - n))
        rows, columns = self.sizes.heights.get(row_class(m), ()), self.sizes.widths.get(key_of(n), ())
        if not rows or not columns:
            return None
        alike = [own for own in columns if octave_of(own) == octave_of(n)] or columns
        height = self._in_place_of(m, rows, ROWS_OF_CLASS[row_class(m)])
        return self.size(height, self._in_place_of(n, alike, OCTAVES[octave_of(n)]))

    def _in_place_of(self, size: int, own: Sequence[int], every: Sequence[int]) -> int:
        """The one of its ``own`` sizes at the place that ``size`` has among ``every`` of its class.

        Without a seed of the run it is ``size`` itself, if this core has it.
        """
        return (
            size if size in own and not self.seed else own[min(every.index(size) if size in every else 0, len(own) - 1)]
        )

    def in_turn(self, size: Size, number: int) -> Size:
        """``size``; if there are only heads, its M with another N at each turn."""
        n = _HEADS_IN_TURN[number % len(_HEADS_IN_TURN)]
        known = (size.M, n) in {(s.M, s.N) for s in self.candidates} if self.claims.only_heads else False
        return self.size(size.M, n) if known else size
