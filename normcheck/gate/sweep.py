"""Sweep of one cell: stored failures, the core, explicit cases, then drawn ones; the first failure is shrunk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from normcheck.cases.beyond import telling
from normcheck.cases.case import Case, without_unusual
from normcheck.cases.depth import Depth
from normcheck.cases.planned import Planned
from normcheck.checks import gpu_memory, sanitizer
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import died, run_case, timed_out, why_not
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, context_lost, undeclared_model
from normcheck.checks.contexts import is_not_run
from normcheck.checks.finding import finding, place, with_larger, worst_ratio
from normcheck.checks.probes import not_as_before
from normcheck.checks.refusal import is_of_exception
from normcheck.circumstances import WRONG
from normcheck.contexts.catalogue import PROFILER
from normcheck.errors import one_line
from normcheck.gate.beside import Beside, Done
from normcheck.gate.blame import Blame, blamed, repro_of, run_surely, whole_sweep, with_blame
from normcheck.gate.configurations import InTurn, are_tried, each_configuration, unjudged
from normcheck.gate.contexts import failing_in_context, missing
from normcheck.gate.diagnosis import explained, named, of_earlier, of_torn
from normcheck.gate.plan import Plan, planner_of
from normcheck.gate.requirements import sizes_required
from normcheck.gate.sequence import ROWS_EVERY, Sequence
from normcheck.gate.shrink import Stop, widened
from normcheck.gate.tally import Tally, empty_outputs, uncounted
from normcheck.gate.torn import other_than, tear, without_graph
from normcheck.gate.what_ran import what_ran
from normcheck.oracle import judging
from normcheck.planner.planner import Planner
from normcheck.result import ASLEEP, CONTEXT, Coverage, Verdict
from normcheck.runner.call import poisoned_memory
from normcheck.runner.session import session_of

Progress = Callable[[int, float], None]
"""Called after each case with the number of cases so far and the worst ratio."""

_ASLEEP_SECONDS, _ASLEEP_SHARE = 3.0, 0.5  # of a cell's time: on a CPU no kernel waits for anybody so long
_TWO_LINES = 140  # characters
_TELLING_SECONDS = 10.0  # at most, for the search for the most telling case


def run_cell(cell: Cell, plan: Plan, progress: Progress, *, with_coverage: bool = True) -> Verdict:
    """The verdict of one cell. Nothing that an implementation does makes it raise.

    Each cell has a process of its own: any damage by the kernel ends with it. ``with_coverage``: the verdict has the
    coverage of its core, and a pass without all of the core is thin. It costs a quarter of a second, for making the
    rest of the core; a caller that needs only the finding saves it.
    """
    reason = why_not(cell, plan.device)
    if reason:
        return uncounted(cell, plan.device, "skip", detail=reason)
    start = time.perf_counter()
    with session_of(cell.implementation) as session:
        return _told(_run(cell, plan, progress, with_coverage, start), session.eager_calls)


def _run(cell: Cell, plan: Plan, progress: Progress, with_coverage: bool, start: float) -> Verdict:
    sizes = dict.fromkeys(sizes_required(plan.required, cell.implementation.name), 0)
    tally = Tally(undeclared_model(cell.implementation, plan.device), sizes=sizes)
    core = planner_of(cell, plan, time.perf_counter() - start)
    with poisoned_memory():
        failed = _search(cell, plan, tally, progress, core, start)
        if failed is not None and WRONG in (how.status for how in failed.contexts.values()):
            plan = replace(plan, within=(*failed.contexts,))
        final = failed is not None and (_context_lost(cell, failed) or any(map(is_not_run, failed.problems)))
        failure = None
        if failed is not None:
            cell = replace(cell, configuration=tally.wrong)
            torn = tear(tally, failed)
            blame = Blame(failed) if final or torn else blamed(cell, plan, failed)
            smallest = blame.result
            for checked in smallest.wrong:
                tally.note(smallest.case, checked)
            advise = blame.alone and plan.profile.explain_seconds > 0 and not (died(smallest) or final)
            failure = finding(cell, smallest, plan.device, advise=advise)
            failure = with_blame(cell, plan, blame, failure)
            if torn:
                shown = repro_of(cell, (*torn.before, smallest.case)) if torn.before else whole_sweep(cell, plan)
                failure = of_torn(cell, plan, other_than(tally, failed), failed) or replace(failure, advice=torn.advice)
                failure = replace(failure, reproduce=shown)
            in_context = failure.kind == CONTEXT
            if failure.where is not None and blame.alone and not (torn or in_context):
                failure = with_larger(failure, widened(cell, plan, smallest, failed))
            if blame.alone and not (final or torn or in_context):
                failure = named(cell, plan, smallest, failed, failure)
            elif blame.needed:
                failure = of_earlier(cell, plan, blame, failure)
    bare = uncounted(cell, plan.device, "skip", seconds=time.perf_counter() - start)
    if failure is None and not tally.cases:
        return tally.skipped(bare, "no case was drawn")
    verdict = tally.verdict(bare, cell.op, failure)
    if not with_coverage:
        return verdict
    verdict = _covered(verdict, core, cell, plan)
    return _awake(verdict, session_of(cell.implementation).idle_seconds) if plan.device == "cpu" else verdict


def _covered(verdict: Verdict, core: Planner, cell: Cell, plan: Plan) -> Verdict:
    """``verdict`` with the coverage of its core; a pass becomes thin if the core was not finished."""
    if verdict.status != "pass":  # the search ended with the failure
        return replace(verdict, core=core.account.so_far())
    coverage = core.account.coverage(verdict.cases)
    verdict = replace(verdict, core=coverage)
    gaps = [_unfinished(core, coverage, plan)] if coverage.missed else []
    gaps += missing(cell, plan, verdict.contexts) + unjudged(plan, verdict.configurations)
    gaps += [f"{name} was never told from zeros" for name in empty_outputs(verdict.vacuity)]
    return verdict if not gaps else replace(verdict, status="thin", detail="; ".join(gaps))


def _unfinished(core: Planner, coverage: Coverage, plan: Plan) -> str:
    """What a core has missed, and why, in two lines of a narrow terminal: a report's JSON names all of it."""
    why = core.account.why_thin()
    if coverage.limit == "cases":
        of_all = "" if core.is_priced else f" of {coverage.planned:,}"
        why = f"{coverage.run:,}{of_all} cases ran ({plan.allowed})"
    told, (first, *more) = f"core not finished, {why}: ", coverage.missed
    words = told + one_line(first, max(_TWO_LINES - len(told), 40), keep_end=False)
    for number, one in enumerate(more):
        rest = f" and {len(more) - number} more"
        if len(words) + len(f", {one}") + len(rest) * (number + 1 < len(more)) > _TWO_LINES:
            return words + rest
        words += f", {one}"
    return words


