"""cuDNN, through the graph API of its frontend: forward and backward of the norms that it has.

Which cases run is cuDNN's decision: ``supports`` builds the forward's graph and passes on the reason of a refusal. A
backward that cuDNN refuses raises UnsupportedCase, so that the forward is checked all the same (the clamped op in fp16
and bf16).

``y_given_stats`` is declared False for a LayerNorm whose N is not a multiple of 16. There, measured on an H200 with
backend 9.19, y comes from the folded form x * a + c with a mean that is not bit for bit the one that is saved: on
constant and on far-offset rows y is off from its own statistics by up to |x| * rstd * u, while end to end it keeps the
bound. Multiples of 16 are clean. ``bitmask_compare`` is "rounded": the bits follow y as it is stored.

If y is NaN, backend 9.19 gives a bit of 1 (measured on an H100, in all dtypes), though neither of the comparisons
that the graph asks for holds for a NaN. That is a finding, and nothing is declared about it.

Rows must be packed: given a row stride, backend 9.19 refuses an RMSNorm, and in a LayerNorm takes the stride for the
number of columns. Its RMSNorm takes a missing bias, its LayerNorm does not.

The words of cuDNN (rows N, hidden size C, scale, inv_variance, DX, DSCALE, DBIAS) are translated in _cudnn_graphs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from normcheck.cases.case import Case
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS, TABLE
from normcheck.cases.tensor_names import STATISTICS
from normcheck.errors import UnsupportedCase, one_line
from normcheck.impls import _cudnn_graphs as graphs
from normcheck.impls._cudnn_graphs import GraphKey
from normcheck.impls._optional import untried
from normcheck.impls.implementation import Implementation, Outputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OPS = tuple(op for op in TABLE if not op.rounds_xhat and op.zero_centered + op.clamped <= op.centered)
"""What cuDNN documents: LayerNorm, by itself or with one of the two fusions; RMSNorm by itself."""


def _oldest(op: Op) -> int:
    """The first backend version that has the op, as cuDNN counts them: 91300 is 9.13.0."""
    if not op.centered:
        return 90100
    return 91300 if op.clamped else 91000 if op.zero_centered else 0


_SHAPES = (
    (1, 1),
    (2, 16),
    (3, 7),
    (33, 127),
    (17, 1000),
    (4, 768),
    (4096, 128),
    (128, 4096),
    (3, 8200),
    (2, 65536),
)
"""(M, N): few, because each costs up to 3 s for every dtype, weight dtype and direction; some round, some ragged."""

_BITMASK_SHAPES = ((1, 768), (1024, 768), (7, 4096), (2, 65536), (3, 7), (5, 1000))
"""(M, N): fewer, because each pair of limits needs a plan of its own. Backend 9.19 refuses the last two,
and the report says so for as long as it does."""

_FOLDED_REASON = "at N not a multiple of 16 y comes from x * a + c with a mean that is not bit for bit the saved one"


def _forward(
    api: ModuleType, op: str, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, **options: float
) -> dict[str, Tensor]:
    """x (M, N), weight, bias (N,) -> y as x; rstd and, of a LayerNorm, mean: fp32 (M,); bitmask uint8 (M, N/8)."""
    _require_plain(x=x, weight=weight, bias=bias)
    key = _key_of(op, x, weight, bias, clips=_clips(options))
    inputs = {"x": x, **_small_inputs(weight, bias), **_scalars(eps=eps, one=1.0, **options)}
    return _run(api, key, inputs, x.device)


def _backward(
    api: ModuleType,
    op: str,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: Outputs,
    **_: float,
) -> dict[str, Tensor]:
    """dy, x (M, N), ``saved`` as forward returned it -> dx as x; dw and, with a bias, db: (N,) as weight.

    eps and the limits are not needed again: they are in the saved rstd and bitmask.
    """
    _require_plain(x=x, dy=dy, weight=weight, bias=bias)
    key = _key_of(op, x, weight, bias, backward=True)
    inputs = {"x": x, "dy": dy, **_small_inputs(weight, bias), **_scalars(one=1.0)}
    inputs |= {name: _packed(saved[name]) for name in (*STATISTICS, "bitmask") if name in saved}
    return _run(api, key, inputs, x.device)


def _run(api: ModuleType, key: GraphKey, inputs: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Execute the plan of ``key`` -> its outputs. Raises UnsupportedCase with cuDNN's reason for a refused graph."""
    plan = _plan(api, key)
    if isinstance(plan, str):
        raise UnsupportedCase(plan)
    outputs = {name: _empty(name, key, device) for name in plan.outputs}
    returned: dict[str, Tensor] = api.execute(plan, {**inputs, **outputs})
    return returned


def _plan(api: ModuleType, key: GraphKey) -> Any:
    """The plan of ``key``, or the reason why there is none: cuDNN's, or that it has no such tensors."""
    if key.M == 0:
        return "M=0: cuDNN has no tensors without elements"
    plan = api.plan(key)
    return plan.reason if isinstance(plan, graphs.Refusal) else plan


