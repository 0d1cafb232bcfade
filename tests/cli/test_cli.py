"""The command line, as a user meets it: exit codes, one-line complaints, findings, reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import normcheck
from normcheck.cases.ops import OPS
from normcheck.cli.output import lasting
from normcheck.impls import discovery
from normcheck.reports.report import formats
from normcheck.result import KINDS
from tests.command_line import Cli, Done, KernelFile
from tests.inner_loop import parametrize

HEADER = """
import torch
from normcheck import Implementation, UnsupportedCase
"""
RIGHT = """
def y_of(x, weight, bias, eps):
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)
"""
DECLARED = "IMPLEMENTATIONS = (Implementation(name='mine', op='rmsnorm', forward=forward),)"
TIMES_1_01 = "def wrong(x, weight, bias, eps): return y_of(x, weight, bias, eps) * 1.01"


@pytest.fixture
def written(kernel_file: KernelFile) -> Callable[..., str]:
    """A file of an implementation; gives its name."""
    return lambda *parts: kernel_file(HEADER, *parts).name


ASKED = ("--device", "cpu", "--dtype", "fp16")
FEW = (*ASKED, "--max-examples", "10", "--no-contexts", "--allow-thin")
CORE = (*ASKED, "--no-contexts", "--time-budget", "0.01")  # little beyond the core, without which nothing passes


def report(cli: Cli, *argv: str, few: tuple[str, ...] = FEW) -> tuple[Done, Any]:
    done = cli("verify", *few, *argv, "--report", "json:out.json")
    return done, json.loads(Path("out.json").read_text(encoding="utf-8"))


# what is right passes, what is wrong is found


@pytest.mark.slow
@pytest.mark.parametrize("op", ["layernorm_relu_bitmask", "rmsnorm", "rmsnorm_llama"])
def test_torch_passes(cli: Cli, op: str) -> None:
    """The beginning of three cores, one of the op with the most outputs; a file below passes a whole one."""
    done = cli("verify", "--impl", "torch", "--op", op, *FEW)
    assert (done.code, done.err) == (0, "")
    assert done.out.rstrip().splitlines()[-1].startswith("THIN  1 of 1 cell thin: ")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("baseline",)])
def test_without_a_command_the_help_has_its_lines(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Usage: normcheck") and done.err.count("\n") > 10


LLAMA = """
def rmsnorm(x, weight, eps):
    wide = x.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
"""


def test_of_a_kernel_that_rounds_as_llama_does_the_report_names_that_op(cli: Cli, kernel_file: KernelFile) -> None:
    done = cli("verify", "--impl", kernel_file(LLAMA).name, *FEW)
    assert done.code == 1 and "y has the wrong dtype" in done.out
    assert "It is right as rmsnorm_llama" in " ".join(done.out.split())
    wrong = LLAMA.replace("+ eps", "+ 2 * eps + 0.5")
    done = cli("verify", "--impl", kernel_file(wrong, name="wrong.py").name, *FEW)
    assert done.code == 1 and "rmsnorm_llama" not in done.out


MARKED = """
import torch
from normcheck import Implementation

class Marks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.mark_dirty(x)
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(wide * rstd, rstd, weight)
        return x.copy_(wide * rstd * weight.float())

    @staticmethod
    def backward(ctx, dy):
        xhat, rstd, weight = ctx.saved_tensors
        wdy = dy.float() * weight.float()
        dw = (dy.float() * xhat).reshape(-1, xhat.shape[-1]).sum(0)
        dx = rstd * (wdy - xhat * (wdy * xhat).mean(-1, keepdim=True))
        return dx.to(dy.dtype), dw.to(weight.dtype), None

def forward(x, weight, bias, *, eps):
    return Marks.apply(x, weight, eps)

