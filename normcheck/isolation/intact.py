"""Whether the functions by which a kernel's process is watched are still those with which it began.

They look for writes around memory that the kernel allocated, for results in memory of earlier ones, for memory that was
never written: in the kernel's own process, which alone knows what it allocates. Code under test can replace any of
them. Then this shows, unless it is replaced as well; what no process can be asked about itself is in
docs/isolation-and-trust.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

_WATCHING = (
    "normcheck.cases.guard_bands",
    "normcheck.impls.kernels.configurations",
    "normcheck.isolation.calls",
    "normcheck.isolation.watched_memory",
    "normcheck.isolation.intact",
    "normcheck.isolation.messages",
    "normcheck.isolation.shared_memory",
    "normcheck.isolation.worker",
    "normcheck.runner.arena",
    "normcheck.runner.call",
    "normcheck.runner.kernel_errors",
    "normcheck.runner.overwriting",
    "normcheck.runner.own_memory",
    "normcheck.runner.run",
)

WATCHED = ", by which normcheck watches it"
"""The end of the message on a function that was replaced."""

_TORCH = ("torch", "torch.nn.functional", "torch.testing", "torch.autograd", "torch.cuda", "torch.linalg")
_JUDGES = ("normcheck.oracle", "normcheck.checks", "normcheck.golden")

_Entry = tuple[str, Mapping[str, Any], str, Any, CodeType | None]


def watched() -> Callable[[], str]:
    """Note the functions now -> a function that names one that has been replaced since, or ""."""
    entries = list(_entries())

    def replaced() -> str:
        for owner, names, name, value, code in entries:
            now = names.get(name)
            if now is not value or (code is not None and now.__code__ is not code):
                return f"{owner}.{name}"
        return ""

    return replaced


def torch_as_it_is() -> Callable[[], str]:
    """Note torch's functions, and those that tell the time -> a function that names what has been done to them since.

    That is one that was replaced, or the import of a module that judges; "" if there is neither. Neither can change a
    verdict, which another process reaches; both say what the code was meant to do. What torch replaces itself, as
    torch.compile does, is not meant, and normcheck itself imports nothing here that judges.
    """
    names: dict[str, Mapping[str, Any]] = {name: vars(sys.modules[name]) for name in _TORCH}
    torch = sys.modules["torch"]
    names |= {"torch.Tensor": vars(torch.Tensor), "torch.cuda.Event": vars(torch.cuda.Event), "time": vars(time)}
    noted = {place: {name: value for name, value in own.items() if callable(value)} for place, own in names.items()}

    def touched() -> str:
        for place, functions in noted.items():
            now = names[place]
            for name, value in functions.items():
                if now.get(name) is not value and not _is_torchs(now.get(name)):
                    return f"replaced {place}.{name}"
        return next((f"imported {name}" for name in sys.modules if name.startswith(_JUDGES)), "")

    return touched


@dataclass(frozen=True)
class Noted:
    """The functions as they are when this is made, which the root does: a process that it forks has the notes without
    a look at each function, which would copy the page on which it counts who refers to it, some MB in all.
    """

    replaced: Callable[[], str] = field(default_factory=watched)
    touched: Callable[[], str] = field(default_factory=torch_as_it_is)


def _is_torchs(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("torch")


def _entries() -> Iterator[_Entry]:
    for module_name in _WATCHING:
        module = sys.modules[module_name]
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module_name:
                continue
            yield (module_name, vars(module), name, value, _code(value))
            if isinstance(value, type):
                own = vars(value)
                yield from (
                    (f"{module_name}.{name}", own, key, member, _code(member))
                    for key, member in own.items()
                    if callable(member) or isinstance(member, property | staticmethod | classmethod)
                )


def _code(value: object) -> CodeType | None:
    return value.__code__ if isinstance(value, FunctionType) else None
