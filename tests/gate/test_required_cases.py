"""``--require NAME:CASES``: a cell that judged fewer is thin and fails the run, and merged shards are held to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normcheck.errors import UsageError
from normcheck.gate.decision import Terms, concluded, decide, terms_of, thinned
from normcheck.gate.options import VerifyOptions
from normcheck.gate.requirements import MOST_REQUIRED, requirement
from normcheck.options import built
from tests.command_line import Cli, KernelFile
from tests.sample_runs import failed, finding, run, skipped, thin_cell, verdict

HUNDRED = Terms(required=("triton",), least={"triton": 100})
EACH = Terms(least={"*": 100})


@pytest.mark.parametrize(
    ("text", "name", "axis", "least"),
    [
        ("mine", "mine", "", 0),
        ("mine.rmsnorm:100", "mine.rmsnorm", "cases", 100),
        ("a/mine.py:rmsnorm", "a/mine.py:rmsnorm", "", 0),
        ("mine.py:rmsnorm:7", "mine.py:rmsnorm", "cases", 7),
        ("mine:-3", "mine:-3", "", 0),  # a name, which is then not among what is checked
        ("mine:1e3", "mine:1e3", "", 0),
        ("mine:٣", "mine:٣", "", 0),
        ("a=b", "a=b", "", 0),
        ("d=1/mine.py:rmsnorm", "d=1/mine.py:rmsnorm", "", 0),
        ("*:61", "*", "cases", 61),
        (f"mine:{MOST_REQUIRED}", "mine", "cases", MOST_REQUIRED),
        ("mine.py:rmsnorm:N=16384", "mine.py:rmsnorm", "N", 16384),
        ("*:M=65536", "*", "M", 65536),
    ],
)
def test_what_is_read(text: str, name: str, axis: str, least: int) -> None:
    assert requirement(text) == (name, axis, least)


@pytest.mark.parametrize(
    "text",
    [
        *("", "*", ":9", "mine:0", "mine:00", f"mine:{MOST_REQUIRED + 1}", "mine:" + "9" * 5000),
        *("mine:N=0", "mine:N=", "mine:N=-1", "mine:N=1e5", "mine:K=5", "mine:n=16384", ":N=9", "mine:N=" + "9" * 5000),
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^require=.{0,60}: expected ") as raised:
        built(VerifyOptions, {"require": text})
    assert len(str(raised.value)) < 200
    with pytest.raises(UsageError, match=r"^require="):  # in a report that somebody wrote by hand, and that is merged
        terms_of(VerifyOptions(), (text,))


def test_terms_of_several() -> None:
    terms = terms_of(VerifyOptions(), ("b:7", "a", "b:70", "b", "*:3", "b:8"))
    assert (set(terms.required), terms.least) == ({"a", "b"}, {"b": 70, "*": 3})


def test_fewer_cases_than_required_are_no_green_run() -> None:
    few = verdict(cases=61, shapes=4)
    status, code, messages = decide([few, verdict(dtype="fp16")], HUNDRED)
    assert (status, code) == ("nothing", 5)
    assert messages == (
        "too few cases: triton rmsnorm bf16 judged 61 on 4 shapes, 100 are required; "
        "give it more time (--time-budget), or choose a larger --profile",
    )
    assert decide([verdict(cases=100)], HUNDRED)[1] == 0
    assert decide([few], Terms(required=("triton",), least={"other": 100}))[1] == 0
    assert "400 were allowed: raise --max-examples" in decide([few], Terms(least={"triton": 500}), most=400.0)[2][0]
    assert "judged 61 on 1 shape, " in decide([verdict(cases=61, shapes=1)], HUNDRED)[2][0]
    assert "judged 61, 100 are" in decide([verdict(cases=61, shapes=None)], HUNDRED)[2][0]


def test_allow_thin_does_not_excuse_it() -> None:
    for terms in (HUNDRED, EACH):
        allowed = Terms(required=terms.required, least=terms.least, allow_thin=True)
        assert decide([thin_cell()], allowed)[1] == 5
        assert decide([thin_cell(cases=100)], allowed)[1] == 0
    assert decide([thin_cell(cases=100)], HUNDRED)[1] == 5  # it is thin all the same


def test_every_cell_that_ran() -> None:
    assert decide([verdict(), skipped(), verdict(cases=100)], EACH)[1] == 0
    _, code, messages = decide([verdict(cases=99), skipped(), verdict(implementation="other", cases=5)], EACH)
    assert (code, len(messages)) == (5, 2)
    assert decide([verdict(cases=99)], Terms(least={"*": 10, "triton": 100}))[1] == 5  # the larger of both
    assert decide([failed(finding(), cases=1)], EACH)[:2] == ("fail", 1)  # it ended with its finding
    assert decide([failed(finding(), cases=1, known="an issue"), verdict()], EACH)[1] == 0


def test_in_every_report_it_is_thin() -> None:
    few = verdict(cases=61, shapes=4)
    told = concluded(run(few, verdict(dtype="fp16")), HUNDRED).verdicts
    assert [v.status for v in told] == ["thin", "pass"]
    assert told[0].detail == "61 of 100 required cases were judged"
    assert thinned(thin_cell(), HUNDRED).detail.endswith("belong together; 31 of 100 required cases were judged")
    assert thinned(skipped(), EACH) == skipped()


def test_a_shard_is_not_held_to_it() -> None:
    told = concluded(run(verdict(cases=61)), Terms(least={"*": 100}, shard=True))
    assert (told.exit_code, told.verdicts[0].status) == (0, "pass")
    assert told.messages == ("a shard: whether the required cases were judged is found by normcheck merge",)


KERNEL = """
import torch
from normcheck import Implementation

