"""cuDNN's graphs for the four ops: built and planned once for each key, kept, and executed on buffers by name.

What cuDNN calls otherwise, translated here and nowhere else: its tensors are (N, C, H, W), where N counts the rows
(our M) and C is the hidden size (our N), with H = W = 1 and channels last; scale is weight, inv_variance is rstd,
grad, DX, DSCALE and DBIAS are dy, dx, dw and db. eps and the limits that bits are compared with are given when a plan
is executed; the limits of the clamp itself are attributes of the graph, so every pair of them is a plan of its own.

Building a plan costs 0.1 to 3 seconds, executing it microseconds. Needs torch with CUDA and nvidia-cudnn-frontend,
which are imported when the first plan is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from normcheck.errors import UnsupportedCase
from normcheck.formats import FORMATS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_PLANS = 256
"""Plans kept at a time, the longest unused forgotten first: each holds compiled kernels. More than a sweep needs."""

_NOT_SUPPORTED = "CUDNN_STATUS_NOT_SUPPORTED"
"""The beginning of a family of statuses, which a RuntimeError of the frontend may hold in its text only."""

ALIGNMENT = 16
"""Bytes. The frontend declares every tensor to be aligned so, and a kernel may then load 16 bytes at once."""


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
    def clamped(self) -> bool:
        return self.op == "layernorm_relu_bitmask"


@dataclass(frozen=True)
class Plan:
    """A graph that is ready to run; ``tensors``: our name -> cuDNN's tensor, those named in ``outputs`` included."""

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
    """The frontend. It has no types, hence no import statement, and takes part only when it is used."""
    return importlib.import_module("cudnn")


@lru_cache(maxsize=MAX_PLANS)
def plan(key: GraphKey) -> Plan | Refusal:
    """Build and plan a graph; refusals are kept too. Any error that is not cuDNN's "not supported" is raised."""
    import torch

    cudnn = frontend_module()
    float32 = cudnn.data_type.FLOAT
    with torch.cuda.device(key.device):
        graph = cudnn.pygraph(
            handle=_handle(key.device), intermediate_data_type=float32, compute_data_type=float32, name=key.op
        )
        tensors, outputs = forward_graph(graph, key) if key.direction == "forward" else backward_graph(graph, key)
        try:
            graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            if not isinstance(error, cudnn.cudnnGraphNotSupportedError) and _NOT_SUPPORTED not in str(error):
                raise
            return Refusal(reason(str(error), cudnn.backend_version()))
        return Plan(graph, tensors, outputs, graph.get_workspace_size(), key.device)


def execute(plan: Plan, buffers: Mapping[str, Tensor]) -> None:
    """Run a plan on torch's current stream, reading and writing ``buffers`` (our names; others are ignored).

    Raises UnsupportedCase for a buffer on the GPU that does not start at a multiple of 16 bytes.
    """
    import torch

    for name in plan.tensors:
        if buffers[name].is_cuda and buffers[name].data_ptr() % ALIGNMENT:
            raise UnsupportedCase(f"{name} starts at no multiple of {ALIGNMENT} bytes, which cuDNN relies on")
    pack = {tensor: buffers[name].detach() for name, tensor in plan.tensors.items()}
    with torch.cuda.device(plan.device):
        handle = _handle(plan.device)
        frontend_module().set_stream(handle, torch.cuda.current_stream().cuda_stream)
        workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=buffers["x"].device)
        plan.graph.execute(pack, workspace, handle=handle)


def reason(message: str, version: int, most: int = 300) -> str:
    """cuDNN's message as one line of printable characters. ``version``: of the backend, as it counts them."""
    words = "".join(c if c.isprintable() or c.isspace() else "?" for c in message).split()
    line = f"cuDNN {version_text(version)} refuses the graph: {' '.join(words) or 'no reason given'}"
    return line if len(line) <= most else line[: most - 3] + "..."


def version_text(version: int) -> str:
    """91900 -> 9.19.0; before 9 the minor version had one digit less: 8905 -> 8.9.5."""
    unit = 10_000 if version >= 90_000 else 1_000
    return f"{version // unit}.{version % unit // 100}.{version % 100}"