IMPLEMENTATIONS = (Implementation(name="mine", op="rmsnorm", forward=forward, overwrites=("x",), biases=(False,)),)
"""


@pytest.mark.slow
def test_an_input_that_may_be_overwritten_may_be_marked_as_written_to(cli: Cli, kernel_file: KernelFile) -> None:
    """Its gradient is judged, also if only another one is wanted: then no call makes the input a part of a graph."""
    enough = ("--dtype", "fp16", "--device", "cpu", "--max-examples", "60", "--allow-thin")
    done = cli("verify", "--impl", kernel_file(MARKED).name, *enough)
    assert done.code == 0 and "right in 6 contexts" in " ".join(done.out.split()), done.out
    assert "not returned: rstd;" in done.out  # but dx and dw
    wrong = MARKED.replace("return dx.to", "return 1.1 * dx.to")
    done = cli("verify", "--impl", kernel_file(wrong, name="wrong.py").name, *enough)
    assert done.code == 1 and "dx is wrong" in done.out
    undeclared = MARKED.replace('overwrites=("x",), ', "")
    done = cli("verify", "--impl", kernel_file(undeclared, name="undeclared.py").name, *enough)
    assert done.code == 1 and "but for those that overwrites= names" in " ".join(done.out.split())


def test_few_cases_are_thin(cli: Cli) -> None:
    """In the profile that runs by default as well, whether it is required or not."""
    few = ("verify", "--impl", "torch", "--op", "rmsnorm", *FEW)
    done = cli(*few[:-1])
    assert (done.code, done.err) == (5, "")
    assert done.last.startswith("THIN  1 of 1 cell thin: rmsnorm/torch fp16; ")
    assert done.last.endswith(". Next: raise --max-examples")
    assert "cases ran (--max-examples 10): no " in " ".join(done.out.split())
    for required in ((), ("--require", "torch")):
        assert cli(*few, *required).code == 0
    done = cli(*few[:-1], "--require", "torch:200")
    assert (done.code, "time" in done.last.partition("Next: ")[2]) == (5, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "declared",
    [
        DECLARED.replace("forward=forward", "forward=lambda x, w, b, *, eps: y_of(x, w, b, eps)"),
        DECLARED.replace("forward=forward", "forward=lambda x, w, b, *, eps: {'y': y_of(x, w, b, eps), 'rstd': None}"),
    ],
)
def test_a_file_with_a_right_kernel_passes(cli: Cli, written: Callable[..., str], declared: str) -> None:
    path = written(RIGHT, declared.replace("op=", "shapes=((5, 7), (20, 24), (3, 129)), op="))  # a core of few cases
    done, document = report(cli, "--impl", path, "--require", "mine", few=CORE)
    assert (done.code, document["status"]) == (0, "pass")
    assert document["verdicts"][0]["not_returned"] == ["rstd"]
    assert set(document["verdicts"][0]["worst"]) == {"y", "dx", "dw", "db"}


@pytest.mark.slow
def test_a_plain_function_without_an_import_of_normcheck(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(f"import torch\n{RIGHT}", encoding="utf-8")
    assert cli("verify", "--impl", "plain.py:y_of", "--op", "rmsnorm", *FEW).code == 0
    assert cli("verify", "--impl", "plain:y_of", "--op", "rmsnorm", *FEW).code == 0  # as a module


WRONG: dict[str, tuple[str, str, str]] = {  # body of forward -> kind, output
    "a value": ("return y_of(x, weight, bias, eps) * 1.01", "mismatch", "y"),
    "nan": ("return y_of(x, weight, bias, eps) * float('nan')", "non_finite", "y"),
    "unwritten": ("return torch.empty_like(x)", "unwritten", "y"),
    "a shape": ("return y_of(x, weight, bias, eps)[:, :0]", "shape", "y"),
    "a detached shape": ("return x.detach().clone().flatten()", "shape", "y"),
    "a dtype": ("return y_of(x, weight, bias, eps).double()", "dtype", "y"),
    "sparse": ("return y_of(x, weight, bias, eps).detach().to_sparse()", "shape", "y"),
    "elsewhere": ("return torch.empty_like(x, device='meta')", "missing", "y"),
    "a list": ("return [x]", "missing", "y"),
    "nothing": ("return None", "missing", "y"),
    "a dict without y": ("return {'rstd': x}", "missing", "y"),
    "a dict with a number": ("return {'y': 3.0}", "missing", "y"),
    "statistics in fp16": ("return {'y': y_of(x, weight, bias, eps), 'rstd': x[:, 0]}", "dtype", "rstd"),
    "too few statistics": ("return {'y': y_of(x, weight, bias, eps), 'rstd': torch.ones(0)}", "shape", "rstd"),
    "an input": ("y = y_of(x, weight, bias, eps); weight.data.zero_(); return y", "input_modified", "weight"),
    "an error": ("raise ValueError('no\\nsuch thing')", "exception", ""),
    "an assertion": ("assert False", "exception", ""),
    "exit 0": ("raise SystemExit(0)", "exception", ""),
    "exit by text": ("import sys; sys.exit('enough')", "exception", ""),
    "a timeout of its own": ("raise TimeoutError", "exception", ""),
}


@parametrize("name", WRONG, inner=1)
@pytest.mark.usefixtures("unshrunk")
def test_what_is_wrong_is_a_finding(cli: Cli, written: Callable[..., str], name: str) -> None:
    body, kind, output = WRONG[name]
    path = written(RIGHT, "def forward(x, weight, bias, *, eps):", f"    {body}", DECLARED)
    done, document = report(cli, "--impl", path)
    assert (done.code, done.err, document["status"]) == (1, "", "fail")
    failure = document["verdicts"][0]["failure"]
    assert kind in KINDS
    assert (failure["kind"], failure["output"]) == (kind, output)
    assert failure["case"] in done.out
    assert failure["reproduce"] == f"normcheck repro {path} '{failure['case']}'"
    again = cli("repro", path, failure["case"], "--device", "cpu")  # and the line shows it again
    assert again.code == 1
    assert again.out.rstrip().splitlines()[-1].startswith("FAIL")


GRADIENTS = """
def forward(x, weight, bias, *, eps):
    rstd = (x.double().square().mean(-1) + eps).rsqrt().float()
    return {'y': y_of(x, weight, bias, eps), 'rstd': rstd}
