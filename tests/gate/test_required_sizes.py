"""``--require NAME:N=SIZE``: a case of that size is asked for, and who refuses it, or never ran it, fails the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from normcheck.gate.decision import concluded, decide, terms_of, thinned
from normcheck.gate.options import VerifyOptions
from normcheck.gate.shards import one_verdict
from normcheck.result import Verdict
from tests.command_line import Cli, KernelFile
from tests.sample_runs import failed, finding, run, skipped, verdict

WIDE = terms_of(VerifyOptions(), ("triton:N=16384",))
KERNEL = """
import torch

def layernorm(x, weight, bias, eps):
    if x.shape[-1] {limit}:
        raise RuntimeError("hidden size is too large")
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
"""


def cell(judged: int, limit: int | None = None, **values: object) -> Verdict:
    limits = {} if limit is None else {"N": limit}
    return verdict(sizes={"N=16384": judged}, limits=limits, **values)


def test_a_cell_has_the_size_if_it_ran_and_nothing_up_to_it_is_refused() -> None:
    assert decide([cell(1), cell(3, 16385, dtype="fp16")], WIDE) == ("pass", 0, ())
    status, code, messages = decide([cell(1), cell(0, 9000, dtype="fp16")], WIDE)
    assert (status, code) == ("nothing", 5)
    assert messages == (
        "triton rmsnorm fp16: N=16384 is required, and its kernel refuses N of 9000: take it, or require less",
    )
    assert decide([cell(2, 16384)], WIDE)[1] == 5  # it takes the size in some cases only
    _, code, (message,) = decide([cell(0)], WIDE)
    assert code == 5
    assert message.startswith("triton rmsnorm bf16: N=16384 is required, and no case of that size was judged: give it")


def test_of_which_cells_it_is_asked() -> None:
    every = terms_of(VerifyOptions(), ("*:N=16384",))
    assert decide([replace(cell(0), implementation="other")], every)[1] == 5
    assert decide([cell(1), replace(cell(0), implementation="other")], WIDE)[1] == 0
    assert decide([cell(1), replace(skipped(), implementation="other")], every)[1] == 0
    assert decide([failed(finding()), cell(0)], WIDE)[1] == 1
    assert decide([cell(0)], replace(WIDE, allow_thin=True))[1] == 5
    assert decide([verdict(sizes={"M=16384": 2})], WIDE)[1] == 5


def test_the_report_says_that_the_cell_is_thin() -> None:
    (told,) = concluded(run(cell(0, 9000)), WIDE).verdicts
    assert told.status == "thin"
    assert told.detail.startswith("N=16384 is required, and its kernel refuses N of 9000")
    assert thinned(cell(1), WIDE) == cell(1)


def test_shards_are_held_to_it_together() -> None:
    shard = replace(WIDE, shard=True)
    assert decide([cell(0)], shard)[1] == 0
    assert concluded(run(cell(0)), shard).messages == (
        "a shard: whether the required cases were judged is found by normcheck merge",
    )
    assert decide([one_verdict([cell(0), cell(1)])], WIDE)[1] == 0
    both = one_verdict([cell(1, 20000), cell(1, 9000)])
    assert (both.sizes, both.limits) == ({"N=16384": 2}, {"N": 9000})
    assert decide([one_verdict([cell(0), cell(0)])], WIDE)[1] == 5


@pytest.mark.slow
@pytest.mark.usefixtures("small_core")
@pytest.mark.parametrize(
    ("limit", "asked", "code", "said"),
    [
        ("> 12000", "N=12001", 5, "N=12001 is required, and its kernel refuses N of 12001: take it, or require less"),
        ("> 12000", "N=12000", 0, ""),
        ("== 12347", "N=12347", 5, "N=12347 is required, and its kernel refuses N of 12347"),  # which no core asks for
        ("== 0", "M=70001", 0, ""),
    ],
)
def test_a_kernel_that_states_a_limit(
    cli: Cli,
    kernel_file: KernelFile,
    tmp_path: Path,
    limit: str,
    asked: str,
    code: int,
    said: str,
) -> None:
    brief = ("--time-budget", "0.1" if asked.startswith("N") else "1")  # many rows are asked after a core
    path, report = kernel_file(KERNEL.format(limit=limit), name="mine.py"), tmp_path / "report.json"
    words = ("--impl", f"{path}:layernorm", "--dtype", "fp32", "--device", "cpu", "--no-contexts", *brief)
    done = cli("verify", *words, "--require", f"mine.py:layernorm:{asked}", "--report", f"json:{report}")
    assert done.code == code, done.out + done.err
    assert said in " ".join(done.out.split())
    (told,) = json.loads(report.read_text())["verdicts"]
    assert told["sizes"] == {asked: told["sizes"][asked]} and bool(told["sizes"][asked]) == (code == 0)
    assert told["status"] == ("pass" if code == 0 else "thin")
