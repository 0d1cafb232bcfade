"""The probes, each against a kernel with just that fault, and against kernels that are right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck import Implementation, UnsupportedCase
from normcheck.audit import catalogue
from normcheck.audit.mutants.kernel import CLEAN, Kernel, KernelCall
from normcheck.audit.mutants.residual import Adding
from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls.adapt import adapt
from normcheck.result import SUMS
from normcheck.runner.call import poisoned_memory
from tests.case_lines import NORMS
from tests.command_line import Cli, KernelFile
from tests.inner_loop import parametrize

CASE = Case(op="layernorm", dtype="fp16", M=6, N=24, seed=2)
STRIDED = replace(CASE, layout="strided", gap=3)


@pytest.fixture(autouse=True)
def _as_in_a_sweep() -> Iterator[None]:
    torch.set_num_threads(1)
    with poisoned_memory():
        yield


def result_of(implementation: Implementation, case: Case = CASE, depth: Depth = Depth.ROWS) -> Result:
    return check(implementation, OPS[implementation.op], case, "cpu", Ask(depth))


def kinds(result: Result) -> list[tuple[str, str]]:
    return [(p.kind, p.output) for p in result.problems]


def layernorm(kernel: Kernel = CLEAN, **fields: Any) -> Implementation:
    return kernel.implementation("mine", "layernorm", **fields)


def finishing(change: Any) -> Kernel:
    """A clean kernel whose outputs are changed at the end: ``change(run, outputs, is_backward)``."""

    def finish(c: KernelCall, out: dict[str, Tensor]) -> dict[str, Tensor]:
        change(c, out, c.dy_io is not None)
        return out

    return Kernel(finish=finish)


@parametrize("case", [CASE, STRIDED, replace(CASE, dtype="fp32"), replace(CASE, M=1), replace(CASE, M=0)], inner=2)
@pytest.mark.parametrize("op", NORMS)
def test_a_clean_kernel_has_no_problem(op: str, case: Case) -> None:
    options = (("lower_clip", 0.0), ("upper_clip", 6.0)) if op == "layernorm_relu_bitmask" else ()
    case = replace(case, op=op, options=options, bias=OPS[op].takes_bias)
    clean = Adding() if OPS[op].adds_residual else CLEAN
    result = result_of(clean.implementation("clean", op), case)
    assert not result.failed
    assert result.probed is not None
    assert all(result.probed.repeats.values())
    assert set(result.probed.repeats) >= {"y", "rstd", "dx", "dw"} | ({"db"} if case.bias else set())
    assert all(same for name, same in result.probed.invariant.items() if name not in SUMS)
    assert bool(result.probed.invariant) == (case.M > 1)


def test_memory_that_was_not_written() -> None:
    def half(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        if is_backward:
            dw = torch.empty_like(out["dw"])
            dw[:5] = out["dw"][:5]
            out["dw"] = dw

    result = result_of(layernorm(finishing(half)))
    assert kinds(result) == [("unwritten", "dw")]
    assert "19 of 24 elements" in result.problems[0].message


def test_memory_that_swallows_a_nan() -> None:
    def swallow(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        if not is_backward:
            old = torch.empty_like(out["y"])
            out["y"] = torch.where(torch.fmin(old, torch.zeros_like(old)) < -100, out["y"] * 2, out["y"])

    implementation = layernorm(finishing(swallow))
    assert not result_of(implementation, depth=Depth.REASON).failed
    assert not result_of(implementation).failed  # a large number does not show it
    assert kinds(result_of(implementation, replace(CASE, seed=3))) == [("unwritten", "y")]  # a negative one does


def test_what_only_the_latest_forward_knows() -> None:
    implementation = catalogue.mutants()["P15"].make("layernorm")
    assert not result_of(implementation, depth=Depth.MEMORY).failed
    result = result_of(implementation)
    assert kinds(result) == [("not_repeatable", "dx")]
    assert "for other inputs before backward" in result.problems[0].message


def test_a_read_behind_the_rows() -> None:
    def peek(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        if not is_backward and c.x_io.stride(0) > c.N:
            behind = c.x_io.as_strided((c.M, 1), c.x_io.stride(), c.x_io.storage_offset() + c.N)
            out["y"] = out["y"] + behind.nan_to_num(0.0)

    implementation = layernorm(finishing(peek))
    assert not result_of(implementation).failed
    assert not result_of(implementation, STRIDED, Depth.REASON).failed
    result = result_of(implementation, STRIDED)
    assert kinds(result) == [("out_of_bounds_read", "y")]
    assert "gaps of its rows" in result.problems[0].message


def test_a_read_around_what_was_allocated() -> None:
    def peek(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        if not is_backward:
            own = torch.zeros(c.N)
            behind = own.as_strided((1,), (1,), own.storage_offset() + c.N)
            out["y"] = out["y"] + behind.nan_to_num(0.0).to(c.io)

    result = result_of(layernorm(finishing(peek)))
    assert kinds(result) == [("out_of_bounds_read", "y")]
    assert "memory that it allocated" in result.problems[0].message


@pytest.mark.parametrize(
    ("at", "words"),
    [(24, "1 behind the end of row 0"), (-1, "1 before its first element"), (6 * 27 - 3, "1 behind its last element")],
)
@pytest.mark.parametrize("name", ["x", "dy"])
def test_a_write_outside_an_input(name: str, at: int, words: str) -> None:
    def scribble(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        tensor = c.x_io if name == "x" else c.dy_io
        if is_backward and tensor is not None:
            tensor.as_strided((1,), (1,), tensor.storage_offset() + at).fill_(float("nan"))

    result = result_of(layernorm(finishing(scribble)), STRIDED, Depth.OFF)
    assert kinds(result) == [("out_of_bounds_write", name)]
    assert result.problems[0].message == f"{name}: 1 element outside it written to, the first {words}"


def test_a_write_outside_an_output() -> None:
    def overrun(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        if is_backward:
            dw = torch.empty_like(out["dw"])
            dw.copy_(out["dw"])
            dw.as_strided((2,), (1,), dw.storage_offset() + c.N).fill_(1)
            out["dw"] = dw

    result = result_of(layernorm(finishing(overrun)), depth=Depth.OFF)
    assert kinds(result) == [("out_of_bounds_write", "dw")]
    assert result.problems[0].message == "dw: 2 elements outside it written to, the first 1 behind its last"


def test_a_write_outside_a_scratch_buffer() -> None:
    def overrun(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        scratch = torch.empty(7)
        scratch.as_strided((1,), (1,), scratch.storage_offset() - 2).fill_(1)

    result = result_of(layernorm(finishing(overrun)), depth=Depth.OFF)
    assert kinds(result) == [("out_of_bounds_write", "")]
    assert "a buffer of 7 elements that it allocated: 1 element outside it" in result.problems[0].message


@pytest.mark.parametrize("name", ["x", "weight", "bias", "dy"])
def test_an_input_that_is_modified(name: str) -> None:
    def modify(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        tensors = {"x": c.x_io, "weight": c.w_io, "bias": c.b_io, "dy": c.dy_io}
        if is_backward:
            tensors[name].view(-1)[3] += 1

    result = result_of(layernorm(finishing(modify)), depth=Depth.OFF)
    assert ("input_modified", name) in kinds(result)


@pytest.mark.parametrize("name", ["mean", "rstd", "y"])
def test_saved_tensors_that_are_modified(name: str) -> None:
    def modify(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        if is_backward:
            c.saved[name].mul_(2)

    result = result_of(layernorm(finishing(modify)))
    assert kinds(result) == [("input_modified", name)]
    assert result.problems[0].message.startswith(f"saved {name} was modified: 6" if name != "y" else "saved y was")


def noisy(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
    """Each call adds up to half an ulp to dw, far inside its bound."""
    if is_backward:
        out["dw"] = out["dw"] * (1 + 2e-7 * torch.rand(c.N))


def test_a_result_that_does_not_repeat() -> None:
    case = replace(CASE, dtype="fp32")
    assert kinds(result_of(layernorm(finishing(noisy)), case)) == [("not_repeatable", "dw")]
    declared = result_of(layernorm(finishing(noisy), deterministic=False), case)
    assert not declared.failed
    assert declared.probed is not None
    assert declared.probed.repeats == {"mean": True, "rstd": True, "y": True, "dx": True, "dw": False, "db": True}


def test_it_is_not_advised_to_declare_what_would_not_help() -> None:
    """Each call gives another mean, within its bound, or another y, and that is wrong."""
    for output, noise, advised in (("mean", 1e-7, True), ("y", 1.0, False)):

        def change(c: KernelCall, out: dict[str, Tensor], is_backward: bool, n: str = output, e: float = noise) -> None:
            if not is_backward:
                out[n] = out[n] * (1 + e * torch.rand(out[n].shape))

        (problem,) = result_of(layernorm(finishing(change)), replace(CASE, dtype="fp32")).problems
        assert problem.kind == "not_repeatable"
        assert ("declare deterministic=False" in problem.message) == advised


def test_not_deterministic_is_no_excuse_for_wrong_values() -> None:
    def leak(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        noisy(c, out, is_backward)
        if is_backward:
            out["dw"] = out["dw"] + torch.empty_like(out["dw"]).nan_to_num(0.0)

    result = result_of(layernorm(finishing(leak), deterministic=False), replace(CASE, dtype="fp32"))
    assert kinds(result) == [("not_repeatable", "dw")]


def test_a_cache_by_address() -> None:
    cache: dict[int, Tensor] = {}

    def remember(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        if not is_backward:
            out["y"] = cache.setdefault(c.x_io.data_ptr(), out["y"])

    result = result_of(layernorm(finishing(remember)))
    assert kinds(result) == [("not_repeatable", "y")]
    assert "depends on earlier calls" in result.problems[0].message


def t5_layer_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """transformers' T5LayerNorm. x is upcast twice, so dx loses digits in half precision; it remembers nothing."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + eps)
    if weight.dtype in [torch.float16, torch.bfloat16]:
        x = x.to(weight.dtype)
    return weight * x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "dtype"), [("rmsnorm_llama", "fp16"), ("rmsnorm_llama", "bf16"), ("rmsnorm", "fp16"), ("rmsnorm", "fp32")]
)
def test_what_remembers_nothing_is_not_told_to_depend_on_earlier_calls(op: str, dtype: str) -> None:
    """Where dx is right for the weights and the rows as they come, and wrong for them in another order."""
    mine = Implementation(name="t5", op=op, forward=adapt(t5_layer_norm)[0])
    right = 0
    for seed in range(45):
        result = result_of(mine, Case(op=op, dtype=dtype, M=2 + seed % 3, N=3 + seed % 5, seed=seed, bias=False))
        right += not result.wrong
        assert kinds(result) == []
    assert right > 8 or (op == "rmsnorm" and dtype != "fp32")  # where y is wrong, it is another op


