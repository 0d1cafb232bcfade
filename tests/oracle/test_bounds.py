"""``normcheck tolerances --explain``: the judge's own bound of an element, its terms, and why each is there."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from normcheck.cases.case_line import parsed
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import check, undeclared_model
from normcheck.checks.finding import finding
from normcheck.errors import UsageError
from normcheck.gate.explain_bound import Question, element, explain, index_of
from normcheck.impls.implementation import Implementation
from normcheck.oracle.expectations import expectations, whole
from normcheck.oracle.judge import Judge, judge_of
from normcheck.oracle.tolerances import table
from tests.case_lines import NORMS
from tests.command_line import Cli
from tests.inner_loop import parametrize

OPTIONS = {"layernorm_relu_bitmask": " lower_clip=-0.5 upper_clip=0.75"}
OF_ELEMENTS = ("y", "dx", "dresidual")


def line_of(op: str, dtype: str, rows: str = "normal", size: str = "M=4 N=24") -> str:
    bias = " bias=none" if True not in OPS[op].biases else ""
    return f"{op} {dtype} {size} rows={rows} seed=3{bias}{OPTIONS.get(op, '')}"


def judge_for(line: str, **model: object) -> Judge:
    case = parsed(line)
    op = OPS[case.op]
    return judge_of(op, case, make(case, op, "cpu"), replace(table().model, **model), {})  # type: ignore[arg-type]


def explained(line: str, output: str, at: str, **more: str) -> str:
    stream = io.StringIO()
    explain(Question(line=line, output=output, at=at, device="cpu", **more), stream)
    return stream.getvalue()


@parametrize("op", NORMS, inner=2)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("rows", ["normal", "offset", "constant"])
def test_every_term_has_a_reason_and_together_they_are_the_bound(op: str, dtype: str, rows: str) -> None:
    seen = set()
    for own_bits in (False, True):
        for part in expectations(judge_for(line_of(op, dtype, rows)), own_bits=own_bits):
            seen.add(part.output)
            if part.output in ("bitmask", "residual_out"):  # whose bound is 0
                continue
            found = element(part, (1, 5)[: 2 if part.output in OF_ELEMENTS else 1])
            assert found.terms, part.output
            assert all(reason and "{" not in reason for _, _, reason in found.terms), found.terms
            largest = max(found.above, found.below)
            total = found.rest + sum(value for _, value, _ in found.terms)
            assert total == pytest.approx(largest, rel=2e-3), (part.output, part.check, found)
            assert not found.rest or part.output == "rstd", found  # which has a wider and a narrower side
    assert {"y", "rstd", "dx", "dw"} <= seen


@pytest.mark.parametrize("output", ["y", "rstd", "mean", "dx", "dw", "db"])
def test_it_is_what_a_finding_says(output: str) -> None:
    """A kernel that is wrong in one element: the report's numbers and terms, and these."""
    case = parsed(line_of("layernorm", "fp16"))
    at = {"y": (2, 7), "dx": (2, 7), "dw": (7,), "db": (7,)}.get(output, (2,))

    def spoilt(function: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
        def call(*arguments: object, **options: object) -> dict[str, torch.Tensor]:
            returned = function(*arguments, **options)
            if output in returned:
                returned[output].reshape(-1, *returned[output].shape[1:] if len(at) == 2 else ())[at] += 64
            return returned

        return call

    def backward(dy, x, weight, bias, saved, *, eps):  # type: ignore[no-untyped-def]
        xf = x.float()
        mean = xf.mean(1, keepdim=True)
        rstd = (xf.var(1, keepdim=True, correction=0) + eps).rsqrt()
        xh, wd = (xf - mean) * rstd, dy.float() * weight.float()
        dx = rstd * (wd - xh * (wd * xh).mean(1, keepdim=True) - wd.mean(1, keepdim=True))
        return {
            "dx": dx.to(x.dtype),
            "dw": (dy.float() * xh).sum(0).to(weight.dtype),
            "db": dy.float().sum(0).to(weight.dtype),
        }

    def forward(x, weight, bias, *, eps):  # type: ignore[no-untyped-def]
        xf = x.float()
        mean = xf.mean(1, keepdim=True)
        rstd = (xf.var(1, keepdim=True, correction=0) + eps).rsqrt()
        y = (xf - mean) * rstd * weight.float() + bias.float()
        return {"y": y.to(x.dtype), "mean": mean, "rstd": rstd}

    wrong = Implementation(name="w", op="layernorm", forward=spoilt(forward), backward=spoilt(backward))
    result = check(wrong, OPS["layernorm"], case, "cpu")
    told = finding(Cell(OPS["layernorm"], wrong, "fp16", "w"), result, "cpu", advise=False)
    assert (told.output, told.index) == (output, at)
    model = undeclared_model(wrong, "cpu")
    judge = judge_of(OPS["layernorm"], case, make(case, OPS["layernorm"], "cpu"), model, {})
    parts = [p for p in expectations(judge) if (p.output, p.check) == (output, told.check)]
    found = element(parts[0], at)
    assert found.expected == pytest.approx(told.expected, rel=1e-6)
    assert max(found.above, found.below) == pytest.approx(told.bound, rel=1e-6 if output != "rstd" else 0.5)
    assert [name for name, _, _ in found.terms] == [term.name for term in told.terms]


def test_blocks_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_of("layernorm_relu_bitmask", "bf16", size="M=9 N=24")
    once = whole(expectations(judge_for(line)))
    monkeypatch.setitem(__import__("normcheck.oracle.judge").oracle.judge.BLOCK_ELEMENTS, "cpu", 48)
    blocks = whole(expectations(judge_for(line)))
    assert once.keys() == blocks.keys()
    for key, tensors in once.items():
        for a, b in zip(tensors, blocks[key], strict=True):
            assert a.shape == b.shape
            assert torch.allclose(a, b, rtol=1e-12, equal_nan=True), key
    text = explained(line, "dx", "8,3")
    assert text == explained(line, "dx", "8,3")
    assert "end to end" in text


def test_a_declared_model_changes_the_bound() -> None:
    line = line_of("layernorm", "fp32", "mean100")
    plain = explained(line, "y", "1,5")
    assert "of the table; another with --impl" in plain
    assert "as torch declares it" in explained(line, "y", "1,5", impl="torch")


def test_an_element_without_a_bound_is_said_to_be_uncheckable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normcheck.oracle.rounding.Rules.gam", lambda rules, count: math.inf)
    assert "none that is finite: uncheckable" in explained(line_of("rmsnorm", "fp32"), "dx", "0,0")


@pytest.mark.parametrize(("clip", "said"), [("0.25", "only 1 is right"), ("0.75", "only 0 is right")])
def test_a_bit(clip: str, said: str) -> None:
    line = "layernorm_relu_bitmask fp16 M=1 N=2 rows=alternating weights=ones seed=3 "
    line = line.replace(" weights=ones", "")
    z = float(judge_for(f"{line}lower_clip=-9 upper_clip=9").truth(slice(0, 1)).forward.z[0, 0])
    low, high = (z - 1, z + 0.25) if clip == "0.25" else (z + 0.75, z + 2)
    text = explained(f"{line}lower_clip={low!r} upper_clip={high!r}", "bitmask", "0,0")
    assert said in text
    assert f"{clip} away" in text


def test_a_bit_in_doubt() -> None:
    line = "layernorm_relu_bitmask fp16 M=1 N=5 seed=3 "
    z = float(judge_for(f"{line}lower_clip=-9 upper_clip=9").truth(slice(0, 1)).forward.z[0, 2])
    assert "either is right" in explained(f"{line}lower_clip=-9 upper_clip={z!r}", "bitmask", "0,2")


@pytest.mark.parametrize(
    ("op", "output", "at", "message"),
    [
        ("rmsnorm", "dq", "0,0", "output=dq: expected one of y, rstd, dx, dw"),
        ("rmsnorm", "mean", "0", "output=mean: expected one of y, rstd, dx, dw"),
        ("rmsnorm", "", "0", "output='': expected one of"),
        ("layernorm", "bitmask", "0,0", "expected one of y, mean, rstd, dx, dw, db, which layernorm has"),
        ("layernorm", "dx", "4,0", "at=4,0: expected ROW,COLUMN of dx, with ROW from 0 to 3 and COLUMN from 0 to 23"),
        ("layernorm", "dx", "0", "at=0: expected ROW,COLUMN"),
        ("layernorm", "dw", "0,0", "at=0,0: expected COLUMN of dw, with COLUMN from 0 to 23"),
        ("layernorm", "mean", "4", "at=4: expected ROW of mean, with ROW from 0 to 3"),
        ("layernorm", "dx", "-1,0", "at=-1,0: expected ROW,COLUMN"),
        ("layernorm", "dx", "", "expected ROW,COLUMN of dx"),
        ("layernorm", "dx", "\x1b[2J", "at=\\x1b[2J: expected"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_right(op: str, output: str, at: str, message: str) -> None:
    case = parsed(line_of(op, "fp16"))
    with pytest.raises(UsageError) as raised:
        index_of(OPS[op], case, output, at)
    assert message in str(raised.value)


@pytest.mark.parametrize("at", ["3,11", "(3, 11)", " 3 , 11 "])
def test_an_index_as_a_report_has_it(at: str) -> None:
    op, case = OPS["layernorm"], parsed(line_of("layernorm", "fp16"))
    assert index_of(op, case, "dx", at) == (3, 11)
    assert index_of(op, case, "dw", "(3,)") == (3,)


def test_where_nothing_can_be_rounded() -> None:
    """A weight of 0 leaves the bias as it is."""
    line = f"{line_of('rmsnorm', 'fp32', size='M=2 N=24')} weights=probe"
    (column, *_) = (judge_for(line).scale.g == 0).nonzero().flatten().tolist()
    text = explained(line, "y", f"1,{column}")
    assert text.count("bound     0: nothing of it can be rounded") == 2
    assert "underflow" not in text
    half = f"{line_of('rmsnorm', 'bf16', size='M=2 N=24')} weights=probe"
    assert [
        name
        for part in expectations(judge_for(half))
        if part.output == "y"
        for name, *_ in element(part, (1, column)).terms
    ] == ["store", "store"]


@pytest.mark.parametrize(
    ("rows", "said"), [("nan", "only whether it is finite is checked"), ("largest", "never failed")]
)
def test_what_is_expected_of_a_row_without_a_bound(rows: str, said: str) -> None:
    line = line_of("layernorm", "fp32", rows)
    judge = judge_for(line)
    y = judge.truth(slice(0, 4)).forward.y
    (row, *_) = (
        ~torch.isfinite(y[:, 0]) if rows == "nan" else judge.truth(slice(0, 4)).checkable[:, 0].logical_not()
    ).nonzero()  # type: ignore[index, union-attr]
    text = explained(line, "y", f"{int(row)},0")
    assert f"expected  {float(y[int(row), 0]):.17g}" in text
    assert said in text


def test_no_rows() -> None:
    with pytest.raises(UsageError, match="no elements; expected a case with M > 0"):
        explained(line_of("rmsnorm", "fp16", size="M=0 N=3"), "y", "0,0")


def test_on_the_command_line(cli: Cli) -> None:
    run = partial(cli, "tolerances")
    line = line_of("layernorm", "fp16")
    code, out, err = run("--explain", line, "--output", "dx", "--at", "3,11", "--device", "cpu")
    assert (code, err) == (0, "")
    assert out.startswith(f"{parsed(line)}\ndx at (3, 11)\n\ngiven the reference's statistics\n  expected  ")
    assert run("--output", "dx") == (2, "", "normcheck: output=dx: expected --explain 'CASE' with it\n")
    assert "M is missing" in run("--explain", "layernorm fp16")[2]
