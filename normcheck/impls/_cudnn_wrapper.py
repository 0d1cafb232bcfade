"""The frontend's ``cudnn.Graph``: nodes take torch tensors, and inputs and outputs are named.

The nodes are those of ``_cudnn_graphs``. The wrapper makes the graph's tensors from torch's, validates and plans at the
end of its ``with`` block, and is called like a function. As in NVIDIA's notebooks it gets the inputs in the order of
their names, and allocates the outputs itself. A forward with a bitmask, which is packed and so has another shape than
its tensor, gets a dict of named inputs and outputs instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from normcheck.impls import _cudnn_graphs as graphs
from normcheck.impls._cudnn_graphs import GraphKey, Refusal

if TYPE_CHECKING:
    from torch import Tensor

OLDEST = 91200
"""The first backend version with which the wrapper works: 9.12.0."""


@dataclass(frozen=True)
class WrapperPlan:
    """A graph that is ready to be called. ``inputs``: our name -> "node::argument"; ``by_name``: called with a dict."""

    graph: Any
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    by_name: bool
    device: int


@lru_cache(maxsize=graphs.MAX_PLANS)
def plan(key: GraphKey) -> WrapperPlan | Refusal:
    """Build and plan a graph; refusals are kept too. Any error that is not cuDNN's "not supported" is raised."""
    import torch

    cudnn = graphs.frontend_module()
    inputs, outputs = input_names(key), graphs.output_names(key)
    by_name = "bitmask" in outputs
    float32 = cudnn.data_type.FLOAT
    with torch.cuda.device(key.device):
        named = {} if by_name else {"inputs": list(inputs.values()), "outputs": list(outputs)}
        handle = graphs.handle_on_stream(key.device)
        wrapper = cudnn.Graph(handle=handle, intermediate_data_type=float32, compute_data_type=float32, **named)
        build = graphs.forward_graph if key.direction == "forward" else graphs.backward_graph
        try:
            with wrapper as graph:
                tensors = build(graph, key, partial(example, key))
                for name in outputs:
                    tensors[name].set_name(name)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            return graphs.refusal(error)
        return WrapperPlan(wrapper, inputs, outputs, by_name, key.device)


def execute(plan: WrapperPlan, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Call a plan on torch's current stream with ``buffers`` (our names) -> its outputs, shaped as theirs.

    Raises UnsupportedCase for a buffer on the GPU that does not start at a multiple of 16 bytes.
    """
    import torch

    graphs.require_aligned(buffers, (*plan.inputs, *plan.outputs))
    given = {theirs: buffers[name].detach() for name, theirs in plan.inputs.items()}
    with torch.cuda.device(plan.device):
        size = max(plan.graph.get_workspace_size(), 1)
        workspace = torch.empty(size, dtype=torch.uint8, device=buffers["x"].device)
        run = partial(plan.graph, handle=graphs.handle_on_stream(plan.device), workspace=workspace)
        if plan.by_name:
            run({**given, **{name: buffers[name] for name in plan.outputs}})
            return {name: buffers[name] for name in plan.outputs}
        returned = run(*given.values())
    return {name: t.view(buffers[name].shape) for name, t in zip(plan.outputs, returned, strict=True)}


def example(key: GraphKey, name: str) -> Tensor:
    """A torch tensor of the size, strides and dtype that cuDNN is to take for the input that we call ``name``."""
    import torch

    form = graphs.form_of(key, name)
    dtype = torch.bool if form.dtype == "bool" else graphs.torch_dtype(form.dtype)
    device = "cpu" if form.number else f"cuda:{key.device}"
    return torch.empty_strided(form.size, form.stride, dtype=dtype, device=device)


def input_names(key: GraphKey) -> dict[str, str]:
    """Our name -> "node::argument", for every input of a graph."""
    forward = key.direction == "forward"
    node = "norm" if forward else "norm_backward"
    named = {"x": f"{node}::input", "weight": f"{node}::scale"}
    if key.facts.zero_centered:
        named |= {"weight": "one_plus_weight::a", "one": "one_plus_weight::b"}
    if forward:
        named["eps"] = f"{node}::epsilon"
        named |= {"bias": f"{node}::bias"} if key.bias else {}
        clips = {"lower_clip": "above_lower::comparison", "upper_clip": "below_upper::comparison"}
        return named | (clips if key.facts.clamped else {})
    named |= {"dy": f"{node}::grad", "rstd": f"{node}::inv_variance"}
    if key.facts.centered:
        named["mean"] = f"{node}::mean"
    return named | ({"dy": "dy_where_bit::a", "bitmask": "dy_where_bit::b"} if key.facts.clamped else {})
