"""``normcheck repro --dump`` and ``--pdb``: a case on disk, and a case under the debugger."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from normcheck.cases.case_line import parsed
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.cli import app
from normcheck.reports._text import compact
from tests.command_line import Cli, KernelFile

KERNEL = """
import torch

def y_of(x, weight, bias, eps):
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)

def wrong(x, weight, bias, eps):
    y = y_of(x, weight, bias, eps)
    spoilt = torch.zeros_like(y)
    spoilt[1, 7] = 0.5
    return y + spoilt

def raising(x, weight, bias, eps):
    local_number = 4711
    raise ValueError("no such thing")

def nan(x, weight, bias, eps):
    return y_of(x, weight, bias, eps) * float("nan")

def two(x, weight, bias, eps):
    return x, x
"""
LINE = "rmsnorm fp16 M=3 N=12 eps=1e-05 rows=normal dy=normal layout=contiguous seed=17 bias=none"


@pytest.fixture
def run(cli: Cli, kernel_file: KernelFile) -> Cli:
    """normcheck repro."""
    kernel_file(KERNEL, name="kernel.py")
    return lambda *argv, stdin="": cli("repro", *argv, "--device", "cpu", stdin=stdin)


def declared(tmp_path: Path, function: str) -> str:
    """A file with IMPLEMENTATIONS, since repro takes the op from there or from the case."""
    path = tmp_path / f"{function}_declared.py"
    path.write_text(
        f"{KERNEL}\nfrom normcheck import Implementation\n"
        f"def forward(x, weight, bias, *, eps): return {function}(x, weight, bias, eps)\n"
        "IMPLEMENTATIONS = (Implementation(name='mine', op='rmsnorm', forward=forward),)\n",
        encoding="utf-8",
    )
    return path.name


def in_a_process(script: Path) -> str:
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def read_by_the_script(folder: Path) -> str:
    """What the script says in this process, which has imported torch; one test below has it in a process of its own."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        runpy.run_path(str(folder / "worst.py"), run_name="__main__")
    assert err.getvalue() == ""
    return out.getvalue()


@pytest.mark.slow
def test_a_dump_shows_the_worst_element(run: Cli, tmp_path: Path) -> None:
    code, out, err = run("kernel.py:wrong", LINE, "--dump", "case")
    assert (code, err) == (1, "")
    assert out.startswith("Written: case. Next: python case/worst.py\n")
    assert {f.name for f in (tmp_path / "case").iterdir()} == {"case.safetensors", "worst.py"}
    assert len((tmp_path / "case" / "worst.py").read_text().splitlines()) <= 10
    lines = in_a_process(tmp_path / "case" / "worst.py").splitlines()
    (y,) = (line for line in lines if line.startswith("y/end_to_end at (1, 7): got "))
    ratio = re.search(r"ratio ([0-9.e+]+)$", y)
    assert ratio
    assert float(ratio[1]) > 1
    assert compact(float(ratio[1])) in out  # as the report has it
    assert any(line.startswith("dx/end_to_end at ") for line in lines)


@pytest.mark.slow
def test_what_is_in_it(run: Cli, tmp_path: Path) -> None:
    line = "layernorm_relu_bitmask bf16 M=4 N=13 lower_clip=-0.5 upper_clip=0.75 layout=strided seed=3 gap=8"
    assert run("triton", line, "--dump", "case")[0] == 0
    tensors = load_file(tmp_path / "case" / "case.safetensors")
    case = parsed(line)
    for name, tensor in make(case, OPS[case.op], "cpu").named():
        assert torch.equal(tensors[name], tensor), name
    names = {key.partition("/")[2] for key in tensors if key.startswith("actual/")}
    assert names == {key.partition("/")[2] for key in tensors if key.startswith("above/")}
    gradients = {f"{g}/{c}" for g in ("dx", "dw") for c in ("given_reference_statistics", "end_to_end")}
    assert gradients | {"y/given_own_statistics", "y/end_to_end", "mean/end_to_end", "bitmask/end_to_end"} <= names
    for name in names:
        error = tensors[f"actual/{name}"].double() - tensors[f"expected/{name}"]
        bound = tensors[f"above/{name}"].where(error > 0, tensors[f"below/{name}"])
        assert bool((error.abs() <= bound).all()), name  # it passed, so by what is written it does
    assert tensors["returned/bitmask"].dtype == torch.uint8
    with safe_open(tmp_path / "case" / "case.safetensors", "pt") as file:
        assert file.metadata()["case"] == str(case)
    assert "ratio inf" not in read_by_the_script(tmp_path / "case")


@pytest.mark.slow
@pytest.mark.parametrize("function", ["raising", "nan", "two"])
def test_a_dump_of_what_broke(run: Cli, tmp_path: Path, function: str) -> None:
    code, _, err = run(f"{declared(tmp_path, function)}", LINE, "--dump", "case")
    assert (code, err) == (1, "")
    tensors = load_file(tmp_path / "case" / "case.safetensors")
    assert {"x", "weight", "dy", "expected/y/end_to_end", "above/dx/end_to_end"} <= set(tensors)
    shown = read_by_the_script(tmp_path / "case")
    assert ("y/end_to_end at (0, 0): got nan" in shown) == (function == "nan")


