"""Effects before the first case: switch on Triton's interpreter on a CPU, load each user's file in a process of its
own, and make and read the folder of earlier failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from normcheck.cases.case_line import parsed
from normcheck.errors import ImportFailed
from normcheck.gate import replay
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import Plan, plan_of
from normcheck.gate.timings import timed
from normcheck.impls import discovery
from normcheck.impls.implementation import Implementation
from normcheck.runner.device import device_for


def prepared(options: VerifyOptions) -> Plan:
    """The plan that ``options`` ask for; on return everything is ready to run it. Raises UsageError."""
    device = device_for(options.device, apart=options.isolation)
    ops = tuple(dict.fromkeys(options.op))
    asked = dict.fromkeys(options.impl, ops) or discovery.by_default(device, ops)
    found = dict(_each_selected(asked, device, options))
    failed = {spec: own for spec, own in found.items() if isinstance(own, ImportFailed)}
    if len(failed) == len(found):
        raise next(iter(failed.values()))
    chosen = [(spec, implementation) for spec, own in found.items() for implementation in _there(spec, ops, own)]
    plan = plan_of(options, device, chosen)
    if options.timings:
        plan = timed(plan, options.timings)
    if not options.database:
        return plan
    return replace(plan, replays=replay.replays(options.database, plan.cells, parsed))


def _there(
    spec: str, ops: tuple[str, ...], found: tuple[Implementation, ...] | ImportFailed
) -> tuple[Implementation, ...]:
    """The implementations, or what stands for them if they could not be imported: their cells are errors."""
    return discovery.not_imported(spec, ops, found) if isinstance(found, ImportFailed) else found


def _each_selected(
    asked: Mapping[str, tuple[str, ...]], device: str, options: VerifyOptions
) -> Iterator[tuple[str, tuple[Implementation, ...] | ImportFailed]]:
    """``selected`` for each spec and its ops, or why it cannot be imported."""
    if options.isolation:
        from normcheck.isolation.select import each_selected_apart

        yield from each_selected_apart(asked, device, options.timeout, sandboxed=options.sandbox)
        return
    for spec, ops in asked.items():
        try:
            yield spec, discovery.in_this_process(discovery.select(spec, ops))
        except ImportFailed as failed:
            yield spec, failed


def selected(
    spec: str, ops: tuple[str, ...], device: str, timeout: float, *, isolation: bool, sandbox: bool = True
) -> tuple[Implementation, ...]:
    """The implementations of ``ops`` (of all, if empty) that ``spec`` names. Raises UsageError.

    With ``isolation`` another process imports and runs their code; it may take ``timeout`` seconds to import it, and
    with ``sandbox`` writes only to a folder of its own.
    """
    if not isolation:
        return discovery.in_this_process(discovery.select(spec, ops))
    from normcheck.isolation.select import select_apart

    return select_apart(spec, ops, device, timeout, sandboxed=sandbox)
