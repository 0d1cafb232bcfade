"""The cuDNN implementation: without a GPU what it says and how it keeps plans; with one, its numbers against fp64."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from normcheck.case import Case
from normcheck.errors import UnsupportedCase
from normcheck.formats import FORMATS
from normcheck.impls import _cudnn_graphs as graphs
from normcheck.impls import cudnn as adapter
from normcheck.impls.cudnn import IMPLEMENTATIONS

BY_OP = {implementation.op: implementation for implementation in IMPLEMENTATIONS}
BITMASK = "layernorm_relu_bitmask"
CLIPS = {"lower_clip": -0.25, "upper_clip": 1.5}
CLIP_OPTIONS = tuple(sorted(CLIPS.items()))


def key(**changes: object) -> graphs.GraphKey:
    plain = {"op": "rmsnorm", "direction": "forward", "M": 4, "N": 64, "dtype": "fp16", "weight_dtype": "fp16"}
    return graphs.GraphKey(**{**plain, "bias": True, "x_row": 64, **changes})


# ---- without a GPU ----


def test_importing_the_adapter_imports_neither_cudnn_nor_torch() -> None:
    code = "import sys, normcheck.impls.cudnn; print(sorted({'torch', 'cudnn'} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout == "[]\n"


@pytest.mark.parametrize("op", BY_OP)
def test_cpu_is_unavailable(op: str) -> None:
    assert BY_OP[op].unavailable("cpu") == "cuDNN needs an NVIDIA GPU"


def test_a_missing_frontend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert BY_OP["rmsnorm"].unavailable("cuda") == "nvidia-cudnn-frontend is not installed"


@pytest.mark.parametrize("error", [ImportError("libcuda is missing"), RuntimeError("no symbol\n cudnnGetVersion")])
def test_a_frontend_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(graphs, "library", fail)
    reason = BY_OP["rmsnorm"].unavailable("cuda")
    assert reason == f"nvidia-cudnn-frontend is installed but does not work: {' '.join(str(error).split())}"


@pytest.mark.parametrize(
    ("op", "version", "expected"),
    [
        ("layernorm", 8905, None),
        ("rmsnorm", 8905, "cuDNN 8.9.5 is installed; rmsnorm needs 9.1.0 or newer"),
        ("rmsnorm", 90100, None),
        ("layernorm_zero_centered", 90900, "cuDNN 9.9.0 is installed; layernorm_zero_centered needs 9.10.0 or newer"),
        (BITMASK, 91299, f"cuDNN 9.12.99 is installed; {BITMASK} needs 9.13.0 or newer"),
        (BITMASK, 91900, None),
    ],
)
def test_an_old_backend_is_named(monkeypatch: pytest.MonkeyPatch, op: str, version: int, expected: str | None) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(graphs, "library", lambda: SimpleNamespace(backend_version=lambda: version))
    assert BY_OP[op].unavailable("cuda") == expected


def test_a_reason_is_one_short_printable_line() -> None:
    assert graphs.reason("[x] Error:\n\tno engine\n", 91900) == "cuDNN 9.19.0 refuses the graph: [x] Error: no engine"
    assert graphs.reason("a\x1b[31mb", 91900).endswith(": a?[31mb")
    assert graphs.reason("", 91900) == "cuDNN 9.19.0 refuses the graph: no reason given"
    assert len(graphs.reason("word " * 200, 91900)) == 300


@pytest.mark.parametrize("layout", ["contiguous", "x_strided", "dy_strided", "strided"])
@pytest.mark.parametrize("M", [1, 4])
@pytest.mark.parametrize("op", BY_OP)
def test_a_case_and_the_call_that_it_becomes_have_one_key(
    monkeypatch: pytest.MonkeyPatch, op: str, M: int, layout: str
) -> None:
    """Otherwise supports() would answer for another plan than the one that runs."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gap = 0 if layout == "contiguous" else 5
    options = CLIPS if op == BITMASK else {}
    case = Case(
        op=op, dtype="bf16", M=M, N=48, layout=layout, gap=gap, weight_dtype="fp32", options=tuple(options.items())
    )
    row = 48 + (gap if layout in ("x_strided", "strided") else 0)
    x = torch.empty(M, row, dtype=torch.bfloat16)[:, :48]
    weight = torch.empty(48)
    called = adapter._key_of(op, x, weight, weight, clips=adapter._clips(options))
    assert adapter._key_of_case(case) == called
    assert called.clips == (tuple(CLIPS.values()) if options else None)