def test_nothing_is_overwritten(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "case").mkdir()
    for there in ("case", "kernel.py"):
        code, out, err = run("torch", LINE, "--dump", there)
        assert (code, out) == (2, "")
        assert err.startswith(f"normcheck: dump={there}: exists; expected a new folder")
    assert list((tmp_path / "case").iterdir()) == []
    assert run("torch", LINE, "--dump", "kernel.py/case")[0] == 2
    assert run("torch", LINE, "--dump", "")[0] == 2
    assert run("cudnn", LINE, "--dump", "refused")[0] == 5
    assert not (tmp_path / "refused").exists()


def test_a_folder_that_turns_out_not_to_be_writable(run: Cli) -> None:
    """To root every folder looks writable, so one is made on trial."""
    code, _, err = run("torch", LINE, "--dump", "/proc/case")
    assert code == 2
    assert err.startswith("normcheck: dump=/proc/case: ")
    assert "expected a folder" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_command_that_reads_a_dump_can_be_pasted(run: Cli, tmp_path: Path) -> None:
    out = run("torch", LINE, "--dump", "a case")[1]
    assert out.startswith("Written: a case. Next: python 'a case/worst.py'\n")
    assert read_by_the_script(tmp_path / "a case")


@pytest.mark.slow
def test_a_dump_without_rows(run: Cli, tmp_path: Path) -> None:
    assert run("torch", LINE.replace("M=3", "M=0"), "--dump", "case")[0] == 0
    assert {line.partition("/")[0] for line in read_by_the_script(tmp_path / "case").splitlines()} == {"dw"}


def test_two_implementations_are_not_dumped_into_one_folder(run: Cli, tmp_path: Path) -> None:
    name = declared(tmp_path, "wrong")
    with open(tmp_path / name, "a", encoding="utf-8") as file:
        file.write("IMPLEMENTATIONS += (Implementation(name='other', op='rmsnorm', forward=forward),)\n")
    code, out, err = run(name, LINE, "--dump", "case")
    assert (code, out) == (2, "")
    assert f"names 2 implementations; expected one, such as {name}:mine" in err


@pytest.fixture
def untraced() -> Iterator[None]:
    """A debugger that is left goes on tracing if it has a breakpoint, which slows every later test of this process."""
    yield
    assert sys.gettrace() is None


@pytest.mark.slow
def test_pdb_where_it_raises(tmp_path: Path) -> None:
    """In a process of its own, with the debugger's commands on standard input; those below are in this one."""
    done = subprocess.run(
        [sys.executable, "-m", "normcheck", "repro", declared(tmp_path, "raising"), LINE, "--device", "cpu", "--pdb"],
        input="p local_number + 1\nw\nq\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(app.__file__).parents[1])},
    )
    assert "4712" in done.stdout
    assert "local_number = 4711" in done.stdout or "raise ValueError" in done.stdout
    assert "raised ValueError: no such thing" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "forward raised ValueError: no such thing" in done.stdout  # and then the finding, as ever
    assert "botframe" not in done.stdout


@pytest.mark.usefixtures("untraced")
def test_pdb_after_forward(run: Cli, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = "p tuple(__return__.shape), float(__return__[1, 7] - x[1, 7]) != 0, eps\nc\n"
    done = run(declared(tmp_path, "wrong"), LINE, "--pdb", stdin=commands)
    shown = capfd.readouterr().out
    assert "((3, 12), True, 1e-05)" in shown
    assert done.code == 1, done.err
    assert shown.count("((3, 12)") == 1
    assert done.last.startswith("FAIL")


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("stdin", ["q\n", ""])
def test_leaving_pdb_interrupts(run: Cli, tmp_path: Path, stdin: str) -> None:
    done = run(declared(tmp_path, "wrong"), LINE, "--pdb", stdin=stdin)
    assert done.code == 130, done.err
    assert "Traceback" not in done.err
    assert "FAIL" not in done.out
    assert "left the debugger, nothing was judged; c goes on" in done.err


@pytest.mark.slow
def test_pdb_without_standard_input(tmp_path: Path) -> None:
    argv = ["normcheck", "repro", "torch", LINE, "--device", "cpu", "--pdb"]
    code = f"import sys; sys.stdin, sys.argv = None, {argv}; from normcheck.cli import app; app.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    said = "normcheck: pdb: standard input is closed; expected a terminal, or the debugger's commands\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.usefixtures("untraced")
def test_pdb_where_a_backward_raises(run: Cli, kernel_file: KernelFile, capfd: pytest.CaptureFixture[str]) -> None:
    kernel_file(
        f"{KERNEL}\nfrom normcheck import Implementation\n"
        "def forward(x, weight, bias, *, eps): return y_of(x, weight, bias, eps)\n"
        "def backward(dy, x, weight, bias, saved, *, eps):\n    inside = 'here'\n    return {'dx': 1 / 0}\n"
        "IMPLEMENTATIONS = (Implementation(name='mine', op='rmsnorm', forward=forward, backward=backward),)\n",
        name="half.py",
    )
    done = run("half.py", LINE, "--pdb", stdin="c\np inside\nq\n")
    assert "'here'" in capfd.readouterr().out
    assert done.code == 1, done.err
