"""Other projects' tests of norm kernels, as plain data: their inputs, their reference, their tolerances.

A recipe copies its source, weak spots included, so that the recipe and this gate can judge the same planted faults.
``normcheck.audit.recipe_judge`` runs one. This module does not need torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from normcheck.cases.dtypes import DTYPES
from normcheck.cases.ops import DRESIDUAL, GRADIENTS, RELU6, RESIDUAL_OUT, names_of
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


BY_DTYPE = {
    "fp16": FixedTolerance(1e-5, 1e-3),
    "bf16": FixedTolerance(1e-5, 1.6e-2),
    "fp32": FixedTolerance(1e-5, 1.3e-6),
}
"""Dtype of the compared output -> the default tolerance of ``torch.testing.assert_close``."""

EXACT = FixedTolerance(0.0, 0.0)


@dataclass(frozen=True)
class Draw:
    """How a tensor is filled: ``offset + factor * numbers``, computed in the tensor's dtype.

    ``numbers``: "randn", "rand", or "ones".
    """

    numbers: str = "randn"
    factor: float = 1.0
    offset: float = 0.0


RANDN, RAND, ONES, ZEROS = Draw(), Draw("rand"), Draw("ones"), Draw("ones", factor=0.0)

MSE_MEAN = "mse_mean"
"""A cotangent: the gradient of ``torch.nn.MSELoss()`` between the reference's y and a randn target."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Another project's test of a norm kernel, as data.

    ``shapes``: the shape for each of ``ops``, in their order. ``x weight bias dy``: how the inputs are drawn, in this
    order and in the io dtype; ``dy`` may be MSE_MEAN, or None for forward only. ``no_bias``: ops called without a bias.
    ``tolerances``: the outputs that are compared, in the source's order; None stands for BY_DTYPE; a bitmask is
    unpacked and compared exactly.

    The reference is torch in fp32 on the same inputs. ``stored``: it is rounded to the io dtype, like a result that
    torch computes in that dtype. (If the source runs torch on CUDA in fp16, this emulates it: fp32 inside, rounded on
    store.) Otherwise the kernel's outputs are widened to fp32 and compared there.

    Peculiarities of references: ``unbiased_rstd``: the variance is divided by N - 1. ``scale_stored``: 1 + weight is
    rounded to the io dtype. ``bias_after_store``: the bias is added to a stored product and stored again.
    """

    name: str
    summary: str
    source: str
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    eps: float = 1e-5
    clips: tuple[float, float] = RELU6
    x: Draw = RANDN
    weight: Draw = RANDN
    bias: Draw = RANDN
    dy: Draw | str | None = RANDN
    tolerances: tuple[tuple[str, FixedTolerance | None], ...]
    no_bias: tuple[str, ...] = ()
    stored: bool = True
    unbiased_rstd: bool = False
    scale_stored: bool = False
    bias_after_store: bool = False
    seed: int = 1

    def shape(self, op: str) -> Shape:
        """M and N for one of ``ops``."""
        return self.shapes[self.ops.index(op)]


def _cudnn(
    forward: FixedTolerance, gradients: FixedTolerance, *statistics: str
) -> tuple[tuple[str, FixedTolerance | None], ...]:
    """One tolerance for each direction; the notebooks pass the reference's gradients as the actual ones."""
    swapped = FixedTolerance(gradients.atol, gradients.rtol, of_actual=True)
    exact = (("bitmask", EXACT),) if "bitmask" in statistics else ()
    plain = tuple((name, forward) for name in ("y", *statistics) if name != "bitmask")
    return (*plain, *exact, *((name, swapped) for name in GRADIENTS))


def _everything(tolerance: FixedTolerance | None) -> tuple[tuple[str, FixedTolerance | None], ...]:
    of_one_input = [name for name in OUTPUTS if name not in (RESIDUAL_OUT, DRESIDUAL)]
    return tuple((name, EXACT if name == "bitmask" else tolerance) for name in of_one_input)


_SAMPLES = "https://github.com/NVIDIA/cudnn-frontend/blob/main/samples/python/"

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="cudnn-zero-centered",
            summary="cuDNN notebook 23, its first half: randn 4096x768 fp16, eps 1e-3, MSE-mean dy, 5e-3/3e-3",
            source=_SAMPLES + "23_layernorm_zero_centered_gamma_forward_training_and_backward.ipynb",
            ops=("layernorm_zero_centered",),
            dtypes=("fp16",),
            shapes=((4096, 768),),
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
            shapes=((4096, 768),),
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
            shapes=((4096, 128),),
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
            shapes=((1151, 8192),),
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
            shapes=((16, 16384), (16384, 64)),
            weight=ONES,
            bias=ZEROS,
            dy=None,
            tolerances=(("y", FixedTolerance(1e-2, 1e-2)),),
            no_bias=("rmsnorm",),
        ),
        Recipe(
            name="torch-testing",
            summary="torch.testing.assert_close with its own tolerances by dtype: randn 128x1024, every output",
            source="https://docs.pytorch.org/docs/stable/testing.html",
            ops=_ALL,
            dtypes=DTYPES,
            shapes=((128, 1024),) * len(_ALL),
            tolerances=_everything(None),
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
        shapes=((128, 1024),) * len(_ALL),
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
