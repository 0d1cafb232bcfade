"""Check what an implementation returned against its contract: names, shapes, dtypes, device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs, torch_dtype
from normcheck.cases.op import Op
from normcheck.cases.tensor_names import CODES, DRESIDUAL_GATE, RESIDUAL_OUT, SCALE
from normcheck.oracle.bitmask import packed_columns
from normcheck.oracle.conventions import OPEN
from normcheck.oracle.gated import groups_of
from normcheck.oracle.quantised import formats, granularity, scale_columns
from normcheck.oracle.tolerances import Model
from normcheck.result import Where


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault other than a wrong value. ``kind``, ``output``, ``check``, ``where``: as of a finding.

    ``frames``: lines of a traceback."""

    kind: str
    output: str
    message: str
    frames: tuple[str, ...] = ()
    check: str = ""
    where: Where | None = None

    @property
    def gpu_failed(self) -> bool:
        """Whether the message says that the GPU, or Triton's launch on it, failed."""
        return "CUDA error" in self.message or "Triton Error" in self.message


def usable_outputs(
    op: Op, case: Case, inputs: Inputs, returned: Mapping[str, Tensor], model: Model | None = None
) -> tuple[dict[str, Tensor], tuple[Problem, ...]]:
    """Forward's outputs that can be judged, by name, and the problems of the others. ``model``: what is declared of
    scales and groups; None: any will do.

    A scale that was given is not an output.
    """
    usable: dict[str, Tensor] = {}
    problems: list[Problem] = []
    for name in op.outputs:
        if name == SCALE and inputs.scale is not None:
            continue
        if name not in returned:
            if name in (RESIDUAL_OUT, SCALE):
                problems.append(Problem("missing", name, f"{name} was not returned: forward gives {_owed(op, inputs)}"))
            continue
        tensor = returned[name].detach().resolve_neg()
        if name == "y":
            allowed = tuple(map(torch_dtype, op.y_dtypes(case.dtype, case.weight_format)))
            problem = _tensor_problem(name, tensor, tuple(inputs.x.shape), allowed, inputs.x.device)
        elif inputs.residual is not None and name == RESIDUAL_OUT:
            like = inputs.residual
            problem = _tensor_problem(name, tensor, tuple(like.shape), (like.dtype,), like.device)
        elif name == "bitmask":
            problem = _bitmask_problem(tensor, case, inputs.x.device)
        elif name == CODES:
            problem = _tensor_problem(name, tensor, tuple(inputs.x.shape), tuple(formats()), inputs.x.device)
        elif name == SCALE:
            problem = _scale_problem(tensor, case, "any" if model is None else model.scale, inputs.x.device)
        else:
            problem = _statistic_problem(name, tensor, case.M, _groups(op, case, tensor, model), inputs.x.device)
        if problem is None:
            usable[name] = tensor
        else:
            problems.append(problem)
    return usable, tuple(problems)


def is_judgeable(op: Op, inputs: Inputs, usable: Mapping[str, Tensor]) -> bool:
    """Whether the usable outputs can be judged at all: without the main one, or the scale of codes, none can."""
    return op.main_output in usable and (not op.quantises or SCALE in usable or inputs.scale is not None)


def _owed(op: Op, inputs: Inputs) -> str:
    """The outputs that every forward of ``op`` returns for such inputs, in words."""
    names = [op.main_output]
    names += [SCALE] * (op.quantises and inputs.scale is None) + [RESIDUAL_OUT] * op.adds_residual
    return f"{', '.join(names[:-1])} and {names[-1]}, as a dict or as {len(names)} tensors in this order"


def usable_gradients(
    inputs: Inputs, returned: Mapping[str, Tensor], *, by_graph: bool = False
) -> tuple[dict[str, Tensor], tuple[Problem, ...]]:
    """The gradients that can be judged, by name, and the problems of the others; a missing gradient is a problem.

    One by a weight, or by a bias, that was not given is ignored. A backward may leave dresidual_gate to its caller, who
    can sum it from dresidual and x; ``by_graph``: the gradients are autograd's, which has all.
    """
    usable: dict[str, Tensor] = {}
    problems: list[Problem] = []
    leaves = inputs.leaves
    for name, like in leaves.items():
        if name not in returned and name == DRESIDUAL_GATE and not by_graph:
            continue
        if name not in returned:
            gives = f"{', '.join(leaves)}; this one gave {', '.join(sorted(returned)) or 'none'}"
            problems.append(Problem("missing", name, f"{name} was not returned: a backward gives {gives}"))
            continue
        tensor = returned[name].detach().resolve_neg()
        problem = _tensor_problem(name, tensor, tuple(like.shape), (like.dtype,), like.device)
        if problem is None:
            usable[name] = tensor
        else:
            problems.append(problem)
    return usable, tuple(problems)


