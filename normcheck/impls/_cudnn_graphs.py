"""cuDNN's graphs of norms: built and planned once for each key, kept, and executed on buffers by name.

cuDNN's own words, which are translated here and nowhere else: its tensors are (N, C, H, W), where N counts the rows
(our M) and C is the hidden size (our N), with H = W = 1 and channels last; scale is weight, inv_variance is rstd,
grad, DX, DSCALE and DBIAS are dy, dx, dw and db. eps and the limits that bits are compared with are given when a plan
is executed; the limits of the clamp itself are attributes of the graph, so every pair of them needs a plan of its own.

Building a plan costs 0.1 to 3 seconds, loading one that another process of this run has built 40 ms, executing it
microseconds. Needs torch with CUDA and nvidia-cudnn-frontend,
which are imported when the first plan is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from normcheck.cases.dtypes import FORMATS
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import GRADIENTS, STATISTICS
from normcheck.errors import UnsupportedCase, one_line
from normcheck.impls import _cudnn_shelf
from normcheck.impls._cudnn_shelf import StoredPlan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_PLANS = 256
"""At most so many plans are kept, the most recently used: each holds compiled kernels. More than a sweep needs."""

_NOT_SUPPORTED = "CUDNN_STATUS_NOT_SUPPORTED"
"""The beginning of a family of statuses, which a RuntimeError of the frontend may hold in its text only."""

ALIGNMENT = 16
"""Bytes to which the frontend declares every tensor aligned, so that a kernel may load 16 bytes at once."""


@dataclass(frozen=True, kw_only=True)
class GraphKey:
    """What a plan depends on: cuDNN compiles for exact sizes and dtypes. Every tensor is packed.

    ``dtype`` of x, y, dy, dx and ``weight_dtype`` of weight, bias, dw, db are normcheck's names. ``clips``: lower and
    upper, in the forward of the clamped op; its backward takes the bits and is the same for all. ``device``: index of
    the GPU.
    """

    op: str
    direction: str
    M: int
    N: int
    dtype: str
    weight_dtype: str
    bias: bool
    clips: tuple[float, float] | None = None
    device: int = 0

    @property
    def facts(self) -> Op:
        """The facts about the op."""
        return OPS[self.op]


@dataclass(frozen=True)
class GraphPlan:
    """A graph that is ready to run; ``tensors``: our name -> cuDNN's tensor or its number, ``outputs`` included."""

    graph: Any
    tensors: Mapping[str, Any]
    outputs: tuple[str, ...]
    workspace_bytes: int
    device: int


@dataclass(frozen=True)
class Refusal:
    """cuDNN does not support a graph; ``reason`` is its own, on one line."""

    reason: str


def frontend_module() -> Any:
    """The module ``cudnn``, imported when it is used; by name, because it has no types."""
    return importlib.import_module("cudnn")


@lru_cache(maxsize=MAX_PLANS)
def plan(key: GraphKey) -> GraphPlan | Refusal:
    """Build and plan a graph, or load it from the shelf of this run; what is built goes there. Refusals are kept too.

    Any error that is not cuDNN's "not supported" is raised.
    """
    import torch

    with torch.cuda.device(key.device):
        return _loaded(key) or _built(key)


def _built(key: GraphKey) -> GraphPlan | Refusal:
    cudnn = frontend_module()
    float32 = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        handle=_handle(key.device), intermediate_data_type=float32, compute_data_type=float32, name=key.op
    )
    tensors = forward_graph(graph, key) if key.direction == "forward" else backward_graph(graph, key)
    try:
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
        return refusal(error)
    if _cudnn_shelf.exists():
        numbers = {name: int(tensor.get_uid()) for name, tensor in tensors.items()}
        _cudnn_shelf.keep(repr(key), StoredPlan(numbers, bytes(graph.serialize())))
    return GraphPlan(graph, tensors, output_names(key), graph.get_workspace_size(), key.device)


def _loaded(key: GraphKey) -> GraphPlan | None:
    """The plan of ``key`` on the shelf; None if there is none, or none that cuDNN takes."""
    stored = _cudnn_shelf.kept(repr(key))
    if stored is None:
        return None
    handle = _handle(key.device)
    graph = frontend_module().pygraph(handle=handle, name=key.op)
    try:
        graph.deserialize(handle, list(stored.data))
    except RuntimeError:
        return None
    return GraphPlan(graph, stored.numbers, output_names(key), graph.get_workspace_size(), key.device)


