"""The contract's edges: fp32 weights, values beside tensors, limits that a kernel states, inputs that it overwrites.

Each is asked of kernels that people have published, written out in torch: none of them may be accused for what its own
source says, and a fault in the same place is still found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import normcheck
from normcheck import Implementation
from normcheck.audit.mutants.kernel import CLEAN
from normcheck.cases import guard_bands
from normcheck.cases.case import Case, unusual
from normcheck.cases.claims import claims_of
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.cases.strategies import choices
from normcheck.checks import own_limit
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.checks.contract import Problem
from normcheck.checks.finding import finding
from normcheck.errors import UsageError
from normcheck.gate.plan import PROFILES, Plan
from normcheck.golden.schema import geometries
from normcheck.impls import discovery
from normcheck.result import Verdict
from normcheck.runner.call import poisoned_memory
from normcheck.runner.overwriting import put_back
from tests.command_line import Cli, KernelFile

HALF = ("fp16", "bf16")
DTYPES = (*HALF, "fp32")
CASES = 22
"""Of a sweep: most of those that open a core, which ask for each dtype of a weight and each layout; the rest of a core,
which takes a second to plan, is not planned for them."""
RMSNORM = Case(op="rmsnorm", dtype="fp16", M=6, N=24, seed=2, bias=False)
LLAMA = replace(RMSNORM, op="rmsnorm_llama", weight_dtype="fp32")
LAYERNORM = Case(op="layernorm", dtype="fp16", M=6, N=24, seed=2)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"layout": "strided", "gap": 3},
    {"layout": "misaligned"},
    {"layout": "dy_expanded"},
    {"layout": "rank3"},
    {"M": 0},
    {"M": 1},
    {"rows": "nan"},
)


@pytest.fixture(autouse=True)
def _as_in_a_sweep() -> Iterator[None]:
    torch.set_num_threads(1)
    with poisoned_memory():
        yield


def result_of(implementation: Implementation, case: Case) -> Result:
    return check(implementation, OPS[implementation.op], case, "cpu")


def kinds(result: Result) -> list[tuple[str, str]]:
    return [(p.kind, p.output) for p in result.problems]


def cell_of(implementation: Implementation, dtype: str = "fp16") -> Cell:
    return Cell(OPS[implementation.op], implementation, dtype, "tests")


def plan_of(cell: Cell) -> Plan:
    return Plan((cell,), PROFILES["quick"], 0, "cpu", 60.0)


def advice_of(implementation: Implementation, case: Case) -> str:
    return finding(cell_of(implementation), result_of(implementation, case), "cpu").advice


def verdicts(implementation: Implementation, *dtypes: str) -> list[Verdict]:
    mine = replace(implementation, builds=False)  # else the whole core is drawn once a call takes longer than others
    return list(normcheck.verify(mine, dtypes=dtypes or DTYPES, max_examples=CASES, device="cpu"))


def accusations(implementation: Implementation, *dtypes: str) -> list[tuple[str, str, str]]:
    """What is said to be wrong: dtype, case, message."""
    failed = [v for v in verdicts(implementation, *dtypes) if v.status not in ("pass", "thin")]
    return [
        (v.dtype, v.failure.case if v.failure else v.detail, v.failure.message if v.failure else "") for v in failed
    ]


# fp32 weights beside half x


def llama(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
    """LlamaRMSNorm.forward of Hugging Face transformers."""
    hidden_states = x.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return weight * hidden_states.to(x.dtype)


def llama_in_io(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
    return llama(x, weight, bias, eps=eps).to(x.dtype)


def one_dtype(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """torch.nn.LayerNorm as on a GPU: fp32 inside, and no weight but in the dtype of x."""
    if weight.dtype != x.dtype:
        raise RuntimeError(f"expected scalar type {x.dtype} but found {weight.dtype}")
    wide = x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return (centered * rstd * weight.float() + bias.float()).to(x.dtype)


def rounding_the_weight(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype).float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("forward", [llama, llama_in_io])
def test_llama_in_the_promoted_dtype_and_in_that_of_x(forward: Callable[..., Tensor]) -> None:
    assert accusations(Implementation(name="llama", op="rmsnorm_llama", forward=forward)) == []


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("weights", ["normal", "probe", "small"])
def test_a_promoted_y_has_no_store_to_hide_behind(dtype: str, weights: str) -> None:
    """y in fp32 is held to an fp32 rounding, and a kernel that rounds it to the dtype of x on the way is found."""
    case = replace(LLAMA, dtype=dtype, weights=weights)

    def twice(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
        return llama_in_io(x, weight, bias, eps=eps).float()

    right = result_of(Implementation(name="llama", op="rmsnorm_llama", forward=llama), case)
    (y,) = [c.comparison for c in right.checked if c.output == "y"]
    assert 0 < y.max_ulp <= 1  # of fp32
    wrong = result_of(Implementation(name="llama", op="rmsnorm_llama", forward=twice), case)
    assert [c.output for c in wrong.wrong] == ["y"]


def test_zeros_in_the_weight_of_a_promoted_y() -> None:
    def cheating(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
        return torch.where(weight == 0, 1e-30, llama(x, weight, bias, eps=eps))

    case = replace(LLAMA, weights="probe", N=300)
    assert not result_of(Implementation(name="llama", op="rmsnorm_llama", forward=llama), case).failed
    assert result_of(Implementation(name="llama", op="rmsnorm_llama", forward=cheating), case).failed


def test_only_a_rounded_xhat_promotes_y() -> None:
    def promoted(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()

    case = replace(RMSNORM, weight_dtype="fp32")
    result = result_of(Implementation(name="mine", op="rmsnorm", forward=promoted), case)
    assert kinds(result) == [("dtype", "y")]
    same = replace(LLAMA, weight_dtype="same")
    wide = Implementation(name="mine", op="rmsnorm_llama", forward=lambda *a, eps: llama(*a, eps=eps).float())
    assert kinds(result_of(wide, same)) == [("dtype", "y")]
    assert kinds(result_of(replace(wide, forward=lambda *a, eps: llama(*a, eps=eps).double()), LLAMA)) == [
        ("dtype", "y")
    ]


def test_a_promoted_y_of_a_backward_of_its_own() -> None:
    def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: None, saved: Any, *, eps: float) -> dict[str, Tensor]:
        assert saved["y"].dtype == torch.float32
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        with torch.enable_grad():
            y = llama(*leaves, None, eps=eps)
        return dict(zip(("dx", "dw"), torch.autograd.grad(y, leaves, dy), strict=True))

    assert not result_of(
        Implementation(name="llama", op="rmsnorm_llama", forward=llama, backward=backward), LLAMA
    ).failed


def test_a_promoted_y_can_be_recorded() -> None:
    dtypes = [dtype for dtype, _ in geometries(OPS["rmsnorm_llama"], LLAMA)["y"]]
    assert dtypes == [torch.float16, torch.float32]
    assert len(geometries(OPS["rmsnorm"], replace(LLAMA, op="rmsnorm"))["y"]) == 1


@pytest.mark.slow
def test_a_norm_of_one_dtype_refuses_and_is_not_accused() -> None:
    implementation = Implementation(name="one", op="layernorm", forward=one_dtype, biases=(True,))
    found = verdicts(implementation)
    assert [v.failure for v in found] == [None] * 3
    for verdict in found[:2]:
        refused = [
            reason for reason in verdict.skipped if reason.startswith("weight_dtype=fp32: forward raised Runtime")
        ]
        assert refused, verdict.skipped
        assert (verdict.cases, sum(verdict.skipped.values()) <= 3) == (CASES, True)  # it is not asked again and again
    assert not any("weight_dtype" in reason for reason in found[2].skipped)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU torch's layer_norm takes fp32 weights beside half")
@pytest.mark.parametrize("dtype", HALF)
def test_layer_norm_of_torch_refuses_fp32_weights_on_a_gpu(dtype: str) -> None:
    def forward(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    implementation = Implementation(name="torch", op="layernorm", forward=forward)
    result = check(implementation, OPS["layernorm"], replace(LAYERNORM, dtype=dtype, weight_dtype="fp32"), "cuda")
    assert not result.failed
    assert result.refused.startswith("weight_dtype=fp32: forward raised RuntimeError")


def test_other_exceptions_of_a_gpu_are_no_refusal() -> None:
    def forward(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: invalid argument")

    case = replace(LAYERNORM, weight_dtype="fp32")
    implementation = Implementation(name="mine", op="layernorm", forward=forward)
    assert kinds(result_of(implementation, case)) == [("exception", "")]


def test_everything_unusual_is_named_in_a_refusal() -> None:
    def forward(*_: Any, **__: Any) -> Tensor:
        raise ValueError("not so")

    case = replace(LAYERNORM, weight_dtype="fp32", layout="misaligned")
    implementation = Implementation(name="mine", op="layernorm", forward=forward)
    assert result_of(implementation, case).refused.startswith("layout=misaligned, weight_dtype=fp32: forward raised")
    assert unusual(replace(LAYERNORM, dtype="fp32", weight_dtype="fp32")) == ()


class RefusingBackward(torch.autograd.Function):
    """Its backward wants one dtype; its forward takes two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, wrong: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rmsnorm(x, weight, eps=eps)[0] * wrong

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if weight.dtype != x.dtype:
            raise RuntimeError("one dtype, please")
        return (*gradients(dy, x, weight, rmsnorm(x, weight, eps=ctx.eps)[1]), None, None)


