"""What crosses between processes: tensors with all that lies around them, and messages that are only data."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from normcheck.cases.guard_bands import NAN, copy, placed
from normcheck.isolation.messages import LONGEST, Garbled, Inbox, packed
from normcheck.isolation.shared_memory import HostMemory, Space, tensor_at
from normcheck.runner.call import without_modes

MEMORY = HostMemory()
SMALL = torch.arange(6, dtype=torch.float16).view(2, 3)


@pytest.mark.parametrize("stride", [(7, 1), (10, 1), (0, 1)])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_tensor_arrives_with_what_lies_around_it(stride: tuple[int, int], shift: int, dtype: torch.dtype) -> None:
    tensor = placed((5, 7), stride, dtype, "cpu", shift=shift)
    place, laid = Space(MEMORY).copy_in(tensor)
    there = tensor_at(MEMORY, json.loads(json.dumps(place)))
    assert (there.shape, there.stride(), there.storage_offset()) == (tensor.shape, stride, tensor.storage_offset())
    assert there.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    assert there.data_ptr() % 512 == tensor.storage_offset() * dtype.itemsize % 512
    there.fill_(3.0)
    there.as_strided((1,), (1,), 0).fill_(4.0)  # in the band before it
    assert tensor.isnan().all()
    laid.bring_back()
    assert torch.equal(tensor, torch.full_like(tensor, 3.0))
    assert tensor.as_strided((1,), (1,), 0).item() == 4.0


def test_places_do_not_overlap() -> None:
    space = Space(MEMORY)
    places = [space.copy_in(copy(placed((3, 5), (5, 1), torch.float32, "cpu"), NAN))[0] for _ in range(5)]
    ends = [place["at"] + place["bytes"] for place in places]
    assert all(end <= place["at"] for end, place in zip(ends, places[1:], strict=False))


@pytest.mark.parametrize(
    "tensor",
    [SMALL, SMALL.t(), SMALL[:, 1:], SMALL[:1].expand(4, 3), SMALL[:0], torch._neg_view(SMALL)],
    ids=["packed", "transposed", "a part", "expanded", "empty", "negative"],
)
def test_a_result_arrives_as_it_is_in_memory(tensor: torch.Tensor) -> None:
    """In no way that a kernel could have a hand in: its functions, and its modes, are not asked."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})) * 0

    expected = tensor.tolist()
    with pytest.MonkeyPatch.context() as patch, Mode(), without_modes():
        for name in ("copy_", "detach", "clone", "contiguous", "data_ptr"):
            patch.setattr(torch.Tensor, name, lambda self, *_, **__: self.fill_(7.0))
        place = Space(MEMORY).copy_in_dense(tensor)
    assert tensor_at(MEMORY, json.loads(json.dumps(place))).tolist() == expected


GOOD = Space(MEMORY).copy_in(SMALL)[0]
RUBBISH = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=9) | st.lists(st.integers())


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(GOOD)), RUBBISH, min_size=1))
@example({"offset": 1})
@example({"at": 4})
def test_what_is_no_place_is_refused(changes: dict[str, Any]) -> None:
    """Or it is another place within the memory."""
    try:
        tensor = tensor_at(MEMORY, {**GOOD, **changes})
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        return
    place = {**GOOD, **changes}
    begin = MEMORY.part(0, MEMORY.size).data_ptr() + place["at"]
    assert begin + place["bytes"] <= MEMORY.part(0, MEMORY.size).data_ptr() + MEMORY.size
    for end in ends(tensor):
        assert begin <= tensor.data_ptr() <= end.data_ptr() <= begin + place["bytes"] - end.element_size()


def ends(tensor: Tensor) -> list[Tensor]:
    """The last element in memory, or nothing of a tensor without elements."""
    return [tensor[tuple(size - 1 for size in tensor.shape)]] if tensor.numel() else []


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(1, 9))
def test_bytes_are_messages_or_garbled(data: bytes, step: int) -> None:
    inbox = Inbox()
    try:
        for first in range(0, len(data), step):
            inbox.add(data[first : first + step])
            message = inbox.next()
            assert message is None or isinstance(message, dict)
    except Garbled:
        pass


def test_a_message_arrives_whole() -> None:
    inbox, message = Inbox(), {"do": "forward", "eps": 1e-5, "given": {"x": GOOD}}
    for byte in packed(message):
        assert inbox.next() is None
        inbox.add(bytes([byte]))
    assert inbox.next() == message
    inbox.add(struct.pack("!I", LONGEST + 1))
    with pytest.raises(Garbled):
        inbox.next()


def test_nobody_can_shrink_it() -> None:
    """Memory that is mapped, and gone, would end the process that judges."""
    memory = HostMemory()
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memory.fd, 4096)
    memory.part(memory.size - 1, 1).fill_(1)
    memory.give_back(1 << 30)