def test_a_backward_is_keyed_by_both_strides_and_not_by_the_limits() -> None:
    x, dy, weight = torch.empty(4, 70)[:, :64], torch.empty(4, 96)[:, :64], torch.empty(64)
    backward = adapter._key_of(BITMASK, x, weight, weight, dy=dy)
    assert (backward.direction, backward.x_row, backward.dy_row, backward.clips) == ("backward", 70, 96, None)


@pytest.fixture
def fresh_plans():
    """No plan of another test, and none of this one afterwards."""
    graphs.plan.cache_clear()
    yield
    graphs.plan.cache_clear()


class Refused(Exception):
    pass


def frontend(built: list[str], error: Exception | None = None) -> SimpleNamespace:
    """A frontend whose graphs have no nodes; ``built`` collects the names of those built."""

    def build(name: str) -> None:
        built.append(name)
        if error is not None:
            raise error

    def pygraph(*, name: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(build=lambda _: build(name), get_workspace_size=lambda: 7)

    return SimpleNamespace(
        pygraph=pygraph,
        data_type=SimpleNamespace(FLOAT="float"),
        heur_mode=SimpleNamespace(A="a", FALLBACK="fallback"),
        backend_version=lambda: 91900,
        cudnnGraphNotSupportedError=Refused,
    )


def install(monkeypatch: pytest.MonkeyPatch, library: SimpleNamespace) -> None:
    monkeypatch.setattr(graphs, "library", lambda: library)
    monkeypatch.setattr(graphs, "_handle", lambda _: "handle")
    monkeypatch.setattr(graphs, "forward_graph", lambda *_: ({}, ("y",)))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())


@pytest.mark.usefixtures("fresh_plans")
def test_a_plan_is_built_once_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    install(monkeypatch, frontend(built))
    first = graphs.plan(key())
    assert isinstance(first, graphs.Plan)
    assert first.workspace_bytes == 7
    assert graphs.plan(key()) is first
    others = ({"M": 5}, {"N": 65}, {"dtype": "bf16"}, {"weight_dtype": "fp32"}, {"bias": False}, {"x_row": 65})
    for change in (*others, {"clips": (0.0, 6.0)}, {"clips": (0.0, 5.0)}, {"device": 1}, {"op": "layernorm"}):
        assert graphs.plan(key(**change)) is not first
    assert len(built) == 11
    assert graphs.plan.cache_info().maxsize == graphs.MAX_PLANS


@pytest.mark.usefixtures("fresh_plans")
def test_a_refusal_is_a_reason_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    install(monkeypatch, frontend(built, Refused("no valid\nengine configs")))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    case = Case(op="rmsnorm", dtype="fp16", M=4, N=64)
    expected = "cuDNN 9.19.0 refuses the graph: no valid engine configs"
    assert BY_OP["rmsnorm"].supports(case) == BY_OP["rmsnorm"].supports(case) == expected
    x, weight = torch.empty(4, 64, dtype=torch.float16), torch.empty(64, dtype=torch.float16)
    with pytest.raises(UnsupportedCase, match="no valid engine configs"):
        BY_OP["rmsnorm"].forward(x, weight, weight, eps=1e-5)
    assert built == ["rmsnorm"]


@pytest.mark.usefixtures("fresh_plans")
def test_any_other_error_of_a_build_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, frontend([], RuntimeError("the device is gone")))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError, match="the device is gone"):
        BY_OP["rmsnorm"].supports(Case(op="rmsnorm", dtype="fp16", M=4, N=64))


def test_what_no_graph_has_a_form_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    empty = Case(op="layernorm", dtype="fp16", M=0, N=64)
    assert BY_OP["layernorm"].supports(empty) == "M=0: cuDNN has no tensors without elements"
    unbiased = Case(op="layernorm", dtype="fp16", M=4, N=64, bias=False)
    assert BY_OP["layernorm"].supports(unbiased) == "bias=none: the LayerNorm of cuDNN takes no missing bias"


def test_model_declares_where_the_saved_mean_differs() -> None:
    def model(op: str, N: int):
        return BY_OP[op].model(Case(op=op, dtype="fp32", M=2, N=N))

    assert model("layernorm", 768) == model("layernorm_zero_centered", 64) == {}
    assert model("rmsnorm", 1000) == {}
    assert model("layernorm", 1000) == model("layernorm_zero_centered", 7) == {"y_given_stats": False}
    assert model(BITMASK, 768) == {"bitmask_compare": "rounded"}
    assert model(BITMASK, 40) == {"bitmask_compare": "rounded", "y_given_stats": False}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", BY_OP)
