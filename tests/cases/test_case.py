"""The case line: a round trip for every case, and one bounded line of complaint for everything else."""

from __future__ import annotations

import string
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from normcheck.cases.case import GIVEN_SCALES, LIMITED, MAX_ELEMENTS, NO_WEIGHT, RETURNED, SAMPLES, Case
from normcheck.cases.case_line import parsed
from normcheck.cases.data_kinds import ANGLE_KINDS, DY_KINDS, GATE_KINDS, RESIDUAL_KINDS, ROW_KINDS, weight_kinds
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.layouts import (
    CHANNELS_LAST,
    HEADS,
    LAYOUTS,
    OF_CHANNELS,
    OF_ROW_GROUPS,
    OF_SAMPLES,
    OF_TOKENS,
    SAMPLES_STRIDED,
    STRIDED,
    TRAILING,
    WEIGHT_STRIDED,
)
from normcheck.cases.ops import OPS
from normcheck.cases.parameters import Parameters, parameters_of, with_parameters
from normcheck.cases.split import CHANNEL_COUNTS, GROUP_COUNTS, HEAD_COLUMNS, KV_HEADS, ROTARY_PARTS, split_of
from normcheck.errors import UsageError
from normcheck.planner.refusals import with_value
from tests.case_lines import OPTIONS
from tests.case_lines import case_of as read

CLAMPED = "layernorm_relu_bitmask fp16 M=3 N=9"
FP32_MAX = 3.4028234663852886e38


@st.composite
def cases(draw: st.DrawFn) -> Case:
    op, dtype, layout = (draw(st.sampled_from(v)) for v in (tuple(OPTIONS), DTYPES, LAYOUTS))
    n = draw(st.integers(1, 10**5))
    options: tuple[tuple[str, float], ...] = ()
    if OPTIONS[op]:
        limit = st.floats(-FP32_MAX, FP32_MAX, width=32)
        lower, upper = draw(st.tuples(limit, limit).filter(lambda pair: pair[0] < pair[1]))
        options = (("lower_clip", lower), ("upper_clip", upper))
    residual: dict[str, str] = {}
    if OPS[op].adds_residual:
        layout = "strided" if layout == HEADS else layout
        residual = {"residual": draw(st.sampled_from(RESIDUAL_KINDS))}
        residual |= {"residual_dtype": draw(st.sampled_from(("same", "fp32")))} if dtype != "fp32" else {}
    scale, gate = RETURNED, draw(st.sampled_from(GATE_KINDS)) if OPS[op].gated else "normal"
    if OPS[op].gated:
        layout = "strided" if layout == HEADS else layout
    samples = draw(st.sampled_from((*SAMPLES, "1"))) if OPS[op].modulated else ""
    if OPS[op].modulated:
        layout = layout if layout in OF_SAMPLES else "strided"
    elif layout == SAMPLES_STRIDED:
        layout = "strided"
    split: dict[str, str] = {}
    if OPS[op].grouped:
        layout = layout if layout in OF_CHANNELS else "strided"
        split = {"channels": draw(st.sampled_from(CHANNEL_COUNTS)), "groups": draw(st.sampled_from(GROUP_COUNTS))}
    elif layout == CHANNELS_LAST:
        layout = "strided"
    if OPS[op].rotary:
        layout, n = layout if layout in OF_TOKENS else "strided", n * 6
        split = {
            "head": draw(st.sampled_from((*HEAD_COLUMNS, "2"))),
            "kv_heads": draw(st.sampled_from((*KV_HEADS, "1"))),
        }
        split |= {"rotary": draw(st.sampled_from((*ROTARY_PARTS, "2"))), "angles": draw(st.sampled_from(ANGLE_KINDS))}
    if OPS[op].quantises:
        layout = "strided" if layout == HEADS else layout
        scale = draw(st.sampled_from((RETURNED, LIMITED, *GIVEN_SCALES)))
    if OPS[op].l2:
        layout, weights = "strided" if layout in (TRAILING, WEIGHT_STRIDED) else layout, NO_WEIGHT
    else:
        always = layout == TRAILING or OPS[op].modulated or OPS[op].rotary
        weights = draw(st.sampled_from((*weight_kinds(OPS[op]), *[NO_WEIGHT] * (not always))))
    has_weight = weights != NO_WEIGHT
    layout = layout if OPS[op].of_row_groups or layout not in OF_ROW_GROUPS else "strided"
    rows = draw(st.integers(0, 10**5))
    divisors = [0, *(d for d in (1, 2, 3, 7) if rows % d == 0)]
    case = Case(
        op=op,
        dtype=dtype,
        M=rows,
        N=n,
        eps=draw(st.just(0.0) | st.floats(2.0**-100, 2.0**100)),
        rows=draw(st.sampled_from(ROW_KINDS)),
        dy=draw(st.sampled_from(DY_KINDS)),
        layout=layout,
        seed=draw(st.integers(0, 10**12 - 1)),
        weights=weights,
        weight_dtype=draw(st.sampled_from(("same", "fp32"))) if has_weight and dtype != "fp32" else "same",
        bias=draw(st.booleans()),
        gap=draw(st.integers(1, 1000)) if layout in STRIDED else 0,
        weight_groups=draw(st.sampled_from(divisors)) if layout in OF_ROW_GROUPS else 0,
        options=options,
        scale=scale,
        gate=gate,
        samples=samples,
        **split,
        **residual,
    )
    assume(case.room <= MAX_ELEMENTS)
    return case


