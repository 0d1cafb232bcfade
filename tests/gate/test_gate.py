"""The gate as a project uses it: its pyproject.toml, and ``normcheck verify`` without arguments."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normcheck.gate.plan import PROFILES
from tests.command_line import Cli, Done, KernelFile

pytestmark = pytest.mark.usefixtures("unshrunk")

RIGHT = "torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)"
KERNEL = """
import torch
from normcheck import Implementation

def right(x, weight, bias, *, eps):
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)

def other(x, weight, bias, *, eps):
    return {body}

SHAPES = ((5, 7), (20, 24), (3, 129))
IMPLEMENTATIONS = (
    Implementation(name="good", op="rmsnorm", forward=right, shapes=SHAPES),
    Implementation(name="other", op="rmsnorm", forward=other, shapes=SHAPES),
)
"""
WRONG, FIXED = "right(x, weight, bias, eps=eps) * 1.01", "right(x, weight, bias, eps=eps)"
CONFIG = """
[tool.normcheck]
impl = "kernels/mine.py"
dtype = "fp16"
max_examples = 24
allow_thin = true
device = "cpu"
isolation = false
contexts = false
report = "json:report.json"
"""
WHOLE = ("--max-examples", "100", "--time-budget", "60")
"""The core of a cell with so few shapes, and a few cases more. With fewer, as in CONFIG, a cell is thin."""


class Project:
    """A folder with a pyproject.toml and a kernel, and normcheck in this process."""

    def __init__(self, folder: Path, cli: Cli, kernel_file: KernelFile) -> None:
        self.folder = folder
        self._cli = cli
        self._kernel_file = kernel_file
        self._number = 0
        self.configure()

    def configure(self, more: str = "") -> None:
        (self.folder / "pyproject.toml").write_text(CONFIG + more, encoding="utf-8")

    def kernel(self, body: str) -> None:
        """A file is imported once in a process: each has a name of its own here, and the same implementations."""
        self._number += 1
        path = self._kernel_file(KERNEL.replace("{body}", body), name=f"kernels/mine_{self._number}.py")
        text = (self.folder / "pyproject.toml").read_text(encoding="utf-8")
        lines = [f'impl = "kernels/{path.name}"' if line.startswith("impl =") else line for line in text.splitlines()]
        (self.folder / "pyproject.toml").write_text("\n".join(lines), encoding="utf-8")

    def __call__(self, *argv: str) -> Done:
        return self._cli(*argv)

    @property
    def report(self) -> Any:
        return json.loads((self.folder / "report.json").read_text(encoding="utf-8"))


@pytest.fixture
def project(tmp_path: Path, cli: Cli, kernel_file: KernelFile, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose failures nobody explains."""
    monkeypatch.setitem(PROFILES, "quick", replace(PROFILES["quick"], explain_seconds=0.0))
    return Project(tmp_path, cli, kernel_file)


def last(done: Done) -> str:
    return done.out.rstrip().splitlines()[-1]


