"""The process that judges, from the side that asks: one that answers is kept, one that ends or hangs is replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

from normcheck.training import process
from normcheck.training.process import NoAnswer, answer

ECHO = """
import socket, sys, time
_, lines, _ = {}, socket.socket(fileno={}).makefile("rw"), {!r}
print('{{"ready": true}}', file=lines, flush=True)
for line in lines:
    if "end" in line:
        break
    time.sleep(60 * ("hang" in line))
    print(line, end="", file=lines, flush=True)
"""
"""A judge that says what it was asked, ends or hangs."""


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    process.close()
    monkeypatch.setattr(process, "_MAIN", ECHO)
    yield
    process.close()


def judges() -> list[int]:
    return [child.pid for child in psutil.Process().children() if any("60 * " in word for word in child.cmdline())]


def said(word: str, device: str = "cpu", seconds: float = 30.0) -> object:
    return answer({"device": device, "word": word}, seconds)["word"]


def test_a_judge_is_kept_until_it_ends_hangs_or_is_for_another_device() -> None:
    assert said("one") == "one"
    first = judges()
    assert (said("two"), judges(), len(first)) == ("two", first, 1)
    with pytest.raises(NoAnswer, match="ended") as lost:
        said("end")
    assert not lost.value.late
    assert (said("three"), len(judges())) == ("three", 1)
    assert judges() != first
    with pytest.raises(NoAnswer, match=r"no answer in 0\.2 s") as lost:
        said("hang", seconds=0.2)
    assert (lost.value.late, judges()) == (True, [])
    assert said("four") == "four"
    before = judges()
    psutil.Process(before[0]).kill()
    psutil.wait_procs([psutil.Process(before[0])], timeout=10)
    assert (said("five"), len(judges())) == ("five", 1)
    before = judges()
    assert (said("six", device="cuda"), len(judges())) == ("six", 1)
    assert judges() != before
    process.close()
    assert judges() == []


def test_a_process_that_was_forked_has_a_judge_of_its_own() -> None:
    assert said("one") == "one"
    mine = judges()
    forked = os.fork()
    if forked == 0:
        code = 1
        try:
            code = int(not (said("two") == "two" and judges() != mine))
            process.close()
        finally:
            os._exit(code)
    assert os.waitpid(forked, 0)[1] == 0
    assert (said("three"), judges()) == ("three", mine)
