"""Jobs in processes that may die: every job has its result, and the right one is blamed."""

from __future__ import annotations

import os
import time

from normcheck.isolation.pool import spread


def start() -> None:
    """Nothing to make ready."""


def work(job: str) -> str:
    if job == "dies":
        os._exit(0)
    if job == "waits":
        time.sleep(0.3)  # it is running when the other one takes the pool along
    return f"{job} in {os.getpid()}"


def died(job: str) -> str:
    return f"{job} died"


def apart(job: str) -> bool:
    return job == "alone"


def test_a_death_is_blamed_on_the_job_that_did_it() -> None:
    jobs = ("waits", "dies", "last", "alone")
    found = dict(spread(work, jobs, workers=2, start=start, died=died, apart=apart))
    assert sorted(found) == [0, 1, 2, 3]
    assert found[1] == "dies died"
    for index in (0, 2, 3):
        assert found[index].startswith(f"{jobs[index]} in ")
    assert len({found[0], found[3].replace("alone", "waits")}) == 2  # a process of its own


def test_one_worker_is_this_process() -> None:
    found = spread(work, ("one", "two"), workers=1, start=start, died=died, apart=apart)
    assert list(found) == [(0, f"one in {os.getpid()}"), (1, f"two in {os.getpid()}")]
