"""A failure of two cases that do not go together, each of which may be right alone: torn between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from normcheck.cases.case import Case
from normcheck.cases.tensor_names import BY_NAME, GRADIENTS
from normcheck.checks.check import Result
from normcheck.checks.contract import Problem
from normcheck.gate.tally import Tally
from normcheck.oracle.conventions import shown

_MOST_SHOWN = 2  # conventions that a case fits
_NONE_OF = {1: "it", 2: "either"}

_GRAPH_ADVICE = (
    "Does one path compute y outside autograd's graph, as under torch.no_grad() or in a kernel without a backward? "
    "Give it a torch.autograd.Function, or declare a backward. If nobody asks for gradients, return a y without a "
    "graph in every case: then no gradient is owed."
)


@dataclass(frozen=True)
class Torn:
    """A failure of two cases that do not go together. ``before``: the other one, to be run first, if that shows it."""

    advice: str
    before: tuple[Case, ...] = ()


def without_graph(tally: Tally) -> Result | None:
    """The first case whose y has no graph, as failed, once the y of another had one: both owe the same gradients.

    What is wrong is that they differ. A kernel whose y never has a graph is judged by its forward alone.
    """
    if len(tally.graphs) < 2:
        return None
    bare = tally.graphs[False]
    message = f"y has no graph here, so there is no gradient; it has one in {tally.graphs[True].case}"
    absent = [name for name in bare.not_returned if name in (*GRADIENTS, *BY_NAME.values())]
    return replace(bare, problems=tuple(Problem("missing", name, message) for name in absent))


def tear(tally: Tally, result: Result) -> Torn | None:
    """What tears a failed case from others, each of which may be right alone; None if nothing does.

    It fits a convention, but none of those that fit all cases before it; or its y alone has no graph.
    """
    if result.has_graph is False and any(problem.output == "dx" for problem in result.problems):
        return Torn(_GRAPH_ADVICE, (tally.graphs[True].case,))
    if not result.conventions or tally.conventions is None or {*result.conventions} & {*tally.conventions}:
        return None
    fits, others = result.conventions[:_MOST_SHOWN], dict[Case | None, list[str]]()
    for each in fits:
        others.setdefault(tally.excluded.get(each, tally.opened), []).append(shown(each))
    refuted = "; ".join(
        f"{case} does not fit {' nor '.join(names) if len(others) > 1 else _NONE_OF[len(names)]}"
        for case, names in others.items()
    )
    return Torn(
        f"This case fits another convention: model={' or '.join(map(shown, fits))}. But {refuted}. "
        "Does the kernel compute some cases in another way than others, or all in a way that is none of these?"
    )


def other_than(tally: Tally, result: Result) -> Case | None:
    """The earlier case that does not fit what a torn ``result`` fits first; None if it is not torn."""
    return tally.excluded.get(result.conventions[0], tally.opened) if result.conventions else None