def refusal(error: Exception) -> Refusal:
    """The refusal, if an error of the frontend in planning means "not supported"; any other error is raised."""
    cudnn = frontend_module()
    if not isinstance(error, cudnn.cudnnGraphNotSupportedError) and _NOT_SUPPORTED not in str(error):
        raise error
    return Refusal(reason(str(error), cudnn.backend_version()))


def execute(plan: GraphPlan, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a plan on torch's current stream with ``buffers`` (our names; others are ignored) -> those of its outputs."""
    import torch

    require_aligned(buffers, plan.tensors)
    pack = {tensor: buffers[name].detach() for name, tensor in plan.tensors.items()}
    with torch.cuda.device(plan.device):
        workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=buffers["x"].device)
        plan.graph.execute(pack, workspace, handle=handle_on_stream(plan.device))
    return {name: buffers[name] for name in plan.outputs}


def require_aligned(buffers: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Raise UnsupportedCase for a buffer on the GPU that does not start at a multiple of 16 bytes."""
    for name in names:
        if buffers[name].is_cuda and buffers[name].data_ptr() % ALIGNMENT:
            raise UnsupportedCase(f"{name} starts at no multiple of {ALIGNMENT} bytes, which cuDNN relies on")


def handle_on_stream(device: int) -> Any:
    """The handle of a GPU, set to torch's current stream."""
    import torch

    handle = _handle(device)
    frontend_module().set_stream(handle, torch.cuda.current_stream().cuda_stream)
    return handle


def reason(message: str, version: int) -> str:
    """cuDNN's message as one line. ``version``: of the backend, as it counts them."""
    return one_line(f"cuDNN {version_text(version)} refuses the graph: {message.strip() or 'no reason given'}", 300)


def version_text(version: int) -> str:
    """91900 -> 9.19.0; before 9 the minor version had one digit less: 8905 -> 8.9.5."""
    unit = 10_000 if version >= 90_000 else 1_000
    return f"{version // unit}.{version % unit // 100}.{version % 100}"


Leaf = Callable[[str], Any]
"""Our name of an input -> what a node of the graph takes for it."""


@dataclass(frozen=True)
class Form:
    """An input in cuDNN's terms. ``dtype``: normcheck's name, or bool. A ``number`` comes when a plan is executed."""

    size: list[int]
    stride: list[int]
    dtype: str
    number: bool = False


def form_of(key: GraphKey, name: str) -> Form:
    """The form of the input that we call ``name``; one that is no tensor of the op is a number."""
    if name in ("weight", "bias"):
        return Form([1, key.N, 1, 1], [key.N, 1, key.N, key.N], key.weight_dtype)
    if name in STATISTICS:
        return Form([key.M, 1, 1, 1], [1, 1, 1, 1], "fp32")
    if name in ("x", "dy", "bitmask"):
        return Form([key.M, key.N, 1, 1], [key.N, 1, key.N, key.N], "bool" if name == "bitmask" else key.dtype)
    return Form([1, 1, 1, 1], [1, 1, 1, 1], "fp32", number=True)


def _tensor(graph: Any, key: GraphKey, name: str) -> Any:
    """An input as a tensor of the graph."""
    form = form_of(key, name)
    return graph.tensor(
        name=name,
        dim=form.size,
        stride=form.stride,
        data_type=_data_type(form.dtype),
        is_pass_by_value=form.number,
    )


def output_names(key: GraphKey) -> tuple[str, ...]:
    """Our names of a graph's outputs."""
    if key.direction == "backward":
        return GRADIENTS if key.bias else GRADIENTS[:2]
    return key.facts.outputs


def forward_graph(graph: Any, key: GraphKey, leaf: Leaf | None = None) -> dict[str, Any]:
    """Add the nodes of a forward to ``graph``. Returns its tensors by our names, outputs included."""
    cudnn = frontend_module()
    leaf = leaf or partial(_tensor, graph, key)
    t = {name: leaf(name) for name in ("x", "weight", "eps")}
    if key.bias:
        t["bias"] = leaf("bias")
    node = {
        "name": "norm",
        "norm_forward_phase": cudnn.norm_forward_phase.TRAINING,
        "input": t["x"],
        "scale": _scale(graph, key, t, leaf),
        "bias": t.get("bias"),
        "epsilon": t["eps"],
    }
    if key.facts.centered:
        y, t["mean"], t["rstd"] = graph.layernorm(**node)
        t["mean"].set_output(True).set_data_type(cudnn.data_type.FLOAT)
    else:
        y, t["rstd"] = graph.rmsnorm(**node)
    t["rstd"].set_output(True).set_data_type(cudnn.data_type.FLOAT)
    if key.facts.clamped:
        y = _clamp(graph, key, y, t, leaf)
    t["y"] = _packed_output(y, key, _data_type(key.dtype))
    return t


def backward_graph(graph: Any, key: GraphKey, leaf: Leaf | None = None) -> dict[str, Any]:
    """Add the nodes of a backward to ``graph``. Returns its tensors by our names, outputs included."""
    leaf = leaf or partial(_tensor, graph, key)
    t = {name: leaf(name) for name in ("x", "dy", "weight", "rstd")}
    node = {"name": "norm_backward", "input": t["x"], "inv_variance": t["rstd"], "grad": t["dy"]}
    if key.facts.clamped:
        t["bitmask"] = leaf("bitmask")
        node["grad"] = graph.mul(name="dy_where_bit", a=t["dy"], b=t["bitmask"])
    node["scale"] = _scale(graph, key, t, leaf)
    if key.facts.centered:
        t["mean"] = leaf("mean")
        dx, dw, db = graph.layernorm_backward(**node, mean=t["mean"])
    else:
        dx, dw, db = graph.rmsnorm_backward(**node, has_dbias=key.bias)
    t["dx"] = _packed_output(dx, key, _data_type(key.dtype))
    for name, tensor in (("dw", dw), ("db", db))[: 1 + key.bias]:
        form = form_of(key, "weight")
        t[name] = (
            tensor.set_output(True).set_data_type(_data_type(form.dtype)).set_dim(form.size).set_stride(form.stride)
        )
    return t


def _scale(graph: Any, key: GraphKey, t: dict[str, Any], leaf: Leaf) -> Any:
    """weight, or 1 + weight in fp32 as a node of its own."""
    if not key.facts.zero_centered:
        return t["weight"]
    t["one"] = leaf("one")
    return graph.add(name="one_plus_weight", a=t["weight"], b=t["one"])


def _clamp(graph: Any, key: GraphKey, z: Any, t: dict[str, Any], leaf: Leaf) -> Any:
    """Clamp z -> y. The bits come from y as it is stored: strictly between the limits, packed by cuDNN."""
    boolean = frontend_module().data_type.BOOLEAN
    lower, upper = key.clips or (None, None)
    t["lower_clip"], t["upper_clip"] = leaf("lower_clip"), leaf("upper_clip")
    y = graph.relu(name="clamp", input=z, lower_clip=lower, upper_clip=upper)
    above = graph.cmp_gt(name="above_lower", input=y, comparison=t["lower_clip"]).set_data_type(boolean)
    below = graph.cmp_lt(name="below_upper", input=y, comparison=t["upper_clip"]).set_data_type(boolean)
    t["bitmask"] = _packed_output(graph.logical_and(name="bit", a=above, b=below), key, boolean)
    return y


def _packed_output(tensor: Any, key: GraphKey, data_type: Any) -> Any:
    """Make an (M, N) tensor an output, with explicit size and strides instead of inferred ones."""
    form = form_of(key, "x")
    return tensor.set_output(True).set_data_type(data_type).set_dim(form.size).set_stride(form.stride)


def _data_type(dtype: str) -> Any:
    data_type = frontend_module().data_type
    halves = {"fp16": data_type.HALF, "bf16": data_type.BFLOAT16}
    return {**halves, "fp32": data_type.FLOAT, "bool": data_type.BOOLEAN}[dtype]


@cache
def _handle(device: int) -> Any:
    """The cuDNN handle of a GPU, kept for the life of the process as cuDNN advises."""
    import torch

    with torch.cuda.device(device):
        return frontend_module().create_handle()


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that normcheck calls ``name``: fp16 -> torch.float16."""
    import torch

    dtype: torch.dtype = getattr(torch, FORMATS[name].torch_name)
    return dtype


def format_name(dtype: torch.dtype) -> str:
    """normcheck's name of a torch dtype: torch.float16 -> fp16."""
    torch_name = str(dtype).removeprefix("torch.")
    return next(name for name, f in FORMATS.items() if f.torch_name == torch_name)
