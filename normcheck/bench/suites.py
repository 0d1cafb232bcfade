"""The suites of a bench, as data: points, and how their bytes are counted. A suite is one entry of ``SUITES``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from normcheck.bench.speed import BACKWARD, FORWARD, Count, Point
from normcheck.cases.op import RELU6, Op
from normcheck.cases.tensor_names import GATE, RESIDUAL, RESIDUAL_GATE


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Points, and how their bytes are counted in each direction; ``source``: the origin of both."""

    name: str
    source: str
    points: tuple[Point, ...]
    counts: Mapping[str, Count]


TRITON_TUTORIAL = Suite(
    name="triton-tutorial",
    source="Triton's tutorial 05-layer-norm.py, bench_layer_norm: M=4096, fp16, N=1024 to 15872 by 512, eps=1e-5",
    points=tuple(Point(op="layernorm", dtype="fp16", M=4096, N=512 * i) for i in range(2, 32)),
    counts=MappingProxyType(
        {
            FORWARD: Count(text="2 * M * N elements: read x, write y", matrices=2),
            BACKWARD: Count(text="3 * M * N elements: read x and dy, write dx", matrices=3),
        }
    ),
)

PYTORCH_LAYERNORM_BACKWARD = Suite(
    name="pytorch-layernorm-backward",
    source="PyTorch's benchmarks/dynamo/genai_layers/kernels.py, LayerNormBackward: bf16 x and dy, fp32 weight, no "
    "bias, M=32768, N=256 to 65536, eps=1e-6. It times the backward; the forward is counted here in the same way",
    points=tuple(
        Point(op="layernorm", dtype="bf16", weight_dtype="fp32", M=32768, N=1 << i, eps=1e-6, bias=False)
        for i in range(8, 17)
    ),
    counts=MappingProxyType(
        {
            FORWARD: Count(text="read x and weight, write y", matrices=2, vectors=1),
            BACKWARD: Count(text="read x, dy and weight, write dx and dw", matrices=3, vectors=2),
        }
    ),
)

SUITES = MappingProxyType({suite.name: suite for suite in (TRITON_TUTORIAL, PYTORCH_LAYERNORM_BACKWARD)})

OWN_COUNTS = MappingProxyType(
    {
        FORWARD: Count(
            text="read x, weight and bias, write y",
            matrices=2,
            vectors=1,
            bias_vectors=1,
            named={RESIDUAL: (2, "read residual, write residual_out"), GATE: (1, "read gate")},
        ),
        BACKWARD: Count(
            text="read x, dy and weight, write dx, dw and db",
            matrices=3,
            vectors=2,
            bias_vectors=1,
            named={
                RESIDUAL: (1, "read dresidual_out"),
                GATE: (2, "read gate, write dgate"),
                RESIDUAL_GATE: (2, "read residual_out, write dresidual"),
            },
        ),
    }
)
"""The counting for sizes that the user gives: every tensor once, but not statistics and bitmasks, nor the scale and
shift of a few samples, which are small."""

SIZES: Mapping[str, tuple[tuple[int, int], ...]] = MappingProxyType(
    {
        "cuda": tuple((8192, n) for n in (1024, 2048, 4096, 8192, 16384)),
        "cpu": ((64, 1024), (64, 4096)),
    }
)
"""The default (M, N). Few rows on a CPU: Triton's interpreter takes a millisecond for each program."""


def suite_of(ops: Sequence[Op], dtypes: Sequence[str], sizes: Sequence[tuple[int, int]]) -> Suite:
    """The sizes that a user gives, as a suite. An op with an optional bias has none, as in most uses."""
    points = tuple(
        Point(op=op.name, dtype=dtype, M=m, N=n, bias=op.biases[0], options=op.clips(RELU6))
        for op in ops
        for dtype in dtypes
        for m, n in sizes
    )
    return Suite(name="", source="", points=points, counts=OWN_COUNTS)