def _tensor_problem(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Problem | None:
    if tensor.layout != torch.strided:
        return Problem("shape", name, f"{name}.layout={tensor.layout}: expected a dense tensor")
    if tuple(tensor.shape) != shape:
        return Problem("shape", name, f"{name}.shape={tuple(tensor.shape)}: expected {shape}")
    if tensor.dtype not in dtypes:
        return Problem("dtype", name, f"{name}.dtype={tensor.dtype}: expected {' or '.join(map(str, dtypes))}")
    return _device_problem(name, tensor, device)


def _groups(op: Op, case: Case, statistic: Tensor, model: Model | None) -> int:
    """How many statistics a row has; without a model, of an op that leaves that open, as many as were returned."""
    if not (op.gated or op.grouped or op.rotary):
        return 1
    if op.gated and (model is None or model.group == OPEN):
        return statistic.numel() // max(case.M, 1)
    return groups_of(op, case, model or Model())


def _statistic_problem(name: str, tensor: Tensor, rows: int, groups: int, device: torch.device) -> Problem | None:
    if tensor.layout != torch.strided:
        return Problem("shape", name, f"{name}.layout={tensor.layout}: expected a dense tensor")
    if tensor.numel() != rows * groups:
        each = "" if groups == 1 else f" times {groups} groups"
        shape = tuple(tensor.shape)
        return Problem("shape", name, f"{name}.shape={shape}: expected M={rows}{each} elements in any shape")
    if tensor.dtype != torch.float32:
        return Problem("dtype", name, f"{name}.dtype={tensor.dtype}: expected torch.float32")
    return _device_problem(name, tensor, device)


def _bitmask_problem(tensor: Tensor, case: Case, device: torch.device) -> Problem | None:
    if tensor.layout != torch.strided:
        return Problem("shape", "bitmask", f"bitmask.layout={tensor.layout}: expected a dense tensor")
    if tensor.dtype not in (torch.uint8, torch.bool):
        return Problem("dtype", "bitmask", f"bitmask.dtype={tensor.dtype}: expected torch.uint8 (packed) or torch.bool")
    columns = case.N if tensor.dtype == torch.bool else packed_columns(case.N)
    if tensor.dim() < 2 or tensor.shape[-1] != columns or tensor.numel() != case.M * columns:
        expected = f"expected ({case.M}, {packed_columns(case.N)}) packed or ({case.M}, {case.N}) bool"
        return Problem("shape", "bitmask", f"bitmask.shape={tuple(tensor.shape)}: {expected}")
    return _device_problem("bitmask", tensor, device)


def _scale_problem(tensor: Tensor, case: Case, declared: str, device: torch.device) -> Problem | None:
    if tensor.layout != torch.strided:
        return Problem("shape", SCALE, f"{SCALE}.layout={tensor.layout}: expected a dense tensor")
    if not granularity(case, tensor, declared):
        each = ("token", "block64", "block128") if declared == "any" else (declared,)
        of: dict[int, list[str]] = {}
        for name in each:
            of.setdefault(scale_columns(case, name), []).append(repr(name))
        shapes = (f"({case.M}, {columns}) of model['scale']={' or '.join(names)}" for columns, names in of.items())
        expected = f"expected {' or '.join(shapes)}"
        return Problem("shape", SCALE, f"{SCALE}.shape={tuple(tensor.shape)}: {expected}")
    if tensor.dtype != torch.float32:
        return Problem("dtype", SCALE, f"{SCALE}.dtype={tensor.dtype}: expected torch.float32")
    return _device_problem(SCALE, tensor, device)


def _device_problem(name: str, tensor: Tensor, device: torch.device) -> Problem | None:
    if tensor.device.type != device.type:
        return Problem("missing", name, f"{name}.device={tensor.device}: expected {device}, where the inputs are")
    return None
