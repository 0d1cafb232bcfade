"""One case in a context: what is wrong there alone is found, what is right there is not accused, and how it is told."""

from __future__ import annotations

from functools import partial
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
from torch import Tensor

import normcheck
from normcheck import Implementation
from normcheck.cases.case_line import parsed
from normcheck.cases.declared import CONTEXT_NAMES
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks import attempt
from normcheck.contexts.catalogue import CONTEXTS, contexts_on
from normcheck.errors import UsageError
from normcheck.impls.kernels import interpreted, interpreter
from normcheck.result import CONTEXT, Verdict
from normcheck.runner import compiled
from tests.command_line import Cli, KernelFile
from tests.quality import context_kernels as kernels

if not torch.cuda.is_available():
    interpreter.enable()  # before torch.compile imports triton

FILE = kernels.__file__
CASE = "rmsnorm fp32 M=40 N=33 eps=1e-05 rows=blend dy=normal layout=contiguous seed=3 bias=none"


@pytest.fixture(autouse=True)
def _alone_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test has compiled or interpreted in this process is none of these kernels'."""
    of_process, before = compiled.graphs, compiled.graphs()
    monkeypatch.setattr(compiled, "graphs", lambda: of_process() - before)
    monkeypatch.setattr(interpreted, "launched", lambda: False)


def judged(kernel: object, *contexts: str, op: str = "rmsnorm", case: str = CASE) -> Verdict:
    (verdict,) = normcheck.verify(kernel, op=op, case=case, context=contexts)  # type: ignore[arg-type]
    return verdict


@pytest.mark.parametrize("name", [n for n in kernels.WRONG if n not in ("hangs", "late", "another_when_compiled")])
def test_what_is_wrong_in_one_context_alone_is_found(name: str) -> None:
    kernel, context, output = kernels.WRONG[name]
    assert judged(kernel).status == "pass"
    found = judged(kernel, context).failure
    assert found is not None and (found.kind, found.check, found.output) == (CONTEXT, context, output)
    assert f"--context {context} '{CASE}'" in found.reproduce or f"context=({context!r},)" in found.reproduce


class OtherInEval(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = self.eps if self.training else 0.0
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight, eps)


def test_the_class_of_a_module_is_in_eval_if_nobody_wants_gradients() -> None:
    assert judged(OtherInEval).status == "pass"
    found = judged(OtherInEval, "inference").failure
    assert found is not None and (found.output, found.check) == ("y", "inference")


@pytest.mark.parametrize("name", kernels.RIGHT)
def test_a_right_twin_is_right_in_every_context(name: str) -> None:
    contexts = [context for context in contexts_on("cpu") if name != "no_autocast" or context != "autocast"]
    verdict = judged(kernels.RIGHT[name], *contexts)
    assert verdict.status == "pass", verdict.detail
    assert all(verdict.contexts[context].status == "held" for context in contexts)


def test_a_dtype_of_autocast_is_wrong_if_somebody_asks_for_that_context() -> None:
    found = judged(kernels.no_autocast, "autocast").failure
    assert found is not None and "under torch.autocast" in found.message


def test_a_second_backward_that_raises_is_told_and_is_no_fault() -> None:
    how = judged(kernels.RIGHT["frees_itself"], "again").contexts["again"]
    assert how.status == "held" and "a second backward through one graph" in how.why


