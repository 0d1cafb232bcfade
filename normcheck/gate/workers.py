"""How many cells are judged side by side, and what of the machine each of their judges gets."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
from collections.abc import Sequence

import torch

from normcheck.cases.dtypes import DTYPES
from normcheck.gate.options import VerifyOptions
from normcheck.impls import discovery
from normcheck.isolation.settling import keep_freed_memory
from normcheck.oracle import judging
from normcheck.runner.environment import memory_bytes

CORES_A_CELL = 2
"""A cell keeps two processes at work: one judges while the other, the kernel's, computes what is judged next."""

CORES_A_GPU_CELL = 1
"""The two of a GPU's cell wait for the GPU besides, and for each other: twelve left a quarter of 16 cores idle."""

MOST_A_GPU = 16
"""A GPU takes processes in turn: four or twelve had 7,000 turns a second in all."""

CELL_BYTES = {"quick": 8 << 30, "ci": 40 << 30, "deep": 40 << 30, "soak": 8 << 30}
"""Of a GPU's memory for a cell, by profile: two CUDA contexts, half a GiB each, the tensors that are shared, and what
judges them. Quick hardly gets to the large cases; ci and deep must have room for all that one cell alone would run."""

_CPU_CELL_BYTES = 4 << 30
"""Of a machine's memory for a cell: the processes of its judge and of its kernel, with a case of a hundred MB."""

_JUDGES_SHARE = 0.6  # of a GPU's memory; the rest is for the kernels' processes


def workers_of(options: VerifyOptions, cells: int, device: str) -> int:
    """How many of so many ``cells`` to judge side by side: as ``--workers`` says, else as fit; never more.

    On a CPU a cell has its two cores, so that what it reaches in its time does not hang on its neighbours. A GPU waits
    for the processes that feed it, so there are as many as cores and memory allow.
    """
    if options.workers is not None:
        return max(1, min(options.workers, cells))
    if not options.isolation or cells < 2:
        return 1
    if device == "cpu":
        return max(1, min(cells, cores_here() // CORES_A_CELL, memory_bytes("cpu") // _CPU_CELL_BYTES))
    return fitting(cells, cores_here(), free_bytes(), options.profile)


def likely_cells(options: VerifyOptions, device: str) -> int:
    """How many cells a run will have, as far as its options tell: of a user's file one op, if they name none."""
    known, ops = discovery.implementations(), options.op
    asked = dict.fromkeys(options.impl, ops) or discovery.by_default(device, ops)
    known_ones = sum(i.op in wanted or not wanted for spec, wanted in asked.items() for i in known.get(spec, ()))
    files = sum(spec not in known for spec in asked)
    return len(set(options.dtype or DTYPES)) * (known_ones + files * max(1, len(set(ops))))


def free_bytes() -> list[int]:
    """The free memory of each GPU."""
    return [torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())]


def fitting(cells: int, cores: int, free: Sequence[int], profile: str) -> int:
    """How many of ``cells`` fit ``cores`` and GPUs with ``free`` bytes each, at least 1."""
    by_memory = sum(min(memory // CELL_BYTES[profile], MOST_A_GPU) for memory in free)
    return max(1, min(cells, cores // CORES_A_GPU_CELL, by_memory))


def patience(workers: int, cores: int | None = None) -> float:
    """How many times longer than ``--timeout`` a case may take among so many, at least 1.

    With more of them than the cores are for, each process waits for its turn: that is no fault of a kernel.
    """
    return max(1.0, CORES_A_CELL * workers / (cores or cores_here()))


def start_judge(device: str, workers: int) -> None:
    """Prepare this new process for judging cells. It gets one GPU, and its share of that GPU's memory."""
    gc.freeze()
    keep_freed_memory()
    share = 1
    if device == "cuda":
        gpus = visible_gpus()
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number_of_this_process() % len(gpus)]
        share = -(-workers // len(gpus))
    take_share(device, share)
    if patience(workers) > 1:
        judging.be_in_crowd()


def number_of_this_process() -> int:
    """Its place among the spawned processes of a pool, from 0."""
    return int(re.split("[-:]", multiprocessing.current_process().name)[-1]) - 1  # SpawnProcess-2: the second one


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return [gpu for gpu in visible.split(",") if gpu]


def take_share(device: str, share: int) -> None:
    """Have this process use one thread, and of its GPU's memory what ``share`` judges on one GPU leave it."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(_JUDGES_SHARE / share)


def cores_here() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))