@given(cases())
def test_round_trip(case: Case) -> None:
    line = str(case)
    assert "\n" not in line
    assert read(line) == case
    assert str(read(line)) == line


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if not (op.modulated or op.rotary)])
def test_a_line_without_a_weight_need_not_say_that_there_is_no_bias(op: str) -> None:
    line = " ".join(
        [f"{op} bf16 M=3 N=9", *(f"{name}={value}" for name, value in zip(OPTIONS[op], (0, 1), strict=False))]
    )
    case = parsed(f"{line} weights=none")
    assert (case.weight, case.bias, case.weight_dtype) == (False, False, "same")
    assert parsed(f"{line} weights=none bias=none weight_dtype=same") == case == parsed(str(case))
    assert "bias" not in str(case)
    with pytest.raises(UsageError, match=r"weight_dtype=fp32 weights=none in the case line: expected one of the two, "):
        parsed(f"{line} weights=none weight_dtype=fp32")
    if OPS[op].takes_bias:
        alone = parsed(f"{line} weights=none bias=yes")
        assert alone == replace(case, bias=True) == parsed(str(alone)) and "weights=none bias=yes" in str(alone)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("samples=7", "samples=7: expected 'one', 'few', 'many' or 'each', or a number that divides M=6"),
        ("samples=two", "samples=two in the case line: expected"),
        ("weights=none", "weights=none: expected a kind of data, of the scale and the shift of rmsnorm_modulate"),
        ("layout=rank3", "layout=rank3: expected"),
    ],
)
def test_what_a_line_says_of_samples(words: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parsed(f"rmsnorm_modulate bf16 M=6 N=9 bias=none {words}")
    assert str(raised.value).startswith(message.split(" 'one'")[0])
    with pytest.raises(UsageError, match="samples=one in the case line: expected"):
        parsed("rmsnorm bf16 M=6 N=9 bias=none samples=one")
    assert parsed("rmsnorm_modulate bf16 M=6 N=9 bias=none").batch == 1
    assert parsed("rmsnorm_modulate bf16 M=6 N=9 bias=none samples=3").shape == (3, 2, 9)


def test_parameters_of_one_case_go_to_another() -> None:
    line = "fused_add_layernorm fp16 M=2 N=3 eps=1e-5 rows=normal dy=normal layout=contiguous seed=0"
    case, other = parsed(line), parsed(f"{line} weight_dtype=fp32 residual_dtype=fp32")
    assert parameters_of(other) == (True, True, "fp32", "fp32")
    assert with_parameters(case, parameters_of(other)) == other and with_parameters(other, parameters_of(case)) == case
    without = with_parameters(case, Parameters(False, False, "same"))
    assert with_value(without, "residual_dtype", "fp32") == replace(without, residual_dtype="fp32")


def test_a_case_without_a_weight_has_no_dtype_of_it() -> None:
    case = Case(op="rmsnorm", dtype="fp16", M=2, N=3, weight_dtype="fp32", weights="probe")
    without = with_parameters(case, Parameters(False, False, "fp32"))
    assert parameters_of(without) == (False, False, "same", "same")
    assert with_parameters(without, Parameters(True, True, "fp32")) == replace(case, weights="normal")
    assert with_value(case, "weight", False) == without  # no bias that nobody has declared
    with pytest.raises(ValueError, match="weights=none: expected"):
        replace(without, weight_dtype="fp32")


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_the_fields_does_not_matter(case: Case, random) -> None:
    op, dtype, *words = str(case).split()
    random.shuffle(words)
    assert read("  ".join([op, dtype, *words])) == case


def test_what_is_left_out_has_a_default() -> None:
    assert read("rmsnorm fp16 M=3 N=129") == Case(op="rmsnorm", dtype="fp16", M=3, N=129)


def test_rank3_factors_the_rows() -> None:
    for m in range(200):
        batch = Case(op="rmsnorm", dtype="fp16", M=m, N=1, layout="rank3").batch
        assert batch >= 1
        assert m % batch == 0
    assert Case(op="rmsnorm", dtype="fp16", M=2**20, N=1, layout="rank3").batch == 2**10


def refused(line: str) -> str:
    """The complaint about ``line``: one printable line that is short however long and odd the input is."""
    with pytest.raises(UsageError) as caught:
        read(line)
    message = str(caught.value)
    assert message.isprintable(), ascii(message)
    assert len(message) <= 480  # an unknown op is answered by the names of all
    return message


MALFORMED = {
    "": "expected 'OP DTYPE",
    "rmsnorm": "expected 'OP DTYPE",
    "M=3 N=9": "expected 'OP DTYPE",
    "norm fp16 M=3 N=9": "op='norm'",
    "rmsnorm fp8 M=3 N=9": "dtype='fp8'",
    "rmsnorm fp64 M=3 N=9": "dtype='fp64'",
    "rmsnorm fp16 M=3": "N is missing",
    "rmsnorm fp16 N=3": "M is missing",
    "rmsnorm fp16 M=3 N=9 eps": "'eps' in the case line: expected name=value",
    "rmsnorm fp16 M=3 N=9 eps=": "expected name=value",
    "rmsnorm fp16 M=3 N=9 =1": "expected name=value",
    "rmsnorm fp16 M=3 N=9 N=9": "N is given twice",
    "rmsnorm fp16 M=3 N=9 colour=red": "in the case line: expected one of M, N, bias, ",
    "rmsnorm fp16 M=3 N=9 op=layernorm": "in the case line: expected one of M, N, bias, ",
    "rmsnorm fp16 M=3 N=9 options=1": "in the case line: expected one of M, N, bias, ",
    "rmsnorm fp16 M=3 N=9 lower_clip=0": "in the case line: expected one of M, N, bias, ",
    "rmsnorm fp16 M=-1 N=9": "M=-1",
    "rmsnorm fp16 M=3 N=0": "N=0",
    "rmsnorm fp16 M=3.0 N=9": "M=3.0",
    "rmsnorm fp16 M=1_0 N=9": "M=1_0",
    "rmsnorm fp16 M=+3 N=9": "M=+3",
    "rmsnorm fp16 M=0x3 N=9": "M=0x3",
    "rmsnorm fp16 M=\u0663 N=9": "expected an integer",
    "rmsnorm fp16 M=3 N=9 seed=1000000000000": "seed=1000000000000",
    "rmsnorm fp16 M=3 N=9 eps=nan": "expected a finite number",
    "rmsnorm fp16 M=3 N=9 eps=inf": "expected a finite number",
    "rmsnorm fp16 M=3 N=9 eps=1e999": "expected a finite number",
    "rmsnorm fp16 M=3 N=9 eps=1_0": "expected a finite number",
    "rmsnorm fp16 M=3 N=9 eps=small": "expected a finite number",
    "rmsnorm fp16 M=3 N=9 eps=-1e-5": "eps=-1e-05",
    "rmsnorm fp16 M=3 N=9 eps=1e-60": "eps=1e-60",  # 0 in a kernel's fp32
    "rmsnorm fp16 M=3 N=9 eps=1e39": "eps=1e+39",  # and infinite
    "rmsnorm fp16 M=3 N=9 rows=strange": "rows=strange",
    "rmsnorm fp16 M=3 N=9 dy=strange": "dy=strange",
    "rmsnorm fp16 M=3 N=9 weights=strange": "weights=strange",
    "rmsnorm fp16 M=3 N=9 layout=strange": "layout=strange",
    "rmsnorm fp16 M=3 N=9 bias=no": "bias=no",
    "rmsnorm fp16 M=3 N=9 weight_dtype=bf16": "weight_dtype=bf16",
    "rmsnorm fp32 M=3 N=9 weight_dtype=fp32": "weight_dtype=fp32",
    "rmsnorm fp16 M=3 N=9 gap=3": "expected gap > 0 exactly for a strided layout",
    "rmsnorm fp16 M=3 N=9 gap=3 layout=rank3": "expected gap > 0 exactly for a strided layout",
    "rmsnorm fp16 M=3 N=9 layout=strided": "expected gap > 0 exactly for a strided layout",
    f"rmsnorm fp16 M={2**17} N={2**17 + 1}": f"at most {MAX_ELEMENTS}",
    "rmsnorm fp16 M=999999999999 N=999999999999": f"at most {MAX_ELEMENTS}",
    "rmsnorm fp16 M=999999 N=1 gap=999999999999 layout=strided": f"at most {MAX_ELEMENTS}",
    "rmsnorm fp16 M=0 N=999999999999": f"at most {MAX_ELEMENTS}",
    "rmsnorm fp16 M=0 N=1 gap=999999999999 layout=strided": f"at most {MAX_ELEMENTS}",
    "rmsnorm fp16 M=" + "9" * 500 + " N=9": "up to 12 digits",
    "rmsnorm fp16 M=3 N=9".ljust(1001): "1001 characters",
    CLAMPED: "lower_clip is missing",
    f"{CLAMPED} lower_clip=0": "upper_clip is missing",
    f"{CLAMPED} lower_clip=1 upper_clip=0": "expected less than upper_clip",
    f"{CLAMPED} lower_clip=1 upper_clip=1": "expected less than upper_clip",
    f"{CLAMPED} lower_clip=nan upper_clip=1": "expected a finite number",
    f"{CLAMPED} lower_clip=0 upper_clip=inf": "expected a finite number",
}


@pytest.mark.parametrize("line", MALFORMED, ids=lambda line: line[:60])
def test_malformed(line: str) -> None:
    assert MALFORMED[line] in refused(line)


def test_a_thousand_characters_are_allowed() -> None:
    assert read("rmsnorm fp16 M=3 N=9".ljust(1000)) == read("rmsnorm fp16 M=3 N=9")


def case_or_complaint(line: str) -> None:
    try:
        case = read(line)
    except UsageError:
        refused(line)
    else:
        assert read(str(case)) == case


@given(st.text(max_size=300))
def test_any_text(text: str) -> None:
    case_or_complaint(text)
    case_or_complaint(f"rmsnorm fp16 M=1 N=1 {text}")


@given(st.data())
def test_any_mutation(data: st.DataObject) -> None:
    """A character replaced, a piece doubled or removed: what a paste or an editor does to a line."""
    line = str(data.draw(cases()))
    for _ in range(data.draw(st.integers(1, 3))):
        start, end = sorted(data.draw(st.tuples(st.integers(0, len(line)), st.integers(0, len(line)))))
        piece = data.draw(st.sampled_from((line[start:end], "")) | st.text(string.printable, max_size=4))
        line = line[:start] + piece + line[end:] if data.draw(st.booleans()) else line[:end] + piece + line[end:]
    case_or_complaint(line)


@pytest.mark.parametrize("name", ["M", "N", "eps", "rows", "seed", "bias", "gap", "anything", "op"])
@given(value=st.text(min_size=1, max_size=900))
def test_any_value_of_a_field(name: str, value: str) -> None:
    case_or_complaint(f"layernorm bf16 M=2 N=3 {name}={value}"[:1000])


def test_there_are_no_more_groups_than_a_grid_has() -> None:
    """As many as they are, unless a word alone makes them more; who names a number has it."""
    assert split_of(131072, "many", "each") == split_of(131072, "many", "few") == (2, 65536, 2)
    assert split_of(65544, "many", "each").groups == 32772
    assert split_of(131072, "many", "65536").groups == 65536