def test_an_exception_in_a_context_is_a_finding_of_that_context() -> None:
    def raises(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        if not torch.is_grad_enabled():
            raise RuntimeError("no inference today")
        return kernels.RIGHT["right"](x, weight, bias, eps=eps)

    found = judged(raises, "inference").failure
    assert found is not None and (found.kind, found.check) == (CONTEXT, "inference")
    assert "no inference today" in found.message and found.traceback


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("torch.manual_seed(123456)", "torch.initial_seed() is 123456"),
        ("torch.set_default_dtype(torch.float64)", "torch.get_default_dtype() is torch.float64"),
        ("torch.set_flush_denormal(True)", "torch.set_flush_denormal is True"),
        ("torch.rand(3)", ""),
        ("with torch.random.fork_rng(): torch.manual_seed(0)", ""),
    ],
)
def test_a_call_that_leaves_another_state_of_torch_is_found(line: str, told: str) -> None:
    def leaves(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        exec(line)
        return kernels.RIGHT["right"](x, weight, bias, eps=eps)

    torch.set_default_dtype(torch.float64)  # the caller's
    try:
        found, once_more = (judged(leaves, "again").failure for _ in range(2))
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found is None) == (once_more is None) == (not told)
    if found is not None:
        assert (found.kind, found.check) == (CONTEXT, "again") and told in found.message


class ReturnsViews(torch.autograd.Function):
    """Right: both outputs are views, as of Liger. Once one was written to, autograd knows no way back through them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        stored = x + residual
        y, rstd = kernels.plain(stored, weight, eps)
        ctx.save_for_backward(stored, weight, rstd)
        return y.view(y.shape), stored.view(stored.shape)

    @staticmethod
    def backward(ctx: Any, *of: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dx, dw = kernels.gradients(of[0], *ctx.saved_tensors)
        return dx + of[1], dx + of[1], dw, None


def test_outputs_may_be_views() -> None:
    def norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, stored = ReturnsViews.apply(x, residual, weight, eps)
        return y, stored

    verdict = judged(norm, "again", op="fused_add_rmsnorm", case=f"fused_add_{CASE}")
    assert (verdict.failure, verdict.contexts["again"].status) == (None, "held")


class KeepsY(torch.autograd.Function):
    """d of a sum of squares, from its own y; ``asks``: autograd keeps it, and knows of changes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, asks: bool) -> Tensor:
        ctx.rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
        y = x * ctx.rstd
        if asks:
            ctx.save_for_backward(y)
        else:
            ctx.y = y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        y = ctx.saved_tensors[0] if ctx.saved_tensors else ctx.y
        return (dy - y * (y * dy).sum(-1, keepdim=True)) * ctx.rstd, None, None


@pytest.mark.parametrize("asks", [False, True])
def test_a_y_that_is_kept_may_be_written_to_by_its_caller(asks: bool) -> None:
    def l2norm(x: Tensor, eps: float) -> Tensor:
        return KeepsY.apply(x, eps, asks)  # type: ignore[no-any-return, no-untyped-call]

    case = "l2norm fp32 M=5 N=64 eps=1e-05 rows=normal dy=normal layout=contiguous seed=3 weights=none bias=none"
    verdict = judged(l2norm, "again", op="l2norm", case=case)
    assert (verdict.failure is None) == asks
    if verdict.failure is not None:
        assert verdict.failure.output == "dx" and "after y was written to in place" in verdict.failure.message
    else:
        assert verdict.contexts["again"].status == "held"


def test_a_context_for_which_memory_is_missing_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory that was there for the case may be another cell's by then."""

    def full(*_: object, **__: object) -> None:
        raise normcheck.UnsupportedCase("needs 1.3 GiB of shared memory, and there are 1.3 GiB")

    monkeypatch.setattr(attempt, "tried", full)
    verdict = judged(kernels.RIGHT["right"], "inference")
    how = verdict.contexts["inference"]
    assert (verdict.status, how.status) == ("pass", "not tried") and "shared memory" in how.why


PREVENTS = kernels.RIGHT["frees_itself"]  # a second backward, which nobody owes who has not promised it


def test_a_promised_context_that_the_kernel_prevents_is_a_finding() -> None:
    (asked,) = normcheck.verify(PREVENTS, op="rmsnorm", case=CASE, require_context=("again",))
    promised = Implementation(name="mine", op="rmsnorm", forward=PREVENTS, contexts=("again",))
    (declared,) = normcheck.verify(promised, case=CASE, context=("again",))
    for found in (asked.failure, declared.failure):
        assert found is not None and (found.kind, found.check) == (CONTEXT, "again")
        assert found.message.startswith("cannot be tried in this context: a second backward")
        assert "require_context=('again',)" in found.reproduce
    assert judged(PREVENTS, "again").status == "pass"


