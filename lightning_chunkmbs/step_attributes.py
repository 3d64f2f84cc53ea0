"""Attributes that a step assigns on modules belong to that step while steps take turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_GONE = object()
_Changes = dict[tuple[int, str], Any]  # (index of the watched module, attribute) -> value, or _GONE
_PLAIN = (bool, int, float, str, bytes, type(None))


class StepAttributes:
    """Gives every step its own values of the attributes that it assigned.

    What a step has assigned is put back before it goes on. An attribute that it has not assigned keeps the latest value
    that any step gave it, as if the steps had run one after the other. Attributes are what sits in a module's
    ``__dict__``; parameters, buffers and submodules do not.

    Args:
        modules: modules whose attributes are watched, by name.
        only: watch only these attributes of a module, by its name.
        outside: further modules by name, in which assignments are reported by :meth:`mixed` instead of kept apart.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        only: Mapping[str, Iterable[str]] | None = None,
        outside: Mapping[str, nn.Module] | None = None,
    ) -> None:
        outside = outside or {}
        self._names = [*modules, *outside]
        self._dicts = [vars(m) for m in (*modules.values(), *outside.values())]
        self._kept = len(modules)
        self._only = {i: set((only or {})[name]) for i, name in enumerate(self._names) if name in (only or {})}
        self._own: dict[int, _Changes] = {}
        self._assigned: dict[tuple[int, str], dict[int, Any]] = {}
        self._before: list[dict[str, Any]] = []
        self._index = {id(d): i for i, d in enumerate(self._dicts)}
        self._touched: set[tuple[int, str]] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice inside also assignments of what was there already."""
        original = nn.Module.__setattr__

        def noticing(module: nn.Module, name: str, value: Any) -> None:
            original(module, name, value)
            i = self._index.get(id(vars(module)))
            if self._touched is not None and i is not None and name in vars(module):
                self._touched.add((i, name))

        nn.Module.__setattr__ = noticing  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = original  # type: ignore[method-assign]

    def enter(self, step: int) -> None:
        """Put the attributes of ``step`` in place; it runs now."""
        for (i, name), value in self._own.setdefault(step, {}).items():
            if value is _GONE:
                self._dicts[i].pop(name, None)
            else:
                self._dicts[i][name] = value
        self._before = [dict(d) for d in self._dicts]
        self._touched = set()

    def leave(self, step: int) -> None:
        """Note what ``step`` has assigned since :meth:`enter`; it pauses or has ended."""
        touched, self._touched = self._touched or set(), None
        for i, (now, before) in enumerate(zip(self._dicts, self._before, strict=True)):
            for name in {*_changed(now, before), *(n for j, n in touched if j == i)}:
                value = now.get(name, _GONE)
                if i >= self._kept:
                    self._assigned.setdefault((i, name), {})[step] = value
                elif name in self._only.get(i, {name}):
                    self._own[step][i, name] = value

    def mixed(self) -> list[str]:
        """Return names of attributes outside the watched modules to which several steps assigned different values."""
        return [
            f"{self._names[i]}.{name}"
            for (i, name), values in self._assigned.items()
            if len(values) > 1 and not _all_alike(list(values.values()))
        ]


def _changed(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    changed = [name for name, value in now.items() if before.get(name, _GONE) is not value]
    if len(now) - len(before) != sum(name not in before for name in changed):
        changed += [name for name in before if name not in now]
    return changed


def _all_alike(values: list[Any]) -> bool:
    first = values[0]
    return all(v is first or (isinstance(v, _PLAIN) and type(v) is type(first) and v == first) for v in values)
