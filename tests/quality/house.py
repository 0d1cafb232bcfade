"""Figures of the tree at some commits, as a table: python tests/quality/house.py COMMIT..."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

ROOT = "normcheck"


def sources(commit: str) -> Iterator[tuple[str, str]]:
    """(path, text) of each source file of the package at a commit."""
    for path in _git("ls-tree", "-r", "--name-only", commit, ROOT).split():
        if path.endswith((".py", ".c", ".h")):
            yield path, _git("show", f"{commit}:{path}")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def figures(commit: str) -> dict[str, int]:
    """Name -> figure. An arrow leads from a package that imports another to that one."""
    lines, count, long, names, modules = 0, 0, 0, Counter[str](), Counter[str]()
    functions, wide, large, arrows = 0, 0, 0, set[tuple[str, str]]()
    packages = set()
    for path, text in sources(commit):
        size = text.count("\n")
        lines, count = lines + size, count + 1
        if not path.endswith(".py"):
            continue
        tree, module = ast.parse(text), path.removesuffix(".py").replace("/", ".")
        is_kernel = "triton.jit" in text or "kernels/" in path
        long += size > 400 and not is_kernel
        modules[path.rsplit("/", 1)[-1]] += not path.endswith("__init__.py")
        packages.add(_room(module) if path.count("/") > 1 else "")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names[node.name] += 1
                large += (node.end_lineno or 0) - node.lineno >= 200
            elif isinstance(node, ast.FunctionDef) and not is_kernel:
                functions += (node.end_lineno or 0) - node.lineno >= 40
                every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                wide += sum(one.arg not in ("self", "cls") for one in every) > 6
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ROOT):
                arrows.add((_room(module), _room(node.module or "")))
    packages.discard("")
    inside = {(one, other) for one, other in arrows if one != other and {one, other} <= packages}
    return {
        "lines (py + C)": lines,
        "files": count,
        "packages": len(packages),
        "arrows between packages": len(inside),
        "arrows that have one back": sum((other, one) in inside for one, other in inside),
        "Python files above 400 lines, but kernels": long,
        "classes above 200 lines": large,
        "functions above 40 lines": functions,
        "functions with more than six parameters": wide,
        "class names used twice": sum(number > 1 for number in names.values()),
        "module names used twice": sum(number > 1 for number in modules.values()),
    }


if __name__ == "__main__":
    every = [figures(commit) for commit in sys.argv[1:]]
    print(f"{'':42}" + "".join(f"{commit:>12}" for commit in sys.argv[1:]))
    for name in every[0]:
        print(f"{name:42}" + "".join(f"{own[name]:>12,}" for own in every))