IMPLEMENTATIONS = (Implementation(name='mine', op='rmsnorm', forward=forward, backward=backward),)
"""


@parametrize(
    ("returned", "kind", "output"),
    [
        ("None", "missing", "dx"),
        ("{}", "missing", "dx"),
        ("{'dx': dy, 'dw': weight}", "mismatch", "dx"),
        ("{'dx': dy[:, :0], 'dw': weight}", "shape", "dx"),
        ("{'dx': dy.double(), 'dw': weight.double()}", "dtype", "dx"),
        ("1 / 0", "exception", ""),
        ("sys.exit(0)", "exception", ""),
    ],
    inner=1,
)
@pytest.mark.usefixtures("unshrunk")
def test_a_wrong_backward(cli: Cli, written: Callable[..., str], returned: str, kind: str, output: str) -> None:
    path = written(
        "import sys", RIGHT, f"def backward(dy, x, weight, bias, saved, *, eps): return {returned}", GRADIENTS
    )
    done, document = report(cli, "--impl", path)
    failure = document["verdicts"][0]["failure"]
    assert (done.code, failure["kind"], failure["output"]) == (1, kind, output)


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["time.sleep(60)", "while True: pass"])
def test_a_kernel_that_does_not_return(cli: Cli, written: Callable[..., str], wait: str) -> None:
    path = written("import time", "def forward(x, weight, bias, *, eps):", "    try:", f"        {wait}")
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"\n    except Exception:\n        return x\n{DECLARED}")
    done, document = report(cli, "--impl", path, "--timeout", "0.2", "--time-budget", "1")
    assert (done.code, document["verdicts"][0]["failure"]["kind"]) == (1, "timeout")
    assert "timeout=0.2" in document["verdicts"][0]["failure"]["message"]


def test_a_kernel_may_print(cli: Cli, written: Callable[..., str]) -> None:
    """Standard output is the report's; what is printed is seen where the kernel runs in the same process."""
    body = "def f(x, weight, bias, eps): print('hello'); return y_of(x, weight, bias, eps)"
    path = written(RIGHT, "print('loading')", body)
    for isolation in ("--isolation", "--no-isolation"):
        done = cli("verify", "--impl", f"{path}:f", "--op", "rmsnorm", *FEW, "--report", "json:-", isolation)
        assert json.loads(done.out)["exit_code"] == done.code == 0
        assert ("hello" in done.err) == (isolation == "--no-isolation")


# nothing checked is not a pass


REFUSING = "forward=lambda x, w, b, *, eps: y_of(x, w, b, eps), supports=lambda case: 'only on Sundays'"


def test_cudnn_on_a_cpu(cli: Cli) -> None:
    done = cli("verify", "--impl", "cudnn", "--op", "rmsnorm", *FEW)
    assert done.code == 5
    assert "cuDNN needs an NVIDIA GPU" in " ".join(done.out.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "declared",
    [
        DECLARED.replace("forward=forward", REFUSING),
        "def forward(*_, **__): raise UnsupportedCase('only on Sundays')\n" + DECLARED,
    ],
)
def test_all_refused(cli: Cli, written: Callable[..., str], declared: str) -> None:
    done, document = report(cli, "--impl", written(RIGHT, declared))
    assert (done.code, document["exit_code"], document["status"]) == (5, 5, "nothing")
    assert document["verdicts"][0]["status"] == "skip"
    assert "only on Sundays" in document["verdicts"][0]["detail"]


@pytest.mark.slow
def test_required_did_not_run(cli: Cli) -> None:
    both = ("--impl", "torch", "--impl", "cudnn", "--op", "rmsnorm")
    assert cli("verify", *both, *FEW).code == 0
    done, document = report(cli, *both, "--require", "cudnn")
    assert (done.code, document["status"]) == (5, "nothing")
    assert "cudnn" in " ".join(document["messages"])


