"""The endless sequence of drawn cases: what it may hold, and that a seed alone decides it."""

from __future__ import annotations

from itertools import chain, islice

import pytest

from normcheck.cases.claims import claims_of
from normcheck.cases.layouts import HEADS
from normcheck.cases.ops import OPS
from normcheck.cases.strategies import Choices, choices, endless, own_of
from normcheck.impls import discovery

PINNED = [
    "rmsnorm bf16 M=2 N=16384 eps=1e-12 rows=nan dy=large layout=strided seed=113 gap=3 weights=none",
    "rmsnorm bf16 M=17 N=64 eps=0.001 rows=mean100 dy=normal layout=heads seed=138 weights=small bias=none",
]


def every(op: str) -> Choices:
    implementation = next(i for i in discovery.select("torch", (op,)) if i.op == op)
    return choices(claims_of(OPS[op], implementation, "bf16", ()))


@pytest.mark.parametrize("op", list(OPS))
def test_every_value_is_drawn_and_no_case_soon_again(op: str) -> None:
    c = every(op)
    drawn = list(islice(endless(c, 0), 4000))
    assert len({*drawn}) == len(drawn)
    assert {case.N for case in drawn if case.layout != HEADS} == {*c.n}
    fields = {*chain.from_iterable(values[0] for values in c.kinds)}
    assert fields >= {"rows", "dy", "eps", "layout", "gap", "weights", "weight_dtype", "bias", "options"}
    for values in c.kinds:
        shown = {tuple(own_of(case, values).items()) for case in drawn}
        assert shown == {tuple(own.items()) for own in values}
    assert {case.M for case in drawn} >= {*c.m[:9]}
    assert max(case.M * case.N for case in drawn) <= max(*c.elements, *c.n)
    assert {case.seed for case in drawn} <= {*range(c.seeds + 1)}


def test_a_seed_gives_the_same_cases_on_every_machine() -> None:
    """Written down: neither Python's version, nor where normcheck lies, nor what else its files say may change them."""
    first = [str(case) for case in islice(endless(every("rmsnorm"), 5), 2)]
    assert first == PINNED
    assert [str(case) for case in islice(endless(every("rmsnorm"), 6), 2)] != first


def test_what_an_op_gets_by_name_is_drawn_in_its_order() -> None:
    """A set of names has another order in another process, and the numbers behind a draw would be another's."""
    (torch,) = (i for i in discovery.implementations()["torch"] if i.op == "fused_add_rmsnorm_modulate")
    *_, of_residual_gate, of_shift = choices(claims_of(OPS[torch.op], torch, "fp16")).kinds
    assert of_residual_gate == ({},)
    assert {*of_shift[0]} == {"samples"}
