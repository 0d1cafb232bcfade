"""The graph that autograd keeps behind y: where the gradients of an input are added up."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def joined(y: Tensor, x: Tensor) -> int:
    """How many gradients of ``x``, a leaf, autograd adds up in the dtype of ``x``; 0 if y does not depend on x.

    Each use of x (``x.float()`` written twice is two) hands over a gradient of its own, rounded to the dtype of ``x``
    before they are added. A view or a copy of x in its own dtype is still x. An autograd.Function hands over one
    gradient for each of its inputs, and so does torch's own norm.
    """
    if type(y) is not Tensor or y.grad_fn is None or not x.requires_grad:
        return 0
    users = _users(y.grad_fn)
    here = get_gradient_edge(x).node
    while len(users.get(here, ())) == 1 and _is_still(x, users[here][0]):
        here = users[here][0]
    return 1 if here is y.grad_fn else len(users.get(here, ()))


def _users(root: Node) -> dict[Node, list[Node]]:
    """Of each node behind ``root`` the nodes that hand it gradients, one that hands it two twice."""
    users: dict[Node, list[Node]] = {}
    todo, seen = [root], {root}
    while todo:
        node = todo.pop()
        for used, _ in node.next_functions:
            if used is not None:
                users.setdefault(used, []).append(node)
                if used not in seen:
                    seen.add(used)
                    todo.append(used)
    return users


def _is_still(x: Tensor, node: Node) -> bool:
    """Whether ``node`` made one tensor of one other and kept its dtype, as a view does."""
    made = getattr(node, "_input_metadata", ())  # a gradient has the dtype of what it is the gradient of
    others = [used for used, _ in node.next_functions if used is not None]
    return len(others) == 1 and [m.dtype for m in made] == [x.dtype]
