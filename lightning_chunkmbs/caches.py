"""Caches of keys and values among a block's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .report import Notices

# Keywords under which models hand a cache of keys and values to their layers.
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
_CACHE_FLAG = "use_cache"
_OFF = dict.fromkeys(_CACHES) | {_CACHE_FLAG: False}


def holds_cache(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call is given a cache of keys and values."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return any(given.get(name) is not None for name in _CACHES)


def drop_cache(
    block: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], notices: Notices
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call's arguments without cache; recomputation would append to it a second time."""
    if _OFF.keys().isdisjoint(kwargs) and _OFF.keys().isdisjoint(names[: len(args)]):
        return args, kwargs
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if holds_cache(names, args, kwargs) or given.get(_CACHE_FLAG):
        notices.warn(
            "cache",
            f"{block}: in training a block gets no cache of keys and values (recomputation would append to it twice), "
            f"so it was dropped. Set use_cache=False in the model's config to silence this.",
        )
    named = [names[i] if i < len(names) else "" for i in range(len(args))]
    return (
        tuple(_OFF.get(name, value) for name, value in zip(named, args, strict=True)),
        {key: _OFF.get(key, value) for key, value in kwargs.items()},
    )