@pytest.mark.parametrize("own", [False, True])
def test_a_backward_that_refuses_does_not_hide_a_wrong_forward(own: bool) -> None:
    def kernel(wrong: float) -> Implementation:
        def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Any:
            return RefusingBackward.apply(x, weight, eps, wrong)

        def backward(*_: Any, **__: Any) -> Any:
            raise RuntimeError("one dtype, please")

        return Implementation(name="mine", op="rmsnorm", forward=forward, backward=backward if own else None)

    case = replace(RMSNORM, weight_dtype="fp32")
    right, wrong = result_of(kernel(1.0), case), result_of(kernel(1.25), case)
    assert not right.failed
    assert right.refused == ""
    assert right.seen.refused.startswith("weight_dtype=fp32: backward")
    assert right.seen.refused.endswith("raised RuntimeError: one dtype, please")
    assert right.not_returned == ("rstd", "dx", "dw")
    assert right.probed is not None and right.probed.repeats == {"y": True}
    assert {c.output for c in wrong.wrong} == {"y"}


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_a_rounded_weight_is_wrong_or_declared() -> None:
    implementation = Implementation(name="mine", op="rmsnorm", forward=rounding_the_weight)
    for dtype in HALF:
        (verdict,) = verdicts(implementation, dtype)
        assert verdict.failure is not None
        assert "weight_dtype=fp32" in verdict.failure.case
    assert accusations(replace(implementation, weight_dtypes=("io",))) == []