@pytest.mark.slow
def test_a_finding_decides_before_what_did_not_run(cli: Cli, written: Callable[..., str]) -> None:
    path = written(RIGHT, TIMES_1_01)
    done = cli("verify", "--impl", f"{path}:wrong", "--impl", "cudnn", "--op", "rmsnorm", "--require", "cudnn", *FEW)
    assert done.code == 1


# one line for what was asked wrongly


def complaint(done: Done) -> str:
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("\n")
    assert done.err.count("\n") == 1, done.err
    assert done.err.startswith("normcheck: ")
    assert "Traceback" not in done.err
    assert len(done.err) < 600
    return done.err


MISTAKES = {
    "verify --op norm": "op=norm: expected one of layernorm,",
    "verify --dtype fp64": "dtype=fp64: expected one of fp16, bf16, fp32",
    "verify --impl apax": "impl=apax: expected a known name (",
    "verify --impl missing.py": "impl=missing.py: no such file",
    "verify --impl .py": "impl=.py: no such file",
    "verify --impl missing.module:f": "impl=missing.module: importing it raised ModuleNotFoundError",
    "verify --impl :f --op rmsnorm": "impl=",
    "verify --profile slow": "profile=slow: expected one of quick, ci, deep",
    "verify --device tpu": "device=tpu: expected one of auto, cpu, cuda",
    "verify --report yaml:out": "report=yaml:out: expected FORMAT:PATH with FORMAT one of github, html, json,",
    "verify --report json": "report=json: expected FORMAT:PATH",
    "verify --report json:": "report=json:: expected FORMAT:PATH",
    "verify --report json:missing/out.json": "report=json:missing/out.json: expected a path",
    "verify --report json:.": "report=json:.: expected a path",
    "verify --report json:/proc/x.json": "report=json:/proc/x.json: expected a path",
    "verify --trace /proc/x.jsonl": "trace=/proc/x.jsonl: expected a path of a file that can be written",
    "golden record --out /proc/x": "out=/proc/x: expected a folder around it that is writable, /proc is not",
    "verify --report json:- --report terminal:-": "at most one report on standard output",
    "verify --impl torch --require cudnn": "require=cudnn: expected one of torch",
    "verify --known-failures /dev/full": "expected a file that can be read (it is no regular file)",
    "verify --report json:one --report junit:one": "report=json:one: expected a file of its own for each report",
    "verify --require apax": "require=apax: expected one of",
    "verify --workers 0": "workers=0: expected an integer from 1",
    "verify --workers 2 --no-isolation": "workers=2: expected 1 with --no-isolation",
    "verify --timeout 0": "timeout=0: expected seconds > 0",
    "verify --timeout -1": "timeout=-1: expected seconds > 0",
    "verify --timeout nan": "timeout=nan: expected seconds > 0",
    "verify --timeout inf": "timeout=inf: expected seconds > 0",
    "verify --max-examples 0": "max_examples=0: expected an integer >= 1",
    "verify --time-budget 0": "time_budget=0: expected seconds > 0",
    "verify --time-budget inf": "time_budget=inf: expected seconds > 0",
    "verify --seed half": "seed=half: expected an integer",
    "verify --config missing.toml": "config=missing.toml: no such file",
    "verify --known-failures missing.txt": "known_failures=missing.txt: expected a file that can be read",
    "verify --max-examples 1.5": "'--max-examples'",
    "verify --colour red": "No such option",
    "verify --op": "'--op'",
    "verify extra": "extra",
    "check": "No such command",
    "repro torch": "case is missing: expected normcheck repro IMPLEMENTATION 'CASE LINE'",
    "repro apax 'rmsnorm fp16 M=3 N=9'": "impl=apax",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(cli: Cli, line: str) -> None:
    words = line.replace("'", "").split(maxsplit=2) if line.startswith("repro apax") else line.split()
    assert MISTAKES[line] in complaint(cli(*words))


def test_a_gpu_that_is_not_there(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "device=cuda" in complaint(cli("verify", "--device", "cuda"))


def test_names_that_no_file_can_have(cli: Cli) -> None:
    assert "file name too long" in complaint(cli("verify", "--impl", "a" * 300 + ".py"))
    assert "expected a path" in complaint(cli("verify", "--report", "json:" + "a" * 300))


BROKEN_FILES = {
    "raise ValueError('first line\\nsecond line')": "importing it raised ValueError: first line second line",
    "raise ValueError('x' * 100000)": "importing it raised ValueError: xxx",
    "import sys; sys.exit(0)": "importing it raised SystemExit",
    "import no_such_package": "importing it raised ModuleNotFoundError",
    "def forward(": ".py, line 5); expected a module",  # one place
    "\0": "importing it raised",
    "": "expected IMPLEMENTATIONS in it",
    "IMPLEMENTATIONS = ()": "expected IMPLEMENTATIONS in it",
    "IMPLEMENTATIONS = 5": "IMPLEMENTATIONS=int: expected a tuple",
    "IMPLEMENTATIONS = (print,)": "expected Implementation(...)",
    "IMPLEMENTATIONS = (Implementation(name='mine', op='norm', forward=print),)": "op='norm' of 'mine'",
    "IMPLEMENTATIONS = (Implementation(name='mine', op=['rmsnorm'], forward=print),)": "op=['rmsnorm'] of 'mine'",
    "IMPLEMENTATIONS = (Implementation(name='mine', op='rmsnorm', forward=5),)": "forward, backward of 'mine'",
    "IMPLEMENTATIONS = (Implementation(name='mine', op='rmsnorm'),)": "importing it raised TypeError",
}
BROKEN_FIELDS = {
    "dtypes=('fp8',)": "dtypes='fp8'",
    "dtypes=()": "dtypes=()",
    "ranks=(3,)": "ranks=(3,)",
    "ranks=2": "ranks=2",
    "model=5": "model=5",
    "model={'chian': 4}": "model='chian' of mine: expected one of accumulate,",
    "shapes=((3,),)": "shapes=((3,),)",
}
BROKEN_FILES |= {
    f"IMPLEMENTATIONS = (Implementation(name='mine', op='rmsnorm', forward=print, {field}),)": message
    for field, message in BROKEN_FIELDS.items()
}


@parametrize("content", BROKEN_FILES, inner=4)
def test_files_that_are_wrong(cli: Cli, written: Callable[..., str], content: str) -> None:
    message = complaint(cli("verify", "--impl", written(content), *FEW))
    assert BROKEN_FILES[content] in message


LINKS = {"circle.py": "too many levels of symbolic links", "folder.py": "is a folder", "folder": "is a folder"}


@pytest.mark.parametrize("name", LINKS)
def test_what_is_no_file(cli: Cli, tmp_path: Path, name: str) -> None:
    """A circle of links was no such file, and a folder brought a list of known names."""
    (tmp_path / "circle.py").symlink_to("circle.py")
    for folder in ("folder", "folder.py"):
        (tmp_path / folder).mkdir()
    assert f"impl={name}: {LINKS[name]}" in complaint(cli("verify", "--impl", name, "--op", "rmsnorm"))


def test_a_file_without_functions_has_none_to_name(cli: Cli, written: Callable[..., str]) -> None:
    path = written("x = 1")
    said = complaint(cli("verify", "--impl", f"{path}:rmsnorm", "--op", "rmsnorm", "--no-isolation"))
    assert said.endswith(f"expected the name of what is in {path}: no function or class is\n")


def test_a_class_that_is_spelt_wrong(cli: Cli, written: Callable[..., str]) -> None:
    """What is imported is not offered: of this file, somebody means the class."""
    path = written("from pathlib import Path\nclass LlamaNorm: ...\ndef rms(x, weight, eps): ...\n")
    message = complaint(cli("verify", "--impl", f"{path}:LlamaNrm", "--op", "rmsnorm"))
    assert message.endswith(": LlamaNorm, rms\n")


@pytest.mark.slow
def test_functions_and_ops(cli: Cli, written: Callable[..., str]) -> None:
    path = written(RIGHT, "forward = y_of; number = 5", DECLARED)
    assert "op is missing" in complaint(cli("verify", "--impl", f"{path}:y_of", *FEW))
    assert "expected the name of what is in" in complaint(cli("verify", "--impl", f"{path}:z_of", *FEW))
    assert "expected the name of what is in" in complaint(cli("verify", "--impl", f"{path}:number"))
    assert "op=layernorm: expected one of rmsnorm, which are what impl=" in complaint(
        cli("verify", "--impl", path, "--op", "layernorm", *FEW)
    )
    assert cli("verify", "--impl", f"{path}:mine", *FEW).code == 0  # by the name that it declares


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "expected 'OP DTYPE"),
        ("rmsnorm fp16 M=3", "N is missing"),
        ("rmsnorm fp16 M=3 N=9 eps=small\nrows=normal", "eps=small"),
        ("rmsnorm fp16 M=0 N=999999999999", "at most"),
        ("rmsnorm_gemma fp16 M=3 N=9", "rmsnorm_gemma has none, expected bias=none"),
        ("rmsnorm fp16 \x1b[2J M=3 N=9", "expected name=value"),
    ],
)
def test_case_lines_that_are_wrong(cli: Cli, line: str, message: str) -> None:
    found = complaint(cli("repro", "torch", line))
    assert message in found
    assert found.rstrip("\n").isprintable()