def forward(x, weight, bias, *, eps):
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)

IMPLEMENTATIONS = tuple(
    Implementation(name=name, op="rmsnorm", forward=forward, shapes=((5, 7), (3, 129))) for name in ("my.one", "two")
)
"""
FEW = ("--dtype", "fp32", "--device", "cpu", "--no-isolation", "--no-contexts", "--max-examples", "9", "--allow-thin")


def test_from_the_command_line_to_the_report(cli: Cli, kernel_file: KernelFile) -> None:
    impl = ("verify", "--impl", str(kernel_file(KERNEL)), *FEW, "--report", "json:out.json")
    assert cli(*impl, "--require", "my.one:9", "--require", "*:9").code == 0
    done = cli(*impl, "--require", "my.one:10")
    assert done.code == 5
    assert "too few cases: my.one rmsnorm fp32 judged 9 on 2 shapes, 10 are required; 9 were allowed" in " ".join(
        done.out.split()
    )
    report = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert report["required"] == ["my.one:10"]
    assert [(v["cases"], v["shapes"], v["status"]) for v in report["verdicts"]] == [(9, 2, "thin")] * 2
    assert "9 of 10 required cases were judged" in report["verdicts"][0]["detail"]
    assert "required" not in report["verdicts"][1]["detail"]
    assert cli(*impl, "--require", "my.three:10").err == (
        "normcheck: require=my.three:10: expected one of my.one, two, which are what is checked\n"
    )


@pytest.mark.slow
def test_in_a_file_and_merged(cli: Cli, kernel_file: KernelFile, tmp_path: Path) -> None:
    """A part of the gate is held to what the file requires of it; shards together have what each alone has not."""
    kernel_file(KERNEL, name="mine_required.py")
    (tmp_path / "pyproject.toml").write_text(
        '[tool.normcheck]\nimpl = "mine_required.py"\nrequire = ["my.one:9", "*:7"]\n', encoding="utf-8"
    )
    assert cli("verify", *FEW).code == 0
    assert cli("verify", *FEW[:-2], "8", "--allow-thin").code == 5
    done = cli("verify", "--impl", "mine_required.py:two", *FEW[:-2], "8", "--allow-thin")
    assert done.code == 0, done.out + done.err
    assert cli("verify", "--impl", "mine_required.py:two", *FEW[:-2], "6", "--allow-thin").code == 5
    for number in ("1", "2"):
        done = cli("verify", *FEW, "--shard", f"{number}/2", "--report", f"json:{number}.json")
        assert done.code == 0, done.out
        assert "is found by normcheck merge" in done.out
    assert cli("merge", "1.json", "2.json", "--allow-thin").code == 0
    done = cli("merge", "1.json", "2.json", "--allow-thin", "--require", "two:10")
    assert done.code == 5
    assert "two rmsnorm fp32 judged 9 " in done.out