def test_what_weight_dtypes_leaves_out_is_not_asked() -> None:
    implementation = Implementation(name="mine", op="rmsnorm", forward=rounding_the_weight, weight_dtypes=("io",))
    cell = cell_of(implementation)
    refused = run_case(cell, replace(RMSNORM, weight_dtype="fp32"), plan_of(cell)).refused
    assert refused == 'weight_dtype=fp32: weight_dtypes=("io",) is declared'
    (weights,) = (own for own in choices(claims_of(cell.op, implementation, "fp16")).kinds if "weight_dtype" in own[0])
    drawn = {own["weight_dtype"] for own in weights}
    assert drawn == {"same"}


@pytest.mark.parametrize("value", [("fp32",), (), ["io"], "io", ("io", "fp16"), None])
def test_weight_dtypes_are_checked(value: Any) -> None:
    with pytest.raises(UsageError, match=r"weight_dtypes=.*expected \('io',\) or \('io', 'fp32'\)"):
        discovery.validated(Implementation(name="mine", op="rmsnorm", forward=llama, weight_dtypes=value), "mine.py")


# values beside tensors


def with_values(**values: Any) -> Implementation:
    """A correct kernel that returns them beside its tensors, and whose backward wants the plain ones back."""
    plain = {name: v for name, v in values.items() if isinstance(v, bool | int | float | str | None)}

    def forward(*tensors: Any, **options: Any) -> dict[str, Any]:
        return {**CLEAN.forward("layernorm", *tensors, **options), **values}

    def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, saved: Any, *, eps: float) -> Any:
        got = {name: value for name, value in saved.items() if not isinstance(value, Tensor)}
        if got != plain:
            raise KeyError(str(got))
        return CLEAN.backward("layernorm", dy, x, weight, bias, saved, eps)

    return Implementation(name="mine", op="layernorm", forward=forward, backward=backward)