@pytest.mark.slow
def test_red_on_a_planted_fault_known_fixed_and_stale(project: Project) -> None:
    project.kernel(WRONG)
    done = project("verify")
    assert (done.code, project.report["status"]) == (1, "fail")
    assert "FAIL rmsnorm other fp16: y is wrong" in done.out

    (project.folder / "known.txt").write_text("rmsnorm other fp16  # 1 % too large, issue 7\n", encoding="utf-8")
    with (project.folder / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write('\nknown_failures = "known.txt"\n')
    done = project("verify")
    assert (done.code, project.report["status"]) == (0, "pass"), done.out
    assert "KNOWN rmsnorm other fp16: y is wrong" in done.out
    assert "0 cells passed, 1 failed as known, 1 thin" in last(done)
    assert [cell["known"] for cell in project.report["verdicts"]] == ["", "1 % too large, issue 7"]
    assert project.report["verdicts"][1]["status"] == "fail"

    project.kernel(FIXED)
    assert project("verify").code == 0  # thin: too little to say that it passes
    done = project("verify", *WHOLE)
    assert (done.code, project.report["status"]) == (1, "fail")
    message = "known.txt:1: known failure 'rmsnorm other fp16' passes now: remove the line"
    assert message in done.out
    assert project.report["messages"] == [message]
    assert last(done).startswith(f"FAIL  {message}")

    (project.folder / "known.txt").write_text("rmsnorm gone fp16  # no longer there\n", encoding="utf-8")
    assert project("verify").code == 1
    assert "matches no cell of this run" in project.report["messages"][0]
    assert project("verify", "--dtype", "fp16").code == 0  # a part of the gate

    (project.folder / "known.txt").write_text("", encoding="utf-8")
    assert project("verify").code == 0


@pytest.mark.slow
def test_the_line_of_a_planted_fault_is_annotated(project: Project) -> None:
    project.kernel(WRONG)
    done = project("verify", "--report", "github:-")
    (name,) = (path.name for path in (project.folder / "kernels").iterdir() if path.suffix == ".py")
    text = (project.folder / "kernels" / name).read_text(encoding="utf-8")
    line = text[: text.index("def other")].count("\n") + 1
    annotated = [text for text in done.out.splitlines() if text.startswith("::error file=")]
    assert len(annotated) == 1
    assert f"::error file=kernels/{name},line={line},title=rmsnorm other fp16" in annotated[0]
    (project.folder / "known.txt").write_text("rmsnorm other fp16  # known\n", encoding="utf-8")
    done = project("verify", "--report", "github:-", "--known-failures", "known.txt")
    assert not [text for text in done.out.splitlines() if text.startswith("::error")]
    assert f"::warning file=kernels/{name},line={line}," in done.out


@pytest.mark.slow
def test_a_required_backend_that_does_not_run(project: Project) -> None:
    project.configure('require = ["cudnn"]\n')
    project.kernel(FIXED)
    done = project("verify")
    assert done.code == 2
    assert "require=cudnn: expected one of good, other" in done.err
    text = (project.folder / "pyproject.toml").read_text(encoding="utf-8")
    (project.folder / "pyproject.toml").write_text(text.replace('impl = "', 'impl = ["cudnn", "') + "\n", "utf-8")
    text = (project.folder / "pyproject.toml").read_text(encoding="utf-8")
    (project.folder / "pyproject.toml").write_text(text.replace('.py"', '.py"]') + "\n", "utf-8")
    done = project("verify")
    assert done.code == 5
    assert "required cudnn did not run rmsnorm" in done.out


@pytest.mark.slow
def test_random_seeds_are_said_and_are_in_the_report(project: Project) -> None:
    project.kernel(FIXED)
    done = project("verify", "--seed", "random", "--max-examples", "2")
    seed = project.report["seed"]
    assert done.err == f"seed {seed}\n"
    assert f"seed {seed}" in done.out
    project("verify", "--seed", "random", "--max-examples", "2")
    assert project.report["seed"] != seed
    assert project("verify", "--seed", "5", "--max-examples", "2").err == ""
    assert project.report["seed"] == 5


def test_a_mistake_in_the_file_is_one_line(project: Project) -> None:
    project.configure("max-examples = 3\n")
    done = project("verify")
    assert (done.code, done.out) == (2, "")
    expected = "pyproject.toml: [tool.normcheck] max-examples=3: no such key; did you mean max_examples?\n"
    assert done.err == f"normcheck: {expected}"


@pytest.mark.slow
def test_red_on_drift(project: Project) -> None:
    project.kernel(FIXED)
    assert project("verify", *WHOLE).code == 0
    done = project("baseline", "make", "report.json", "--out", "baseline.json")
    assert (done.code, done.out) == (0, "baseline.json: 2 cells\n")
    with (project.folder / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write('\nbaseline = "baseline.json"\n')
    done = project("verify", *WHOLE)
    assert (done.code, project.report["messages"]) == (0, []), done.out

    stored = json.loads((project.folder / "baseline.json").read_text(encoding="utf-8"))
    worst = next(c for c in stored["cells"] if c["implementation"] == "other")["worst"]
    worst["dw"] |= {"ratio": worst["dw"]["ratio"] / 2.1, "case": worst["y"]["case"] + " gap=1"}
    worst["y"] |= {"ratio": worst["y"]["ratio"] / 1.9}
    (project.folder / "baseline.json").write_text(json.dumps(stored), encoding="utf-8")
    done = project("verify", *WHOLE)
    assert (done.code, project.report["status"]) == (1, "fail")
    (message,) = project.report["messages"]
    assert message.startswith("drift from baseline.json: rmsnorm other fp16 dw: worst ratio 0.")
    assert last(done).startswith("FAIL  drift from baseline.json")
    assert project("verify", "--drift-ratio", "3").code == 0
    assert "seed=0 (now 1)" in project("verify", "--seed", "1", "--drift-ratio", "3").out
    assert project("verify", "--drift-ratio", "0.5").code == 2


@pytest.mark.slow
def test_baselines_that_cannot_be_made(project: Project) -> None:
    for argv, expected in (
        (("missing.json", "--out", "b.json"), "missing.json: expected normcheck-report/1"),
        (("pyproject.toml", "--out", "b.json"), "pyproject.toml: expected normcheck-report/1, in JSON"),
        (("missing.json",), "'--out'"),
    ):
        done = project("baseline", "make", *argv)
        assert (done.code, done.out) == (2, "")
        assert expected in done.err
    project.kernel(FIXED)
    project("verify")
    done = project("baseline", "make", "report.json", "--out", "b.json")
    assert (done.code, done.err) == (2, "normcheck: report.json: expected a cell that passed\n")  # both are thin
    project("verify", *WHOLE)
    done = project("baseline", "make", "report.json", "--out", "missing/b.json")
    assert (done.code, done.out) == (2, "")
    assert "out=missing/b.json: expected a file that can be written" in done.err
    before = (project.folder / "report.json").read_bytes()
    done = project("baseline", "make", "report.json", "--out", "./report.json")
    assert (done.code, done.err) == (2, "normcheck: out=./report.json: expected another file, this one is read\n")
    assert (project.folder / "report.json").read_bytes() == before


SAME = ("op", "implementation", "dtype", "device", "status", "not_returned", "uncheckable", "skipped", "model", "notes",
        "vacuity", "repeats", "invariance", "known", "detail", "failed_at", "failure")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("body", [FIXED, WRONG, "rare(x, weight, bias, eps)"])
def test_three_shards_merged_say_what_one_run_says(project: Project, body: str) -> None:
    """``rare``: wrong from N = 100 on, which is not the first case."""
    few = WHOLE if body == FIXED else ()
    project.kernel(body.replace("rare(x, weight, bias, eps)", f"({WRONG}) if x.shape[-1] >= 100 else ({FIXED})"))
    one = project("verify", *few)
    whole = project.report
    for number in (1, 2, 3):
        assert project("verify", *few, "--shard", f"{number}/3", "--report", f"json:{number}.json").code in (0, 1)
    done = project("merge", "2.json", "1.json", "3.json", "--report", "json:report.json")
    together = project.report
    assert done.code == one.code == int(body != FIXED)
    assert (together["status"], together["messages"]) == (whole["status"], whole["messages"])
    assert (together["complete"], together["shard"]) == (True, "")
    for a, b in zip(whole["verdicts"], together["verdicts"], strict=True):
        assert a["status"] in (("pass",) if body == FIXED else ("thin", "fail"))
        passed = a["status"] != "fail"
        assert {key: a[key] for key in SAME if passed or key in SAME[:5]} == {
            key: b[key] for key in SAME if passed or key in SAME[:5]
        }
        for key in ("detail", "failure", "failed_at"):
            assert a[key] == b[key]
        if passed:
            assert a["cases"] == b["cases"] == (100 if body == FIXED else 24)
            assert {n: w["ratio"] for n, w in a["worst"].items()} == {n: w["ratio"] for n, w in b["worst"].items()}


@pytest.mark.slow
def test_known_failures_may_be_said_to_merge_alone(project: Project) -> None:
    (project.folder / "known.txt").write_text("rmsnorm other fp16  # 1 % too large\n", encoding="utf-8")
    project.kernel(WRONG)
    for number in (1, 2):
        assert project("verify", "--shard", f"{number}/2", "--report", f"json:{number}.json").code == 1
    assert project("merge", "1.json", "2.json").code == 1
    done = project("merge", "2.json", "1.json", "--known-failures", "known.txt", "--report", "json:report.json")
    assert done.code == 0
    assert [cell["known"] for cell in project.report["verdicts"]] == ["", "1 % too large"]
    assert "KNOWN rmsnorm other fp16" in done.out


@pytest.mark.slow
def test_in_processes_side_by_side(project: Project) -> None:
    """What is replayed travels to the judges. The first run, which stores it, is of this process: it costs a tenth."""
    project.configure('database = ".normcheck"\n')
    project.kernel(f"({WRONG}) if x.shape[-1] >= 100 else ({FIXED})")
    assert project("verify").code == 1
    assert project.report["verdicts"][1]["failed_at"] > 0
    assert project("verify", "--isolation", "--workers", "2").code == 1
    assert [cell["failed_at"] for cell in project.report["verdicts"]] == [None, -1]


@pytest.mark.slow
def test_a_shard_alone_does_not_judge_what_is_stale(project: Project) -> None:
    project.configure('known_failures = "known.txt"\n')
    (project.folder / "known.txt").write_text("rmsnorm other fp16  # gone\n", encoding="utf-8")
    project.kernel(FIXED)
    for number in (1, 2):
        done = project("verify", *WHOLE, "--shard", f"{number}/2", "--report", f"json:{number}.json")
        assert done.code == 0
        assert "found by normcheck merge" in done.out
    done = project("merge", "1.json", "2.json")
    assert done.code == 1
    assert "passes now: remove the line" in done.out
    assert project("merge", "1.json").code == 2
    assert "shard=2/2 is missing" in project("merge", "1.json").err


@pytest.mark.slow
def test_the_last_failure_is_replayed_first(project: Project) -> None:
    project.configure('database = ".normcheck"\n')
    rare = f"({WRONG}) if x.shape[-1] >= 100 else ({FIXED})"
    project.kernel(rare)
    assert project("verify").code == 1
    first = project.report["verdicts"][1]
    assert first["cases"] > 1
    (file,) = (project.folder / ".normcheck").iterdir()
    assert first["failure"]["case"] in file.read_text(encoding="utf-8")
    project.kernel(rare)
    assert project("verify").code == 1
    again = project.report["verdicts"][1]
    assert (again["cases"], again["failed_at"]) == (1, -1)
    assert again["failure"]["case"] == first["failure"]["case"]
    with file.open("a", encoding="utf-8") as stream:
        stream.write("nonsense\n")
    project.kernel(FIXED)
    assert project("verify").code == 0
    fixed = project.report["verdicts"][1]
    assert fixed["cases"] == 24 + 1
    assert any("not replayed" in note for note in fixed["notes"])


@pytest.mark.slow
def test_a_part_of_the_gate_needs_what_is_required_of_it(project: Project) -> None:
    project.configure('require = ["good", "cudnn"]\n')
    project.kernel(FIXED)
    name = next((project.folder / "kernels").iterdir()).name
    assert project("verify").code == 2  # cudnn is not among what the file asks for
    assert project("verify", "--dtype", "bf16").code == 0
    assert project("verify", "--dtype", "bf16", *WHOLE).code == 0
    assert project.report["required"] == ["good"]
    assert project("verify", "--impl", f"kernels/{name}:other").code == 0
    assert project.report["required"] == []
    done = project("verify", "--impl", "cudnn", "--op", "rmsnorm")
    assert (done.code, project.report["required"]) == (5, ["cudnn"])
    done = project("verify", "--impl", "torch", "--op", "rmsnorm", "--require", "good")
    assert (done.code, done.err) == (2, "normcheck: require=good: expected one of torch, which are what is checked\n")


@pytest.mark.slow
def test_shards_of_a_part_are_merged_as_a_part(project: Project) -> None:
    project.configure('known_failures = "known.txt"\n')
    (project.folder / "known.txt").write_text("rmsnorm other fp16  # known\n", encoding="utf-8")
    project.kernel(FIXED)
    for number in (1, 2):
        assert (
            project("verify", "--dtype", "bf16", "--shard", f"{number}/2", "--report", f"json:{number}.json").code == 0
        )
    assert project("merge", "1.json", "2.json").code == 0


def test_no_report_over_what_is_read(project: Project) -> None:
    project.kernel(FIXED)
    before = (project.folder / "pyproject.toml").read_bytes()
    done = project("verify", "--report", "json:pyproject.toml")
    assert (done.code, done.err) == (
        2,
        "normcheck: report=json:pyproject.toml: expected another file, this one is read\n",
    )
    assert (project.folder / "pyproject.toml").read_bytes() == before
    project("verify", "--shard", "1/1", "--report", "json:1.json")
    done = project("merge", "1.json", "--report", "junit:./1.json")
    assert (done.code, done.err) == (2, "normcheck: report=junit:./1.json: expected another file, this one is read\n")


def test_a_report_over_a_file_that_cannot_be_written_is_said_before_the_sweep(project: Project) -> None:
    project.kernel(FIXED)
    program = Path(sys.executable).resolve()  # runs, so that nobody may write to it, not even root
    done = project("verify", "--report", f"json:{program}")
    assert (done.code, done.out) == (2, "")
    assert "expected a path of a file that can be written, in a folder that exists" in done.err