def _told(verdict: Verdict, eager: int) -> Verdict:
    """``verdict``; a pass is thin if torch.compile ran ``eager`` calls as they are, and any other has a note on it."""
    if not eager:
        return verdict
    words = f"torch.compile gave up {eager} time{'s' * (eager > 1)}: what was judged there was not compiled"
    if verdict.status not in ("pass", "thin"):
        return replace(verdict, notes=(*verdict.notes, words))
    return replace(verdict, status="thin", detail="; ".join(filter(None, [verdict.detail, words])))


def _awake(verdict: Verdict, idle: float) -> Verdict:
    """``verdict``; an error if it is thin because the kernel, on a CPU, slept for most of the time."""
    if verdict.status != "thin" or idle < max(_ASLEEP_SECONDS, _ASLEEP_SHARE * verdict.seconds):
        return verdict
    slept = f"its process slept for {idle:.0f} of {verdict.seconds:.0f} s, in which {verdict.cases} cases were judged"
    return replace(verdict, status="error", error=ASLEEP, detail=f"{slept}; {verdict.detail}")


def result_of(cell: Cell, case: Case, plan: Plan) -> Verdict:
    """The verdict of one case alone, which is not shrunk."""
    reason = why_not(cell, plan.device)
    if reason:
        return uncounted(cell, plan.device, "skip", detail=reason)
    start = time.perf_counter()
    tally = Tally(undeclared_model(cell.implementation, plan.device))
    with poisoned_memory():
        session_of(cell.implementation).configure(cell.asked)
        result = run_case(cell, case, plan)
        tally.add(result)
        tally.contexts.update(result.contexts)
        failure = finding(cell, result, plan.device) if result.failed else None
        failure = failure and explained(cell, plan, result, failure)
        session_of(cell.implementation).configure("")
    bare = uncounted(cell, plan.device, "skip", detail=result.refused, seconds=time.perf_counter() - start)
    return bare if result.refused else tally.verdict(bare, cell.op, failure)


