"""Other projects' tests of norm kernels, as plain data: their inputs, their reference, their tolerances.

A recipe copies its source, weak spots included, so that the recipe and this gate can judge the same planted faults.
``normcheck.audit.recipe_judge`` runs one. This module does not need torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from normcheck.cases.dtypes import DTYPES
from normcheck.cases.op import RELU6
from normcheck.cases.ops import OPS, names_of
from normcheck.cases.tensor_names import BY_NAME, CODES, GRADIENTS, RESIDUAL_OUT
from normcheck.errors import UsageError, one_of
from normcheck.result import OUTPUTS

Shape = tuple[int, int]
"""M rows, N hidden size."""

_ALL = names_of(lambda op: not op.of_models)


@dataclass(frozen=True)
class FixedTolerance:
    """Allows ``|actual - expected| <= atol + rtol * |expected|``, as ``torch.testing.assert_close`` does.

    ``of_actual``: the source swaps actual and expected, so that ``rtol`` scales the kernel's own value.
    """

    atol: float
    rtol: float
    of_actual: bool = False


@dataclass(frozen=True, kw_only=True)
class ByDtype:
    """A tolerance for each dtype of the compared output."""

    fp16: FixedTolerance
    bf16: FixedTolerance
    fp32: FixedTolerance


Tolerance = FixedTolerance | ByDtype

TORCH_DEFAULTS = ByDtype(
    fp16=FixedTolerance(1e-5, 1e-3),
    bf16=FixedTolerance(1e-5, 1.6e-2),
    fp32=FixedTolerance(1e-5, 1.3e-6),
)
"""The tolerances that ``torch.testing.assert_close`` has by default."""

EXACT = FixedTolerance(0.0, 0.0)


@dataclass(frozen=True)
class Draw:
    """How a tensor is filled: ``offset + factor * numbers``, computed in the tensor's dtype.

    ``numbers``: "randn", "rand", or "ones". ``over_n``: the factor is divided by the hidden size.
    """

    numbers: str = "randn"
    factor: float = 1.0
    offset: float = 0.0
    over_n: bool = False


RANDN, RAND, ONES, ZEROS = Draw(), Draw("rand"), Draw("ones"), Draw("ones", factor=0.0)

MSE_MEAN = "mse_mean"
"""A cotangent: the gradient of ``torch.nn.MSELoss()`` between the reference's y and a randn target."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The inputs of one call: M and N, the stride of rows over N, and the seed that they are drawn from.

    ``scale``: the one that is given to an op that returns codes, else None.
    """

    shape: Shape
    width: int
    seed: int
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Another project's test of a norm kernel, as data.

    ``shapes``: the shapes for each of ``ops``, in their order. ``widths``: each shape is run with the rows of x, and of
    a residual, this many times N apart. ``trials``: and with this many draws, the first from ``seed``, the next from
    the seeds after it. ``scales``: and with each of these given, if the op returns codes.
    ``x weight bias dy residual``: how the inputs are drawn, in this order and in the io dtype;
    ``dy`` may be MSE_MEAN, or None for forward only; an op without a residual draws none. ``no_bias``: ops called
    without a bias. ``tolerances``: the outputs that are compared, in the source's order; a bitmask is unpacked and
    compared exactly.

    The reference is torch in fp32 on the same inputs. ``stored``: it is rounded to the io dtype, like a result that
    torch computes in that dtype. (If the source runs torch on CUDA in fp16, this emulates it: fp32 inside, rounded on
    store.) Otherwise the kernel's outputs are widened to fp32 and compared there. A residual is added in fp32, and that
    sum is normed. Codes are e4m3fn, of y in fp32 times the reciprocal of the scale, and compared as numbers.

    Peculiarities of references: ``unbiased_rstd``: the variance is divided by N - 1. ``scale_stored``: 1 + weight is
    rounded to the io dtype. ``weight_after_store``: a stored product of x and rstd is multiplied by the weight, in the
    io dtype. ``bias_after_store``: the bias is added to a stored product and stored again.

    Raises ValueError for gradients of an op that adds a residual, since no source compares any and no reference is
    here, and for an op that returns codes without ``scales``, or with gradients.
    """

    name: str
    summary: str
    source: str
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[Shape, ...], ...]
    widths: tuple[int, ...] = (1,)
    trials: int = 1
    scales: tuple[float, ...] = ()
    eps: float = 1e-5
    clips: tuple[float, float] = RELU6
    x: Draw = RANDN
    weight: Draw = RANDN
    bias: Draw = RANDN
    dy: Draw | str | None = RANDN
    residual: Draw = RANDN
    tolerances: tuple[tuple[str, Tolerance], ...]
    no_bias: tuple[str, ...] = ()
    stored: bool = True
    unbiased_rstd: bool = False
    scale_stored: bool = False
    weight_after_store: bool = False
    bias_after_store: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        adding = [op for op in self.ops if OPS[op].adds_residual]
        if adding and self.dy is not None:
            raise ValueError(f"recipe={self.name}: expected dy=None with op={adding[0]}, which adds a residual")
        codes = [op for op in self.ops if OPS[op].quantises]
        if codes and not (self.scales and self.dy is None):
            raise ValueError(f"recipe={self.name}: expected scales and dy=None with op={codes[0]}, which returns codes")

    def inputs_of(self, op: str) -> tuple[Drawing, ...]:
        """What one of ``ops`` is called with, the source's smallest inputs first."""
        return tuple(
            Drawing(shape=shape, width=width, seed=self.seed + trial, scale=scale)
            for shape in self.shapes[self.ops.index(op)]
            for width in self.widths
            for scale in self.scales or (None,)
            for trial in range(self.trials)
        )