def test_every_tensor_outside_a_graph_has_a_name(op: str, direction: str) -> None:
    """The installed frontend takes the nodes; what it would ask for at execution is what the adapter fills."""
    cudnn = pytest.importorskip("cudnn")
    for bias in (True, False) if op == "rmsnorm" else (True,):
        clips = (0.0, 6.0) if op == BITMASK and direction == "forward" else None
        described = key(op=op, direction=direction, bias=bias, clips=clips, x_row=72, dy_row=64)
        graph = cudnn.pygraph(intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT)
        build = graphs.forward_graph if direction == "forward" else graphs.backward_graph
        tensors, outputs = build(graph, described)
        outside = [t for t in graph._tensor_by_uid.values() if not t.is_virtual]
        assert {id(t) for t in outside} == {id(t) for t in tensors.values()}
        assert tuple(tensors["x"].get_stride()[:2]) == (72, 1)
        packed = tensors["y" if direction == "forward" else "dx"]
        assert tuple(packed.get_stride()[:2]) == (64, 1)
        assert set(outputs) <= set(tensors)
        assert ("db" in outputs) == (direction == "backward" and bias)


# ---- on a GPU ----

DTYPES = tuple(name for name in FORMATS if name != "fp64")


@pytest.fixture
def on_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    for implementation in IMPLEMENTATIONS:
        reason = implementation.unavailable("cuda")
        if reason is not None:
            pytest.skip(reason)