def forward_graph(graph: Any, key: GraphKey) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Add the nodes of a forward to ``graph`` -> our name -> tensor, and which of them are outputs."""
    cudnn = frontend_module()
    t = {
        "x": _matrix(graph, key, "x", _data_type(key.dtype)),
        "weight": _vector(graph, key, "weight"),
        "eps": _scalar(graph, "eps"),
    }
    if key.bias:
        t["bias"] = _vector(graph, key, "bias")
    node = {
        "name": "norm",
        "norm_forward_phase": cudnn.norm_forward_phase.TRAINING,
        "input": t["x"],
        "scale": _scale(graph, key, t),
        "bias": t.get("bias"),
        "epsilon": t["eps"],
    }
    if key.op == "rmsnorm":
        y, t["rstd"] = graph.rmsnorm(**node)
        outputs: tuple[str, ...] = ("y", "rstd")
    else:
        y, t["mean"], t["rstd"] = graph.layernorm(**node)
        outputs = ("y", "mean", "rstd")
        t["mean"].set_output(True).set_data_type(cudnn.data_type.FLOAT)
    t["rstd"].set_output(True).set_data_type(cudnn.data_type.FLOAT)
    if key.clamped:
        y = _clamp(graph, key, y, t)
        outputs += ("bitmask",)
    t["y"] = _packed_output(y, key, _data_type(key.dtype))
    return t, outputs


def backward_graph(graph: Any, key: GraphKey) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Add the nodes of a backward to ``graph`` -> our name -> tensor, and which of them are outputs."""
    t = {
        "x": _matrix(graph, key, "x", _data_type(key.dtype)),
        "dy": _matrix(graph, key, "dy", _data_type(key.dtype)),
        "weight": _vector(graph, key, "weight"),
        "rstd": _statistic(graph, key, "rstd"),
    }
    node = {"name": "norm_backward", "input": t["x"], "inv_variance": t["rstd"], "grad": t["dy"]}
    if key.clamped:
        t["bitmask"] = _matrix(graph, key, "bitmask", frontend_module().data_type.BOOLEAN)
        node["grad"] = graph.mul(name="dy_where_bit", a=t["dy"], b=t["bitmask"])
    node["scale"] = _scale(graph, key, t)
    if key.op == "rmsnorm":
        dx, dw, db = graph.rmsnorm_backward(**node, has_dbias=key.bias)
    else:
        t["mean"] = _statistic(graph, key, "mean")
        dx, dw, db = graph.layernorm_backward(**node, mean=t["mean"])
    t["dx"] = _packed_output(dx, key, _data_type(key.dtype))
    t["dw"] = dw.set_output(True).set_data_type(_data_type(key.weight_dtype))
    if not key.bias:
        return t, ("dx", "dw")
    t["db"] = db.set_output(True).set_data_type(_data_type(key.weight_dtype))
    return t, ("dx", "dw", "db")


def _scale(graph: Any, key: GraphKey, t: dict[str, Any]) -> Any:
    """weight, or 1 + weight in fp32 as a node of its own."""
    if key.op != "layernorm_zero_centered":
        return t["weight"]
    t["one"] = _scalar(graph, "one")
    return graph.add(name="one_plus_weight", a=t["weight"], b=t["one"])


def _clamp(graph: Any, key: GraphKey, z: Any, t: dict[str, Any]) -> Any:
    """Clamp z -> y. The bits come from y as it is stored: strictly between the limits, packed by cuDNN."""
    boolean = frontend_module().data_type.BOOLEAN
    lower, upper = key.clips or (None, None)
    t["lower_clip"], t["upper_clip"] = _scalar(graph, "lower_clip"), _scalar(graph, "upper_clip")
    y = graph.relu(name="clamp", input=z, lower_clip=lower, upper_clip=upper)
    above = graph.cmp_gt(name="above_lower", input=y, comparison=t["lower_clip"]).set_data_type(boolean)
    below = graph.cmp_lt(name="below_upper", input=y, comparison=t["upper_clip"]).set_data_type(boolean)
    t["bitmask"] = _packed_output(graph.logical_and(name="bit", a=above, b=below), key, boolean)
    return y


def _packed_output(tensor: Any, key: GraphKey, data_type: Any) -> Any:
    """Make an (M, N) tensor an output, with its size and strides given and not left to be inferred."""
    size, stride = _rows(key)
    return tensor.set_output(True).set_data_type(data_type).set_dim(size).set_stride(stride)


def _rows(key: GraphKey) -> tuple[list[int], list[int]]:
    """Size and strides of an (M, N) matrix with packed rows."""
    return [key.M, key.N, 1, 1], [key.N, 1, key.N, key.N]


def _matrix(graph: Any, key: GraphKey, name: str, data_type: Any) -> Any:
    size, stride = _rows(key)
    return graph.tensor(name=name, dim=size, stride=stride, data_type=data_type)


def _vector(graph: Any, key: GraphKey, name: str) -> Any:
    N = key.N
    return graph.tensor(name=name, dim=[1, N, 1, 1], stride=[N, 1, N, N], data_type=_data_type(key.weight_dtype))


def _statistic(graph: Any, key: GraphKey, name: str) -> Any:
    return graph.tensor(name=name, dim=[key.M, 1, 1, 1], stride=[1, 1, 1, 1], data_type=_data_type("fp32"))


def _scalar(graph: Any, name: str) -> Any:
    """A number that is given at execution, from a fp32 tensor (1, 1, 1, 1) on the CPU."""
    ones = [1, 1, 1, 1]
    return graph.tensor(name=name, dim=ones, stride=ones, data_type=_data_type("fp32"), is_pass_by_value=True)


def _data_type(dtype: str) -> Any:
    data_type = frontend_module().data_type
    return {"fp16": data_type.HALF, "bf16": data_type.BFLOAT16, "fp32": data_type.FLOAT}[dtype]


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