def _cudnn(forward: FixedTolerance, gradients: FixedTolerance, *statistics: str) -> tuple[tuple[str, Tolerance], ...]:
    """One tolerance for each direction; the notebooks pass the reference's gradients as the actual ones."""
    swapped = FixedTolerance(gradients.atol, gradients.rtol, of_actual=True)
    exact = (("bitmask", EXACT),) if "bitmask" in statistics else ()
    plain = tuple((name, forward) for name in ("y", *statistics) if name != "bitmask")
    return (*plain, *exact, *((name, swapped) for name in GRADIENTS))


def _everything(tolerance: Tolerance) -> tuple[tuple[str, Tolerance], ...]:
    of_one_input = [name for name in OUTPUTS if name not in (RESIDUAL_OUT, CODES, *BY_NAME, *BY_NAME.values())]
    return tuple((name, EXACT if name == "bitmask" else tolerance) for name in of_one_input)


_SAMPLES = "https://github.com/NVIDIA/cudnn-frontend/blob/main/samples/python/"

_BY_HALF, _BY_FP32 = FixedTolerance(1e-2, 1e-2, of_actual=True), FixedTolerance(1e-4, 1e-4, of_actual=True)

_VLLM_SHAPES = ((4096, 8), *((tokens, N) for N in (8, 768, 769, 5120, 5125, 8192) for tokens in (7, 83)))

_VLLM: Mapping[str, Any] = MappingProxyType(
    {
        "source": "https://github.com/vllm-project/vllm/blob/main/tests/kernels/core/test_layernorm.py",
        "dtypes": DTYPES,
        "widths": (1, 2),
        "eps": 1e-6,
        "x": Draw(factor=0.5, over_n=True),
        "residual": Draw(factor=0.5, over_n=True),
        "weight": Draw(factor=0.1, offset=1.0),
        "dy": None,
        "weight_after_store": True,
    }
)
"""What both recipes of vLLM's test have."""

