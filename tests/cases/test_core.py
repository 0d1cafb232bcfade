"""The core: every pair of values that belong together is in it, whatever an implementation declares."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from normcheck.cases.axes import (
    BANDS,
    BANDS_END,
    COMMON_COLUMNS,
    OCTAVES,
    PAIRS,
    ROWS_OF_CLASS,
    WIDTHS,
    band_of,
    is_edge,
    octave_of,
    row_class,
    width_of,
)
from normcheck.cases.beyond import far_apart, full_blocks, large, many, model_sizes, rows_between, splits_of_models
from normcheck.cases.case import Case
from normcheck.cases.claims import Claims, claims_of, unclaimed
from normcheck.cases.core import at_most, core, drawn
from normcheck.cases.data_kinds import ANGLE_KINDS
from normcheck.cases.depth import Depth
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.goals import goals
from normcheck.cases.layouts import EXPANDED
from normcheck.cases.missed import in_words
from normcheck.cases.ops import OPS
from normcheck.cases.planned import Planned, goals_of
from normcheck.cases.sizes import Extent
from normcheck.cases.split import HEAD_COLUMNS, HEADS_SPAN, KV_HEADS, ROTARY_PARTS
from normcheck.cases.strategies import choices, endless
from normcheck.cases.strides import apart, cotangents, in_channels_last, misaligned_alone, parameters, read_by_forward
from normcheck.gate.plan import PROFILES
from normcheck.impls.implementation import Implementation
from tests.case_lines import case_of
from tests.inner_loop import parametrize
from tests.some import some

QUICK = PROFILES["quick"].extent
SHAPES = (None, ((2, 16), (3, 7), (33, 127), (17, 1000), (4096, 128), (2, 65536)), ((4, 64),))
DECLARED = list(itertools.product(((False,), (True,), (False, True)), ((2,), (2, 3)), (True, False), SHAPES))
"""Biases, ranks, strided and shapes: every combination that an implementation may declare."""


def claims(op: str = "layernorm", dtype: str = "fp16", **fields: Any) -> Claims:
    implementation = Implementation(name="x", op=op, forward=lambda: None, **{"ranks": (2, 3), **fields})
    return claims_of(OPS[op], implementation, dtype)


@cache
def plain_core(seed: int = 0) -> tuple[Planned, ...]:
    """The core of what ``claims()`` declares, which many tests look at, and none changes."""
    return tuple(core(claims(), QUICK, seed))


def covers(planned: Iterable[Planned]) -> set[object]:
    return set().union(*(goals_of(one) for one in planned))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_every_pair_that_belongs_together_is_there_for_whatever_may_be_declared(op: str) -> None:
    """Whatever may be declared is shared out among the ops, so that each two values meet, and each with every op and
    dtype: a core depends on little of both.
    """
    every, turn = itertools.product(DECLARED, (True, False), (QUICK, QUICK.with_dear_rows)), list(OPS).index(op)
    mine, dtypes = itertools.islice(every, 4 * turn % 19, None, 19), itertools.cycle(DTYPES)
    for ((biases, ranks, strided, shapes), own, extent), dtype in some(
        zip(mine, itertools.islice(dtypes, turn % 3, None), strict=False)
    ):
        if not set(biases) & set(OPS[op].biases):
            continue
        backward = (lambda: None) if own else None
        declared = claims(op, dtype, biases=biases, ranks=ranks, strided=strided, shapes=shapes, backward=backward)
        found = core(declared, extent, 0)
        left = goals(declared, extent, 0) - covers(found)
        assert not left, (biases, ranks, strided, shapes, in_words(left))
        assert len(found) < 380


@pytest.mark.slow
def test_what_an_implementation_does_not_declare_is_not_asked() -> None:
    plain = [planned.case for planned in core(claims("rmsnorm", biases=(False,), ranks=(2,), strided=False), QUICK, 0)]
    assert {case.layout for case in plain} == {"contiguous", "misaligned"}
    assert {case.bias for case in plain} == {False}
    shapes = ((2, 16), (3, 7))
    assert {(case.M, case.N) for planned in core(claims(shapes=shapes), QUICK, 0) for case in [planned.case]} == {
        *shapes
    }
    own = [planned.case.layout for planned in core(claims(backward=lambda: None), QUICK, 0)]
    assert "dy_expanded" in own
    assert "dy_scalar" not in own  # a backward of its own gets a dy whose last stride is 1


@pytest.mark.slow
@pytest.mark.parametrize("op", [name for name, op in OPS.items() if len(op.weights_of((False, True))) == 2])
def test_every_pair_that_belongs_together_is_there_without_a_weight(op: str) -> None:
    """With both and without any, and the two seeds, take turns, as a core depends on little of its op."""
    turn = list(OPS).index(op)
    weights, seed = ((False,), (False, True))[turn % 2], (0, 7)[turn // 2 % 2]
    declared = claims(op, weights=weights)
    found = core(declared, QUICK, seed)
    assert not goals(declared, QUICK, seed) - covers(found)
    without = [planned.case for planned in found if not planned.case.weight]
    assert len(found) < 380
    assert len(without) == len(found) if weights == (False,) else 15 < len(without) < 30
    assert {(case.bias, case.weight_dtype) for case in without} == {(False, "same")}
    assert {case.layout for case in without} == set(declared.layouts)
    assert {row_class(case.M) for case in without} == {row_class(planned.case.M) for planned in found}


def test_an_eps_that_is_a_constant_is_the_only_one_that_is_asked() -> None:
    fixed = claims("rmsnorm", epsilons=(2e-6,))
    after = [next(endless(choices(fixed), 1)), *model_sizes(fixed, 0), *large(fixed, "cuda", 1, 0), *far_apart(fixed)]
    asked = [one.case for one in core(fixed, QUICK, 0)] + after
    assert {case.eps for case in asked} == {2e-6}
    assert not goals(fixed, QUICK) - covers(core(fixed, QUICK, 0))


def test_two_rows_and_full_blocks_of_rows_are_asked_at_the_columns_of_models() -> None:
    """A kernel that was wrong for two rows of 512 alone passed 400 cases; in a core few M are even."""
    sizes = {(case.M, case.N) for case in model_sizes(claims("rmsnorm"), 3)}
    assert sizes >= {(m, n) for m in (2, 64) for n in (256, 512, 1024, 2048, 4096, 8192)}
    assert not list(model_sizes(claims("rmsnorm", shapes=((2, 512),)), 3))


BETWEEN: dict[str, Callable[[Case], bool]] = {
    "one block of 32 rows and no loop": lambda case: 32 < case.M < 64,
    "of 128": lambda case: 128 < case.M < 256,
    "of 512": lambda case: 512 < case.M < 1024,
    "of 2048": lambda case: 2048 < case.M < 4096,
    "32 groups": lambda case: case.split.groups == 32 and case.split.channels > 64,
    "four channels in each of four groups": lambda case: case.split.groups % 4 == 0 == case.split.channels % 16,
    "groups of pairs of channels": lambda case: case.split.channels // case.split.groups in (10, 16),
    "ten channels, last": lambda case: case.split == (32, 320, 16) and case.layout == "channels_last",
    "places behind the last 1024, last": lambda case: (
        case.split.length > 1024
        and case.split.length % 64 > 0
        and "x" in in_channels_last(case)
        and case.layout == "channels_last"
    ),
    "a quarter of heads of 256": lambda case: (case.head, case.rotary, case.angles) == ("256", "quarter", "normal"),
    "the third of four samples": lambda case: case.batch == 4 and case.M // case.batch % 8 == 0,
    "thousands of rows of dy apart": lambda case: case.M > 2048 and case.layout == "dy_strided" and case.N == 64,
    "thousands of rows of x apart": lambda case: case.M > 2048 and case.layout == "x_strided" and case.N == 64,
    "eight heads of q for each of k": lambda case: case.of_heads.k > 1 and case.of_heads.q == 8 * case.of_heads.k,
    "full blocks of rows, each tensor at its distance": lambda case: (
        case.M % 64 == 0 and case.layout == "strided" and len({*apart(case).values()}) == len(apart(case)) > 3
    ),
    "full blocks of rows of one gradient": lambda case: case.M % 64 == 0 and case.layout == "dy_expanded",
    "a group of 2^18 elements": lambda case: case.split.columns == 1 << 18,
    "one pass over channels of a mean far from 0": lambda case: (
        (case.layout, case.rows) == ("channels_last", "mean10000") and case.split.length % 16 == 0
    ),
    "heads of 512": lambda case: case.of_heads.columns == 512,
    "many rows of many columns, each tensor at its distance": lambda case: (
        case.M * case.N > 1 << 20 and case.layout == "strided" and case.seed % 2 == 1
    ),
    "rows past 2048 of a prompt, in full blocks": lambda case: (
        case.M > 2048 and case.N > 4096 and case.M % 64 == 0 == case.N % 64
    ),
    "tokens past 1024 of four samples": lambda case: case.batch == 4 and case.M // case.batch > 1024,
    "the last of four samples of many columns": lambda case: case.batch == 4 and case.M >= 2048 and case.N > 1024,
    "the second half of eight samples": lambda case: case.batch == 8 and case.M // case.batch > 64,
    "groups of many channels and places": lambda case: case.split.channels >= 512 and case.split.length >= 256,
    "heads of more tokens than columns": lambda case: (
        case.M > case.of_heads.columns >= 128 and case.of_heads.q >= 32 and case.rotary == "all"
    ),
    "a sample by a product": lambda case: case.batch > 1 and _is_rounded_down(case.M // case.batch),
}
"""Kernels that were wrong for such cases passed on a CPU."""


def _is_rounded_down(m: int) -> bool:
    return bool(np.float32(m) * (np.float32(1) / np.float32(m)) < 1)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_every_block_and_groups_of_models_are_asked_after_the_core(seed: int) -> None:
    """Their data hide nothing."""
    for name, shows in BETWEEN.items():
        words = ("group", "groupnorm"), ("channels", "groupnorm"), ("places", "groupnorm"), ("heads", "qk_norm_rope")
        words += (("prompt", "rmsnorm"),)
        declared = claims(next((op for word, op in words if word in name), "layernorm_modulate"))
        after = [*splits_of_models(declared, seed), *model_sizes(declared, seed), *rows_between(declared, seed)]
        after += [*full_blocks(declared, seed), *many(declared, seed, "strided")]
        plain = ("shifted", "normal", "blend", "mean10000")
        assert any(shows(case) for case in after if case.rows in plain), name
    assert not list(rows_between(claims("rmsnorm", shapes=((2, 512),)), seed))
    assert not list(full_blocks(claims("rmsnorm", shapes=((2, 512),)), seed))


@pytest.mark.parametrize("op", OPS)
def test_each_tensor_alone_is_misaligned_in_whole_vectors(op: str) -> None:
    """Backwards that took the address of a gate, or of the sum's own cotangent, for granted passed, and a forward that
    took that of the bias.
    """
    cases = [case for case in full_blocks(claims(op), 0) if case.layout == "misaligned"]
    every = {name for case in cases for name in (*read_by_forward(case), *cotangents(case), *parameters(case))}
    alone = {misaligned_alone(case) for case in cases if case.N % 8 == 0}
    assert every - alone <= {"cos", "sin"} and len(every - alone) < 2  # of heads few N are admitted
    assert all(case.bias for case in cases if misaligned_alone(case) == "bias")


def test_heads_that_differ_in_those_of_k_alone_follow_each_other() -> None:
    """A plan that was kept by the shapes of x and of the weights was that of other heads of q."""
    cases = list(splits_of_models(claims("qk_norm_rope"), 0))
    alike = [{(c.M, c.N, c.head, c.rotary, c.weight_dtype, c.layout) for c in cases if c.kv_heads == k} for k in "35"]
    assert set.intersection(*alike)


def test_no_height_is_asked_for_that_no_width_leaves_room_for() -> None:
    """A kernel of groups that refuses every N but multiples of 128, one by one."""
    left = claims("rmsnorm_gated")
    while more := {n for goal in goals(left, QUICK) if goal[0] == "N" for n in goal[1:] if n % 128}:
        for n in more:
            left = left.without("N", n)
    assert not goals(left, QUICK) - covers(core(left, QUICK, 0))


def test_who_takes_both_is_asked_early_without_a_weight() -> None:
    opens = itertools.takewhile(lambda planned: planned.opens, drawn(claims(weights=(False, True)), QUICK, 0))
    opening = [planned.case.weight for planned in opens]
    assert opening.index(False) < 20
    assert opening[0]


def test_who_declares_nothing_of_weights_is_asked_as_before() -> None:
    """Not one goal more, whichever pairs of axes a weight has."""
    plain = claims()
    assert plain == claims(weights=(True,))
    assert "weight" not in {
        axis for goal in goals(plain, QUICK, 0) for axis in (goal[:1] if len(goal) == 2 else PAIRS[goal[0]])
    }


@parametrize("op", ["layernorm", "rmsnorm"], inner=1)
@pytest.mark.parametrize("biases", [(False,), (False, True)])
def test_bias_layout_and_rank_do_not_go_in_step(op: str, biases: tuple[bool, ...]) -> None:
    """An RMSNorm without a bias was never given a strided tensor: bias and layout alternated together."""
    found = [planned.case for planned in core(claims(op, biases=biases), QUICK, 0)]
    asked = {(case.bias, case.layout) for case in found}
    own = [bias for bias in OPS[op].biases if bias in biases] or OPS[op].biases
    every = ("contiguous", "misaligned", "x_strided", "dy_strided", "strided", "rank3", "rank3_strided", *EXPANDED)
    assert asked >= {(bias, layout) for bias in own for layout in every}


OF_ANY_SIZE = [name for name, op in OPS.items() if not op.rotary]
"""The ops whose rows may have any length."""


def test_a_core_of_heads_has_every_split_early_and_no_other_rows() -> None:
    found = [planned.case for planned in core(claims("qk_norm_rope"), QUICK, 0)]
    first = found[:30]
    assert {case.M for case in first} >= {0, 1, 2, 65, 300} and not any(case.N % HEADS_SPAN for case in found)
    assert {case.N for case in first} >= {192, 768, 1152, 1536, 6144}
    assert {case.of_heads.columns for case in first} == set(map(int, HEAD_COLUMNS))
    for axis, words in (("kv_heads", KV_HEADS), ("rotary", ROTARY_PARTS), ("angles", ANGLE_KINDS)):
        assert {getattr(case, axis) for case in first} == set(words), axis
    assert all(case_of(str(case)) == case for case in found) and len(found) < 200


@pytest.mark.parametrize("op", OF_ANY_SIZE)
def test_the_sizes_that_find_most_are_within_the_first_thirty(op: str) -> None:
    first = [planned.case for planned in itertools.islice(drawn(claims(op), QUICK, 0), 30)]
    assert {case.M for case in first} >= {1, 2, 65, 300}
    assert {case.N for case in first} >= {1, 3, 64, 129, 768, 1024, 1025, 4097, 8200}


def rows_by_octave(found: Iterable[Planned]) -> dict[tuple[int, str], dict[int, int]]:
    """Class of N -> band of M -> how many cases of a core."""
    counts = {octave: dict.fromkeys(BANDS, 0) for octave in OCTAVES}
    for case in (planned.case for planned in found):
        if band_of(case.M):
            counts[octave_of(case.N)][band_of(case.M)] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("op", OF_ANY_SIZE)
def test_no_seed_is_unlucky_and_each_line_of_a_core_is_a_case(op: str) -> None:
    """Whatever the seed: one row, a few and more of each octave, round, a multiple of 8 and ragged, come in a core.

    Only 9 rows of 131072 are too many elements for quick. Interpreted kernels and a GPU have the same. Each op has
    a seed of its own, with one of the three: the sizes of a core depend on its op by the goals of residuals and
    scales alone.
    """
    seed, extents = list(OPS).index(op), (QUICK, QUICK.with_dear_rows, QUICK.on("cuda"))
    found = core(claims(op), extents[seed % 3], seed)
    assert all(case_of(str(planned.case)) == planned.case for planned in found)
    counts = rows_by_octave(found)
    holes = [(*octave, band) for octave, by_band in counts.items() for band in BANDS if not by_band[band]]
    assert holes == [(131072, "a power of two", 9)], (seed, holes)
    several = {planned.case.N for planned in found if planned.case.M > 1}
    assert several >= set(COMMON_COLUMNS), seed
    edges = {octave_of(n)[0] for n in several if is_edge(n)}
    assert edges == {high for high, _ in OCTAVES if high >= 8}, seed
    alone = {planned.case.N for planned in found if planned.case.M == 1}
    assert min(sum(n > low for n in alone) for low in (32768, 65536)) >= 3
    assert len(found) <= 380
    assert max(planned.case.M for planned in found if planned.case.N > 65536) <= BANDS_END


@pytest.mark.parametrize("extent", [QUICK, QUICK.with_dear_rows.with_dear_columns, QUICK.on("cuda")])
def test_rows_of_every_width_end_in_the_middle_of_a_vector(extent: Extent) -> None:
    """Several of them: of an even N that is no multiple of 8, one that is a multiple of 4, and one that is not."""
    several = {planned.case.N for planned in core(claims("rmsnorm"), extent, 0) if planned.case.M > 1}
    ends = {(width_of(n), n % 4) for n in several if n > 8 and n % 2 == 0 and n % 8}
    assert ends == {(width, end) for width in WIDTHS[1:-1] for end in (0, 2)}


def test_every_class_of_sizes_is_in_a_core() -> None:
    found = [planned.case for planned in plain_core()]
    assert {octave_of(case.N) for case in found} == set(OCTAVES)
    assert {row_class(case.M) for case in found} == {low for low in ROWS_OF_CLASS if low <= QUICK.rows}


def test_a_class_is_what_its_sizes_say() -> None:
    """Each octave has the rows that its block holds; each of its sizes belongs to it; N = 2^k + 1 begins the next."""
    assert {high for high, _ in OCTAVES} == {2**k for k in range(18)}
    for (high, fit), sizes in OCTAVES.items():
        assert sizes
        assert all(high // 2 < n <= high and octave_of(n) == (high, fit) for n in sizes)
    assert [octave_of(n)[0] for n in (1, 2, 3, 4, 5, 256, 257, 512, 65536, 65537, 10**6)] == [
        *(1, 2, 4, 4, 8, 256, 512, 512, 65536, 131072, 131072)
    ]


def test_another_seed_is_another_core() -> None:
    """A kernel that knows the default run by heart is found by --seed random: sizes, kinds and data are others."""
    first, other = ({(c.case.M, c.case.N, c.case.seed) for c in plain_core(seed) if c.case.M} for seed in (0, 7))
    assert len(first & other) < 5
    ours, theirs = ({c.case.N for c in plain_core(seed)} for seed in (0, 7))
    assert len(theirs - ours) >= 8
    assert tuple(core(claims(), QUICK, 7)) == plain_core(7)


def test_what_was_refused_is_asked_no_more_and_nothing_else_is_lost() -> None:
    whole = claims("rmsnorm")
    left = whole.without("bias", True).without("layout", "strided").without("N", 3).without("M", 65)
    found = core(left, QUICK, 0)
    assert all(left.takes(planned.case) for planned in found)
    assert not goals(left, QUICK, 0) - covers(found)
    assert {case.M for planned in found for case in [planned.case]} & {100, 129, 133}  # another of its class


def test_what_is_done_is_not_run_again() -> None:
    found = plain_core()
    done = frozenset(covers(found[:60]))
    rest = core(claims(), QUICK, 0, done=done, used=1000)
    assert len(rest) <= len(found) - 30
    assert not goals(claims(), QUICK, 0) - done - covers(rest)


def test_dear_rows_leave_out_the_tall_ones_only() -> None:
    dear = QUICK.with_dear_rows
    assert max(planned.case.M for planned in core(claims(), dear, 0)) == dear.rows == 300
    assert sum(planned.case.M for planned in core(claims(), dear, 0)) < 3400


def test_other_rows_are_asked_once_at_least_in_each_class_of_rows() -> None:
    """New values in memory that was used before, and a row alone: a kernel may choose its way by M."""
    asked = [planned.case.M for planned in plain_core() if planned.probe == Depth.ROWS]
    for least, most in ((2, 8), (9, 63), (64, 255), (256, 4096), (4097, 65535)):
        assert any(least <= m <= most for m in asked)
    assert sum(m > 20 for m in asked) == 3


def test_words_for_what_is_missing() -> None:
    every = goals(claims(), QUICK, 0)
    small = [planned for planned in plain_core() if planned.case.M <= 8 and planned.case.N <= 63]
    words = in_words(every - covers(small))
    assert words[0] == "no M of 9 to 65535"
    assert words[1] == "no N above 63"
    assert words[-1].endswith("pairs of values that belong together")
    assert in_words([]) == ()
    assert in_words([("m", 9), ("layout", "rank3"), ("eps", 0.5), (0, 1, 2)]) == (
        "no M of 9 to 63",
        "no eps 0.5",
        "no layout rank3",
        "1 pairs of values that belong together",
    )
    assert in_words([("width", 1), ("width", 2), ("n", (64, "a power of two"))])[:2] == (
        "no N of 1 to 63",
        "no N of 64 to 1023 that is a power of two",
    )
    assert in_words([("M", 257)]) == ("not M=257",)
    assert in_words([("empty", ("layout", "strided")), ("empty", ("n", (64, "a multiple of 8")))]) == (
        "no M of 0 with N of 64 to 1023 that is a multiple of 8, layout strided",
    )


def test_whatever_is_missing_has_words() -> None:
    """A core is finished if nothing can be said to be missing."""
    for op in ("layernorm_relu_bitmask", "rmsnorm"):
        assert all(in_words([goal]) for goal in goals(claims(op=op), QUICK, 0))


def test_a_pair_names_two_axes() -> None:
    assert all(one != other for one, other in PAIRS)
    case = Case(op="layernorm", dtype="fp16", M=20, N=24, rows="blend")
    pairs = {goal for goal in goals_of(Planned(case, Depth.MEMORY)) if len(goal) == 3}
    assert (PAIRS.index(("n", "rows")), (2, "a multiple of 8"), "subnormal") in pairs


@parametrize("declared", [{"groups": 8}, {"channels": 64, "groups": 8}, {"channels": 12}], inner=1)
def test_all_cases_have_the_channels_and_the_groups_that_are_declared(declared: dict[str, Any]) -> None:
    own = Implementation(name="x", op="groupnorm", forward=lambda: None, **declared)
    wanted = claims_of(OPS["groupnorm"], own, "fp16")
    cases = [planned.case for planned in core(wanted, QUICK, 0)]
    cases += itertools.islice(endless(choices(wanted), 1), 100)
    assert len(cases) > 300 and not any(unclaimed(OPS["groupnorm"], own, case) for case in cases)
    assert any(unclaimed(OPS["groupnorm"], replace(own, **{name: 5}), cases[-1]) for name in declared)


def test_no_core_has_more_cases_than_are_told_before_any_is_made() -> None:
    assert len(plain_core()) <= at_most(claims(), QUICK, 0)
    few = claims("rmsnorm", batch_invariant=True, shapes=SHAPES[2])  # fewer goals than cases open it
    assert len(core(few, QUICK, 1)) <= at_most(few, QUICK, 1)