def test_values_beside_tensors_are_for_the_backward() -> None:
    values = {"BLOCK_SIZE": 1024, "fast": True, "scale": 0.5, "mode": "llama", "offset": None}
    dropped = {"shape": (3, 4), "dtype": torch.float16, "list": [1]}
    result = result_of(with_values(**values, **dropped), LAYERNORM)
    assert not result.failed, result.problems
    assert result.notes == ()
    assert {"y", "mean", "rstd", "dx", "dw", "db"} == set(result.probed.repeats)


def test_values_are_those_of_the_forward_whose_backward_it_is() -> None:
    """Another forward in between, with other data, does not replace them."""

    def forward(*tensors: Any, **options: Any) -> dict[str, Any]:
        out = CLEAN.forward("layernorm", *tensors, **options)
        return {**out, "first": float(out["mean"].flatten()[0])}

    def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, saved: Any, *, eps: float) -> Any:
        assert saved["first"] == float(x.float().mean(-1).flatten()[0]), "of another forward"
        return CLEAN.backward("layernorm", dy, x, weight, bias, saved, eps)

    implementation = Implementation(name="mine", op="layernorm", forward=forward, backward=backward)
    case = replace(LAYERNORM, dtype="fp32", rows="integers")
    result = result_of(implementation, case)
    assert not result.failed, result.problems


VALUES = """
from normcheck import Implementation
from normcheck.audit.mutants.kernel import CLEAN


def forward(x, weight, bias, *, eps):
    return {**CLEAN.forward("layernorm", x, weight, bias, eps), "num_warps": 4, "what": "a kernel", "shape": (1, 2)}


def backward(dy, x, weight, bias, saved, *, eps):
    if (saved["num_warps"], saved["what"], "shape" in saved) != (4, "a kernel", False):
        raise KeyError(str(sorted(saved)))
    return CLEAN.backward("layernorm", dy, x, weight, bias, saved, eps)


IMPLEMENTATIONS = (Implementation(name="mine", op="layernorm", forward=forward, backward=backward),)
"""


def run_file(cli: Cli, path: Path, *more: str) -> dict[str, Any]:
    """The verdicts of a file in a process of its own, by name."""
    few = ("--device", "cpu", "--no-contexts", "--max-examples", "14", "--report", "json:out.json")
    cli("verify", "--impl", path.name, *few, *more)
    document = json.loads(Path("out.json").read_text(encoding="utf-8"))
    return {v["implementation"]: v for v in document["verdicts"] if v["status"] != "skip"}


@pytest.mark.slow
def test_values_stay_in_the_process_of_the_kernel(cli: Cli, kernel_file: KernelFile) -> None:
    found = run_file(cli, kernel_file(VALUES), "--dtype", "fp16")
    assert found["mine"]["status"] == "thin", found  # not with so few cases


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda y: (y, y), "forward returned tuple: expected y, a tensor, or a dict such as {'y': y, 'rstd': rstd}"),
        (lambda y: [y], "forward returned list: expected y, a tensor, or a dict"),
        (lambda y: {"y": 3.0}, "forward returned y=float: expected a tensor"),
        (lambda y: {"y": None, "out": y}, "forward returned y=NoneType: expected a tensor"),
        (lambda y: {"out": y, "n": 3}, "forward returned ['n', 'out']: expected 'y' among them"),
    ],
)
def test_y_is_a_tensor(returned: Callable[[Tensor], Any], words: str) -> None:
    implementation = Implementation(
        name="mine", op="layernorm", forward=lambda x, *_, **__: returned(torch.zeros_like(x))
    )
    (problem,) = result_of(implementation, LAYERNORM).problems
    assert (problem.kind, problem.output) == ("missing", "y")
    assert words in problem.message


