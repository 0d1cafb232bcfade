"""``verify --layout``: only cases of the layouts that are asked for, and heads also of whoever cannot declare them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normcheck import verify
from normcheck.cases.case_line import parsed
from normcheck.cases.layouts import LAYOUTS
from normcheck.errors import ExitCode, UsageError
from normcheck.gate.options import VerifyOptions
from normcheck.options import options_of
from tests.command_line import Cli
from tests.inner_loop import parametrize

KERNELS = """
import torch
from normcheck import Implementation

def right(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

def reading(x, strides, weight, eps):
    return right(x.as_strided(x.shape, (*strides, 1)) if x.dim() == 3 else x, weight, eps)

def gaps_ignored(x, weight, eps):
    return reading(x, (x.stride(0), x.shape[-1]), weight, eps)

def others_ignored(x, weight, eps):
    return reading(x, (x.shape[1] * x.stride(1), x.stride(1)), weight, eps)

def viewed(x, weight, eps):
    return right(x.view(-1, x.shape[-1]), weight, eps).view(x.shape)

def last_head_doubled(x, weight, eps):
    y = right(x, weight, eps).clone()
    y[:, -1] *= 2
    return y

def transposed(x, weight, eps):
    return right(x, weight, eps).transpose(0, 1).contiguous().transpose(0, 1)

def only_of_attention(x, weight, eps):
    if x.dim() != 3 or x.shape[-1] not in (64, 128, 256, 512):
        raise RuntimeError("head_dim")
    return right(x, weight, eps)

def forward(others, x, weight, bias, *, eps):
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    y = x.float() * rstd * weight.float()
    x.copy_(y if bias is None else y + bias.float())
    if others and x.dim() == 3 and x.numel():
        beside = x.as_strided((len(x), 1, x.shape[2]), x.stride(), x.storage_offset() + x.shape[1] * x.stride(1))
        beside.copy_(beside * 2)
    return {"y": x, "rstd": rstd}

def backward(dy, x, weight, bias, saved, *, eps):
    xhat = x.float() * saved["rstd"].view(*x.shape[:-1], 1)
    wd = dy.float() * weight.float()
    dx = (wd - xhat * (xhat * wd).mean(-1, keepdim=True)) * saved["rstd"].view(*x.shape[:-1], 1)
    dw, db = (t.flatten(0, -2).sum(0).to(weight.dtype) for t in (dy.float() * xhat, dy.float()))
    return {"dx": dx.to(x.dtype), "dw": dw, "db": db}

def made(name, others, **fields):
    def call(x, weight, bias, *, eps):
        return forward(others, x, weight, bias, eps=eps)
    return Implementation(name=name, op="rmsnorm", forward=call, backward=backward, overwrites=("x",), **fields)

IMPLEMENTATIONS = (made("in_place", 0, heads=True), made("beside", 1, heads=True), made("undeclared", 0))
"""

WAYS = ("--isolation", "--no-isolation")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "qk_norm.py"
    path.write_text(KERNELS, encoding="utf-8")
    return str(path)


@pytest.fixture
def told(cli: Cli, file: str) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Exit code, the one verdict and what was printed, of ``verify`` for a kernel of the file."""

    def run(name: str, *more: str, dtype: str = "fp16") -> tuple[int, dict[str, Any], str]:
        impl = f"{file}:{name}"
        done = cli(
            *("verify", "--impl", impl, "--op", "rmsnorm", "--dtype", dtype, "--device", "cpu"),
            *("--report", "json:out.json", "--no-contexts", *more),
        )
        (verdict,) = json.loads(Path("out.json").read_text(encoding="utf-8"))["verdicts"]
        return done.code, verdict, " ".join(done.out.split())

    return run


HEADS = ("--layout", "heads")
FEW = ("--max-examples", "20", "--allow-thin")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [("right", WAYS[0]), ("transposed", WAYS[0]), ("only_of_attention", WAYS[1])])
@pytest.mark.usefixtures("small_core")
def test_a_right_function_passes_with_heads_alone(told: Callable[..., Any], name: str, way: str) -> None:
    code, verdict, out = told(name, *HEADS, way, "--time-budget", "0.1")
    assert (code, verdict["status"]) == (ExitCode.PASS, "pass"), verdict["failure"]
    assert "asked for: only layout heads" in out
    assert {parsed(worst["case"]).layout for worst in verdict["worst"].values()} == {"heads"}
    assert {"dx", "dw", "y"} == set(verdict["worst"])


