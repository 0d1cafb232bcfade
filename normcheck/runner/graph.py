"""The graph that autograd keeps behind y: how many gradients of an input it adds up."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def joined(y: Tensor, x: Tensor) -> int:
    """How many gradients of ``x``, a leaf, autograd adds up in the dtype of ``x``; 0 if y does not depend on x.

    Each use of x (``x.float()`` written twice is two) has a gradient of its own, which is rounded to the dtype of ``x``
    before the gradients are added. A view or a copy of x in its own dtype is still x. An autograd.Function returns one
    gradient for each of its inputs, and so does torch's own norm.
    """
    if type(y) is not Tensor or y.grad_fn is None or not x.requires_grad:
        return 0
    users = _users(y.grad_fn)
    node = get_gradient_edge(x).node
    while len(users.get(node, ())) == 1 and _is_view_or_copy(x, users[node][0]):
        node = users[node][0]
    return 1 if node is y.grad_fn else len(users.get(node, ()))


def _users(root: Node) -> dict[Node, list[Node]]:
    """Node behind ``root`` -> the nodes that hand it gradients; a node that hands it two is there twice."""
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


def _is_view_or_copy(x: Tensor, node: Node) -> bool:
    """Whether ``node`` made one tensor of the dtype of ``x`` from one other, as a view does."""
    results = getattr(node, "_input_metadata", ())  # a node's inputs are gradients, of the dtypes of its results
    others = [used for used, _ in node.next_functions if used is not None]
    return len(others) == 1 and [r.dtype for r in results] == [x.dtype]
