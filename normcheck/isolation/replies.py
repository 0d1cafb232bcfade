"""What another process answers, checked: tensors, strays, and what it says is broken or refused.

Outputs are copied out of shared memory, so that nothing that runs later can change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from normcheck.errors import Broken, UnsupportedCase
from normcheck.isolation.messages import Message
from normcheck.isolation.shared_memory import Space, taken
from normcheck.runner.arena import Stray

_KINDS = ("exception", "missing", "shape", "not_repeatable", "input_modified")


class Returned(dict[str, Tensor]):
    """Outputs of a forward. ``graph``: how the other process calls the graph behind y, None where there is none;
    ``joined``: how many gradients of x are added up in it; ``gradients``: what came of it, where that was asked for at
    once."""

    graph: int | None = None
    joined: int = 0
    gradients: dict[str, Tensor] | Broken | None = None


def copied_out(space: Space, answer: Message, what: str) -> Returned:
    """Copies of what was returned in answer to ``what``. Raises Broken for what is no answer."""
    try:
        return Returned({str(item["name"]): _received(space, item) for item in answer["returned"]})
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        raise nonsense(what, answer) from None


def _received(space: Space, item: Mapping[str, Any]) -> Tensor:
    """A copy of what was returned. Raises Broken where it could not be shared, ValueError for what is no place."""
    name, reason = str(item["name"]), item.get("unusable")
    if reason is not None:
        raise Broken("shape", name, str(reason))
    here = space.memory.device
    if item["device"] != here:
        raise Broken(
            "missing", name, f"{name}.device={str(item['device'])[:20]}: expected {here}, where the inputs are"
        )
    tensor = taken(space.memory, item)
    if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() != item["bytes"]:
        raise ValueError("expected packed elements")  # no more of them than there are bytes
    return tensor.clone()


def complain(answer: Message) -> None:
    """Raise what the other process says: UnsupportedCase or Broken."""
    refused, broken = answer.get("refused"), answer.get("broken")
    if refused is not None:
        raise UnsupportedCase(str(refused))
    if broken is not None:
        raise broken_of(broken)


def broken_of(told: object) -> Broken:
    """What another process tells of something broken, as the exception that it is here."""
    if not isinstance(told, dict) or told.get("kind") not in _KINDS:
        return nonsense("a call", {})
    frames = told.get("frames")
    lines = tuple(str(line)[:1000] for line in frames[:20]) if isinstance(frames, list) else ()
    return Broken(str(told["kind"]), str(told.get("output", ""))[:100], str(told.get("message", ""))[:100_000], lines)


def nonsense(what: str, answer: Message) -> Broken:
    """What an answer that is none comes to."""
    return Broken("crash", "", f"its process gave no sensible answer to {what}: {str(answer)[:200]}")


def stray(item: object) -> Stray:
    """What was written around one buffer, as ``arena.Arena.strays`` tells it. Raises Broken for anything else."""
    try:
        name, elements, bad, where = map(str, item if isinstance(item, list) else ())
        return Stray(name[:100], int(elements), int(bad), where[:200])
    except ValueError:
        raise nonsense("strays", {"stray": str(item)[:100]}) from None