WRONG = {
    "gaps_ignored": ("out_of_bounds_read", "x is (1, 2, 64) with strides (288, 72, 1) here"),
    "others_ignored": ("out_of_bounds_read", "does it use x.stride(0) for tokens and x.stride(1) for heads?"),
    "viewed": ("exception", "view size is not compatible"),
    "last_head_doubled": ("mismatch", "(the last)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_found(
    told: Callable[..., Any], cli: Cli, file: str, request: pytest.FixtureRequest, name: str, way: str
) -> None:
    kind, words = WRONG[name]
    if "(1, 2, 64)" not in words:  # the smallest such case
        request.getfixturevalue("unshrunk")
    code, verdict, out = told(name, *HEADS, way)
    assert (code, verdict["failure"]["kind"]) == (ExitCode.FOUND, kind)
    assert words in out
    case = verdict["failure"]["case"]
    assert parsed(case).layout == "heads"
    assert cli("repro", f"{file}:{name}", case, way).code == ExitCode.FOUND
    assert cli("repro", f"{file}:right", case, way).code == ExitCode.PASS  # nobody declared heads


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize(
    ("asked", "way"),
    [(("--max-examples", "40", "--allow-thin"), WAYS[0]), ((*HEADS, *FEW), WAYS[0]), ((*HEADS, *FEW), WAYS[1])],
)
def test_a_kernel_in_place_writes_its_own_heads_only(
    told: Callable[..., Any], asked: tuple[str, ...], way: str
) -> None:
    code, verdict, _ = told("in_place", *asked, way)
    assert (code, verdict["failure"]) == (ExitCode.PASS, None)
    code, verdict, out = told("beside", *asked, way)
    assert (code, verdict["failure"]["kind"], verdict["failure"]["output"]) == (
        ExitCode.FOUND,
        "out_of_bounds_write",
        "x",
    )
    assert "which lies behind the" in out


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_who_does_not_declare_heads_gets_them_only_if_they_are_asked_for(told: Callable[..., Any]) -> None:
    for name in ("undeclared", "others_ignored"):
        _, verdict, _ = told(name, "--max-examples", "25", "--allow-thin", *(() if name == "undeclared" else HEADS))
        assert (verdict["status"] == "fail") == (name == "others_ignored")
    _, verdict, _ = told("undeclared", *HEADS, "--max-examples", "25", "--allow-thin")
    assert verdict["failure"] is None
    assert verdict["cases"] == 25


@pytest.mark.slow
def test_a_known_implementation_has_what_it_declares(cli: Cli) -> None:
    done = cli("verify", "--impl", "triton", "--op", "rmsnorm", "--dtype", "fp16", *HEADS)
    assert done.code == ExitCode.NOTHING
    assert "layout=heads: declares only contiguous, misaligned, x_strided" in " ".join(done.out.split())
    code = cli("verify", "--impl", "torch", "--op", "rmsnorm", "--dtype", "fp16", *HEADS, *FEW).code
    assert code == ExitCode.PASS


OF_THREE = ("rank3", "heads", "trailing", "channels_last", "weight_stacked", "samples")


@parametrize("layout", [layout for layout in LAYOUTS if not layout.startswith(OF_THREE)], inner=1)
def test_any_layout_can_be_asked_for(told: Callable[..., Any], layout: str) -> None:
    code, verdict, _ = told("right", "--layout", layout, WAYS[1], "--max-examples", "6", "--allow-thin")
    assert (code, verdict["failure"]) == (ExitCode.PASS, None)
    assert {parsed(worst["case"]).layout for worst in verdict["worst"].values()} == {layout}


@pytest.mark.slow
def test_several_layouts(told: Callable[..., Any]) -> None:
    code, verdict, out = told("right", "--layout", "strided", *HEADS, *FEW)
    assert (code, verdict["failure"]) == (ExitCode.PASS, None)
    assert "asked for: only layout strided, heads" in out


def test_a_layout_that_a_function_has_not_is_a_skip_with_its_reason(told: Callable[..., Any]) -> None:
    code, verdict, _ = told("right", "--layout", "rank3")
    assert (code, verdict["status"]) == (ExitCode.NOTHING, "skip")
    assert verdict["detail"].startswith("layout=rank3: declares only contiguous, misaligned, x_strided")


def test_an_unknown_layout_is_a_wrong_command(cli: Cli, file: str) -> None:
    done = cli("verify", "--impl", f"{file}:right", "--op", "rmsnorm", "--layout", "head")
    assert (done.code, done.out) == (ExitCode.USAGE, "")
    assert done.err == f"normcheck: layout=head: expected one of {', '.join(LAYOUTS)}\n"


@pytest.mark.slow
def test_layouts_may_stand_in_the_configuration(cli: Cli, file: str) -> None:
    table = f'[tool.normcheck]\nimpl = ["{file}:right"]\nop = "rmsnorm"\ndtype = "fp16"\nlayout = '
    few = "max_examples = 6\nallow_thin = true\ncontexts = false\n"
    Path("pyproject.toml").write_text(f'{table}["heads"]\n{few}', encoding="utf-8")
    done = cli("verify", "--device", "cpu")
    assert done.code == ExitCode.PASS
    assert "asked for: only layout heads" in " ".join(done.out.split())
    Path("pyproject.toml").write_text(f'{table}"head"\n', encoding="utf-8")
    done = cli("verify", "--device", "cpu")
    assert done.code == ExitCode.USAGE
    assert "pyproject.toml: [tool.normcheck] layout=head: expected one of contiguous, " in done.err


def test_a_shell_completes_layouts() -> None:
    option = options_of(VerifyOptions)["layout"]
    assert option.names is not None
    assert tuple(option.names()) == LAYOUTS
    assert not option.open


def test_the_python_interface_asks_for_layouts_as_well() -> None:
    def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        seen.add(x.dim())
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    seen = set[int]()
    few: dict[str, Any] = {"op": "rmsnorm", "dtypes": "fp16", "max_examples": 20, "device": "cpu"}
    (verdict,) = verify(rmsnorm, layout="heads", **few)
    assert (verdict.failure, seen) == (None, {3})
    (verdict,) = verify(rmsnorm, op="rmsnorm", case="rmsnorm fp16 M=20 N=64 layout=heads bias=none")
    assert (verdict.status, verdict.cases) == ("pass", 1)
    (verdict,) = verify(rmsnorm, layout=["rank3"], **few)
    assert verdict.detail.startswith("layout=rank3: declares only")
    with pytest.raises(UsageError, match="layout=head: expected one of contiguous"):
        verify(rmsnorm, layout="head", **few)


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_what_failed_before_in_another_layout_is_not_run(told: Callable[..., Any], tmp_path: Path) -> None:
    database = ("--database", str(tmp_path / "kept"), "--max-examples", "30", "--allow-thin")
    code, verdict, _ = told("last_head_doubled", *HEADS, *database)
    assert (code, parsed(verdict["failure"]["case"]).layout) == (ExitCode.FOUND, "heads")
    _, again, _ = told("last_head_doubled", *HEADS, *database)
    assert again["failure"]["case"] == verdict["failure"]["case"]
    assert (again["cases"], again["failed_at"]) == (1, -1)  # before all others