def _search(cell: Cell, plan: Plan, tally: Tally, progress: Progress, core: Planner, start: float) -> Result | None:
    """The most telling of the failing results; None if none has failed when the budget is used up.

    ``start``: the time when the cell began.
    """
    in_turn = InTurn(cell, plan, core)
    found = _first_failing(cell, plan, tally, progress, core, in_turn)
    if found and not tear(tally, found[0]):
        failed, tally.wrong = in_turn.blamed(found[0])
        if tally.wrong:
            return failed
        found = [failed]
    in_turn.ask("")
    found, known = found or _first_again(cell, plan, tally), Ask(Depth.OFF, conventions=tally.conventions)
    if not found and are_tried(cell, plan):
        tried = each_configuration(cell, plan, tally.plain, time.perf_counter() - start, known)
        tally.configurations, tally.wrong = tried.configured, tried.wrong
        if tried.failed is not None:
            return tried.failed
    if not found and plan.contexts and plan.shard[0] == 1:
        used = time.perf_counter() - start
        found, tally.contexts = failing_in_context(cell, plan, tally.plain, used, known)
        if not found:
            looked = what_ran(cell, plan, tally.plain, time.perf_counter() - start)
            tally.ran = looked.ran
            if looked.how is not None:
                tally.contexts[PROFILER] = looked.how
            if looked.failed is not None:
                return looked.failed
        if found:
            return found[0]
    if not found and plan.profile.sanitizer and plan.device == "cuda" and plan.shard[0] == 1:
        found = _under_sanitizer(cell, tally)
        if found:
            return found[0]
    return _most_telling(cell, plan, found[0], tally) if found else None


def _first_failing(
    cell: Cell, plan: Plan, tally: Tally, progress: Progress, core: Planner, in_turn: InTurn
) -> list[Result]:
    """The first failing result, or an empty list if the time or the number of cases is used up before."""
    found: list[Result] = []
    asked_at_once: set[Case] = set()
    replayed = 0

    def run(
        planned: Planned, upcoming: Case | None = None, *, own: bool = True, done: Done | None = None
    ) -> tuple[Result, float]:
        began, compiling = time.perf_counter(), judging.compiling_seconds()
        if done is None:
            asked = replace(tally.ask, depth=planned.probe, upcoming=upcoming, other_modes=bool(plan.contexts))
            in_turn.ask(in_turn.of(planned.case))
            result = run_surely(cell, planned.case, plan, asked)
            in_turn.note(time.perf_counter() - began)
            seconds = time.perf_counter() - began - (judging.compiling_seconds() - compiling)
        else:
            in_turn.ask("")
            result, seconds = done.result, done.seconds
        if own or result.failed:
            tally.add(result)
            progress(tally.cases, max(tally.floors.values(), default=0.0))
        failed = result if result.failed else without_graph(tally)
        if failed is not None:
            found.append(failed)
            raise Stop
        usual = _asked_at_once(cell, result)
        if usual is not None and usual not in asked_at_once and tally.cases < plan.most:
            asked_at_once.add(usual)
            result_of_usual, took = run(Planned(usual, Depth.MEMORY), own=own)
            core.saw_another(usual, Depth.MEMORY, refused=bool(result_of_usual.refused), seconds=took)
        return result, seconds

    sequence = Sequence(cell, plan, core, lambda: tally.cases - replayed)
    try:
        for case in _replayed(cell, plan, tally):
            run(Planned(case, Depth.ROWS))
        replayed = tally.cases  # they have no number in the sequence
        with Beside(cell, plan) as beside:
            for asked in sequence:
                if sequence.is_too_slow(asked):
                    tally.too_slow[f"{asked.planned.case.M}x{asked.planned.case.N}"] = None
                    continue
                done = None
                room = max(0, plan.most - tally.cases + replayed - 1)
                beside.look(asked.planned, replace(tally.ask, other_modes=bool(plan.contexts)), room, sequence.coming)
                done = beside.result(asked.planned, tally.conventions)
                if done is not None and died(done.result):  # it may be another's victim
                    once_more, done = (() if timed_out(done.result) else done.result.after), None
                    for case in once_more:
                        run(Planned(case, Depth.MEMORY), own=False)
                result, seconds = run(asked.planned, asked.upcoming, own=asked.own, done=done)
                sequence.saw(asked, refused=bool(result.refused), seconds=seconds)
    except Stop:
        pass
    tally.failed_at = sequence.number
    return found


