"""Heads: x is a view of a larger buffer, with the numbers of any other layout, and nothing else in the buffer is x."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from normcheck.cases import guard_bands
from normcheck.cases.case import Case, with_rows
from normcheck.cases.claims import Claims, claims_of, unclaimed
from normcheck.cases.core import core
from normcheck.cases.data_kinds import ROW_KINDS
from normcheck.cases.declared import WEIGHT_LAYOUTS
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.goals import goals
from normcheck.cases.guard_bands import NAN
from normcheck.cases.inputs import make
from normcheck.cases.layouts import CHANNELS_LAST, HEAD_SIZES, HEADS, LAYOUTS, SAMPLES_STRIDED
from normcheck.cases.missed import in_words
from normcheck.cases.ops import OPS
from normcheck.cases.planned import goals_of
from normcheck.cases.split import others_behind
from normcheck.cases.strategies import cases, choices, within
from normcheck.errors import UsageError
from normcheck.gate.plan import PROFILES
from normcheck.impls.implementation import Implementation
from normcheck.isolation.shared_memory import shared_bytes
from tests.case_lines import case_of
from tests.inner_loop import parametrize
from tests.some import some

QUICK, CI = PROFILES["quick"].extent, PROFILES["ci"].extent


def heads(m: int, n: int = 64, **fields: Any) -> Case:
    return Case(**{"op": "rmsnorm", "dtype": "fp16", "M": m, "N": n, "layout": HEADS, **fields})


def claims(only: tuple[str, ...] = (), op: str = "rmsnorm", dtype: str = "fp16", **fields: Any) -> Claims:
    declared = Implementation(name="x", op=op, forward=lambda: None, **{"heads": True, **fields})
    return claims_of(OPS[op], declared, dtype, only)


# --- The case


@pytest.mark.parametrize(
    ("m", "shape", "others"),
    [
        *((0, (0, 1, 64), 2), (1, (1, 1, 64), 2), (2, (1, 2, 64), 2), (3, (1, 3, 64), 2), (4, (2, 2, 64), 2)),
        *((5, (5, 1, 64), 2), (6, (2, 3, 64), 2), (17, (17, 1, 64), 2), (20, (4, 5, 64), 4), (24, (3, 8, 64), 4)),
        *((64, (2, 32, 64), 16), (300, (10, 30, 64), 16), (4096, (128, 32, 64), 16)),
    ],
)
def test_tokens_and_heads_follow_from_m(m: int, shape: tuple[int, ...], others: int) -> None:
    case = heads(m)
    assert (case.shape, others_behind(case.heads)) == (shape, others)
    assert case.head_strides == ((shape[1] + others) * 64, 64)
    assert heads(m, gap=8).head_strides == ((shape[1] + others) * 72, 72)
    assert (case.rank, with_rows(case, 1).shape) == (3, (1, 1, 64))


def test_every_m_has_heads() -> None:
    for m in range(200):
        tokens, count, _ = heads(m).shape
        assert tokens * count == m
        assert 1 <= count <= (8 if m < 64 else 32)
        assert tokens > 1 or m <= 3


def test_what_lies_between_counts_as_memory() -> None:
    packed, case = heads(4096, contiguous := 128, layout="contiguous"), heads(4096, contiguous, gap=64)
    tokens, *_ = case.shape
    assert case.room >= tokens * case.head_strides[0] > packed.room
    assert not case.small
    assert heads(64).small
    assert shared_bytes(case) > shared_bytes(packed)


def test_a_gap_is_allowed_and_not_asked_for() -> None:
    assert LAYOUTS[-1] == HEADS
    for line in ("rmsnorm fp16 M=20 N=64 layout=heads", "rmsnorm fp16 M=20 N=64 layout=heads gap=8"):
        assert str(case_of(str(case_of(line)))) == str(case_of(line))
    with pytest.raises(UsageError, match="expected gap > 0 exactly for a strided layout; heads may have one"):
        case_of("rmsnorm fp16 M=20 N=64 gap=8")
    with pytest.raises(UsageError, match="elements"):
        case_of("rmsnorm fp16 M=1000000000 N=100 layout=heads")


# --- Its tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [0, 1, 2, 5, 20, 65])
def test_the_bits_are_those_of_any_layout(m: int, dtype: str) -> None:
    for rows in (*ROW_KINDS[:3], "blend", "nan"):
        case = heads(m, dtype=dtype, rows=rows, dy="correlated", weights="probe", seed=9, gap=8)
        one = make(case, OPS["rmsnorm"], "cpu")
        other = make(replace(case, layout="contiguous", gap=0), OPS["rmsnorm"], "cpu")
        for (name, a), (_, b) in some(zip(one.named(), other.named(), strict=True)):
            packed = guard_bands.as_integers(a.contiguous()).flatten()
            assert torch.equal(packed, guard_bands.as_integers(b.contiguous()).flatten()), (rows, name)


@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("m", [1, 3, 5, 20])
def test_all_that_is_not_x_is_poison(m: int, gap: int) -> None:
    case = heads(m, 128, gap=gap)
    x, dy = (getattr(make(case, OPS["rmsnorm"], "cpu"), name) for name in ("x", "dy"))
    tokens, count, n = case.shape
    assert x.shape == dy.shape == (tokens, count, n)
    assert x.stride() == ((count + others_behind(case.heads)) * (n + gap), n + gap, 1)
    assert dy.is_contiguous()
    whole = guard_bands.as_integers(x.as_strided((x.untyped_storage().nbytes() // 2,), (1,), 0))
    assert int((whole == NAN.bits[x.dtype]).sum()) == len(whole) - case.M * n
    behind = x.as_strided((tokens, others_behind(case.heads), n), x.stride(), x.storage_offset() + count * x.stride(1))
    assert bool(behind.isnan().all())  # the last token has its k and v as well


def test_a_write_beside_the_heads_is_told_by_its_place() -> None:
    case = heads(20, 64, gap=8)
    before = make(case, OPS["rmsnorm"], "cpu").x
    for offset, words in (
        (66, "3 behind the end of head 0 of token 0"),
        (5 * 72 + 2, "element 2 of head 5 of token 0, which lies behind the 5 heads of x"),
        (3 * 648 + 8 * 72, "element 0 of head 8 of token 3, which lies behind the 5 heads of x"),
        (4 * 648, "297 behind its last element"),
        (-4, "4 before its first element"),
    ):
        after = guard_bands.copy(before, NAN)
        after.as_strided((1,), (1,), after.storage_offset() + offset).fill_(1.0)
        assert guard_bands.trespass(before, after) == (1, words)
        assert not guard_bands.untouched(before, after)


# --- Which cases have heads

ONLY: tuple[tuple[str, ...], ...] = ((), (HEADS,), (HEADS, "strided"))


def test_who_declares_nothing_gets_none() -> None:
    silent = claims(heads=False)
    assert HEADS not in silent.layouts
    assert all(planned.case.layout != HEADS for planned in core(silent, QUICK, 0))
    declared = Implementation(name="x", op="rmsnorm", forward=lambda: None)
    assert unclaimed(OPS["rmsnorm"], declared, heads(20)) == "layout=heads: heads=False is declared"
    assert not unclaimed(OPS["rmsnorm"], replace(declared, heads=True), heads(20))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("only", ONLY)
def test_a_core_has_tokens_of_one_head_and_of_several_and_a_single_token(only: tuple[str, ...], number: int) -> None:
    """Each choice of layouts with each extent, and with each of three seeds by turns."""
    extent = (QUICK, QUICK.with_dear_rows, CI, QUICK.on("cuda"))[number]
    seed = (0, 1, 7)[(ONLY.index(only) + number) % 3]
    declared = claims(only)
    planned = core(declared, extent, seed)
    left = goals(declared, extent, seed).difference(*map(goals_of, planned))
    assert not left, in_words(left)
    found = [one.case for one in planned if one.case.layout == HEADS]
    assert {case.N for case in found} == set(HEAD_SIZES)
    assert {one.case.layout for one in planned} == set(declared.layouts)
    for wanted in (
        lambda case: case.shape[0] > 1 and case.heads > 1,
        lambda case: case.shape[0] > 1 and case.heads == 1,
        lambda case: case.shape[0] == 1 and case.heads > 1,
        lambda case: case.gap > 0 and case.heads > 1,
        lambda case: case.M == 0 or HEADS not in only,
    ):
        assert any(map(wanted, found))
    assert sum(case.gap == 0 for case in found) > len(found) / 3


@parametrize("layout", [layout for layout in LAYOUTS if layout not in (HEADS, CHANNELS_LAST, SAMPLES_STRIDED)], inner=2)
def test_a_core_of_one_layout_is_finished(layout: str) -> None:
    name = layout.removeprefix("weight_")
    of_weights: dict[str, Any] = {"weight_layouts": (name,)} if name in WEIGHT_LAYOUTS else {"trailing": True}
    declared = claims((layout,), ranks=(2, 3, 4), **of_weights)
    planned = core(declared, QUICK, 0)
    left = goals(declared, QUICK).difference(*map(goals_of, planned))
    assert not left, in_words(left)
    assert {one.case.layout for one in planned} == {layout}


def test_declared_shapes_have_heads_of_their_own_sizes() -> None:
    declared = claims(shapes=((24, 80), (7, 96)))
    found = {(p.case.M, p.case.N) for p in core(declared, QUICK, 0) if p.case.layout == HEADS}
    assert found == {(24, 80), (7, 96)}


@pytest.mark.slow
@pytest.mark.parametrize("only", [(), (HEADS,)])
def test_what_is_drawn_near_heads_has_a_size_of_heads(only: tuple[str, ...]) -> None:
    drawn: list[Case] = []

    @settings(max_examples=300, database=None, deadline=None)
    @given(cases(within(choices(claims(only)), heads(20, 256, gap=8))))
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    of_heads = [case for case in drawn if case.layout == HEADS]
    assert {case.N for case in of_heads} <= {64, 128, 256}
    assert of_heads
    assert (of_heads == drawn) == bool(only)
