"""What is measured, as data: points, and how their bytes are counted. A suite is one entry of ``SUITES``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from normcheck.bench.speed import BACKWARD, FORWARD, Count, Point
from normcheck.cases.ops.op import Op


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Points and the counting of their bytes, by direction; ``source``: where both come from."""

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
        FORWARD: Count(text="read x, weight and bias, write y", matrices=2, vectors=1, bias_vectors=1),
        BACKWARD: Count(text="read x, dy and weight, write dx, dw and db", matrices=3, vectors=2, bias_vectors=1),
    }
)
"""For sizes of one's own: every tensor once; statistics and bitmasks, which are small, are left out."""

SIZES: Mapping[str, tuple[tuple[int, int], ...]] = MappingProxyType(
    {
        "cuda": tuple((8192, n) for n in (1024, 2048, 4096, 8192, 16384)),
        "cpu": ((64, 1024), (64, 4096)),
    }
)
"""(M, N) where none are asked for; on a CPU few rows, Triton's interpreter takes a millisecond for each program."""

_CLIPS = (("lower_clip", 0.0), ("upper_clip", 6.0))


def suite_of(ops: Sequence[Op], dtypes: Sequence[str], sizes: Sequence[tuple[int, int]]) -> Suite:
    """Sizes of one's own as a suite. An op that may be called without a bias is, as its users mostly do."""
    points = tuple(
        Point(op=op.name, dtype=dtype, M=m, N=n, bias=op.biases[0], options=_CLIPS if op.clamped else ())
        for op in ops
        for dtype in dtypes
        for m, n in sizes
    )
    return Suite(name="", source="", points=points, counts=OWN_COUNTS)
