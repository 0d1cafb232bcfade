"""A function of somebody's file as an implementation, called as a definition says; this runs in the kernel's process.

``normcheck_entry.json``, beside the file, says how: ``Entry`` as data.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from normcheck.errors import Broken, UsageError, one_line, shown
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from torch import Tensor

SPEC, ENTRY = "normcheck_entry.json", "normcheck_entry.py"
"""The files that are written beside a solution's own."""

ENTRY_SOURCE = """\
from pathlib import Path
from normcheck.loaders.entry import implementations
IMPLEMENTATIONS = implementations(Path(__file__).parent)
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """``file``, ``function``: what is called, with the ``inputs`` and, if ``into``, the ``outputs`` as positional
    arguments, each (name, role, dtype). ``full``: pairs of (M, N) and the shape of x; others have M in the last axis of
    rows. ``ops``: what it is said to compute; ``dtype`` and ``epsilons`` are claims, () for any eps.
    """

    name: str
    file: str
    function: str
    into: bool
    inputs: tuple[tuple[str, str, str], ...]
    outputs: tuple[tuple[str, str, str], ...]
    rank: int
    full: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    ops: tuple[str, ...]
    dtype: str
    shapes: tuple[tuple[int, int], ...]
    epsilons: tuple[float, ...]

    def as_json(self) -> str:
        """This entry as text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Entry:
        """The entry that ``as_json`` wrote."""
        told = json.loads(text)
        return cls(**{name: tuples(value) for name, value in told.items()})

    def declared(self, op: str, forward: Callable[..., Any]) -> Implementation:
        """The implementation of ``op`` with this ``forward``, and these claims: in both processes the same."""
        roles = {role for _, role, _ in self.inputs}
        return Implementation(
            name=self.name,
            op=op,
            forward=forward,
            dtypes=(self.dtype,),
            biases=("bias" in roles,),
            weights=("weight" in roles,),
            weight_dtypes=("io",),
            shapes=self.shapes,
            epsilons=self.epsilons or None,
            source=self.file,
        )


def implementations(folder: Path) -> tuple[Implementation, ...]:
    """Import what ``folder`` holds. Raises what its import raises."""
    entry = Entry.read((folder / SPEC).read_text(encoding="utf-8"))
    function = getattr(imported(folder / entry.file), entry.function, None)
    if not callable(function):
        raise UsageError(f"entry_point={entry.file}::{entry.function}: expected a function of this name in it")
    called = _called(entry, function)
    return tuple(entry.declared(op, called) for op in entry.ops)


def imported(path: Path) -> ModuleType:
    """The module in the file ``path``, which can import the files beside it."""
    name = f"normcheck_loaded_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path.name}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses look up their module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _called(entry: Entry, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as the forward of an implementation. Only y, and the sum, are asked of it: it has no gradients."""
    import torch

    full_of = dict(entry.full)
    rewritten = {name for name, _, _ in entry.inputs} & {name for name, _, _ in entry.outputs}
    """Inputs that are outputs, too: a call may write into them and return nothing."""

    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, **named: Any) -> Any:
        rows, columns = x.shape
        full = full_of.get((rows, columns)) or (*[1] * (entry.rank - 2), rows, columns)
        residual = named.get("residual")
        roles = {"x": x, "residual": residual, "gate": named.get("gate"), "weight": weight, "bias": bias}
        tensors = {role: tensor for role, tensor in roles.items() if tensor is not None}
        given = [eps if role == "eps" else _given(tensors[role], role, full, dtype) for _, role, dtype in entry.inputs]
        if rewritten:  # into copies: what the judge holds stays
            given = [
                t.clone() if name in rewritten and isinstance(t, torch.Tensor) else t
                for t, (name, _, _) in zip(given, entry.inputs, strict=True)
            ]
        with torch.no_grad():
            if entry.into:
                made = [torch.empty(full, dtype=_dtype(dtype), device=x.device) for _, _, dtype in entry.outputs]
                function(*given, *made)
            else:
                returned_by_it = function(*given)
                own = {name: t for t, (name, _, _) in zip(given, entry.inputs, strict=True) if name in rewritten}
                made = _several(own if returned_by_it is None and own else returned_by_it, entry)
            returned = {
                role: _flat(tensor, role, full, (rows, columns))
                for (_, role, _), tensor in zip(entry.outputs, made, strict=True)
            }
            if residual is not None and "residual_out" not in returned:  # the definition has no such output
                returned["residual_out"] = (x.double() + residual.double()).to(x.dtype)
        return returned

    forward.__wrapped__ = function  # type: ignore[attr-defined]  # for source_location
    return forward


def _given(tensor: Tensor, role: str, full: tuple[int, ...], dtype: str) -> Tensor:
    """An input as the definition has it. A weight may be wider than x there, with the same values."""
    return tensor.to(_dtype(dtype)) if role in ("weight", "bias") else tensor.reshape(full)


def _several(returned: Any, entry: Entry) -> list[Any]:
    """The outputs that a call returned: one tensor, several in order, or a dict by name. Raises Broken."""
    names = [name for name, _, _ in entry.outputs]
    if isinstance(returned, Mapping):
        if all(name in returned for name in names):
            return [returned[name] for name in names]
    elif isinstance(returned, tuple | list):
        if len(returned) == len(names):
            return list(returned)
    elif len(names) == 1:
        return [returned]
    of = one_line(type(returned).__name__, 60)
    raise Broken("missing", entry.outputs[0][1], f"it returned {of}: expected {', '.join(map(shown, names))}")


def _flat(tensor: Any, role: str, full: tuple[int, ...], flat: tuple[int, int]) -> Any:
    """An output as (M, N). Raises Broken for another shape than that of x."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise Broken("missing", role, f"{role} is {one_line(type(tensor).__name__, 60)}: expected a tensor")
    if tuple(tensor.shape) != full:
        raise Broken("shape", role, f"{role}.shape={tuple(tensor.shape)}: expected {full}")
    return tensor.reshape(flat)


def _dtype(name: str) -> Any:
    import torch

    return {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def tuples(value: Any) -> Any:
    """JSON arrays as tuples, all the way down."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value