def test_a_fault_of_normcheck_itself(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3, which nobody takes for a finding, and a traceback to report."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("our own fault")

    monkeypatch.setattr("normcheck.checks.check.judge_of", broken)
    done, document = report(cli, "--impl", "torch", "--op", "rmsnorm")
    assert (done.code, document["status"], document["verdicts"][0]["status"]) == (3, "error", "error")
    assert "our own fault" in document["verdicts"][0]["detail"]
    monkeypatch.setattr("normcheck.gate.engine.prepared", broken)
    done = cli("verify", *FEW)
    assert done.code == 3
    assert "Traceback" in done.err


def test_a_report_that_cannot_be_written(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normcheck.reports.targets.writable", lambda path: True)
    done = cli("verify", "--impl", "torch", "--op", "rmsnorm", *FEW, "--report", "json:missing/out.json")
    assert done.code not in (0, 1)
    line = done.out.rstrip().splitlines()[-1]  # which is read alone
    assert line.startswith(
        "ERROR  report=json:missing/out.json: it cannot be written: No such file or directory; 0 passed, 1 thin"
    )


def test_interrupted(cli: Cli, written: Callable[..., str]) -> None:
    """Ctrl-C: the reports of what was done, then 130."""
    interrupting = "def forward(x, weight, bias, *, eps): raise KeyboardInterrupt"
    path = written(interrupting, DECLARED)
    done, document = report(cli, "--no-isolation", "--impl", "torch", "--impl", path, "--op", "rmsnorm")
    assert (done.code, document["exit_code"], document["complete"]) == (130, 130, False)
    assert [v["implementation"] for v in document["verdicts"]] == ["torch"]


# reports


TOP = {
    "schema": str,
    "normcheck": str,
    "argv": list,
    "seed": int,
    "profile": str,
    "seconds": float,
    "environment": dict,
    "status": str,
    "exit_code": int,
    "verdicts": list,
}
VERDICT = {
    "op": str,
    "implementation": str,
    "dtype": str,
    "device": str,
    "status": str,
    "detail": str,
    "cases": int,
    "seconds": float,
    "worst": dict,
    "not_returned": list,
    "failure": (dict, type(None)),
}
NUMBER = (float, int, str)  # a string where JSON has no number for it
WORST = {"ratio": NUMBER, "max_abs": NUMBER, "max_ulp": NUMBER, "case": str}
FAILURE = {
    "kind": str,
    "output": str,
    "case": str,
    "index": list,
    "actual": NUMBER,
    "expected": NUMBER,
    "error": NUMBER,
    "bound": NUMBER,
    "ratio": NUMBER,
    "max_ulp": NUMBER,
    "mismatched": int,
    "numel": int,
    "message": str,
    "reproduce": str,
}


def conforms(value: Any, schema: dict[str, Any]) -> None:
    assert list(value)[: len(schema)] == list(schema)
    for key, kind in schema.items():
        assert isinstance(value[key], kind), key


@pytest.mark.slow
def test_the_json_report(cli: Cli, written: Callable[..., str]) -> None:
    path = written(RIGHT, TIMES_1_01)
    done, document = report(cli, "--impl", f"{path}:wrong", "--impl", "torch", "--op", "rmsnorm", "--seed", "3")
    conforms(document, TOP)
    assert (document["schema"], document["normcheck"]) == ("normcheck-report/1", normcheck.__version__)
    assert document["argv"][0] == "verify"
    assert f"{path}:wrong" in document["argv"]
    assert (document["seed"], document["profile"], document["exit_code"]) == (3, "quick", done.code)
    assert {"python", "torch", "device"} <= set(document["environment"])
    for verdict in document["verdicts"]:
        conforms(verdict, VERDICT)
        assert (verdict["op"], verdict["dtype"], verdict["device"]) == ("rmsnorm", "fp16", "cpu")
        for worst in verdict["worst"].values():
            conforms(worst, WORST)
    by_name = {verdict["implementation"]: verdict for verdict in document["verdicts"]}
    assert (by_name["torch"]["status"], by_name["torch"]["cases"], by_name["torch"]["failure"]) == ("thin", 10, None)
    conforms(by_name[f"{path}:wrong"]["failure"], FAILURE)
    assert by_name[f"{path}:wrong"]["failure"]["ratio"] > 1


def test_json_on_standard_output_stands_alone(cli: Cli) -> None:
    done = cli(
        "verify", "--impl", "torch", "--op", "rmsnorm", *FEW, "--report", "json:-", "--report", "terminal:out.txt"
    )
    assert json.loads(done.out)["status"] == "pass"
    assert "THIN" in done.err  # the screen moves to standard error
    assert "THIN" in Path("out.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_same_seed_finds_the_same(cli: Cli, written: Callable[..., str]) -> None:
    """A kernel that is wrong in one column: found and shrunk alike. One that is right: the same worst cases."""
    both = """
def rare(x, weight, bias, *, eps):
    y = y_of(x, weight, bias, eps)
    return torch.where(torch.arange(x.shape[-1]) == 40, 1.01 * y, y).to(x.dtype)

def right(x, weight, bias, *, eps):
    return y_of(x, weight, bias, eps)

SHAPES = ((1, 41), (5, 7), (20, 24), (3, 129))  # no large ones: a short core
kernel = {"op": "rmsnorm", "shapes": SHAPES, "builds": False}
IMPLEMENTATIONS = tuple(Implementation(name=f.__name__, forward=f, **kernel) for f in (rare, right))
"""
    path = written(RIGHT, both)

    def verdicts(name: str, seed: str) -> list[dict[str, Any]]:
        cases = (
            "--max-examples",
            "100",
            "--no-contexts",
        )  # contexts have as long as there is time
        _, document = report(cli, "--impl", f"{path}{name}", "--seed", seed, *cases)
        for verdict in document["verdicts"]:
            del verdict["seconds"], verdict["core"]["building"]
        return list(document["verdicts"])

    first, again, (other,) = verdicts("", "0"), verdicts("", "0"), verdicts(":right", "1")
    assert first == again
    assert first[1]["cases"] == 100 > first[1]["core"]["run"]
    assert [verdict["status"] for verdict in first] == ["fail", "pass"]
    assert " M=1 N=41 " in first[0]["failure"]["case"]
    assert other["worst"] != first[1]["worst"]


# the other commands


@pytest.mark.slow
def test_repro_shows_every_check(cli: Cli, written: Callable[..., str]) -> None:
    line = "rmsnorm fp16 M=3 N=129 rows=offset seed=17"
    done = cli("repro", "torch", line, "--device", "cpu")
    assert done.code == 0
    assert {"y", "dx", "dw", "db"} <= set(done.out.split())
    done = cli("repro", f"{written(RIGHT, TIMES_1_01)}:wrong", line, "--device", "cpu")
    assert done.code == 1
    assert line in done.out
    assert cli("repro", "cudnn", line, "--device", "cpu").code == 5


@pytest.mark.parametrize(
    "line",
    [
        "layernorm fp32 M=3 N=4097 eps=0.0 rows=mean10000 weights=probe",
        "layernorm fp16 M=3 N=9 eps=0.0 rows=zero",
        "rmsnorm fp16 M=0 N=9 rows=blend",
        "layernorm fp32 M=0 N=9 dy=last_row",
        "layernorm_relu_bitmask bf16 M=0 N=9 lower_clip=0 upper_clip=1",
    ],
)
@pytest.mark.parametrize("implementation", ["torch"])
def test_cases_at_the_edge_accuse_nobody(cli: Cli, implementation: str, line: str) -> None:
    """Rows without a variance and no rows at all are not a kernel's fault."""
    assert cli("repro", implementation, line, "--device", "cpu").code == 0


def test_sums_too_long_for_any_bound(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2^23 terms on nothing is known of a sum in fp32: its outputs are uncheckable, and are counted."""
    monkeypatch.setattr("normcheck.oracle.rounding.Rules.gam", lambda rules, count: float("inf"))
    done = cli("repro", "torch", "layernorm fp32 M=3 N=9 rows=blend weights=probe", "--device", "cpu")
    assert done.code == 0
    assert "uncheckable" in done.out


@pytest.mark.slow
def test_quiet_and_verbose(cli: Cli, written: Callable[..., str]) -> None:
    path = written(RIGHT, TIMES_1_01)
    wrong = ("verify", "--impl", f"{path}:wrong", "--op", "rmsnorm", *FEW)
    quiet = cli(*wrong, "-q").out
    assert quiet.lstrip().startswith("FAIL rmsnorm")
    assert quiet.rstrip().splitlines()[-1].startswith("FAIL  1 of 1 cell failed")
    assert cli("verify", "--impl", "torch", "--op", "rmsnorm", *FEW, "-q").out.count("\n") == 1
    verbose = cli("verify", "--impl", "torch", "--op", "rmsnorm", *FEW, "-v").out
    assert "other bits when run again in 0 of " in verbose
    assert "expected one of -q and -v" in complaint(cli("verify", "-q", "-v"))


def test_version(cli: Cli) -> None:
    assert cli("--version") == Done(0, f"normcheck {normcheck.__version__}\n", "")


def test_list(cli: Cli) -> None:
    done = cli("list")
    assert done.code == 0
    for name in (*OPS, *discovery.implementations(), *formats()):
        assert name in done.out


def test_list_says_what_has_to_be_asked_for(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normcheck.cli.list.device_here", lambda: "cpu")
    lines = {" ".join(line.split()) for line in cli("list").out.splitlines()}
    assert "torch rmsnorm runs" in lines
    assert "torch_native rmsnorm runs with --impl torch_native: not in the default set on a CPU" in lines
    assert "triton_tutorial layernorm runs with --impl triton_tutorial: not in the default set" in lines


def test_the_default_set_of_a_cpu(cli: Cli) -> None:
    """What a known implementation finds on a CPU turns no run red that did not ask for it."""
    done, document = report(cli, "--op", "rmsnorm", "--no-isolation", "--max-examples", "1")
    assert done.code == 0
    assert {v["implementation"] for v in document["verdicts"]} == {"torch", "triton", "cudnn"}


def test_the_default_sets() -> None:
    everything = {name: tuple(i.op for i in found) for name, found in discovery.implementations().items()}
    on_gpu = discovery.by_default("cuda")
    assert {"torch_native", "torch_compile", "cudnn_graph", "liger"} <= set(on_gpu) - set(discovery.by_default("cpu"))
    assert "triton_tutorial" in set(everything) - set(on_gpu)
    assert on_gpu["torch_native"] == everything["torch_native"] == ("layernorm", "rmsnorm")
    assert "torch_native" not in discovery.by_default("cuda", ("layernorm_zero_centered",))
    assert discovery.by_default("cuda", ("rmsnorm",))["liger"] == ("rmsnorm",)


@pytest.mark.parametrize("value", ["'cpu'", "('cpu', 'tpu')", "('cpu', 3)", "None"])
def test_a_wrong_default_set_is_named(cli: Cli, written: Callable[..., str], value: str) -> None:
    declared = DECLARED.replace("forward=forward", f"forward=lambda x, w, b, *, eps: x, by_default={value}")
    done = cli("verify", "--impl", written(declared), "--no-isolation", *FEW)
    complaint(done)
    assert "by_default=" in done.err
    assert "expected a tuple with one of cpu, cuda, or ()" in done.err


def test_tolerances_is_the_table_itself(cli: Cli) -> None:
    table = Path(normcheck.__file__).with_name("oracle").joinpath("tolerances.toml").read_text(encoding="utf-8")
    assert cli("tolerances") == Done(0, table, "")


@pytest.mark.parametrize("argv", [("--help",), ("verify", "--help")])
def test_help(cli: Cli, argv: tuple[str, ...]) -> None:
    done = cli(*argv)
    assert (done.code, done.err) == (0, "")
    assert "verify" in done.out


@pytest.mark.slow
def test_as_a_module() -> None:
    """The whole way once, in a process of its own."""
    argv = (sys.executable, "-m", "normcheck", "verify", "--op", "norm")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    complaint(Done(done.returncode, done.stdout, done.stderr))


@pytest.mark.parametrize("lines", [True, False])
def test_an_output_outlives_its_reader(lines: bool) -> None:
    """As of ``normcheck verify ... | head -1``: the command goes on, and says once that somebody has left."""
    read, write = os.pipe()
    left: list[str] = []
    with open(write, "w", encoding="utf-8", buffering=1 if lines else -1) as file:
        stream = lasting(file, lambda: left.append("left"))
        print("first", file=stream, flush=True)
        assert (os.read(read, 100), left) == (b"first\n", [])
        os.close(read)
        for _ in range(3):
            print("nobody reads this", file=stream, flush=True)
    assert left == ["left"]


@pytest.mark.slow
def test_a_reader_that_leaves_changes_no_exit_code(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "normcheck", "verify", "--impl", "torch", "--op", "rmsnorm", *FEW, "--no-isolation"]
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [*argv, "--report", "json:out.json"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
    assert done.returncode == json.loads((tmp_path / "out.json").read_text())["exit_code"] == 0
    assert done.stderr.startswith("normcheck: standard output was closed before the end")