def exact(op: str, x, weight, bias, dy, eps: float):
    """y before its store, statistics and gradients in fp64, and bits of y as it is stored in the dtype of x."""
    x64, w64, b64 = (t.double().requires_grad_() for t in (x, weight, bias))
    mean = torch.zeros_like(x64[:, :1]) if op == "rmsnorm" else x64.mean(1, keepdim=True)
    rstd = ((x64 - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    z = (x64 - mean) * rstd * (w64 + (op == "layernorm_zero_centered")) + b64
    expected = {"y": z.detach(), "mean": mean.detach().flatten(), "rstd": rstd.detach().flatten()}
    dy = dy.double()
    if op == BITMASK:
        expected["y"] = z.detach().clamp(*CLIPS.values())
        stored = expected["y"].to(x.dtype)
        expected["bitmask"] = (stored > CLIPS["lower_clip"]) & (stored < CLIPS["upper_clip"])
        dy = dy * expected["bitmask"]
    return expected | dict(zip(("dx", "dw", "db"), torch.autograd.grad(z, (x64, w64, b64), dy), strict=True))


def inputs(M: int, N: int, dtype: str, x_gap: int = 0, dy_gap: int = 0):
    """x, weight, bias, dy on the GPU; rows of x and dy with NaN behind them."""
    generator = torch.Generator().manual_seed(M * 7919 + N)
    draw = [torch.randn(shape, generator=generator) for shape in ((M, N), (N,), (N,), (M, N))]
    x, weight, bias, dy = (t.to("cuda", graphs.torch_dtype(dtype)) for t in draw)

    def spaced(rows: torch.Tensor, gap: int) -> torch.Tensor:
        wide = torch.full((M, N + gap), float("nan"), dtype=rows.dtype, device="cuda")
        wide[:, :N] = rows
        return wide[:, :N]

    return spaced(x, x_gap), weight, bias, spaced(dy, dy_gap)


def unpacked(bitmask: torch.Tensor) -> torch.Tensor:
    return ((bitmask[..., None] >> torch.arange(8, device="cuda")) & 1).flatten(1).bool()


def close(name: str, actual: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    u = FORMATS["fp32" if name in ("mean", "rstd") else dtype].u
    # Relative: the one rounding of the store; absolute: fp32 sums of at most 4096 numbers of order 1.
    torch.testing.assert_close(actual.double(), expected, rtol=1.01 * u, atol=2e-5 if name != "dw" else 2e-4)


def check(op: str, M: int, N: int, dtype: str, x_gap: int = 0, dy_gap: int = 0) -> None:
    x, weight, bias, dy = inputs(M, N, dtype, x_gap, dy_gap)
    options = CLIPS if op == BITMASK else {}
    expected = exact(op, x, weight, bias, dy, 1e-5)
    actual = BY_OP[op].forward(x, weight, bias, eps=1e-5, **options)
    for name in set(actual) - {"bitmask"}:
        close(name, actual[name], expected[name], dtype)
    saved = dict(actual)
    if op == BITMASK:
        wrong = unpacked(actual["bitmask"]) != expected["bitmask"]
        assert int(wrong.sum()) <= wrong.numel() * 1e-4
        weights_of_bits = 2 ** torch.arange(8, device="cuda")
        saved["bitmask"] = (expected["bitmask"].view(M, N // 8, 8) * weights_of_bits).sum(2).to(torch.uint8)
    gradients = BY_OP[op].backward(dy, x, weight, bias, saved, eps=1e-5, **options)
    for name in ("dx", "dw", "db"):
        close(name, gradients[name], expected[name], dtype)


def refusal_of(*arguments: object) -> str | None:
    """What cuDNN gave as its reason while these were checked, or None."""
    try:
        check(*arguments)
    except UnsupportedCase as refused:
        return str(refused)
    return None


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N"), [(1, 1), (3, 7), (17, 1000), (33, 768)])
@pytest.mark.parametrize("op", [op for op in BY_OP if op != BITMASK])
def test_numbers(op: str, M: int, N: int, dtype: str) -> None:
    check(op, M, N, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_behind_the_clamp(dtype: str) -> None:
    """The backward may be refused (in fp16 and bf16 it was, by backend 9.19); the forward has been checked by then."""
    refusal = refusal_of(BITMASK, 33, 768, dtype)
    assert refusal is None or (dtype != "fp32" and refusal.startswith("cuDNN "))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_a_bias_may_be_missing() -> None:
    x, weight, bias, dy = inputs(5, 768, "fp32")
    expected = exact("rmsnorm", x, weight, torch.zeros_like(bias), dy, 1e-5)
    actual = BY_OP["rmsnorm"].forward(x, weight, None, eps=1e-5)
    gradients = BY_OP["rmsnorm"].backward(dy, x, weight, None, actual, eps=1e-5)
    close("y", actual["y"], expected["y"], "fp32")
    close("dx", gradients["dx"], expected["dx"], "fp32")
    assert "db" not in gradients


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_weight_in_fp32_beside_half_precision_rows() -> None:
    x, _, _, dy = inputs(5, 768, "bf16")
    _, weight, bias, _ = inputs(5, 768, "fp32")
    expected = exact("layernorm", x, weight, bias, dy, 1e-5)
    actual = BY_OP["layernorm"].forward(x, weight, bias, eps=1e-5)
    gradients = BY_OP["layernorm"].backward(dy, x, weight, bias, actual, eps=1e-5)
    close("y", actual["y"], expected["y"], "bf16")
    close("dw", gradients["dw"], expected["dw"], "fp32")
    assert gradients["dw"].dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("gaps", [(8, 0), (0, 8), (8, 24), (3, 3)], ids=str)
@pytest.mark.parametrize("op", ["layernorm", "rmsnorm"])
def test_strided_rows_are_right_or_refused(op: str, gaps: tuple[int, int]) -> None:
    refusal = refusal_of(op, 33, 768, "fp16", *gaps)
    assert refusal is None or refusal.startswith("cuDNN ")


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_a_refused_graph_gives_a_reason() -> None:
    case = Case(op=BITMASK, dtype="fp32", M=3, N=7, options=CLIP_OPTIONS)
    reason = BY_OP[BITMASK].supports(case)
    assert reason is not None
    assert reason.startswith("cuDNN ")
    assert "\n" not in reason
    x, weight, bias, _ = inputs(3, 7, "fp32")
    with pytest.raises(UnsupportedCase) as refused:
        BY_OP[BITMASK].forward(x, weight, bias, eps=1e-5, **CLIPS)
    assert str(refused.value) == reason


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_bits_are_packed_least_significant_first() -> None:
    """With weight 0 y is the bias: element 0 and element 11 pass, the others are at a limit, which is no pass."""
    x, weight, bias, _ = inputs(3, 768, "fp32")
    bias.fill_(CLIPS["upper_clip"])
    bias[0], bias[11], bias[12] = 0.5, 1.0, CLIPS["lower_clip"]
    bitmask = BY_OP[BITMASK].forward(x, weight * 0, bias, eps=1e-5, **CLIPS)["bitmask"]
    assert bitmask.dtype == torch.uint8
    assert bitmask.shape == (3, 96)
    assert bitmask.tolist() == [[1, 8] + [0] * 94] * 3
