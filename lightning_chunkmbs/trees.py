"""Trees of containers: what is entered when the tensors of a call or of an output are looked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any


def map_tree(fn: Callable[[Any, str], Any], tree: Any, path: str = "") -> Any:
    """Return ``tree`` with every leaf replaced by ``fn(leaf, path)``.

    Tuples, lists, dicts and dataclasses (also named tuples and ``ModelOutput``) are entered. A container whose leaves
    all stay what they were is returned itself and not a copy: a block may write to a list it is given.
    """
    fields, kind = _entered(type(tree))  # type: ignore[arg-type]
    if kind is None:
        return fn(tree, path)
    if fields is not None:
        old = [getattr(tree, name) for name in fields]
        new = [map_tree(fn, value, f"{path}.{name}") for name, value in zip(fields, old, strict=True)]
        return tree if _same(old, new) else dataclasses.replace(tree, **dict(zip(fields, new, strict=True)))
    if kind is dict:
        mapped = {key: map_tree(fn, value, f"{path}[{key!r}]") for key, value in tree.items()}
        return tree if _same(tree.values(), mapped.values()) else _like(tree, mapped)
    items = [map_tree(fn, value, f"{path}[{i}]") for i, value in enumerate(tree)]
    return tree if _same(tree, items) else _like(tree, items)


@functools.cache  # each call of a block asks this dozens of times
def _entered(cls: type) -> tuple[tuple[str, ...] | None, type | None]:
    """Return the fields of a dataclass, and as what objects of a class are entered; None: they are leaves."""
    if dataclasses.is_dataclass(cls):
        return tuple(f.name for f in dataclasses.fields(cls) if f.init), cls
    return None, next((kind for kind in (dict, tuple, list) if issubclass(cls, kind)), None)


def _same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(map(is_, old, new))


def _like(tree: Any, values: Any) -> Any:
    """Return a container of ``tree``'s type that holds ``values``."""
    kind: Any = type(tree)
    if hasattr(tree, "_fields"):
        return kind(*values)
    if isinstance(tree, dict) and hasattr(tree, "default_factory"):
        return kind(tree.default_factory, values)
    return kind(values)


def leaves(tree: Any) -> list[Any]:
    """Return every leaf of ``tree``, in the order in which :func:`map_tree` visits them."""
    fields, kind = _entered(type(tree))  # type: ignore[arg-type]
    if kind is None:
        return [tree]
    if fields is not None:
        tree = [getattr(tree, name) for name in fields]
    return [leaf for value in (tree.values() if kind is dict else tree) for leaf in leaves(value)]


def tree_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return path and value of every leaf of ``tree``, in the order in which :func:`map_tree` visits them."""
    found: list[tuple[str, Any]] = []

    def visit(leaf: Any, path: str) -> Any:
        found.append((path, leaf))
        return leaf

    map_tree(visit, tree)
    return found
