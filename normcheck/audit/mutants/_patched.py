"""Our Triton kernels with a few lines replaced, loaded as separate modules when a case first runs."""

from __future__ import annotations

import linecache
import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from normcheck.audit.mutants.mutant import Mutant
from normcheck.cases.ops import OPS
from normcheck.errors import NormcheckError
from normcheck.impls import kernels
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton import implementation, modulated, quantising
from normcheck.impls.triton_calls import own_kernels

_FOLDER = Path(kernels.__file__).parent
_SHARED = "from normcheck.impls.kernels.forward import"
"""The import by which the other parts get the functions of forward.py that they use."""

STORE_Y = "tl.store(y_ptr + rows[:, None] * N + cols[None, :], z, mask=mask)"
"""The line of forward.py that stores y, which faults of columns and of rows replace."""


PARTS = ("forward", "backward", "quantised", "modulated")
"""The modules of which lines can be replaced."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A piece of source text, ``old``, and its replacement, ``new``; ``old`` must occur exactly ``times`` times.

    ``harmless``: no fault by itself, such as a smaller block that lets a fault in another line show.
    """

    old: str
    new: str
    times: int = 1
    harmless: bool = False


@dataclass(frozen=True, kw_only=True)
class Patched:
    """A kernel that differs from ours by ``Lines`` of forward.py, backward.py, quantised.py and modulated.py.

    ``name`` is its implementation's; ``coded``: which of ``CODED`` it is, if the op returns codes. A call with an op
    returns the implementation, without importing the kernels yet.
    """

    name: str
    forward: tuple[Lines, ...] = ()
    backward: tuple[Lines, ...] = ()
    quantised: tuple[Lines, ...] = ()
    modulated: tuple[Lines, ...] = ()
    coded: str = "triton"

    def __call__(self, op: str) -> Implementation:
        """The patched kernels' implementation of ``op``."""
        kernels = partial(module_of, self)
        if OPS[op].quantises:
            return quantising(op, name=self.name, coded=self.coded, kernels=kernels, source=__name__)
        if OPS[op].modulated:
            return modulated(op, name=self.name, kernels=kernels, source=__name__)
        return implementation(op, name=self.name, kernels=kernels, source=__name__)

    def without_fault(self) -> Patched:
        """Our kernels with nothing but the harmless lines replaced."""
        harmless: dict[str, Any] = {
            part: tuple(line for line in getattr(self, part) if line.harmless) for part in PARTS
        }
        return replace(self, name=f"{self.name}.harmless", **harmless)

    def source(self, part: str) -> str:
        """The text of the module of ``part`` with its lines replaced.

        Raises NormcheckError if the file does not have a line, or not as many times as it should.
        """
        lines: tuple[Lines, ...] = getattr(self, part)
        if part != "forward" and self.forward:
            lines = (*lines, Lines(old=_SHARED, new=f"from {_module_name(self, 'forward')} import"))
        text = (_FOLDER / f"{part}.py").read_text(encoding="utf-8")
        for line in lines:
            if text.count(line.old) != line.times:
                problem = f"occurs {text.count(line.old)} times in {part}.py; expected {line.times}"
                raise NormcheckError(f"mutant={self.name}: {line.old.strip()!r} {problem}")
            text = text.replace(line.old, line.new)
        return text


def patched(
    id: str,
    *,
    forward: tuple[Lines, ...] = (),
    backward: tuple[Lines, ...] = (),
    quantised: tuple[Lines, ...] = (),
    modulated: tuple[Lines, ...] = (),
    coded: str = "triton",
    **fields: Any,
) -> Mutant:
    """A mutant of our kernels, of layernorm in fp16 unless ``fields``, which are Mutant's, say otherwise."""
    fields = {"ops": ("layernorm",), "dtypes": ("fp16",), "language": "triton", **fields}
    parts: dict[str, Any] = {"forward": forward, "backward": backward, "quantised": quantised, "modulated": modulated}
    make = Patched(name=id, **parts, coded=coded)
    return Mutant(id=id, make=make, **fields)


def module_of(patched: Patched, part: str) -> Any:
    """The module of ``part``, one of ``PARTS``; our own module if no line of it differs.

    Triton reads a kernel by ``inspect.getsource``, so the module's text is put where that looks.
    """
    if not patched.forward and not getattr(patched, part):
        return own_kernels(part)
    name = _module_name(patched, part)
    if name not in sys.modules:
        if part != "forward" and patched.forward:
            module_of(patched, "forward")
        _load(name, f"<{patched.name}: {part}.py>", patched.source(part))
    return sys.modules[name]


def _module_name(patched: Patched, part: str) -> str:
    return f"{__name__}_{re.sub(r'[^0-9A-Za-z]', '_', patched.name)}_{part}"


def _load(name: str, filename: str, text: str) -> None:
    """Run ``text`` as the module ``name``. Its file is in ``linecache`` only, and stays there without a time stamp."""
    module = ModuleType(name)
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    sys.modules[name] = module
    try:
        exec(compile(text, filename, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
