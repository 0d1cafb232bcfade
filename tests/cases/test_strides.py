"""Which tensors of a case lie apart: each of them alone in some case, and each at a distance of its own in another."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from normcheck.cases.case import Case, with_other_values
from normcheck.cases.claims import claims_of
from normcheck.cases.data_kinds import dy_kinds
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.cases.strategies import choices, endless
from normcheck.cases.strides import apart, cotangents, in_channels_last, read_by_forward
from normcheck.impls import discovery

ROWS = {
    "rmsnorm": {"x"},
    "fused_add_rmsnorm": {"x", "residual"},
    "rmsnorm_gated": {"x", "gate"},
    "layernorm_modulate": {"x", "scale", "shift"},
    "fused_add_rmsnorm_modulate": {"x", "residual", "scale", "shift", "residual_gate"},
}


def cases(op: str, layout: str) -> list[Case]:
    samples = "few" if OPS[op].modulated else ""
    case = Case(op=op, dtype="fp16", M=6, N=8, bias=False, samples=samples, layout=layout, gap=4)
    return [replace(case, seed=seed) for seed in range(20)]


@pytest.mark.parametrize("op", OPS)
def test_other_values_lie_alike(op: str) -> None:
    """A kernel that takes the one must take the other: shapes, strides and alignment, of each seed."""
    layouts = set()
    for torch in discovery.select("torch", (op,)):
        for case in islice(endless(choices(claims_of(OPS[op], torch, "fp16")), 0), 200):
            one, other = (make(own, OPS[op], "cpu") for own in (case, with_other_values(case)))
            lie = [[(name, t.shape, t.stride(), t.data_ptr() % 16) for name, t in own.named()] for own in (one, other)]
            assert lie[0] == lie[1], case
            layouts.add(case.layout)
    assert len(layouts) > 5


@pytest.mark.parametrize("op", ROWS)
def test_each_tensor_lies_apart_alone(op: str) -> None:
    one = cases(op, "contiguous")[0]
    assert set(read_by_forward(one)) == ROWS[op] and cotangents(one)[0] == "dy"
    for layout, every in (("x_strided", read_by_forward(one)), ("dy_strided", cotangents(one))):
        assert {tuple(apart(case)) for case in cases(op, layout)} == {(name,) for name in every}
    of_rows = {name for name in (*ROWS[op], *cotangents(one)) if name not in ("scale", "shift", "residual_gate")}
    found = {tuple(apart(case)) for case in cases(op, "samples_strided")}
    assert {frozenset(names) for names in found} == {frozenset({name}) for name in of_rows} | {frozenset(of_rows)}


@pytest.mark.parametrize("op", ROWS)
def test_what_lies_apart_is_what_the_tensors_say(op: str) -> None:
    for layout in ("x_strided", "dy_strided", "strided"):
        packed = dict(make(cases(op, "contiguous")[0], OPS[op], "cpu").named())
        for case in cases(op, layout):
            made = dict(make(case, OPS[op], "cpu").named())
            moved = {name for name, tensor in made.items() if tensor.stride() != packed[name].stride()}
            assert moved == set(apart(case))
    each = {tensor.stride(-2) for name, tensor in made.items() if name in apart(case)}
    assert case.seed % 2 and len(each) == len(apart(case))


def test_x_or_dy_or_both_are_in_channels_last_memory() -> None:
    assert {in_channels_last(case) for case in cases("groupnorm", "channels_last")} == {("x",), ("dy",), ("x", "dy")}


def test_no_dy_is_so_large_that_a_right_product_overflows() -> None:
    """Eager code that rounds each step is right by the page of its op."""
    for op in ("rmsnorm_gated", "layernorm_modulate", "qk_norm_rope", "groupnorm"):
        assert "large" not in dy_kinds(OPS[op], "fp16") and "large" in dy_kinds(OPS[op], "bf16")
    assert "large" in dy_kinds(OPS["rmsnorm"], "fp16") and dy_kinds(OPS["rmsnorm_quant"], "fp16") == ("normal",)