def test_a_flood_of_values_is_refused_at_once() -> None:
    def forward(x: Tensor, *_: Any, **__: Any) -> dict[str, Any]:
        return {"y": x, **dict.fromkeys(map(str, range(10**5)), x)}

    (problem,) = result_of(Implementation(name="mine", op="layernorm", forward=forward), LAYERNORM).problems
    assert (problem.kind, problem.message) == ("shape", "forward returned 100001 values: expected 256 at most")


# a limit that a kernel states


class TooWide(ValueError):
    """A kernel's own exception."""


def _limit_in_one_line(x: Tensor) -> None:
    raise RuntimeError("This layer norm doesn't support feature dim >= 64KB.")


def _limit_over_lines(x: Tensor) -> None:
    if x.shape[-1] > 2:
        raise NotImplementedError(
            f"expected at most 2 columns, "
            f"got {x.shape[-1]}"
        )  # fmt: skip


def _limit_by_assert(x: Tensor) -> None:
    assert x.shape[-1] < 2, "too wide"


def _limit_on_a_line(x: Tensor) -> None:
    if x.shape[-1] > 2: raise TooWide("at most 2 columns")  # fmt: skip # noqa: E701


def _wrong_call(x: Tensor) -> None:
    torch.zeros(3).reshape()


def _wrong_attribute(x: Tensor) -> None:
    raise TooWide(x.no_such_thing)


def _gpu_error(x: Tensor) -> None:
    raise RuntimeError("CUDA error: an illegal instruction was encountered")


def _wrapped(x: Tensor) -> None:
    try:
        torch.zeros(3).reshape()
    except TypeError as error:
        raise RuntimeError("the kernel did not run") from error


def _wrapped_silently(x: Tensor) -> None:
    try:
        torch.zeros(3).reshape()
    except TypeError:
        raise RuntimeError("the kernel did not run")  # noqa: B904


def _of_torch(x: Tensor) -> None:
    torch.nn.functional.cosine_embedding_loss(x, x, x, reduction="no such")


