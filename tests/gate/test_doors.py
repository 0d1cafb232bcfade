"""What a new user does first: several files at once, torch's names of dtypes, a line to paste."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from normcheck.errors import ExitCode
from normcheck.gate.plan import PROFILES
from tests.command_line import Cli
from tests.plain_rmsnorm import THROUGH_AUTOGRAD

RIGHT = """
import torch

def rmsnorm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
"""

SEVERAL = """
import torch
from normcheck import Implementation

def forward(x, weight, bias, *, eps, factor):
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float() * factor
    return (y if bias is None else y + bias.float()).to(x.dtype)

def right(x, weight, bias, *, eps):
    return forward(x, weight, bias, eps=eps, factor=1.0)

def wrong(x, weight, bias, *, eps):
    return forward(x, weight, bias, eps=eps, factor=1.1)

IMPLEMENTATIONS = (
    Implementation(name="right", op="rmsnorm", forward=right), Implementation(name="wrong", op="rmsnorm", forward=wrong)
)
"""

FEW = ("--dtype", "float16", "--max-examples", "4", "--allow-thin", "--no-contexts", "--device", "cpu")


def written(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.slow
def test_two_files_of_one_name_are_told_apart(tmp_path: Path, cli: Cli) -> None:
    files = [written(tmp_path, f"{folder}/norm.py", RIGHT) for folder in ("old", "new")]
    done = cli("verify", "--impl", files[0], "--impl", files[1], *FEW)
    assert done.code == ExitCode.PASS
    out = done.out
    assert "rmsnorm old/norm.py:rmsnorm fp16" in out
    assert "rmsnorm new/norm.py:rmsnorm fp16" in out


@pytest.mark.parametrize("isolation", ["--isolation", "--no-isolation"])
def test_a_file_that_cannot_be_imported_is_an_error_and_the_others_run(
    tmp_path: Path, cli: Cli, isolation: str
) -> None:
    right, broken = (
        written(tmp_path, "right.py", RIGHT),
        written(tmp_path, "broken.py", "import nothing_of_this_name\n"),
    )
    done = cli("verify", "--impl", broken, "--impl", right, "--op", "rmsnorm", isolation, *FEW)
    assert done.code == ExitCode.BROKEN
    out = " ".join(done.out.split())
    assert "Not imported rmsnorm broken.py fp16" in out
    assert "No module named 'nothing_of_this_name' (broken.py:1)" in out
    assert "ERROR 1 of 2 cells could not be judged: rmsnorm/broken.py fp16; 0 passed, 1 thin, 4 cases" in out


def test_a_file_that_cannot_be_imported_alone_is_a_wrong_command(tmp_path: Path, cli: Cli) -> None:
    broken = written(tmp_path, "broken.py", "1 / 0\n")
    done = cli("verify", "--impl", broken, "--op", "rmsnorm", *FEW)
    assert done.code == ExitCode.USAGE
    assert "importing it raised ZeroDivisionError" in done.err


@pytest.mark.slow
def test_the_line_to_paste_names_one_of_several(tmp_path: Path, cli: Cli) -> None:
    several = written(tmp_path, "several.py", SEVERAL)
    done = cli("verify", "--impl", several, *FEW)
    assert done.code == ExitCode.FOUND
    (line,) = (line for line in done.out.splitlines() if line.startswith("Reproduce: "))
    assert line.startswith(f"Reproduce: normcheck repro {several}:wrong 'rmsnorm fp16 ")


def test_an_unexpected_signature_is_a_wrong_command(tmp_path: Path, cli: Cli) -> None:
    file = written(tmp_path, "mine.py", "def rmsnorm(x, weight):\n    return x\n")
    done = cli("verify", "--impl", file, *FEW)
    assert done.code == ExitCode.USAGE
    assert "expected a function rmsnorm(x, weight, eps), rmsnorm(x, weight, bias, eps) or, without a" in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("os._exit(3)", "its process ended with exit code 3 during backward, by torch autograd through y"),
        ("time.sleep(100)", "no result after timeout=1 s, during backward, by torch autograd through y"),
    ],
)
@pytest.mark.usefixtures("unshrunk")
def test_what_ends_in_the_backward_of_autograd_is_told_so(tmp_path: Path, cli: Cli, what: str, says: str) -> None:
    file = written(tmp_path, "mine.py", THROUGH_AUTOGRAD.format(backward=what))
    done = cli("verify", "--impl", file, *FEW, "--timeout", "1")
    assert done.code == ExitCode.FOUND
    assert says in " ".join(done.out.split())


def test_one_column_has_rows_in_the_picture(tmp_path: Path, cli: Cli) -> None:
    text = RIGHT.replace(".to(x.dtype)", ".to(x.dtype)\n    y[8:] = 9 if y.shape[-1] == 1 else y[8:]\n    return y")
    file = written(tmp_path, "mine.py", text.replace("    return (", "    y = ("))
    done = cli(
        "repro", file, "rmsnorm fp16 M=16 N=1 eps=1e-05 rows=normal dy=normal layout=contiguous seed=0 bias=none"
    )
    assert done.code == ExitCode.FOUND
    assert "row\\col 0\n" in done.out
    assert "Where: only rows >= 8 of 16" in done.out


IGNORES = """
import torch