_FLASHINFER_SHAPES = tuple(
    (M, N) for N in (111, 500, 1024, 3072, 3584, 4096, 8192, 16384) for M in (1, 19, 99, 989) if M < 989 or N <= 1024
)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="cudnn-zero-centered",
            summary="cuDNN notebook 23, its first half: randn 4096x768 fp16, eps 1e-3, MSE-mean dy, 5e-3/3e-3",
            source=_SAMPLES + "23_layernorm_zero_centered_gamma_forward_training_and_backward.ipynb",
            ops=("layernorm_zero_centered",),
            dtypes=("fp16",),
            shapes=(((4096, 768),),),
            eps=1e-3,
            dy=MSE_MEAN,
            tolerances=_cudnn(FixedTolerance(5e-3, 3e-3), FixedTolerance(5e-3, 3e-3), "mean", "rstd"),
            unbiased_rstd=True,
            scale_stored=True,
        ),
        Recipe(
            name="cudnn-relu-bitmask",
            summary="cuDNN notebook 25: randn 4096x768 fp32, eps 1e-3, MSE-mean dy, 5e-3, gradients 2e-4, exact bits",
            source=_SAMPLES + "25_layernorm_forward_training_and_backward_with_relu_bitmask.ipynb",
            ops=("layernorm_relu_bitmask",),
            dtypes=("fp32",),
            shapes=(((4096, 768),),),
            eps=1e-3,
            dy=MSE_MEAN,
            tolerances=_cudnn(FixedTolerance(5e-3, 5e-3), FixedTolerance(2e-4, 2e-4), "rstd", "mean", "bitmask"),
            unbiased_rstd=True,
        ),
        Recipe(
            name="cudnn-rmsnorm",
            summary="cuDNN notebook 28, its first half: randn 4096x128 fp16, eps 1e-3, MSE-mean dy, 5e-3/3e-3",
            source=_SAMPLES + "28_rmsnorm.ipynb",
            ops=("rmsnorm",),
            dtypes=("fp16",),
            shapes=(((4096, 128),),),
            eps=1e-3,
            dy=MSE_MEAN,
            tolerances=_cudnn(FixedTolerance(5e-3, 3e-3), FixedTolerance(5e-3, 3e-3), "rstd"),
            bias_after_store=True,
        ),
        Recipe(
            name="triton-tutorial",
            summary="Triton tutorial 05: 1151x8192 fp16, x = -2.3 + 0.5 randn, dy = 0.1 randn, rand weights, 1e-2",
            source="https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html",
            ops=("layernorm",),
            dtypes=("fp16",),
            shapes=(((1151, 8192),),),
            x=Draw("randn", factor=0.5, offset=-2.3),
            weight=RAND,
            bias=RAND,
            dy=Draw("randn", factor=0.1),
            tolerances=tuple((name, FixedTolerance(1e-2, 0.0)) for name in ("y", "dx", "db", "dw")),
        ),
        Recipe(
            name="kernelbench",
            summary="KernelBench level 1 as first published: y alone, fp32 randn, weight 1, bias 0, 1e-2; reduced: "
            "N 16384 for 4194304 (LayerNorm), 16384 rows for 1048576 of 64 (RMSNorm)",
            source="https://github.com/ScalingIntelligence/KernelBench",
            ops=("layernorm", "rmsnorm"),
            dtypes=("fp32",),
            shapes=(((16, 16384),), ((16384, 64),)),
            weight=ONES,
            bias=ZEROS,
            dy=None,
            tolerances=(("y", FixedTolerance(1e-2, 1e-2, of_actual=True)),),
            no_bias=("rmsnorm",),
        ),
        Recipe(
            name="kernelbench-by-precision",
            summary="KernelBench level 1 as of 2026: y alone, rand, weight 1, bias 0, 5 trials, fp32 1e-4, else 1e-2; "
            "reduced like kernelbench",
            source="https://github.com/ScalingIntelligence/KernelBench/blob/main/src/kernelbench/eval.py",
            ops=("layernorm", "rmsnorm"),
            dtypes=DTYPES,
            shapes=(((16, 16384),), ((16384, 64),)),
            trials=5,
            x=RAND,
            weight=ONES,
            bias=ZEROS,
            dy=None,
            tolerances=(("y", ByDtype(fp16=_BY_HALF, bf16=_BY_HALF, fp32=_BY_FP32)),),
            no_bias=("rmsnorm",),
        ),
        Recipe(
            name="vllm-rmsnorm",
            summary="vLLM's test of RMSNorm: y alone, x = randn / 2N, weight 1 + 0.1 randn, eps 1e-6, packed and "
            "strided rows, 1e-2; reduced: 4096 tokens with N = 8 alone",
            ops=("rmsnorm", "rmsnorm_llama"),
            shapes=(_VLLM_SHAPES, _VLLM_SHAPES),
            no_bias=("rmsnorm",),
            tolerances=(("y", FixedTolerance(1e-2, 1e-2)),),
            **_VLLM,
        ),
        Recipe(
            name="vllm-residual",
            summary="vLLM's test of the same with a residual, as small as x: y and residual_out, 1e-2",
            ops=("fused_add_rmsnorm",),
            shapes=(_VLLM_SHAPES,),
            tolerances=(("y", FixedTolerance(1e-2, 1e-2)), (RESIDUAL_OUT, FixedTolerance(1e-2, 1e-2))),
            **_VLLM,
        ),
        Recipe(
            name="flashinfer-quant",
            summary="flashinfer's test of rmsnorm_quant: randn, eps 1e-6, scale 0.01, 1 and 10, packed and strided "
            "rows, codes with rtol=1 and atol=1; reduced: 989 rows with N up to 1024 alone",
            source="https://github.com/flashinfer-ai/flashinfer/blob/main/tests/utils/test_norm.py",
            ops=("rmsnorm_quant",),
            dtypes=("fp16", "bf16"),
            shapes=(_FLASHINFER_SHAPES,),
            widths=(1, 2),
            scales=(0.01, 1.0, 10.0),
            eps=1e-6,
            dy=None,
            tolerances=((CODES, FixedTolerance(1.0, 1.0, of_actual=True)),),
        ),
        Recipe(
            name="torch-testing",
            summary="torch.testing.assert_close with its own tolerances by dtype: randn 128x1024, every output",
            source="https://docs.pytorch.org/docs/stable/testing.html",
            ops=_ALL,
            dtypes=DTYPES,
            shapes=(((128, 1024),),) * len(_ALL),
            tolerances=_everything(TORCH_DEFAULTS),
        ),
    )
}
"""Name -> recipe."""


