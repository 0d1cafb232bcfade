"""Whole cells for each shard, by what they took before: each cell once, and about the same time for all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normcheck.errors import UsageError
from normcheck.gate.decision import Terms, decide
from normcheck.gate.plan import PROFILES
from normcheck.gate.shards import merged
from normcheck.gate.timings import shares
from normcheck.result import ELSEWHERE, CellKey, Verdict
from tests.command_line import Cli, KernelFile
from tests.sample_runs import run, skipped, verdict

KERNEL = """
import torch

def rmsnorm(x, weight, bias=None, eps=1e-6):
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype){wrong}
"""


def keys(count: int) -> list[CellKey]:
    return [CellKey("rmsnorm", f"kernel {number}", "fp16") for number in range(count)]


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=60), st.integers(1, 9))
def test_each_cell_is_in_one_shard_and_none_is_much_longer(seconds: list[float], count: int) -> None:
    cells = keys(len(seconds))
    took = dict(zip(cells, seconds, strict=True))
    parts = shares(cells, took, count)
    assert len(parts) == count
    assert sorted(key.implementation for part in parts for key in part) == sorted(key.implementation for key in cells)
    loads = [sum(took[key] for key in part) for part in parts]
    least = max(sum(seconds) / count, max(seconds))  # no sharing is shorter than this
    assert max(loads) <= sum(seconds) / count + max(seconds) * (1 - 1 / count) + 1e-6
    assert max(loads) <= 2 * least + 1e-6
    assert parts == shares(cells[::-1], took, count)  # whatever order a machine has them in


def test_the_longest_cell_has_a_shard_to_itself() -> None:
    cells = keys(5)
    first, second = shares(cells, dict(zip(cells, (60.0, 15.0, 15.0, 15.0, 15.0), strict=True)), 2)
    assert {len(first), len(second)} == {1, 4}


@pytest.mark.slow
def test_shards_of_whole_cells_say_together_what_one_run_says(
    cli: Cli, kernel_file: KernelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROFILES, "quick", replace(PROFILES["quick"], explain_seconds=0.0))
    right = str(kernel_file(KERNEL.format(wrong=""), name="right.py"))
    wrong = str(kernel_file(KERNEL.format(wrong=" * 1.01"), name="wrong.py"))
    argv = ("verify", "--impl", right, "--impl", wrong, "--op", "rmsnorm", "--max-examples", "16", "--allow-thin")
    argv += ("--dtype", "fp16", "--dtype", "fp32", "--no-isolation", "--device", "cpu")
    assert cli(*argv, "--report", "json:one.json").code == 1
    codes = []
    for number in (1, 2, 3):
        shard = ("--shard", f"{number}/3", "--timings", "one.json", "--report", f"json:{number}.json")
        codes.append(cli(*argv, *shard).code)
    assert sorted(codes) in ([0, 1, 1], [0, 0, 1])
    assert cli("merge", "1.json", "2.json", "3.json", "--allow-thin", "--report", "json:all.json").code == 1
    one, together = (report(name)["verdicts"] for name in ("one.json", "all.json"))
    for name in ("op", "implementation", "dtype", "status", "cases", "failure", "failed_at", "source"):
        assert [v[name] for v in one] == [v[name] for v in together], name
    done = cli("merge", "1.json", "2.json", "--allow-thin")
    assert (done.code, "shard=3/3 is missing" in done.err) == (2, True)
    done = cli(*argv, "--shard", "1/2", "--timings", "absent.json")
    assert (done.code, "absent.json: expected normcheck-report/1" in done.err) == (2, True)


def report(name: str) -> Any:
    return json.loads(Path(name).read_text(encoding="utf-8"))


def elsewhere() -> Verdict:
    return replace(skipped(), implementation="triton", dtype="bf16", detail=ELSEWHERE)


def joined(*parts: Verdict) -> Verdict:
    reports = [(f"{k}.json", run(part, shard=f"{k}/{len(parts)}")) for k, part in enumerate(parts, 1)]
    (cell,) = merged(reports).verdicts
    return cell


def test_a_shard_that_leaves_a_cell_to_another_is_no_failure_of_its_own() -> None:
    shard = Terms(shard=True, required=("triton",))
    assert decide((elsewhere(),), shard)[:2] == ("pass", 0)
    assert decide((elsewhere(), verdict(status="thin", detail="short")), shard)[:2] == ("nothing", 5)
    assert decide((elsewhere(),), Terms())[:2] == ("nothing", 5)  # of a whole run it would be one


def test_a_cell_that_no_shard_or_two_have_judged() -> None:
    assert joined(elsewhere(), verdict(cases=9), elsewhere()).cases == 9
    for parts, judged in (((elsewhere(), elsewhere()), 0), ((verdict(), verdict(), elsewhere()), 2)):
        with pytest.raises(UsageError, match=f"{judged} shards judged it: expected one, so the same --timings"):
            joined(*parts)


def test_two_versions_of_a_file_are_never_merged() -> None:
    """Not even if one of them is on another machine, under the same name."""
    a, b = (verdict(file="mine.py", source=letter * 64, machine={"host": letter}) for letter in "ab")
    with pytest.raises(UsageError, match=r"mine.py was another on b than on a \(sha256 b{12}, a{12}\)"):
        joined(a, b)
    both = joined(a, replace(a, machine={"host": "c"}))
    assert both.machine == {"host": "a, c"}
    assert joined(a, replace(b, source="")).cases == 400  # a report of an earlier version does not say
