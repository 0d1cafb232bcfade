"""What a worker sends is data: half a message waits, garbage is refused, and a reply is what it may be or a crash."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normcheck.errors import Broken, UnsupportedCase
from normcheck.isolation.messages import LONGEST, Garbled, Inbox, packed
from normcheck.isolation.replies import broken_of, copied_out, raise_failure, stray
from normcheck.isolation.shared_memory import HostMemory, Space

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])  # of how busy this machine is
@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=3), min_size=1, max_size=3), st.integers(1, 9))
def test_messages_arrive_whole_in_whatever_pieces(messages: list[dict[str, object]], piece: int) -> None:
    sent, inbox, found = b"".join(map(packed, messages)), Inbox(), []
    for start in range(0, len(sent), piece):
        inbox.add(sent[start : start + piece])
        while (message := inbox.next()) is not None:
            found.append(message)
    assert found == messages


@pytest.mark.parametrize(
    "received",
    [
        struct.pack("!I", LONGEST + 1),
        struct.pack("!I", 3) + b"\xff\xfe{",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 100_000) + b"[" * 100_000,
        b"HTTP/1.1 200",
    ],
)
def test_what_is_no_message_is_refused(received: bytes) -> None:
    inbox = Inbox()
    inbox.add(received)
    with pytest.raises(Garbled):
        inbox.next()


def test_a_reply_raises_what_it_reports() -> None:
    raise_failure({})
    with pytest.raises(UnsupportedCase, match="not today"):
        raise_failure({"refused": "not today"})
    with pytest.raises(Broken) as raised:
        raise_failure({"broken": {"kind": "exception", "message": "no", "frames": ["line 1\n"] * 50}})
    assert (raised.value.kind, len(raised.value.frames)) == ("exception", 20)


@pytest.mark.parametrize("item", [None, 3, [], {}, {"kind": "pass"}, {"kind": ["exception"]}, {"kind": "crash"}])
def test_a_failure_that_makes_no_sense_is_a_crash(item: object) -> None:
    """A worker cannot claim a kind that only its parent sees, such as its own death."""
    assert broken_of(item).kind == "crash"
    assert "no sensible answer" in broken_of(item).message


def test_no_memory_for_a_copy_says_nothing_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that others had filled, a right kernel was said to have crashed."""
    space = Space(HostMemory())
    answer = {"returned": [{"name": "dx", "device": "cpu", **space.copy_in_dense(torch.ones(3, 4))}], "gradients": []}
    assert copied_out(space, answer, "gradients")["dx"].sum() == 12

    def clone(self: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    with pytest.raises(torch.OutOfMemoryError):
        copied_out(space, answer, "gradients")


@pytest.mark.parametrize("item", [None, "x", ["y", 1, 2], ["y", "many", 2, "behind"], ["y", 1, 2, "behind", 5]])
def test_a_stray_write_that_makes_no_sense_is_a_crash(item: object) -> None:
    with pytest.raises(Broken, match="no sensible answer to strays"):
        stray(item)
    assert stray(["y", 12, 1, "3 behind its last"])[:3] == ("y", 12, 1)
