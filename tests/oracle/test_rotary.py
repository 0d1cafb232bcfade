"""Heads that are rotated: the reference against the definition in mpmath, blocks, conventions, pairs, and v."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

import normcheck
from normcheck.cases.case import Case
from normcheck.cases.data_kinds import ANGLE_KINDS
from normcheck.cases.dtypes import FORMATS
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import OPS
from normcheck.cases.split import HEAD_COLUMNS, HEADS_SPAN, KV_HEADS, ROTARY_PARTS
from normcheck.errors import UsageError
from normcheck.oracle import rounding
from normcheck.oracle.conventions import candidates, in_words, plainest, with_convention
from normcheck.oracle.rotary import PAIRS, ROUNDINGS, normalised, output_y
from normcheck.oracle.rounding import NO_ROOM
from normcheck.oracle.tolerances import Model, table
from tests.oracle.definitions import Numbers, assert_held_to, dot, exact, held_of, in_blocks, slopes
from tests.some import some

OP = OPS["qk_norm_rope"]


def case_of(**fields: Any) -> Case:
    own = {"op": OP.name, "dtype": "fp32", "M": 2, "N": 30, "seed": 3, "bias": False, "head": "6", "kv_heads": "one"}
    return Case(**{**own, "rotary": "4", "angles": "normal", **fields})


def model_of(**declared: Any) -> Model:
    return replace(table().model, **{"pairs": "neox", "rounding": "once", **declared})


def definition(case: Case, inputs: Inputs, x: Numbers, pairs: str) -> Numbers:
    """y of a case, in exact numbers: one head after another, one pair of its columns after another."""
    heads, weights = case.of_heads, (exact(inputs.q_weight), exact(inputs.k_weight))
    cosines, sines, y = exact(inputs.cos), exact(inputs.sin), list(x)
    for token in range(case.M):
        for head in range(heads.q + heads.k):
            first = token * case.N + head * heads.columns
            own = x[first : first + heads.columns]
            rstd = 1 / mpmath.sqrt(sum(v * v for v in own) / heads.columns + mpmath.mpf(case.eps))
            weight = weights[head >= heads.q]
            n = [v * rstd * w for v, w in zip(own, weight, strict=True)]
            y[first : first + heads.columns] = n
            for j in range(heads.pairs):
                a, b = (j, j + heads.pairs) if pairs == "neox" else (2 * j, 2 * j + 1)
                c, s = cosines[token * heads.pairs + j], sines[token * heads.pairs + j]
                y[first + a], y[first + b] = n[a] * c - n[b] * s, n[b] * c + n[a] * s
    return y


@pytest.mark.parametrize("rotary", ["2", "4", "6"])
@pytest.mark.parametrize("pairs", PAIRS)
def test_the_reference_is_the_definition(pairs: str, rotary: str) -> None:
    """dx is a central difference of sum(dy * y)."""
    case = case_of(rotary=rotary, layout="strided", gap=3)
    held, inputs = held_of(case, model_of(pairs=pairs)), make(case, OP, "cpu")
    assert inputs.cos is not None and inputs.cos.shape == (2, int(rotary) // 2)
    assert inputs.cos.stride(0) == int(rotary) and case.option_values == {"q_heads": 3, "k_heads": 1}
    with mpmath.workdps(65):
        x, dy = exact(inputs.x), exact(inputs.dy)
        right = {"y": definition(case, inputs, x, pairs)}
        right |= slopes({"dx": x}, lambda: dot(dy, definition(case, inputs, x, pairs)))
        assert_held_to(held, right, least=1e-40)


def test_v_is_copied_and_its_gradient_as_well() -> None:
    case = case_of(dtype="fp16")
    held, inputs = held_of(case, model_of()), make(case, OP, "cpu")
    for name, like in (("y", inputs.x), ("dx", inputs.dy)):
        of_v = slice(case.of_heads.width, case.N)
        assert torch.equal(held[name].expected[:, of_v], like[:, of_v].double())
        assert bool((held[name].bound.upper[:, of_v] == NO_ROOM).all())
        assert bool((held[name].bound.upper[:, : of_v.start] > 1e-12).all())


@pytest.mark.parametrize("pairs", PAIRS)
def test_a_pair_keeps_its_length_in_one_pairing_alone(pairs: str) -> None:
    case, model = case_of(M=5, N=1536, head="128", rotary="half", dtype="fp16"), model_of(pairs=pairs)
    inputs = make(case, OP, "cpu")
    rules = rounding.rules(OP, model)
    rows, statistics = normalised(OP, rules, case, inputs.x.double(), inputs, 0)
    of = rows.rotation
    assert of is not None
    width = of.heads.width
    y = output_y(OP, rules, rows, statistics, FORMATS["fp16"])[0].y[:, :width].reshape(rows.x.shape)
    stretched = of.cos.square() + of.sin.square()
    before, after = rows.xh * of.factor, y
    for side_by_side, keeps in ((of.side_by_side, True), (not of.side_by_side, False)):
        pairing = replace(of, side_by_side=side_by_side)
        a, b, rest = pairing.parts(before)
        c, d, same = pairing.parts(after)
        assert torch.allclose(a**2 + b**2, (c**2 + d**2) / stretched, rtol=1e-9) == keeps
        assert torch.equal(rest, same)


def test_every_term_and_the_count_of_a_rotation_widen_what_they_are_about() -> None:
    case = case_of(dtype="bf16", M=5, N=576, head="64", rotary="half")
    once, inputs = model_of(), make(case, OP, "cpu")
    rules = rounding.rules(OP, once)
    more = replace(rules, count={**rules.count, "rotation": rules.count["rotation"] + 50})

    def before_store(numbers: rounding.Rules) -> Tensor:
        rows, statistics = normalised(OP, numbers, case, inputs.x.double(), inputs, 0)
        return output_y(OP, numbers, rows, statistics, FORMATS["bf16"])[1].before_store

    grown = before_store(more) > before_store(rules)
    turned = torch.zeros(case.of_heads.normed, 64, dtype=torch.bool)
    turned[:, :32] = True
    assert torch.equal(grown[:, : case.of_heads.width].any(0), turned.flatten())
    for rounds in ROUNDINGS[1:]:
        wide, tight = held_of(case, model_of(rounding=rounds))["dx"], held_of(case, once)["dx"]
        assert bool((wide.bound.upper >= tight.bound.upper).all())


def test_samples_in_several_blocks_have_what_one_block_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    case, model = case_of(M=5, dtype="fp16"), model_of(rounding="each", pairs="interleaved")
    for name, one, other in some(in_blocks(case, model, 2, monkeypatch)):
        assert torch.allclose(one, other, rtol=1e-12, atol=0), name


def test_conventions_that_a_case_tells_apart() -> None:
    every = candidates(OP, table().model)
    assert [dict(each) for each in every] == [{"pairs": p, "rounding": r} for p in PAIRS for r in ROUNDINGS]
    assert len(in_words(OP, every[:1])) == 2
    fp32, fp16, still = case_of(), case_of(dtype="fp16"), case_of(dtype="fp16", angles="zero")
    assert [len({plainest(each, case) for each in every}) for case in (fp32, fp16, still)] == [2, 8, 4]
    every_y = [held_of(fp16, with_convention(table().model, one))["y"].expected for one in every[: len(ROUNDINGS)]]
    assert not any(torch.equal(one, other) for one, other in pairwise(every_y))
    once, *others = every_y
    for other in others:
        assert bool(((once - other).abs() <= 6 * 2.0 ** -FORMATS["fp16"].p * (1 + once.abs().max())).all())


@pytest.mark.parametrize("columns", [HEADS_SPAN, 384, 576, 768, 1344, 12288])
def test_every_word_splits_every_row_of_a_run(columns: int) -> None:
    for head in HEAD_COLUMNS:
        for kv_heads in KV_HEADS:
            for rotary in ROTARY_PARTS:
                own = case_of(N=columns, head=head, kv_heads=kv_heads, rotary=rotary).of_heads
                assert (own.q + own.k + own.v) * own.columns == columns and own.k == own.v >= 1 <= own.q
                assert own.columns in (64, int(head)) and 1 <= own.pairs <= own.columns // 2


@pytest.mark.parametrize("angles", ANGLE_KINDS)
def test_no_token_has_the_angles_of_its_neighbour(angles: str) -> None:
    inputs = make(case_of(M=9, N=192, head="64", rotary="all", angles=angles), OP, "cpu")
    assert inputs.cos is not None and inputs.sin is not None
    length = (inputs.cos.double() ** 2 + inputs.sin.double() ** 2).sqrt()
    sizes = 2.0 ** (torch.arange(9).double() % 4 - 1)[:, None] if angles == "scaled" else torch.ones(9, 1).double()
    assert torch.allclose(length, sizes.expand_as(length), rtol=1e-6)
    if angles != "zero":
        assert not bool(
            (inputs.cos - inputs.cos.roll(1, 0))
            .abs()
            .add((inputs.sin - inputs.sin.roll(1, 0)).abs())
            .sum(1)
            .eq(0)
            .any()
        )


def test_bounds_without_a_run() -> None:
    case = case_of(dtype="bf16")
    inputs, model = make(case, OP, "cpu"), {"pairs": "neox", "rounding": "once"}
    held = held_of(case, model_of())
    named = {name: t for name, t in inputs.named() if name != "dy"}
    about = {"eps": case.eps, "q_heads": 3, "k_heads": 1, "model": model, **named}
    found = normcheck.bound(OP.name, dy=inputs.dy, **about)
    assert found.keys() == {"y", "rstd", "dx"} and torch.equal(found["y"].value, held["y"].expected)
    assert torch.equal(found["dx"].bound, held["dx"].bound.upper) and found["rstd"].value.numel() == 2 * 4
    normcheck.assert_within({"y": found["y"].value.bfloat16()}, OP.name, **about)
    with pytest.raises(AssertionError, match="y is wrong"):
        normcheck.assert_within({"y": inputs.x}, OP.name, **about)
    for wrong, said in (
        ({"q_heads": 2}, "as k and v have as many heads"),
        ({"cos": None}, "as qk_norm_rope takes one"),
    ):
        with pytest.raises(UsageError, match=said):
            normcheck.bound(OP.name, **{**about, **wrong})
