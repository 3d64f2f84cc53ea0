"""Trees of containers: what is entered when the tensors of a call or of an output are looked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any


def map_tree(fn: Callable[[Any, str], Any], tree: Any, path: str = "") -> Any:
    """Return ``tree`` with every leaf replaced by ``fn(leaf, path)``.

    Tuples, lists, dicts and dataclasses (also named tuples and ``ModelOutput``) are entered. A container whose leaves
    all stay what they were is returned itself and not a copy: a block may write to a list it is given.
    """
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [f for f in dataclasses.fields(tree) if f.init]
        old = [getattr(tree, f.name) for f in fields]
        new = [map_tree(fn, value, f"{path}.{f.name}") for f, value in zip(fields, old, strict=True)]
        if _same(old, new):
            return tree
        return dataclasses.replace(tree, **{f.name: value for f, value in zip(fields, new, strict=True)})
    if isinstance(tree, dict):
        mapped = {key: map_tree(fn, value, f"{path}[{key!r}]") for key, value in tree.items()}
        return tree if _same(tree.values(), mapped.values()) else _like(tree, mapped)
    if isinstance(tree, (tuple, list)):
        items = [map_tree(fn, value, f"{path}[{i}]") for i, value in enumerate(tree)]
        return tree if _same(tree, items) else _like(tree, items)
    return fn(tree, path)


def _same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))


def _like(tree: Any, values: Any) -> Any:
    """Return a container of ``tree``'s type that holds ``values``."""
    kind: Any = type(tree)
    if hasattr(tree, "_fields"):
        return kind(*values)
    if isinstance(tree, dict) and hasattr(tree, "default_factory"):
        return kind(tree.default_factory, values)
    return kind(values)


def tree_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return path and value of every leaf of ``tree``, in the order in which :func:`map_tree` visits them."""
    found: list[tuple[str, Any]] = []

    def visit(leaf: Any, path: str) -> Any:
        found.append((path, leaf))
        return leaf

    map_tree(visit, tree)
    return found
