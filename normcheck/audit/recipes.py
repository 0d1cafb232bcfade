"""How others test a norm kernel, as plain data: their inputs, their reference, their tolerances.

A recipe is written down as it was found, weak spots included, so that the same planted faults can be judged by it and
by this gate. ``normcheck.audit.recipe_judge`` runs one. Nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from normcheck.cases.dtypes import DTYPES
from normcheck.errors import UsageError, one_of

Shape = tuple[int, int]
"""M rows, N hidden size."""

_ALL = ("layernorm", "layernorm_zero_centered", "layernorm_relu_bitmask", "rmsnorm")


@dataclass(frozen=True)
class Tolerance:
    """Close is ``|actual - expected| <= atol + rtol * |expected|``, as in ``torch.testing.assert_close``.

    ``of_actual``: the source passes the two the other way round, so that ``rtol`` scales the kernel's own value.
    """

    atol: float
    rtol: float
    of_actual: bool = False


BY_DTYPE = {
    "fp16": Tolerance(1e-5, 1e-3),
    "bf16": Tolerance(1e-5, 1.6e-2),
    "fp32": Tolerance(1e-5, 1.3e-6),
}
"""What ``torch.testing.assert_close`` takes where nothing is said: by the dtype of the output that is compared."""

EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class Draw:
    """How a tensor is filled: ``offset + factor * numbers``, computed in its own dtype.

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
    """Somebody's test of a norm kernel, as data.

    ``shapes``: of each of ``ops``, in their order. ``x weight bias dy``: how they are drawn, in this order and in the
    io dtype; ``dy`` may be MSE_MEAN, or None for forward only; ``no_bias``: ops that are called without a bias.
    ``tolerances``: the outputs that are compared, in the source's order; None stands for BY_DTYPE; a bitmask is
    unpacked and compared exactly.

    The reference is torch in fp32 on the same inputs. ``stored``: rounded to the io dtype, as torch's own result in it
    is (where the source runs torch on CUDA in fp16, this emulates it: fp32 inside, rounded on store); else the kernel's
    outputs are widened to fp32 and compared there. Peculiarities of references: ``unbiased_rstd``: the variance is
    divided by N - 1; ``scale_stored``: 1 + weight is rounded to the io dtype; ``bias_after_store``: the bias is added
    to a stored product and stored again.
    """

    name: str
    summary: str
    source: str
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    eps: float = 1e-5
    clips: tuple[float, float] = (0.0, 6.0)
    x: Draw = RANDN
    weight: Draw = RANDN
    bias: Draw = RANDN
    dy: Draw | str | None = RANDN
    tolerances: tuple[tuple[str, Tolerance | None], ...]
    no_bias: tuple[str, ...] = ()
    stored: bool = True
    unbiased_rstd: bool = False
    scale_stored: bool = False
    bias_after_store: bool = False
    seed: int = 1

    def shape(self, op: str) -> Shape:
        """M and N for one of ``ops``."""
        return self.shapes[self.ops.index(op)]


def _cudnn(forward: Tolerance, gradients: Tolerance, *statistics: str) -> tuple[tuple[str, Tolerance | None], ...]:
    """Two tolerances, one a direction; the notebooks pass the reference's gradients as the actual ones."""
    swapped = Tolerance(gradients.atol, gradients.rtol, of_actual=True)
    exact = (("bitmask", EXACT),) if "bitmask" in statistics else ()
    plain = tuple((name, forward) for name in ("y", *statistics) if name != "bitmask")
    return (*plain, *exact, *((name, swapped) for name in ("dx", "dw", "db")))


def _everything(tolerance: Tolerance | None) -> tuple[tuple[str, Tolerance | None], ...]:
    names = ("y", "mean", "rstd", "bitmask", "dx", "dw", "db")
    return tuple((name, EXACT if name == "bitmask" else tolerance) for name in names)


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
            tolerances=_cudnn(Tolerance(5e-3, 3e-3), Tolerance(5e-3, 3e-3), "mean", "rstd"),
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
            tolerances=_cudnn(Tolerance(5e-3, 5e-3), Tolerance(2e-4, 2e-4), "rstd", "mean", "bitmask"),
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
            tolerances=_cudnn(Tolerance(5e-3, 3e-3), Tolerance(5e-3, 3e-3), "rstd"),
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
            tolerances=tuple((name, Tolerance(1e-2, 0.0)) for name in ("y", "dx", "db", "dw")),
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
            tolerances=(("y", Tolerance(1e-2, 1e-2)),),
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
    """A recipe by its name, or one's own tolerances: ``atol=1e-3,rtol=1e-3`` (one that is absent is 0).

    One's own are tried on randn 128x1024 with a randn dy, on every output of every op in every dtype, against fp32
    values that are not rounded: rounded ones would differ from a correct kernel's by whole ulps, 8e-3 in bf16.
    Raises UsageError for anything else.
    """
    if text in RECIPES:
        return RECIPES[text]
    if len(text) > 100 or not text.isprintable():  # it is the recipe's name, which reports print
        raise UsageError(f"recipe={text}: expected at most 100 printable characters")
    pairs = [part.partition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    if not set(names) <= {"atol", "rtol"}:
        raise UsageError(f"recipe={text}: expected {one_of((*RECIPES, 'atol=NUMBER,rtol=NUMBER'))}")
    if len(set(names)) < len(names):
        raise UsageError(f"recipe={text}: expected atol and rtol once each")
    values = {name.strip(): _tolerance(text, name.strip(), value) for name, _, value in pairs}
    own = Tolerance(values.get("atol", 0.0), values.get("rtol", 0.0))
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