@pytest.mark.slow
def test_a_promised_context_that_this_machine_lacks_makes_a_cell_thin(cli: Cli) -> None:
    within = ("--max-examples", "30", "--context", "inference", "--require-context", "graph")
    done = cli("verify", "--impl", f"{FILE}:right", "--op", "rmsnorm", "--dtype", "fp32", *within)
    assert done.code == 5
    assert "it must hold in the context graph, which was not tried: it takes a GPU" in " ".join(done.out.split())


def test_the_contexts_that_can_be_promised_are_all_of_them() -> None:
    assert tuple(CONTEXTS) == CONTEXT_NAMES
    with pytest.raises(UsageError, match="contexts="):
        normcheck.verify(Implementation(name="mine", op="rmsnorm", forward=PREVENTS, contexts=("graphs",)), case=CASE)
    with pytest.raises(UsageError, match="expected no --no-contexts"):
        normcheck.verify(PREVENTS, op="rmsnorm", contexts=False, require_context=("again",))


def test_a_missing_gradient_of_a_frozen_input_is_found() -> None:
    def nothing_frozen(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        if x.requires_grad != weight.requires_grad:
            x = x.detach()
        return kernels.RIGHT["right"](x, weight, bias, eps=eps)

    found = judged(nothing_frozen, "frozen").failure
    assert found is not None and "dx is missing with a gradient wanted of x alone" in found.message


class FrozenBias(torch.autograd.Function):
    """Wrong: without a gradient of the bias alone it sums over x in place of xhat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            y = torch.nn.functional.layer_norm(leaves[0], dy.shape[-1:], leaves[1], leaves[2], ctx.eps)
        dx, dw, db = torch.autograd.grad(y, leaves, dy)
        if ctx.needs_input_grad[:3] == (True, True, False):
            dw = (dy * ctx.saved_tensors[0]).sum(0)
        return dx, dw, db, None


def test_a_fault_that_shows_if_one_of_three_gradients_is_not_wanted_is_found() -> None:
    def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return FrozenBias.apply(x, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]

    line = "layernorm fp32 M=40 N=33 eps=1e-05 rows=shifted dy=normal layout=contiguous seed=3"
    assert judged(layernorm, op="layernorm", case=line).status == "pass"
    found = judged(layernorm, "frozen", op="layernorm", case=line).failure
    assert found is not None and "dw is outside its bound with a gradient wanted of x and weight" in found.message


class LastLayer(torch.autograd.Function):
    """Right, and wrong in the subclass: if nobody uses the sum, there is no gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        y, rstd = kernels.plain(total, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)
        return y, total

    @classmethod
    def without(cls, dx: Tensor) -> Tensor:
        return dx

    @classmethod
    def backward(cls, ctx: Any, dy: Tensor, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dw = kernels.gradients(dy, *ctx.saved_tensors)
        dx = cls.without(dx) if dsum is None else dx + dsum
        return dx, dx, dw, None


class LosesLastLayer(LastLayer):
    @classmethod
    def without(cls, dx: Tensor) -> Tensor:
        return torch.zeros_like(dx)


@pytest.mark.parametrize(("of", "is_found"), [(LastLayer, False), (LosesLastLayer, True)])
def test_a_sum_that_nobody_uses_has_no_gradient(of: type[LastLayer], is_found: bool) -> None:
    def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return of.apply(x, residual, weight, eps)  # type: ignore[no-any-return, no-untyped-call]

    line = "fused_add_rmsnorm fp32 M=40 N=33 eps=1e-05 rows=shifted dy=normal layout=contiguous seed=3 bias=none"
    verdict = judged(fused_add_rmsnorm, "frozen", op="fused_add_rmsnorm", case=line)
    assert (verdict.failure is not None) == is_found, verdict.detail
    if verdict.failure is not None:
        assert "with no gradient of residual_out, as in the last layer" in verdict.failure.message


def test_the_picture_shows_where_the_bits_differ() -> None:
    def first_column(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        y = kernels.RIGHT["right"](x, weight, bias, eps=eps)
        return y if current_thread() is main_thread() else y.index_fill(1, torch.tensor([7]), 5.0)

    found = judged(first_column, "thread").failure
    assert found is not None and found.where is not None
    assert found.where.summary == "only column 7 of 33, in every row"


def test_who_takes_another_way_without_gradients_or_repeats_no_bits_is_held_to_the_bound() -> None:
    def unsteady(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        y = kernels.RIGHT["right"](x, weight, bias, eps=eps)
        usual = torch.is_grad_enabled() and weight.requires_grad and current_thread() is main_thread()
        return y if usual else y * (1 + 2.0**-23)

    declared = Implementation(name="unsteady", op="rmsnorm", forward=unsteady, deterministic=False)
    for context in ("inference", "frozen"):
        assert judged(declared, context).contexts[context].status == "held"
        assert judged(unsteady, context).contexts[context].status == "held"
    assert judged(declared, "thread").contexts["thread"].status == "held"
    assert judged(unsteady, "thread").status == "fail"


def test_one_of_several_graphs_of_torch_compile_need_not_have_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        y = kernels.RIGHT["right"](x, weight, bias, eps=eps)
        return y if current_thread() is main_thread() else y * (1 + 2.0**-23)

    assert judged(other, "thread").status == "fail"
    monkeypatch.setattr(compiled, "graphs", lambda: 2)
    assert judged(other, "thread").contexts["thread"].status == "held"


def test_a_backward_of_its_own_has_no_graph_and_nothing_frozen() -> None:
    verdict = judged(Implementation(name="own", op="rmsnorm", forward=_forward, backward=_backward), "again", "frozen")
    assert verdict.contexts["again"].status == "held"
    assert verdict.contexts["frozen"].status == "not tried" and "of its own" in verdict.contexts["frozen"].why


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> dict[str, Tensor]:
    y, rstd = kernels.plain(x, weight, eps)
    return {"y": y if bias is None else y + bias, "rstd": rstd}


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, saved: dict[str, Tensor], *, eps: float
) -> dict[str, Tensor]:
    dx, dw = kernels.gradients(dy, x, weight, saved["rstd"].reshape(-1, 1))
    return {"dx": dx, "dw": dw} | ({} if bias is None else {"db": dy.sum(0)})


def test_a_gpu_s_context_on_a_cpu_is_not_tried_and_says_why() -> None:
    verdict = judged(kernels.RIGHT["right"], "graph")
    assert verdict.status == "pass" and verdict.contexts["graph"].why == "it takes a GPU"


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["torch", "torch_native"])
def test_kernels_of_torch_are_right_in_every_context(cli: Cli, impl: str) -> None:
    case = CASE.replace("fp32", "bf16").replace("M=40", "M=300").replace("N=33", "N=768")
    contexts = [word for name in contexts_on("cpu") if name != "autocast" for word in ("--context", name)]
    done = cli("repro", impl, *contexts, case, "--device", "cpu", "--no-isolation")
    assert done.code == 0, done.out
    assert "context thread: held" in done.out


@pytest.mark.slow
def test_a_kernel_that_hangs_in_a_second_thread_is_found_in_its_own_process(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli("repro", f"{FILE}:hangs", "--context", "thread", CASE, "--device", "cpu", "--timeout", "1")
    assert done.code == 1 and "is wrong in another context (thread)" in done.out
    assert "no result after timeout=1 s" in done.out


@pytest.mark.slow
def test_a_result_that_is_written_again_later_is_found_in_its_own_process(cli: Cli) -> None:
    assert cli("repro", f"{FILE}:late", CASE, "--device", "cpu").code == 0
    done = cli("repro", f"{FILE}:late", "--context", "again", CASE, "--device", "cpu")
    assert done.code == 1 and "y is wrong in another context (again)" in done.out


@pytest.mark.slow
def test_torch_compile_is_tried_with_sizes_that_change_if_somebody_asks(cli: Cli) -> None:
    """In its own process; g++ takes longest, so no limit of time."""
    within = ("--context", "compile", CASE, "--device", "cpu", "--timeout", "600")
    done = cli("repro", f"{FILE}:plain_when_compiled", *within)
    assert done.code == 0 and "context compile: held" in done.out, done.out


@pytest.mark.slow
def test_what_is_wrong_inside_torch_compile_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch traces is the subject here, not what g++ makes of it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    kernel, context, output = kernels.WRONG["another_when_compiled"]
    assert judged(kernel).status == "pass"
    found = judged(kernel, context).failure
    assert found is not None and (found.kind, found.check, found.output) == (CONTEXT, "compile", output)
    assert "y is outside its bound inside torch.compile" in found.message


@pytest.mark.slow
def test_what_a_context_compiles_leaves_no_trace_in_the_counters_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of the fixture, which hides this process's own graphs
    before = compiled.graphs(), compiled.eager_calls()
    with compiled.uncounted():
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert compiled.graphs() > before[0]
    assert (compiled.graphs(), compiled.eager_calls()) == before


def test_other_inputs_of_the_shape_are_judged_before_they_stand_for_what_is_right() -> None:
    def right_for_one(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        y = kernels.RIGHT["right"](x, weight, bias, eps=eps)
        return y if float(x[0, 0]) == first else y * 2

    case = parsed(CASE)
    first = float(make(case, OPS[case.op], "cpu").x[0, 0])
    found = judged(right_for_one, "inference").failure
    assert found is not None and "outside its bound with other inputs of its shape" in found.message


def test_a_class_gets_the_weight_of_each_call_in_one_module_and_no_two_threads_at_once(
    cli: Cli, kernel_file: KernelFile
) -> None:
    source = (
        "import torch\nclass Norm(torch.nn.RMSNorm):\n    def __init__(self, n, eps):\n        super().__init__(n, eps)"
    )
    done = cli(
        "repro", f"{kernel_file(source)}:Norm", *("--context", "thread"), CASE, "--device", "cpu", "--no-isolation"
    )
    assert done.code == 0, done.out
    assert "context thread: not tried; normcheck puts the weight of each call into one module" in " ".join(
        done.out.split()
    )


def by_product(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
    """Right: the mean of squares is a product of matrices, whose bits hang on the number of threads."""
    squares = x.float().square() @ torch.ones(x.shape[1], 1) / x.shape[1]
    return (x.float() * torch.rsqrt(squares + eps) * weight.float()).to(x.dtype)


def test_a_new_thread_has_the_number_of_torch_threads_of_the_main_one() -> None:
    """A product of matrices has other bits with other threads, of which a new one has as many as there are cores."""
    line = "rmsnorm fp32 M=131 N=64 eps=1e-05 rows=normal dy=normal layout=contiguous seed=3 bias=none"
    for context in ("thread", "threads"):
        verdict = judged(by_product, context, case=line)
        assert verdict.status == "pass", verdict.failure


def test_what_a_kernel_keeps_with_a_parameter_is_found_once_the_weights_are_others() -> None:
    """Of a plain tensor it keeps nothing, and a parameter is one as of a module."""

    def converted(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        wide = weight.float()
        if isinstance(weight, torch.nn.Parameter):
            wide = vars(weight).setdefault("wide", weight.detach().double().float())
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * wide).to(x.dtype)

    found = judged(converted, "inference").failure
    assert found is not None and (found.check, found.output) == ("inference", "y")