def _require_plain(**given: Tensor | None) -> None:
    """Raise UnsupportedCase for rows with gaps between them, and for a misaligned address.

    The stride of a single row does not matter.
    """
    for name, tensor in given.items():
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            apart = f"the rows of {name} are {tensor.stride(0)} elements apart"
            raise UnsupportedCase(f"{apart}; the norms of cuDNN take packed rows only")
        if tensor.is_cuda and tensor.data_ptr() % graphs.ALIGNMENT:
            raise UnsupportedCase(
                f"{name} does not begin at a multiple of {graphs.ALIGNMENT} bytes, which plans rely on"
            )


def _supports(api: ModuleType, case: Case) -> str | None:
    """Why cuDNN cannot run the forward of this case, or None. Builds the plan, for torch's current GPU."""
    plan = _plan(api, _key_of_case(case))
    return plan if isinstance(plan, str) else None


def unavailable(op: str, oldest: int, device: str) -> str | None:
    """Why nothing can run on ``device`` (cpu or cuda), or None."""
    if device != "cuda":
        return "cuDNN needs an NVIDIA GPU"
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    if reason := untried("nvidia-cudnn-frontend"):
        return reason
    import torch  # before the frontend, which then finds the cuDNN that torch came with

    if not torch.cuda.is_available():
        return "cuDNN needs an NVIDIA GPU, and torch sees none"
    try:
        version = graphs.frontend_module().backend_version()
    except (ImportError, OSError, RuntimeError) as error:  # a broken install; RuntimeError: no libcudnn was found
        return f"nvidia-cudnn-frontend is installed but does not work: {one_line(str(error), 240)}"
    if version >= oldest:
        return None
    return f"cuDNN {graphs.version_text(version)} is installed; {op} needs {graphs.version_text(oldest)} or newer"


def _model(case: Case) -> Mapping[str, Any]:
    """What is declared about the arithmetic of a case, and the reason; the module's docstring has the measurements."""
    op, model = OPS[case.op], dict[str, Any]()
    if op.clamped:
        model["bitmask_compare"] = "rounded"
    if op.centered and case.N % 16:
        model |= {"y_given_stats": False, "reason": _FOLDED_REASON}
    return model


def _key_of(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    clips: tuple[float, float] | None = None,
    backward: bool = False,
) -> GraphKey:
    """The key of a call."""
    M, N = x.shape
    return GraphKey(
        op=op,
        direction="backward" if backward else "forward",
        M=M,
        N=N,
        dtype=graphs.format_name(x.dtype),
        weight_dtype=graphs.format_name(weight.dtype),
        bias=bias is not None,
        clips=clips,
        device=x.device.index or 0,
    )


def _key_of_case(case: Case) -> GraphKey:
    """The key of the forward of ``case`` on torch's current GPU: as ``_key_of``, but before there are tensors."""
    import torch

    return GraphKey(
        op=case.op,
        direction="forward",
        M=case.M,
        N=case.N,
        dtype=case.dtype,
        weight_dtype=case.dtype if case.weight_dtype == "same" else case.weight_dtype,
        bias=case.bias,
        clips=_clips(case.option_values),
        device=torch.cuda.current_device(),
    )


def _clips(options: Mapping[str, float]) -> tuple[float, float] | None:
    return (options["lower_clip"], options["upper_clip"]) if options else None


def _small_inputs(weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    return {"weight": _packed(weight)} | ({} if bias is None else {"bias": _packed(bias)})


def _packed(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is not contiguous or not aligned as cuDNN needs it."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % graphs.ALIGNMENT else tensor


def _scalars(**numbers: float) -> dict[str, Tensor]:
    """Numbers as cuDNN takes them: fp32 (1, 1, 1, 1) on the CPU."""
    import torch

    return {name: torch.full((1, 1, 1, 1), number, dtype=torch.float32) for name, number in numbers.items()}


def _empty(name: str, key: GraphKey, device: torch.device) -> Tensor:
    """Memory for an output, packed and not initialised."""
    import torch

    shape: tuple[int, ...] = (key.M, key.N) if name in ("y", "dx") else (key.N,) if name in ("dw", "db") else (key.M,)
    dtype = {"y": key.dtype, "dx": key.dtype, "dw": key.weight_dtype, "db": key.weight_dtype}.get(name, "fp32")
    if name == "bitmask":
        return torch.empty((key.M, (key.N + 7) // 8), dtype=torch.uint8, device=device)
    return torch.empty(shape, dtype=graphs.torch_dtype(dtype), device=device)


def implementations(name: str, api: ModuleType, *, oldest: int = 0, **fields: Any) -> tuple[Implementation, ...]:
    """All of ``_OPS``. ``api``: a module with ``plan(key)`` and ``execute(plan, buffers)``, such as _cudnn_graphs.

    ``oldest``: the first backend version, as cuDNN counts them, that ``api`` works with. ``fields``: as of each.
    """
    return tuple(
        Implementation(
            name=name,
            op=op.name,
            forward=partial(_forward, api, op.name),
            backward=partial(_backward, api, op.name),
            supports=partial(_supports, api),
            unavailable=partial(unavailable, op.name, max(oldest, _oldest(op))),
            biases=(True,) if op.centered else (False, True),
            strided=False,
            model=_model,
            shapes=_BITMASK_SHAPES if op.clamped else _SHAPES,
            source="https://github.com/NVIDIA/cudnn-frontend/tree/main/samples/python",
            **({**fields, "by_default": ()} if op.clamped else fields),  # its bits of a NaN are wrong
        )
        for op in _OPS
    )


IMPLEMENTATIONS = implementations("cudnn", graphs)