def raising(limit: Callable[[Tensor], None], *, backward: bool) -> Implementation:
    def forward(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Any:
        if not backward:
            limit(x)
        return CLEAN.forward("layernorm", x, weight, bias, eps)

    def own_backward(dy: Tensor, x: Tensor, *_: Any, **__: Any) -> Any:
        limit(x)

    return Implementation(name="mine", op="layernorm", forward=forward, backward=own_backward)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("limit", [_limit_in_one_line, _limit_over_lines, _limit_by_assert, _limit_on_a_line])
def test_a_limit_that_a_kernel_states_is_called_its_own(limit: Callable[[Tensor], None], backward: bool) -> None:
    implementation = raising(limit, backward=backward)
    assert kinds(result_of(implementation, LAYERNORM)) == [("exception", "")]
    advice = advice_of(implementation, LAYERNORM)
    assert "test_contract.py" in advice
    assert "raise normcheck.UnsupportedCase there, or declare the limit with supports(case) or shapes=" in advice


@pytest.mark.parametrize(
    "limit",
    [_wrong_call, _wrong_attribute, _gpu_error, _wrapped, _wrapped_silently, _of_torch],
    ids=lambda f: f.__name__,
)
def test_an_exception_from_elsewhere_is_no_limit(limit: Callable[[Tensor], None]) -> None:
    implementation = raising(limit, backward=False)
    assert kinds(result_of(implementation, LAYERNORM)) == [("exception", "")]
    assert advice_of(implementation, LAYERNORM) == ""


def test_a_cause_is_told_under_the_traceback() -> None:
    (problem,) = result_of(raising(_wrapped, backward=False), LAYERNORM).problems
    assert problem.frames[-1].startswith("because of TypeError: ")
    assert "raise RuntimeError" in problem.frames[-2]


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home/me/kernels.py", True),
        ("/venv/lib/python3.11/site-packages/liger_kernel/ops/rms_norm.py", True),
        ("/venv/lib/python3.11/site-packages/triton/compiler/compiler.py", False),
        ("/venv/lib/python3.11/site-packages/torch/_dynamo/exc.py", False),
    ],
)
def test_whose_limit_it_is(file: str, own: bool) -> None:
    frames = (f"{file}:12 in forward: raise RuntimeError('at most 64 KB')",)
    problem = Problem("exception", "", "forward raised RuntimeError: at most 64 KB", frames)
    assert bool(own_limit.advice(problem, LAYERNORM)) == own
    assert ("strided=False" in own_limit.advice(problem, replace(LAYERNORM, layout="x_strided", gap=8))) == own
    assert own_limit.advice(replace(problem, kind="crash"), LAYERNORM) == ""
    assert own_limit.advice(replace(problem, frames=()), LAYERNORM) == ""
    assert own_limit.advice(replace(problem, message="supports(case) raised RuntimeError: no"), LAYERNORM) == ""


# inputs that a kernel overwrites


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """y as x, in memory of its own, and rstd."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * rstd * weight.float()).to(x.dtype), rstd


def gradients(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx as x, in memory of its own, and dw."""
    xhat = x.float() * rstd.reshape(*x.shape[:-1], 1)
    wdy = dy.float() * weight.float()
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd.reshape(*x.shape[:-1], 1)
    return dx.to(x.dtype), (dy.float() * xhat).flatten(0, -2).sum(0).to(weight.dtype)


def dense(dy: Tensor) -> Tensor:
    """dy, or a copy of it when its rows share one memory: as ``dy.contiguous()`` in Liger."""
    return dy.contiguous() if 0 in dy.stride() else dy


