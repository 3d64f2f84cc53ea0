"""Attributes that a step assigns on modules belong to that step while steps take turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any

from torch import nn

_GONE = object()
_Changes = dict[tuple[int, str], Any]  # (index of the watched module, attribute) -> value, or _GONE
_INTERNAL = frozenset(vars(nn.Module()))  # torch's own dicts of parameters, hooks and so on
_PLAIN = (bool, int, float, str, bytes, type(None))


class StepAttributes:
    """Gives every step its own values of the attributes that it assigned.

    What a step has assigned is put back before it goes on, and taken away when it pauses or ends. An attribute that it
    has not assigned keeps the value that was assigned last, as if the steps had run one after the other. Attributes are
    what sits in a module's ``__dict__``, its buffers, and the entries of its dicts. Of a list a step sees what was in
    it when it began and what it does to it; what steps append is in the list in their order when they have ended,
    whichever ends first. Of every module, also of those not watched, each step has its own ``training`` flag.

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
        only, outside = only or {}, outside or {}
        whole = [m for name, m in modules.items() if name not in only]
        held = [value for m in whole for name, value in vars(m).items() if name not in _INTERNAL]
        inner = [m._buffers for m in whole] + [value for value in held if isinstance(value, dict)]
        self._lists: list[tuple[list[Any], dict[int, int]]] = [(value, {}) for value in held if isinstance(value, list)]
        self._names = [*modules, *("" for _ in inner), *outside]
        self._dicts: list[dict[Any, Any]] = [vars(m) for m in modules.values()]
        self._dicts += [*inner, *(vars(m) for m in outside.values())]
        self._kept = len(modules) + len(inner)
        self._only = {i: set(only[name]) for i, name in enumerate(self._names) if name in only}
        self._own: dict[int, _Changes] = {}
        self._latest: _Changes = {}  # what the running step's values hide
        self._own_lists: dict[int, list[_OwnList]] = {}
        self._assigned: dict[tuple[int, str], dict[int, Any]] = {}
        self._before: list[dict[str, Any]] = []
        self._index = {id(d): i for i, d in enumerate(self._dicts)}
        self._touched: set[tuple[int, str]] | None = None
        self._modes: dict[nn.Module, bool] = {}  # as they are for a step that has not set its own
        self._own_modes: dict[int, dict[nn.Module, bool]] = {}
        self._running: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice inside also assignments of what was there already, and of ``training`` on any module."""
        original = nn.Module.__setattr__

        def noticing(module: nn.Module, name: str, value: Any) -> None:
            if name == "training" and self._running is not None:
                self._modes.setdefault(module, module.training)
                self._own_modes.setdefault(self._running, {})[module] = value
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
        own = self._own.setdefault(step, {})
        self._latest = {(i, name): self._dicts[i].get(name, _GONE) for i, name in own}
        self._put(own)
        if step not in self._own_lists:
            self._own_lists[step] = [_OwnList(step, *shared) for shared in self._lists]
        for lists in self._own_lists[step]:
            lists.show()
        self._set_modes(self._own_modes.get(step, {}))
        self._before = [dict(d) for d in self._dicts]
        self._touched, self._running = set(), step

    def leave(self, step: int, *, ended: bool = False) -> None:
        """Note what ``step`` has assigned since :meth:`enter`; it pauses or has ended."""
        touched, self._touched, self._running = self._touched or set(), None, None
        both = enumerate(zip(self._dicts, self._before, strict=True))
        touched |= {(i, name) for i, (now, before) in both for name in _changed(now, before)}
        for i, name in touched:
            if name != "training":
                self._note(step, i, name)
        self._put(self._latest)
        self._latest = {}
        for own in self._own_lists[step]:
            own.hide(ended)
        self._leave_modes(step, ended)
        self._before = []
        if ended:  # what it assigned stays on the modules, as it would have, and is not kept alive here
            self._own.pop(step)
            self._own_lists.pop(step)

    def _note(self, step: int, i: int, name: str) -> None:
        """Note that ``step`` has assigned an attribute."""
        value = self._dicts[i].get(name, _GONE)
        if i >= self._kept:
            self._assigned.setdefault((i, name), {})[step] = value
        elif name in self._only.get(i, {name}):
            self._own[step][i, name] = value
            self._latest.pop((i, name), None)

    def _put(self, values: _Changes) -> None:
        for (i, name), value in values.items():
            if value is _GONE:
                self._dicts[i].pop(name, None)
            else:
                self._dicts[i][name] = value

    @contextmanager
    def modes_of(self, step: int) -> Iterator[None]:
        """Have every module in the mode that the paused ``step`` has put it in."""
        own = self._own_modes.get(step, {})
        self._set_modes(own)
        try:
            yield
        finally:
            self._set_modes({module: self._modes[module] for module in own})

    def _leave_modes(self, step: int, ended: bool) -> None:
        own = self._own_modes.get(step, {})
        if ended:
            self._modes.update(self._own_modes.pop(step, {}))
        self._set_modes({module: self._modes[module] for module in own})

    @staticmethod
    def _set_modes(modes: Mapping[nn.Module, bool]) -> None:
        for module, training in modes.items():
            vars(module)["training"] = training

    def mixed(self) -> list[str]:
        """Return names of attributes outside the watched modules to which several steps assigned different values."""
        return [
            f"{self._names[i]}.{name}"
            for (i, name), values in self._assigned.items()
            if len(values) > 1 and not _all_alike(list(values.values()))
        ]


class _OwnList:
    """A list as one step sees it.

    Args:
        step: the step's index.
        shared: the list.
        added: how many entries each step that has ended has appended; shared by the steps.
    """

    def __init__(self, step: int, shared: list[Any], added: dict[int, int]) -> None:
        self._step, self._added = step, added
        self._shared = shared
        self._start = list(shared)
        self._own = list(shared)
        self._others: list[Any] = []

    def show(self) -> None:
        """Put the step's contents into the list."""
        self._others = list(self._shared)
        self._shared[:] = self._own

    def hide(self, ended: bool) -> None:
        """Put the others' contents back; those of a step that has ended join them."""
        own = self._own = list(self._shared)
        self._shared[:] = self._others
        n = len(self._start)
        if not ended:
            return
        if len(own) < n or (len(own) > n and any(a is not b for a, b in zip(own, self._start, strict=False))):
            self._shared[:] = own  # it was made anew
            return
        for i, (before, now) in enumerate(zip(self._start, own, strict=False)):
            if now is not before and i < len(self._shared):
                self._shared[i] = now
        later = sum(count for step, count in self._added.items() if step > self._step)
        end = max(0, len(self._shared) - later)
        self._shared[end:end] = own[n:]
        self._added[self._step] = len(own) - n


def _changed(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    if len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values())):
        return []  # the same in the same order, which is found in a fraction of the time
    changed = [name for name, value in now.items() if before.get(name, _GONE) is not value]
    if len(now) - len(before) != sum(name not in before for name in changed):
        changed += [name for name in before if name not in now]
    return changed


def _all_alike(values: list[Any]) -> bool:
    first = values[0]
    return all(v is first or (isinstance(v, _PLAIN) and type(v) is type(first) and v == first) for v in values)


def named_attributes(module: nn.Module, names: list[str]) -> dict[str, list[str]]:
    """Return the attributes named in ``lockstep_attributes`` by the name of their module.

    Raises:
        ValueError: there is no such module.
    """
    found: dict[str, list[str]] = {}
    modules = dict(module.named_modules())
    for name in names:
        owner, _, attribute = name.rpartition(".")
        if not owner or owner not in modules:
            raise ValueError(
                f"lockstep_attributes names an attribute of a module below the LightningModule, for example "
                f"'model.encoder.cache'; '{name}' names none. Attributes of the LightningModule itself and of its "
                f"direct children need not be named."
            )
        found.setdefault(owner, []).append(attribute)
    return found