def rmsnorm(x, weight, eps):
    wide = torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride()).float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
"""


def test_a_kernel_that_ignores_strides_is_asked_whether_it_uses_them(tmp_path: Path, cli: Cli) -> None:
    line = "rmsnorm fp16 M=3 N=4 eps=1e-05 rows=normal dy=normal layout=x_strided seed=0 gap=2 bias=none"
    done = cli("repro", written(tmp_path, "mine.py", IGNORES), line)
    assert done.code == ExitCode.FOUND
    advice = "Rows of x lie 6 elements apart here, not N=4: does it use x.stride(-2)?"
    assert advice in " ".join(done.out.split())


OF_GROUPS = """
import torch

def groupnorm(x, weight, bias, eps, groups):
    packed = torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())
    y = torch.nn.functional.group_norm(packed.float(), groups, weight.float(), None, eps)
    return (y if bias is None else y + bias.float()[:, None]).to(x.dtype)
"""


def test_of_samples_that_lie_apart_the_stride_of_a_sample_is_asked_for(tmp_path: Path, cli: Cli) -> None:
    line = "groupnorm fp32 M=3 N=24 eps=1e-05 rows=normal dy=normal layout=x_strided seed=0 gap=2 channels=4 groups=2"
    done = cli("repro", written(tmp_path, "mine.py", OF_GROUPS), line)
    assert done.code == ExitCode.FOUND
    advice = "Samples of x lie 26 elements apart here, not N=24: does it use x.stride(0)?"
    assert advice in " ".join(done.out.split())


SCALED = """
def rmsnorm(x, weight, eps):
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float() * 1.25).to(x.dtype)
"""


@pytest.mark.parametrize("layout", ["x_strided", "dy_strided", "strided", "dy_expanded", "dy_scalar"])
def test_nobody_is_asked_about_strides_that_do_not_matter(tmp_path: Path, cli: Cli, layout: str) -> None:
    """Its y is wrong for packed rows too; and a forward does not read dy."""
    gap = " gap=2" if layout.endswith("strided") else ""
    line = f"rmsnorm fp16 M=3 N=4 eps=1e-05 rows=normal dy=normal layout={layout} seed=0{gap} bias=none"
    done = cli("repro", written(tmp_path, "mine.py", SCALED), line)
    assert done.code == ExitCode.FOUND
    assert "stride" not in done.out.replace(line, "").replace(layout, "")


@pytest.mark.slow
def test_one_finding_in_three_dtypes_is_told_once(tmp_path: Path, cli: Cli) -> None:
    file = written(tmp_path, "mine.py", "def rmsnorm(x, weight, eps):\n    raise ValueError('not today')\n")
    done = cli("verify", "--impl", file, "--max-examples", "4", "--device", "cpu")
    assert done.code == ExitCode.FOUND
    assert done.out.count("ValueError: not today") == 1
    assert "FAIL rmsnorm mine.py:rmsnorm fp16, bf16, fp32: raised an exception" in done.out
    assert done.out.count("Reproduce: ") == 1


def test_one_mistake_in_three_dtypes_is_told_once_with_three_ratios(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the README's own example, which told it three times."""
    monkeypatch.setitem(PROFILES, "quick", replace(PROFILES["quick"], shrink_seconds=0.0, explain_seconds=0.0))
    file = written(tmp_path, "mine.py", SCALED)
    done = cli("verify", "--impl", file, "--max-examples", "4", "--device", "cpu", "--no-isolation")
    assert done.code == ExitCode.FOUND
    assert "FAIL rmsnorm mine.py:rmsnorm fp16, bf16, fp32: y is wrong" in done.out
    assert [done.out.count(words) for words in ("Reproduce: ", "Also in bf16: ", "Also in fp32: ")] == [1, 1, 1]


SKIPPED = """
from normcheck import Implementation

IMPLEMENTATIONS = (
    Implementation(
        name="mine", op="rmsnorm", forward=lambda x, *rest, **options: x, unavailable=lambda device: "no licence"
    ),
)
"""


@pytest.mark.parametrize(("more", "suggested"), [((), False), (("--impl", "cudnn", "--op", "rmsnorm"), True)])
def test_doctor_is_suggested_for_what_it_lists(
    tmp_path: Path, cli: Cli, more: tuple[str, ...], suggested: bool
) -> None:
    done = cli("verify", "--impl", written(tmp_path, "mine.py", SKIPPED), *more, *FEW)
    assert "rmsnorm mine fp16: no licence" in done.out.replace("  ", " ")
    assert ("normcheck doctor says" in done.out) == suggested