class LigerRMSNorm:
    """Liger's RMSNorm, whose in_place=True writes dx over dy."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> dict[str, Tensor]:
        y, rstd = rmsnorm(x, weight, eps=eps)
        return {"y": y, "rstd": rstd}

    @staticmethod
    def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: None, saved: Any, *, eps: float) -> dict[str, Tensor]:
        dy = dense(dy)
        dx, dw = gradients(dy, x, weight, saved["rstd"])
        return {"dx": dy.copy_(dx), "dw": dw}


class OverDy(torch.autograd.Function):
    """The same through autograd, as LigerRMSNormFunction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = rmsnorm(x, weight, eps=eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        dy = dense(dy)
        dx, dw = gradients(dy, x, weight, rstd)
        return dy.copy_(dx), dw, None


class InPlace:
    """y over x; its backward works from x, which is given as its caller had it."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> dict[str, Tensor]:
        y, rstd = rmsnorm(x, weight, eps=eps)
        return {"y": x.copy_(y), "rstd": rstd}

    @staticmethod
    def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: None, saved: Any, *, eps: float) -> dict[str, Tensor]:
        dx, dw = gradients(dy, x, weight, saved["rstd"])
        return {"dx": x.copy_(dx), "dw": dw}  # and what it pleases in the memory that is its own


class OverX(torch.autograd.Function):
    """y over x through autograd; its backward keeps a copy of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = rmsnorm(x, weight, eps=eps)
        ctx.save_for_backward(x.clone(), weight, rstd)
        ctx.over, ctx.eps = x.detach(), eps
        return ctx.over.copy_(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        y = rmsnorm(x, weight, eps=ctx.eps)[0]
        assert guard_bands.same_bits(y, ctx.over), "what forward wrote was undone before backward"
        return (*gradients(dy, x, weight, rstd), None)


def by_autograd(function: Any) -> Callable[..., Tensor]:
    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
        y: Tensor = function.apply(x, weight, eps)
        return y

    return forward


def no_bias(case: Case) -> str | None:
    return "takes no bias" if case.bias else None


OVER = {
    "dy": Implementation(name="mine", op="rmsnorm", forward=LigerRMSNorm.forward, backward=LigerRMSNorm.backward),
    "dy, by autograd": Implementation(name="mine", op="rmsnorm", forward=by_autograd(OverDy)),
    "x": Implementation(name="mine", op="rmsnorm", forward=InPlace.forward, backward=InPlace.backward),
    "x, by autograd": Implementation(name="mine", op="rmsnorm", forward=by_autograd(OverX)),
}
OVER = {what: replace(i, supports=no_bias, ranks=(2, 3)) for what, i in OVER.items()}


@pytest.mark.parametrize("what", OVER)
@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_what_is_overwritten_by_contract_is_no_finding(what: str, fields: dict[str, Any]) -> None:
    case, name = replace(RMSNORM, **fields), what.partition(",")[0]
    result = result_of(replace(OVER[what], overwrites=(name,)), case)
    assert not result.failed, (result.problems, result.wrong)
    assert {c.output for c in result.checked} >= {"y", "dx", "dw"}
    if case.M > 1:  # all that is asked of any kernel was asked
        assert result.probed is not None
        assert all(result.probed.repeats.values())
        assert result.probed.invariant.keys() >= {"y", "dx"}
    undeclared = result_of(OVER[what], case)
    same_memory = case.layout == "dy_expanded" and name == "dy"  # the kernel writes into a copy then
    if case.M and not same_memory:
        assert ("input_modified", name) in kinds(undeclared)
        advice = finding(cell_of(OVER[what]), replace(undeclared, checked=()), "cpu").advice
        assert f'declare overwrites=("{name}",)' in advice


@pytest.mark.parametrize("what", ["dy", "dy, by autograd"])
@pytest.mark.parametrize("declared", [("x",), ()])
def test_only_what_is_declared_may_be_overwritten(what: str, declared: tuple[str, ...]) -> None:
    assert ("input_modified", "dy") in kinds(result_of(replace(OVER[what], overwrites=declared), RMSNORM))


@pytest.mark.parametrize("fields", [{}, {"layout": "dy_strided", "gap": 3}, {"layout": "dy_expanded"}], ids=str)
@pytest.mark.parametrize("at", [-1, "behind a row", "behind the last"])
def test_a_write_around_what_may_be_overwritten_is_found(fields: dict[str, Any], at: int | str) -> None:
    case = replace(RMSNORM, **fields)
    if at == "behind a row" and not case.gap:
        pytest.skip("there is nothing behind a row")

    def backward(dy: Tensor, *others: Any, **options: Any) -> Any:
        last = sum((n - 1) * s for n, s in zip(dy.shape, dy.stride(), strict=True))
        place = {"behind a row": case.N, "behind the last": last + 1}.get(str(at), at)
        dy.as_strided((1,), (1,), dy.storage_offset() + int(place)).fill_(0.5)
        return LigerRMSNorm.backward(dy, *others, **options)

    implementation = replace(OVER["dy"], backward=backward, overwrites=("dy",))
    assert ("out_of_bounds_write", "dy") in kinds(result_of(implementation, case))


def test_a_fault_of_an_overwriting_kernel_is_found() -> None:
    """It reads dy again after it has written dx there."""

    def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: None, saved: Any, *, eps: float) -> dict[str, Tensor]:
        dx, _ = gradients(dy, x, weight, saved["rstd"])
        dy.copy_(dx)
        return {"dx": dy, "dw": gradients(dy, x, weight, saved["rstd"])[1]}

    result = result_of(replace(OVER["dy"], backward=backward, overwrites=("dy",)), RMSNORM)
    assert {c.output for c in result.wrong} == {"dw"}


def test_what_was_overwritten_is_put_back_after_an_exception() -> None:
    calls = 0

    def backward(dy: Tensor, *others: Any, **options: Any) -> Any:
        dy.fill_(7.0)
        raise normcheck.UnsupportedCase("no plan")

    def forward(*tensors: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return LigerRMSNorm.forward(*tensors, **options)

    result = result_of(replace(OVER["dy"], forward=forward, backward=backward, overwrites=("dy",)), RMSNORM)
    assert (result.problems, result.seen.refused) == ((), "no plan")
    assert calls > 1


def test_a_storage_that_was_resized_is_left_alone() -> None:
    def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: None, saved: Any, *, eps: float) -> dict[str, Tensor]:
        dx, dw = gradients(dy, x, weight, saved["rstd"])
        dy.untyped_storage().resize_(0)
        return {"dx": dx, "dw": dw}

    result = result_of(replace(OVER["dy"], backward=backward, overwrites=("dy",)), RMSNORM)
    assert kinds(result)[0] == ("input_modified", "dy")


def test_only_the_elements_are_put_back() -> None:
    for fields in LAYOUTS:
        inputs = make(replace(RMSNORM, **{"rows": "normal", **fields}), OPS["rmsnorm"], "cpu")
        before = guard_bands.buffer_of(inputs.dy).clone()
        with put_back(("dy",), inputs):
            guard_bands.buffer_of(inputs.dy).fill_(0)
        after = guard_bands.buffer_of(inputs.dy)
        width = inputs.dy.element_size()
        changed = (before != after).view(-1, width).any(1)
        inside = torch.zeros(len(changed), dtype=torch.bool)
        shape = [min(n, 1) if s == 0 else n for n, s in zip(inputs.dy.shape, inputs.dy.stride(), strict=True)]
        inside.as_strided(shape, inputs.dy.stride(), inputs.dy.storage_offset()).fill_(True)
        assert torch.equal(changed, ~inside), fields


OVERWRITING = """
import torch
from normcheck import Implementation
from test_contract import OVER
from dataclasses import replace

def behind(dy, *others, **options):
    last = sum((n - 1) * s for n, s in zip(dy.shape, dy.stride()))
    dy.as_strided((1,), (1,), dy.storage_offset() + last + 1).fill_(0.5)
    return OVER["dy"].backward(dy, *others, **options)

def declared(what, dtype):
    return replace(OVER[what], name=f"declared {what}", overwrites=(what.partition(",")[0],), dtypes=(dtype,))

HALF = replace(OVER["dy"], dtypes=("fp16",))
IMPLEMENTATIONS = (
    *map(declared, OVER, ("fp16", "bf16", "fp32", "bf16")),
    *(replace(OVER[what], name=f"silent {what}", dtypes=("fp16",)) for what in ("dy", "x, by autograd")),
    replace(HALF, name="behind", backward=behind, overwrites=("dy",)),
    replace(HALF, name="x, declared dy", forward=OVER["x"].forward, overwrites=("dy",)),
)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_overwriting_in_a_process_of_its_own(cli: Cli, kernel_file: KernelFile) -> None:
    """Who declares it is right, each in one dtype by turns, and who overwrites anything else is wrong."""
    source = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{OVERWRITING}"
    found = run_file(cli, kernel_file(source), "--max-examples", "8")
    assert [name for name, v in found.items() if v["status"] == "thin"] == [f"declared {what}" for what in OVER]
    assert {name: v["failure"]["kind"] for name, v in found.items() if v["failure"]} == {
        **{f"silent {what}": "input_modified" for what in ("dy", "x, by autograd")},
        "behind": "out_of_bounds_write",
        "x, declared dy": "input_modified",
    }


@pytest.mark.parametrize("value", [("weight",), ("mean",), "dy", ["dy"], None, (1,)])
def test_overwrites_are_checked(value: Any) -> None:
    with pytest.raises(UsageError, match=r"overwrites=.*expected a tuple with one of x, dy, residual, or \(\)"):
        discovery.validated(Implementation(name="mine", op="rmsnorm", forward=llama, overwrites=value), "mine.py")