def recipe(text: str) -> Recipe:
    """A recipe by its name, or a user's own tolerances: ``atol=1e-3,rtol=1e-3`` (an absent one is 0).

    A user's tolerances apply to every output of every op in every dtype, on randn 128x1024 with a randn dy. The
    expected values are fp32 and not rounded: rounded ones would differ from a correct kernel's by whole ulps, 8e-3 in
    bf16. Raises UsageError for anything else.
    """
    if text in RECIPES:
        return RECIPES[text]
    if len(text) > 100 or not text.isprintable():  # reports print the text, as the recipe's name
        raise UsageError(f"recipe={text}: expected at most 100 printable characters")
    pairs = [part.partition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    if not set(names) <= {"atol", "rtol"}:
        raise UsageError(f"recipe={text}: expected {one_of((*RECIPES, 'atol=NUMBER,rtol=NUMBER'))}")
    if len(set(names)) < len(names):
        raise UsageError(f"recipe={text}: expected atol and rtol once each")
    values = {name.strip(): _tolerance(text, name.strip(), value) for name, _, value in pairs}
    own = FixedTolerance(values.get("atol", 0.0), values.get("rtol", 0.0))
    return Recipe(
        name=text,
        summary=f"one's own tolerances, atol {own.atol:g} and rtol {own.rtol:g}: randn 128x1024, every output",
        source="the command line",
        ops=_ALL,
        dtypes=DTYPES,
        shapes=(((128, 1024),),) * len(_ALL),
        tolerances=_everything(own),
        stored=False,
    )


def _tolerance(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (0 <= number < math.inf):
        raise UsageError(f"{name}={value.strip()} in recipe={text}: expected a finite number >= 0")
    return number