@pytest.mark.slow
@pytest.mark.parametrize("what", ["gamma", "rstd"])
def test_what_is_remembered_by_address_is_found(what: str) -> None:
    """Twenty times: new memory may lie where that of an earlier call was, and then a fresh call is as wrong."""
    for _ in range(20):
        kept: dict[object, Tensor] = {}
        if what == "gamma":
            kernel = Kernel(gamma=lambda c, kept=kept: kept.setdefault(c.w_io.data_ptr(), c.w.clone()))
        else:
            key = lambda c: (c.x_io.data_ptr(), len(c.x))  # noqa: E731
            kernel = Kernel(rstd=lambda c, kept=kept, key=key: kept.setdefault(key(c), CLEAN.rstd(c)).clone())
        result = result_of(layernorm(kernel))
        assert [p.kind for p in result.problems] == ["not_repeatable"]
        assert result.problems[0].message.endswith("it depends on earlier calls")


REMEMBERING = """
from normcheck.audit.mutants.kernel import CLEAN, Kernel

kept = {{}}


def recalled(c):
    return kept.setdefault(({key}, c.M), CLEAN.{what}(c)).clone()


IMPLEMENTATIONS = (Kernel({what}=recalled).implementation("mine", "layernorm"),)
"""
"""A clean kernel that keeps what it computed in the first call with the same key."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "key"), [("gamma", "0"), ("gamma", "c.w_io.data_ptr()"), ("rstd", "0"), ("rstd", "c.x_io.data_ptr()")]
)
def test_what_a_process_remembers_is_found(what: str, key: str, cli: Cli, kernel_file: KernelFile) -> None:
    """There the tensors of each call lie at the same addresses, and some are remembered whatever the address."""
    done = cli("repro", str(kernel_file(REMEMBERING.format(what=what, key=key))), str(CASE), "--isolation")
    assert done.code == 1
    assert "it depends on earlier calls" in " ".join(done.out.split())


BY_BATCH = Kernel(rstd=lambda c: CLEAN.rstd(c) * (1 + 2.0**-23 * (c.M > 1)))
"""The last bit of rstd depends on how many rows there are."""


def test_batch_invariance_is_measured_and_judged_where_it_is_declared() -> None:
    case = replace(CASE, dtype="fp32", rows="shifted")
    measured = result_of(layernorm(BY_BATCH), case)
    assert not measured.failed
    assert measured.probed is not None
    assert measured.probed.invariant == {"mean": True, "rstd": False, "y": False, "dx": False, "dw": False, "db": False}
    declared = result_of(layernorm(BY_BATCH, batch_invariant=True), case)
    assert kinds(declared) == [("not_repeatable", "rstd")]
    assert "batch_invariant=True is declared" in declared.problems[0].message
    assert not result_of(layernorm(batch_invariant=True), case).failed


def plan_of(cell: Cell, cases: int) -> Plan:
    return Plan((cell,), replace(PROFILES["quick"], max_examples=cases, seconds=600.0, large_share=0.0), 0, "cpu", 60.0)


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_a_first_case_that_ends_otherwise() -> None:
    """Right at any time, but not with the same bits after ten cases."""
    calls = 0

    def drift(c: KernelCall) -> Tensor:
        nonlocal calls
        calls += 1
        return CLEAN.rstd(c) * (1 + 2.0**-23 * (calls > 30))

    cell = Cell(OPS["layernorm"], layernorm(Kernel(rstd=drift)), "fp32", "tests")
    verdict = run_cell(cell, plan_of(cell, 15), lambda *_: None)
    assert verdict.failure is not None
    assert (verdict.failure.kind, verdict.failure.output) == ("not_repeatable", "rstd")


class Refuses(Exception):
    """An exception that says something."""


@pytest.mark.parametrize("fields", [{"M": 0}, {"layout": "misaligned"}, {"layout": "dy_expanded"}])
def test_a_clear_refusal_of_an_unusual_case(fields: Mapping[str, Any]) -> None:
    def forward(*_: Any, **__: Any) -> Tensor:
        raise Refuses("this kernel wants something else")

    implementation = Implementation(name="mine", op="layernorm", forward=forward)
    result = result_of(implementation, replace(CASE, **fields))
    assert not result.failed
    assert result.refused.endswith("forward raised Refuses: this kernel wants something else")
    assert kinds(result_of(implementation)) == [("exception", "")]  # of an ordinary case it is a finding


def test_what_is_not_claimed_is_not_asked() -> None:
    for fields, layout in (({"strided": False}, "dy_expanded"), ({"strided": False}, "strided"), ({}, "dy_scalar")):
        cell = Cell(OPS["layernorm"], layernorm(**fields), "fp16", "tests")
        case = replace(CASE, layout=layout, gap=3 if layout == "strided" else 0)
        assert f"layout={layout}" in run_case(cell, case, plan_of(cell, 1)).refused


def test_a_refusal_by_the_library_is_no_finding() -> None:
    def forward(*_: Any, **__: Any) -> Tensor:
        raise UnsupportedCase("not here")

    assert result_of(Implementation(name="mine", op="layernorm", forward=forward)).refused == "not here"


def with_refusing_backward(kernel: Kernel, after: int) -> Implementation:
    """Its backward's library refuses every call ``after`` so many."""
    own = layernorm(kernel)
    assert own.backward is not None
    calls = 0

    def backward(*tensors: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise UnsupportedCase("no plan for it")
        return own.backward(*tensors, **options)  # type: ignore[misc]

    return replace(own, backward=backward)


def test_a_backward_that_its_library_refuses_is_no_finding() -> None:
    result = result_of(with_refusing_backward(CLEAN, 0))
    assert not result.failed
    assert result.probed.repeats == dict.fromkeys(("mean", "rstd", "y"), True)  # forward is asked all the same
    assert result.probed.invariant.keys() == {"mean", "rstd", "y"}
    assert result.seen.refused == "no plan for it"


def test_a_forward_is_probed_where_its_backward_is_refused() -> None:
    calls = 0

    def drift(_: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        nonlocal calls
        calls += not is_backward
        if calls > 1:
            out["rstd"] = torch.nextafter(out["rstd"], torch.tensor(torch.inf))

    assert kinds(result_of(with_refusing_backward(finishing(drift), 0))) == [("not_repeatable", "rstd")]


@pytest.mark.parametrize("after", [2, 3])
def test_a_backward_that_is_refused_when_it_is_run_again_is_a_finding(after: int) -> None:
    result = result_of(with_refusing_backward(CLEAN, after))
    assert kinds(result) == [("not_repeatable", "")]
    assert "refused when it was run again: no plan for it" in result.problems[0].message


def test_an_exception_of_a_second_call_is_a_finding() -> None:
    calls = 0

    def once(c: KernelCall, out: dict[str, Tensor], is_backward: bool) -> None:
        nonlocal calls
        calls += not is_backward
        if calls > 1:
            raise Refuses("only once")

    result = result_of(layernorm(finishing(once)))
    assert kinds(result) == [("exception", "")]
    assert "not the first time" in result.problems[0].message


def test_vacuity_is_counted() -> None:
    result = result_of(layernorm(), replace(CASE, weights="probe", M=2))
    zeros = {c.output: c.comparison.zeros for c in result.checked}
    assert zeros["y"] == 0
    assert zeros["rstd"] == 0
    result = result_of(layernorm(), replace(CASE, rows="zero"))
    zeros = {(c.output, c.check): (c.comparison.zeros, c.comparison.numel) for c in result.checked}
    assert zeros["mean", "end to end"] == (6, 6)
    assert zeros["dw", "end to end"] == (24, 24)
    assert result_of(layernorm(), depth=Depth.REASON).checked[0].comparison.zeros is None


@pytest.mark.slow
def test_a_cell_says_what_zeros_would_pass() -> None:
    """A tolerance so wide that nothing is checked is said."""
    wide = {"chain": "any", "y_form": "folded"}
    cell = Cell(OPS["layernorm"], layernorm(model=wide), "fp16", "tests")
    verdict = run_cell(cell, plan_of(cell, 30), lambda *_: None)
    assert verdict.failure is None
    assert set(verdict.vacuity) == {"y", "mean", "rstd", "dx", "dw", "db"}
    for counts in verdict.vacuity.values():
        assert counts.checks > 0
        assert counts.empty < counts.checks
        assert counts.share < 0.5