def _asked_at_once(cell: Cell, result: Result) -> Case | None:
    """The case without what is unusual, if an exception was taken for a refusal of that; None if it was not.

    What else the case has, such as N = 1, is refused by ``UnsupportedCase`` or a declaration alone.
    """
    case, claims = result.case, cell.claims
    if not any(is_of_exception(case, reason) for reason in (result.refused, result.seen.refused)):
        return None
    usual = without_unusual(case)
    known = not claims.shapes or (usual.M, usual.N) in claims.shapes
    return usual if known and usual != case else None


def _replayed(cell: Cell, plan: Plan, tally: Tally) -> tuple[Case, ...]:
    """The cases that failed in earlier runs, which the first shard runs. Their notes go to ``tally``."""
    replay = plan.replays.get(cell.key)
    if replay is None or plan.shard[0] != 1:
        return ()
    tally.notes.update(dict.fromkeys(replay.notes))
    return tuple(case for case in replay.cases if not cell.layouts or case.layout in cell.layouts)


def _first_again(cell: Cell, plan: Plan, tally: Tally) -> list[Result]:
    """Run the first case again, after all others: its result if that fails or has other bits, else an empty list."""
    first = tally.first
    if first is None or first.failed or not cell.implementation.deterministic or tally.cases < ROWS_EVERY:
        return []
    again = run_surely(cell, first.case, plan, Ask(Depth.OFF, tally.floors, patient=not tally.late))
    if gpu_memory.is_short(again.refused):
        return []
    several = session_of(cell.implementation).graphs > 1  # which of them torch.compile takes hangs on earlier calls
    problems = () if several else tuple(not_as_before(first.seen, again.seen))
    return [replace(again, problems=(*again.problems, *problems))] if problems or again.failed else []


def _under_sanitizer(cell: Cell, tally: Tally) -> list[Result]:
    """The failing result that compute-sanitizer finds, else an empty list. What it did becomes a note of ``tally``."""
    case, problems, note = sanitizer.examine(cell)
    if note:
        tally.notes[note] = None
    return [Result(case, tally.base, problems=problems)] if case is not None else []


def _most_telling(cell: Cell, plan: Plan, failed: Result, tally: Tally) -> Result:
    """``failed``, or a failure on another kind of data: the one whose output is computed first, then the largest ratio.

    The first case may fail by a hair, and another kind of data may show the same fault plainly.
    """
    most = min(plan.profile.seconds / 4, _TELLING_SECONDS, plan.profile.shrink_seconds)
    best, end = failed, time.perf_counter() + most
    if _context_lost(cell, failed) or died(failed) or tear(tally, failed):
        return failed
    for case in telling(cell.claims, plan.seed) if most else ():
        if time.perf_counter() > end or timed_out(best):
            break
        result = run_case(cell, case, plan, Ask(Depth.OFF, tally.floors))
        if result.failed and (place(result), -worst_ratio(result)) < (place(best), -worst_ratio(best)):
            best = result
    for checked in best.wrong:
        tally.note(best.case, checked)
    return best


def _context_lost(cell: Cell, failed: Result) -> bool:
    """Whether this process has lost its GPU's context, so that nothing runs any more; a worker would be replaced."""
    return not session_of(cell.implementation).isolated and any(map(context_lost, failed.problems))
