"""The plain order ends where another extent leaves nothing to run."""

from __future__ import annotations

from itertools import cycle

import pytest

from normcheck.cases.claims import claims_of
from normcheck.cases.declared import Declared
from normcheck.cases.goals import goals
from normcheck.cases.ops import OPS
from normcheck.cases.sizes import Extent
from normcheck.planner import plain as order
from normcheck.planner.must import Limits
from normcheck.planner.own import Own
from normcheck.planner.record import Record
from normcheck.planner.refusals import Refusals


def test_a_core_that_may_grow_when_all_of_it_is_done_is_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a kernel that seemed dear, on a busy machine, and whose goals have all been covered by other cases."""
    usual = Extent(rows=20, paired_rows=20, elements=3000, heights=2, widths=1, dear_rows=20)
    smaller = Extent(rows=9, paired_rows=9, elements=1000, heights=1, widths=1, dear_rows=9)
    claims = claims_of(OPS["rmsnorm"], Declared(), "fp16")
    record = Record(done=set(goals(claims, usual, 0)))
    extents = cycle((smaller, usual))
    monkeypatch.setattr(order, "affordable", lambda *arguments: next(extents))
    limits = Limits(usual=30.0, telling=30.0, most=60.0, core=30.0, least=(100, 6), cases=400)
    refusals = Refusals(claims, lambda own: goals(own, usual, 0))
    made = order.Plain(refusals, usual, 0, limits, Own("cpu"), record, shard=(1, 1), fits=True)
    steps = 0
    while made.next() is not None:
        steps += 1
    assert steps > 5 and made.opened and made.next() is None
