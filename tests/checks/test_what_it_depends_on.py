"""A result that is not always the same says what it depends on: other rows, other calls, memory around what it gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normcheck.errors import ExitCode
from tests.command_line import Cli

GOT_PAST = Path(__file__).parents[1] / "quality" / "got_past"
DTYPES = ("fp16", "bf16", "fp32")
"""By turns: what is asked does not look at a dtype."""


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.slow
def test_a_backward_that_reads_behind_saved_statistics_reads_outside(cli: Cli) -> None:
    file = str(GOT_PAST / "w04_one_row.py")
    done = cli("verify", "--impl", file, "--dtype", "bf16", "--max-examples", "60", "--report", "json:r.json")
    (verdict,) = json.loads(Path("r.json").read_text(encoding="utf-8"))["verdicts"]
    found = verdict["failure"]
    assert (done.code, found["kind"], found["output"]) == (ExitCode.FOUND, "out_of_bounds_read", "dx")
    assert "dx depends on what lies around y or mean or rstd, as backward gets it" in found["message"]


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "dtype"), list(zip((2, 700, 3000), DTYPES, strict=True)))
def test_it_does_so_however_far_behind_them_it_reads(cli: Cli, columns: int, dtype: str) -> None:
    line = f"layernorm {dtype} M=1 N={columns} eps=1e-05 rows=normal dy=normal layout=contiguous seed=0"
    done = cli("repro", str(GOT_PAST / "w04_one_row.py"), line)
    assert done.code == ExitCode.FOUND
    assert "reads outside its tensors (dx)" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_case_of_what_is_not_batch_invariant_is_reproduced(cli: Cli, dtype: str) -> None:
    line = f"rmsnorm {dtype} M=256 N=631 eps=1e-05 rows=normal dy=normal layout=contiguous seed=2 bias=none"
    done = cli("repro", str(GOT_PAST / "w23_batch.py"), line)
    assert done.code == ExitCode.FOUND
    assert "y depends on the other rows" in done.out


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.slow
def test_what_is_not_batch_invariant_depends_on_the_other_rows(cli: Cli) -> None:
    file, reports = str(GOT_PAST / "w23_batch.py"), ("--report", "json:r.json", "--report", "markdown:r.md")
    done = cli("verify", "--impl", file, "--dtype", "fp16", "--max-examples", "60", *reports)
    (verdict,) = json.loads(Path("r.json").read_text(encoding="utf-8"))["verdicts"]
    found = verdict["failure"]
    assert (done.code, found["kind"], found["check"]) == (ExitCode.FOUND, "not_repeatable", "among other rows")
    assert "a row of y has other bits among 25" in found["message"]
    for text in (done.out, Path("r.md").read_text(encoding="utf-8")):
        assert "y depends on the other rows" in text
        assert "when run again" not in text


STATEFUL = """
import torch
from normcheck import Implementation

kept = {}

def forward(x, weight, bias, *, eps):
    with torch.no_grad():
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * rstd * kept.setdefault(weight.data_ptr(), weight.float().clone())).to(x.dtype)

IMPLEMENTATIONS = (Implementation(name="mine", op="rmsnorm", forward=forward, biases=(False,)),)
"""


def test_a_weight_that_is_kept_makes_a_result_depend_on_earlier_calls(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STATEFUL, encoding="utf-8")
    line = "rmsnorm fp32 M=3 N=24 eps=1e-05 rows=normal dy=normal layout=contiguous seed=0 bias=none"
    done = cli("repro", str(tmp_path / "mine.py"), line)
    assert done.code == ExitCode.FOUND
    assert "y depends on earlier calls" in done.out
    assert "when run again" not in done.out
