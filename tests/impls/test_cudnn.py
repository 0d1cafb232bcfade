"""The cuDNN implementation: without a GPU what it says and how it keeps plans; with one, its numbers against fp64."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from normcheck.cases.case import Case
from normcheck.cases.claims import claims_of, unclaimed
from normcheck.cases.dtypes import FORMATS
from normcheck.cases.ops import OPS
from normcheck.cases.strategies import choices
from normcheck.errors import UnsupportedCase
from normcheck.impls import _cudnn_graphs as graphs
from normcheck.impls import _cudnn_shelf
from normcheck.impls import cudnn as adapter
from normcheck.impls._cudnn_shelf import StoredPlan, shelf
from normcheck.impls.cudnn import IMPLEMENTATIONS
from normcheck.oracle.tolerances import Model, declared_model
from tests.some import some

BY_OP = {implementation.op: implementation for implementation in IMPLEMENTATIONS}
BITMASK = "layernorm_relu_bitmask"
CLIPS = {"lower_clip": -0.25, "upper_clip": 1.5}
CLIP_OPTIONS = tuple(sorted(CLIPS.items()))
DTYPES = tuple(name for name in FORMATS if name != "fp64")


def key(**changes: object) -> graphs.GraphKey:
    plain = {"op": "rmsnorm", "direction": "forward", "M": 4, "N": 64, "dtype": "fp16", "weight_dtype": "fp16"}
    return graphs.GraphKey(**{**plain, "bias": True, **changes})


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
    monkeypatch.setattr(graphs, "frontend_module", fail)
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
    monkeypatch.setattr(graphs, "frontend_module", lambda: SimpleNamespace(backend_version=lambda: version))
    assert BY_OP[op].unavailable("cuda") == expected


def test_a_reason_is_one_short_printable_line() -> None:
    assert graphs.reason("[x] Error:\n\tno engine\n", 91900) == "cuDNN 9.19.0 refuses the graph: [x] Error: no engine"
    assert graphs.reason("a\x1b[31mb", 91900).endswith(r": a\x1b[31mb")
    assert graphs.reason("", 91900) == "cuDNN 9.19.0 refuses the graph: no reason given"
    assert len(graphs.reason("word " * 200, 91900)) == 300


@pytest.mark.parametrize("op", BY_OP)
def test_a_case_and_the_call_that_it_becomes_have_one_key(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Otherwise supports() would answer for another plan than the one that runs."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    options = CLIPS if op == BITMASK else {}
    case = Case(op=op, dtype="bf16", M=4, N=48, weight_dtype="fp32", options=tuple(options.items()))
    x, weight = torch.empty(4, 48, dtype=torch.bfloat16), torch.empty(48)
    called = adapter._key_of(op, x, weight, weight, clips=adapter._clips(options))
    assert adapter._key_of_case(case) == called
    assert called.clips == (tuple(CLIPS.values()) if options else None)


def wide_rows(M: int) -> torch.Tensor:
    """(M, 64) with 6 elements of somebody else behind each row."""
    return torch.zeros(M, 70)[:, :64]


@pytest.mark.parametrize("op", BY_OP)
def test_rows_with_gaps_are_refused_before_a_plan_is_built(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """cuDNN takes a LayerNorm with a row stride, and computes something else."""
    monkeypatch.setattr(graphs, "plan", lambda _: pytest.fail("a plan was asked for"))
    assert not BY_OP[op].strided
    options = CLIPS if op == BITMASK else {}
    reason = "the rows of x are 70 elements apart; the norms of cuDNN take packed rows only"
    with pytest.raises(UnsupportedCase, match=f"^{reason}$"):
        BY_OP[op].forward(wide_rows(4), torch.ones(64), torch.ones(64), eps=1e-5, **options)
    with pytest.raises(UnsupportedCase, match=r"^the rows of dy are 70 elements apart"):
        BY_OP[op].backward(wide_rows(4), torch.zeros(4, 64), torch.ones(64), torch.ones(64), {}, eps=1e-5, **options)


def test_the_stride_of_a_single_row_means_nothing() -> None:
    adapter._require_plain(x=wide_rows(1))  # it raises nothing
    with pytest.raises(UnsupportedCase):
        adapter._require_plain(x=wide_rows(2))


@pytest.mark.parametrize("op", BY_OP)
def test_the_plans_of_a_sweep_are_kept(op: str) -> None:
    """Every shape, dtype, weight dtype and pair of limits that a sweep of one op may draw, both directions."""
    plans = 0
    for dtype in DTYPES:
        drawn = choices(claims_of(OPS[op], BY_OP[op], dtype))
        weights, clips = (
            next(values for values in drawn.kinds if axis in values[0]) for axis in ("weights", "options")
        )
        described = len(drawn.shapes) * len({(own["weight_dtype"], own["bias"]) for own in weights})
        plans += described * len(clips) + described
    assert plans <= graphs.MAX_PLANS


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
    monkeypatch.setattr(graphs, "frontend_module", lambda: library)
    monkeypatch.setattr(graphs, "_handle", lambda _: "handle")
    monkeypatch.setattr(graphs, "forward_graph", lambda *_: {})
    monkeypatch.setattr(graphs, "backward_graph", lambda *_: {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())


@pytest.mark.usefixtures("fresh_plans")
def test_a_plan_is_built_once_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    install(monkeypatch, frontend(built))
    first = graphs.plan(key())
    assert isinstance(first, graphs.GraphPlan)
    assert first.workspace_bytes == 7
    assert graphs.plan(key()) is first
    others = ({"M": 5}, {"N": 65}, {"dtype": "bf16"}, {"weight_dtype": "fp32"}, {"bias": False})
    others += ({"direction": "backward"}, {"clips": (0.0, 6.0)}, {"clips": (0.0, 5.0)}, {"device": 1})
    for change in (*others, {"op": "layernorm"}):
        assert graphs.plan(key(**change)) is not first
    assert len(built) == 11
    assert graphs.plan.cache_info().maxsize == graphs.MAX_PLANS


def storing(built: list[str], taken: list[object], error: Exception | None = None) -> SimpleNamespace:
    """A frontend whose graphs are stored as three bytes; ``taken`` collects what is made a graph again."""

    def deserialize(*given: object) -> None:
        taken.append(given)
        if error is not None:
            raise error

    def pygraph(*, name: str, **_: object) -> SimpleNamespace:
        of = {"build": lambda _: built.append(name), "get_workspace_size": lambda: 7}
        return SimpleNamespace(**of, serialize=lambda: [1, 2, 255], deserialize=deserialize)

    return SimpleNamespace(**{**vars(frontend(built)), "pygraph": pygraph})


@pytest.mark.usefixtures("fresh_plans")
def test_a_plan_of_another_process_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    taken: list[object] = []
    install(monkeypatch, storing(built, taken))
    tensors = {name: SimpleNamespace(get_uid=lambda number=number: number) for number, name in enumerate(("x", "y"), 5)}
    monkeypatch.setattr(graphs, "forward_graph", lambda *_: tensors)
    with shelf():
        graphs.plan(key())
        graphs.plan.cache_clear()  # as in another process
        loaded = graphs.plan(key())
        assert isinstance(loaded, graphs.GraphPlan)
        assert (built, taken) == (["rmsnorm"], [("handle", [1, 2, 255])])
        assert (loaded.tensors, loaded.outputs, loaded.workspace_bytes) == ({"x": 5, "y": 6}, ("y", "rstd"), 7)
        assert graphs.plan(key()) is loaded
        graphs.plan(key(N=65))
        assert built == ["rmsnorm"] * 2
    graphs.plan.cache_clear()
    graphs.plan(key())
    assert built == ["rmsnorm"] * 3


@pytest.mark.usefixtures("fresh_plans")
def test_a_stored_plan_that_cudnn_does_not_take_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    install(monkeypatch, storing(built, [], RuntimeError("another version")))
    with shelf():
        _cudnn_shelf.keep(repr(key()), StoredPlan({}, b""))
        assert isinstance(graphs.plan(key()), graphs.GraphPlan)
    assert built == ["rmsnorm"]


@pytest.mark.usefixtures("fresh_plans")
def test_a_refusal_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, frontend([], Refused("no engine")))
    with shelf():
        assert isinstance(graphs.plan(key()), graphs.Refusal)
        assert _cudnn_shelf.kept(repr(key())) is None


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
@pytest.mark.parametrize("status", ["NOT_SUPPORTED", "NOT_SUPPORTED_DATA_TYPE", "NOT_SUPPORTED_LAYOUT"])
def test_a_runtime_error_with_such_a_status_is_a_refusal(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    """What the frontend raised for the clamped op on an H200, backend 9.19."""
    message = f"CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: cudnnFinalize Failed cudnn_status: CUDNN_STATUS_{status}"
    install(monkeypatch, frontend([], RuntimeError(message)))
    assert graphs.plan(key()) == graphs.Refusal(f"cuDNN 9.19.0 refuses the graph: {message}")


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("message", ["the device is gone", "code: CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH"])
def test_any_other_error_of_a_build_is_raised(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    install(monkeypatch, frontend([], RuntimeError(message)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError, match=message):
        BY_OP["rmsnorm"].supports(Case(op="rmsnorm", dtype="fp16", M=4, N=64))


def test_what_no_graph_has_a_form_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    empty = Case(op="layernorm", dtype="fp16", M=0, N=64)
    assert BY_OP["layernorm"].supports(empty) == "M=0: cuDNN has no tensors without elements"


@pytest.mark.parametrize("op", BY_OP)
def test_only_an_rmsnorm_takes_a_missing_bias(op: str) -> None:
    own, case = BY_OP[op], Case(op=op, dtype="fp16", M=4, N=64, bias=False)
    reason = "" if op == "rmsnorm" else "bias=none: biases=(True,) is declared"
    assert unclaimed(OPS[op], own, case) == reason
    assert False in claims_of(OPS[op], own, "fp16").biases or reason


def test_model_declares_where_the_saved_mean_differs() -> None:
    def model(op: str, N: int):
        return BY_OP[op].model(Case(op=op, dtype="fp32", M=2, N=N))

    assert model("layernorm", 768) == model("layernorm_zero_centered", 64) == {}
    assert model("rmsnorm", 1000) == {}
    reason = "at N not a multiple of 16 y comes from x * a + c with a mean that is not bit for bit the saved one"
    folded = {"y_given_stats": False, "reason": reason}
    assert model("layernorm", 1000) == model("layernorm_zero_centered", 7) == folded
    assert model(BITMASK, 768) == {"bitmask_compare": "rounded"}
    assert model(BITMASK, 40) == {"bitmask_compare": "rounded", **folded}
    assert declared_model(Model(), model(BITMASK, 40), "cudnn").reason == reason


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", BY_OP)
def test_every_tensor_outside_a_graph_has_a_name(op: str, direction: str) -> None:
    """The installed frontend takes the nodes; what it would ask for at execution is what the adapter fills."""
    cudnn = pytest.importorskip("cudnn")
    for bias in some(BY_OP[op].biases):
        clips = (0.0, 6.0) if op == BITMASK and direction == "forward" else None
        described = key(op=op, direction=direction, bias=bias, clips=clips)
        graph = cudnn.pygraph(intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT)
        build = graphs.forward_graph if direction == "forward" else graphs.backward_graph
        tensors, outputs = build(graph, described), graphs.output_names(described)
        outside = [t for t in graph._tensor_by_uid.values() if not t.is_virtual]
        assert {id(t) for t in outside} == {id(t) for t in tensors.values()}
        for name in ("x", "y") if direction == "forward" else ("x", "dy", "dx"):
            assert tuple(tensors[name].get_stride()[:2]) == (64, 1)
        assert set(outputs) <= set(tensors)
        assert ("db" in outputs) == (direction == "backward" and bias)


# ---- on a GPU ----


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


def inputs(M: int, N: int, dtype: str):
    """x, weight, bias, dy on the GPU."""
    generator = torch.Generator().manual_seed(M * 7919 + N)
    draw = [torch.randn(shape, generator=generator) for shape in ((M, N), (N,), (N,), (M, N))]
    return tuple(t.to("cuda", graphs.torch_dtype(dtype)) for t in draw)


def unpacked(bitmask: torch.Tensor) -> torch.Tensor:
    return ((bitmask[..., None] >> torch.arange(8, device="cuda")) & 1).flatten(1).bool()


def close(name: str, actual: torch.Tensor, expected: torch.Tensor, dtype: str, extra: float = 0.0) -> None:
    u = FORMATS["fp32" if name in ("mean", "rstd") else dtype].u
    # Relative: the one rounding of the store; absolute: fp32 sums of at most 4096 numbers of order 1.
    torch.testing.assert_close(actual.double(), expected, rtol=1.01 * u, atol=extra + (2e-5 if name != "dw" else 2e-4))


def cancelled(op: str, weight: torch.Tensor, dy: torch.Tensor, rstd: torch.Tensor) -> float:
    """What rounding may leave in dx at N=1: there it is rstd * (dy * g - mean(dy * g)), the difference of two equal
    numbers, and rstd is 1/sqrt(eps) = 316 because a row of one element has no variance.
    """
    g = weight.double() + (op == "layernorm_zero_centered")
    return float((1e-6 * (dy.double() * g).abs() * rstd[:, None]).max())


def check(op: str, M: int, N: int, dtype: str) -> None:
    x, weight, bias, dy = inputs(M, N, dtype)
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
    extra = {"dx": cancelled(op, weight, dy, expected["rstd"])} if N == 1 else {}
    for name in ("dx", "dw", "db"):
        close(name, gradients[name], expected[name], dtype, extra.get(name, 0.0))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N"), [(1, 1), (3, 7), (17, 1000), (33, 768)])
@pytest.mark.parametrize("op", [op for op in BY_OP if op != BITMASK])
def test_numbers(op: str, M: int, N: int, dtype: str) -> None:
    check(op, M, N, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_numbers_behind_the_clamp() -> None:
    check(BITMASK, 33, 768, "fp32")


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu", "fresh_plans")
@pytest.mark.parametrize("op", BY_OP)
def test_a_plan_of_the_shelf_makes_the_same_bits(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    x, weight, bias, dy = inputs(33, 768, "fp32")
    options = CLIPS if op == BITMASK else {}

    def both() -> dict[str, torch.Tensor]:
        outputs = BY_OP[op].forward(x, weight, bias, eps=1e-5, **options)
        return outputs | BY_OP[op].backward(dy, x, weight, bias, outputs, eps=1e-5, **options)

    with shelf():
        built = both()
        graphs.plan.cache_clear()
        for build in ("forward_graph", "backward_graph"):
            monkeypatch.setattr(graphs, build, lambda *_: pytest.fail("a plan was built again"))
        loaded = both()
    assert loaded.keys() == built.keys() >= {"y", "rstd", "dx", "dw", "db"}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in built.items())


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_backward_that_cudnn_refuses_is_unsupported(dtype: str) -> None:
    """Backend 9.19 has none behind the clamp in half precision; the numbers of the forward are checked by then."""
    with pytest.raises(UnsupportedCase, match=r"^cuDNN [\d.]+ refuses the graph: .*CUDNN_STATUS_NOT_SUPPORTED"):
        check(BITMASK, 33, 768, dtype)


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
