"""The cuDNN implementations on a backend of this file's own, and the wrapper's on a GPU.

The backend computes each node in fp64 on a CPU from what the installed frontend has recorded: it shows which tensor the
adapter hands over for which input and output, not what cuDNN makes of them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from normcheck.errors import UnsupportedCase
from normcheck.impls import _cudnn_graphs as graphs
from normcheck.impls import _cudnn_wrapper as wrapper
from normcheck.impls.cudnn_graph import IMPLEMENTATIONS
from normcheck.impls.discovery import implementations
from normcheck.oracle import bitmask
from tests.impls.test_cudnn import BITMASK, CLIPS, DTYPES, exact
from tests.impls.test_cudnn import BY_OP as PYGRAPH

BY_OP = {implementation.op: implementation for implementation in IMPLEMENTATIONS}
NODES = ("layernorm", "rmsnorm", "layernorm_backward", "rmsnorm_backward")
NODES += ("add", "mul", "relu", "cmp_gt", "cmp_lt", "logical_and")


def test_importing_the_adapter_imports_neither_cudnn_nor_torch() -> None:
    code = "import sys, normcheck.impls.cudnn_graph; print(sorted({'torch', 'cudnn'} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout == "[]\n"


def test_what_is_declared_is_what_cudnn_declares() -> None:
    for op, ours in BY_OP.items():
        theirs = PYGRAPH[op]
        assert (ours.model, ours.shapes, ours.strided) == (theirs.model, theirs.shapes, theirs.strided)
        assert ours.by_default == (() if op == "layernorm_relu_bitmask" else ("cuda",))
    assert set(BY_OP) == set(PYGRAPH)


@pytest.mark.parametrize(
    ("op", "version", "oldest"),
    [("rmsnorm", 91199, "9.12.0"), (BITMASK, 91299, "9.13.0"), ("rmsnorm", 91200, None), (BITMASK, 91300, None)],
)
def test_the_wrapper_asks_for_more(monkeypatch: pytest.MonkeyPatch, op: str, version: int, oldest: str | None) -> None:
    cudnn = pytest.importorskip("cudnn")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cudnn, "backend_version", lambda: version)
    installed = graphs.version_text(version)
    expected = None if oldest is None else f"cuDNN {installed} is installed; {op} needs {oldest} or newer"
    assert BY_OP[op].unavailable("cuda") == expected


# ---- on a backend of our own ----


def computed(node: str, given: dict[str, Any], outputs: int) -> tuple[torch.Tensor, ...]:
    """What a node gives, in fp64. ``given``: argument -> value."""
    if node in ("add", "mul"):
        a, b = given["a"], given["b"]
        return ((a + b if node == "add" else a * b),)
    if node == "relu":
        return (given["input"].clamp(given["lower_clip"], given["upper_clip"]),)
    if node in ("cmp_gt", "cmp_lt"):
        gt = node == "cmp_gt"
        return ((given["input"] > given["comparison"] if gt else given["input"] < given["comparison"]).double(),)
    if node == "logical_and":
        return (given["a"] * given["b"],)
    x, g = given["input"], given["scale"].reshape(-1)
    if not node.endswith("backward"):
        mean = x.mean(1, keepdim=True) if node == "layernorm" else torch.zeros_like(x[:, :1])
        rstd = ((x - mean).square().mean(1, keepdim=True) + given["epsilon"]).rsqrt()
        y = (x - mean) * rstd * g + (0 if given["bias"] is None else given["bias"])
        return (y, rstd) if node == "rmsnorm" else (y, mean, rstd)
    mean = given["mean"].reshape(-1, 1) if node == "layernorm_backward" else 0
    rstd, dy = given["inv_variance"].reshape(-1, 1), given["grad"]
    xhat, wdy = (x - mean) * rstd, dy * g
    c2 = wdy.mean(1, keepdim=True) if node == "layernorm_backward" else 0
    dx = (wdy - xhat * (xhat * wdy).mean(1, keepdim=True) - c2) * rstd
    return (dx, (dy * xhat).sum(0), dy.sum(0))[:outputs]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The installed frontend on a CPU: its graphs are built as ever, planned at once, and executed by ``computed``."""
    cudnn = pytest.importorskip("cudnn")
    recorded: dict[int, list[tuple[str, dict[str, Any], tuple[Any, ...]]]] = {}

    def recording(name: str) -> Any:
        original = getattr(cudnn.pygraph, name)

        def node(graph: Any, **given: Any) -> Any:
            result = original(graph, **given)
            made = tuple(result) if isinstance(result, (tuple, list)) else (result,)
            recorded.setdefault(id(graph), []).append((name, given, made))
            return result

        return node

    def execute(graph: Any, pack: dict[Any, torch.Tensor], workspace: torch.Tensor, handle: object) -> None:
        buffers = {getattr(tensor, "uid", tensor): t for tensor, t in pack.items()}
        made: dict[int, torch.Tensor] = {}

        def value(given: Any) -> Any:
            if not isinstance(given, cudnn.Tensor):
                return given
            if given.get_uid() in made:
                return made[given.get_uid()]
            t, (rows, columns) = buffers[given.get_uid()], given.get_dim()[:2]
            if given.get_data_type() == cudnn.data_type.BOOLEAN:
                return bitmask.unpack(t.reshape(rows, -1), columns).double()
            return t.reshape(rows, columns).double()

        for name, given, results in recorded[id(graph)]:
            arguments = {key: value(g) for key, g in given.items()}
            for tensor, t in zip(results, computed(name, arguments, len(results)), strict=False):
                if tensor is None:  # db where there is none
                    continue
                made[tensor.get_uid()] = t
                if tensor.get_uid() in buffers:
                    buffer = buffers[tensor.get_uid()]
                    packed = buffer.dtype == torch.uint8
                    buffer.copy_((bitmask.pack(t.bool()) if packed else t).reshape(buffer.shape))

    for name in NODES:
        monkeypatch.setattr(cudnn.pygraph, name, recording(name))
    for name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
        monkeypatch.setattr(cudnn.pygraph, name, lambda *_: None)
    monkeypatch.setattr(cudnn.pygraph, "build", lambda *_: None)
    monkeypatch.setattr(cudnn.pygraph, "get_workspace_size", lambda _: 7)
    monkeypatch.setattr(cudnn.pygraph, "get_execution_plan_count", lambda _: 1)
    monkeypatch.setattr(cudnn.pygraph, "execute", execute)
    monkeypatch.setattr(cudnn, "backend_version", lambda: 91900)
    monkeypatch.setattr(graphs, "handle_on_stream", lambda _: None)
    monkeypatch.setattr(graphs, "_handle", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    for name in ("empty", "empty_strided"):
        original = getattr(torch, name)
        here = lambda *a, original=original, device="cpu", **k: original(*a, device="cpu", **k)  # noqa: E731
        monkeypatch.setattr(torch, name, here)
    graphs.plan.cache_clear()
    wrapper.plan.cache_clear()
    yield recorded
    graphs.plan.cache_clear()
    wrapper.plan.cache_clear()


def inputs(M: int, N: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in ((M, N), (N,), (N,), (M, N)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op", BY_OP)
@pytest.mark.parametrize("name", ["cudnn", "cudnn_graph"])
@pytest.mark.usefixtures("backend")
def test_every_tensor_arrives_where_it_belongs(name: str, op: str, bias: bool) -> None:
    implementation = next(i for i in implementations()[name] if i.op == op)
    if bias not in implementation.biases:
        pytest.skip("cuDNN's LayerNorm takes no missing bias")
    x, weight, b, dy = inputs(5, 24, "cpu")
    given = b if bias else None
    options = CLIPS if op == BITMASK else {}
    outputs = implementation.forward(x, weight, given, eps=1e-3, **options)
    expected = exact(op, x, weight, b if bias else torch.zeros_like(b), dy, 1e-3)
    if op == BITMASK:
        assert torch.equal(bitmask.unpack(outputs["bitmask"], 24), expected["bitmask"])
    gradients = implementation.backward(dy, x, weight, given, outputs, eps=1e-3, **options)
    assert set(gradients) == ({"dx", "dw", "db"} if bias else {"dx", "dw"})
    for key, tensor in {**outputs, **gradients}.items():
        if key != "bitmask":
            assert tensor.shape == (x.shape if key in ("y", "dx") else expected[key].shape)
            torch.testing.assert_close(tensor.double(), expected[key], rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.usefixtures("backend")
def test_a_mistaken_name_shows_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """mean and rstd of a backward have the same form: swapped, nothing but the numbers says so."""
    right = wrapper.input_names

    def swapped(key: graphs.GraphKey) -> dict[str, str]:
        named = right(key)
        return {**named, "mean": named["rstd"], "rstd": named["mean"]} if key.direction == "backward" else named

    monkeypatch.setattr(wrapper, "input_names", swapped)
    with pytest.raises(AssertionError, match="dx"):
        test_every_tensor_arrives_where_it_belongs("cudnn_graph", "layernorm", bias=True)


@pytest.mark.usefixtures("backend")
def test_a_refusal_is_a_reason_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = graphs.frontend_module()
    asked = []

    def refuse(*_: object) -> None:
        asked.append(1)
        raise cudnn.cudnnGraphNotSupportedError("no valid\nengine configs")

    monkeypatch.setattr(cudnn.pygraph, "check_support", refuse)
    x, weight, b, _ = inputs(5, 24, "cpu")
    for _ in range(2):
        with pytest.raises(UnsupportedCase, match=r"^cuDNN 9\.19\.0 refuses the graph: no valid engine configs$"):
            BY_OP["rmsnorm"].forward(x, weight, b, eps=1e-3)
    assert asked == [1]


@pytest.mark.usefixtures("backend")
def test_any_other_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(graphs.frontend_module().pygraph, "check_support", fail)
    x, weight, b, _ = inputs(5, 24, "cpu")
    with pytest.raises(RuntimeError, match="the device is gone"):
        BY_OP["rmsnorm"].forward(x, weight, b, eps=1e-3)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", BY_OP)
def test_it_gives_the_bits_that_cudnn_gives(op: str, dtype: str) -> None:
    """The same graph of the same backend: whatever differs is the wrapper's."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    reason = BY_OP[op].unavailable("cuda")
    if reason is not None:
        pytest.skip(reason)
    x, weight, b, dy = inputs(33, 768, "cuda", graphs.torch_dtype(dtype))
    options = CLIPS if op == BITMASK else {}
    both = [i.forward(x, weight, b, eps=1e-5, **options) for i in (BY_OP[op], PYGRAPH[op])]
    assert list(both[0]) == list(both[1])
    for name in both[0]:
        assert both[0][name].shape == both[1][name].shape
        assert torch.equal(both[0][name], both[1][name]), name
    try:
        expected = PYGRAPH[op].backward(dy, x, weight, b, both[1], eps=1e-5, **options)
    except UnsupportedCase as refused:
        with pytest.raises(UnsupportedCase, match=f"^{re.escape(str(refused)[:60])}"):
            BY_OP[op].backward(dy, x, weight, b, both[0], eps=1e-5, **options)
        return
    actual = BY_OP[op].backward(dy, x, weight, b, both[0], eps=1e-5, **options)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0, msg=name)
