"""The compiled norms. On a CPU each variant costs seconds of C++."""

from __future__ import annotations

import pytest
import torch

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.check import Result, check
from normcheck.impls import torch_compile
from normcheck.impls.torch_compile import IMPLEMENTATIONS
from normcheck.runner.call import poisoned_memory

BY_OP = {i.op: i for i in IMPLEMENTATIONS}
CLIPS = (("lower_clip", -0.5), ("upper_clip", 2.0))


def checked(op: str, dtype: str, device: str, depth: Depth = Depth.ROWS, **changes: object) -> Result:
    options = CLIPS if op == "layernorm_relu_bitmask" else ()
    case = Case(op=op, dtype=dtype, **{"M": 6, "N": 33, "options": options, **changes})
    with poisoned_memory():
        return check(BY_OP[op], OPS[op], case, device, Ask(depth))


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


needs_compiler = pytest.mark.skipif(
    torch_compile.unavailable("cpu") is not None, reason=str(torch_compile.unavailable("cpu"))
)


@pytest.fixture
def without_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo and autograd's part of a compilation, and no C++: the graph's operations are called one by one."""
    compiled = torch.compile(torch_compile._norm, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(torch_compile, "_compiled", lambda: compiled)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in BY_OP if op != "layernorm"])  # of which the clamped one has each term
def test_an_op_is_compiled_once_for_all_shapes_and_eps(op: str, request: pytest.FixtureRequest) -> None:
    """The clamped one, which has the most outputs, by C++ as well."""
    if op != "layernorm_relu_bitmask":
        request.getfixturevalue("without_cpp")
    before = graphs()
    for shape in ({}, {"M": 17, "N": 100, "eps": 1e-3}, {"M": 3, "N": 1000, "eps": 0.5, "rows": "shifted"}):
        result = checked(op, "bf16", "cpu", Depth.MEMORY, **shape)
        assert not result.failed, (result.wrong, result.problems)
        assert {c.output for c in result.checked} >= {"y", "rstd", "dx", "dw", "db"}
        assert set(result.not_returned) == set()
    assert graphs() - before == 1


@needs_compiler
@pytest.mark.usefixtures("without_cpp")
@pytest.mark.slow
def test_its_graph_serves_one_backward() -> None:
    """Why nobody may keep it: what the forward saved is given back."""
    x, weight, dy = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True), torch.randn(4, 16)
    y = BY_OP["rmsnorm"].forward(x, weight, None, eps=1e-5)["y"]
    torch.autograd.grad(y, (x, weight), dy)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, (x, weight), dy)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = "torch.compile needs a C++ compiler on a CPU: no-such-compiler is not there; install it or set CXX"
    assert {i.unavailable("cpu") for i in IMPLEMENTATIONS} == {said}


def test_a_gpu_needs_triton_and_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert torch_compile.unavailable("cuda").startswith("TRITON_INTERPRET is set")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert torch_compile.unavailable("cuda") == "torch.compile needs triton on a GPU, which is not installed"


def test_it_is_in_the_default_set_of_a_gpu() -> None:
    assert {i.by_default for i in IMPLEMENTATIONS} == {("cuda",)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("op", BY_OP)
def test_it_passes_on_a_gpu(op: str, dtype: str) -> None:
    for shape in ({}, {"M": 4096, "N": 1000, "rows": "shifted"}):
        result = checked(op, dtype, "cuda", **shape)
        assert not result.failed, (result.wrong, result.problems)
