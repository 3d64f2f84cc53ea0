"""What a test must not leave behind in any activation store, asserted after every test."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

from lightning_chunkmbs.offload import ActivationStore

_stores: weakref.WeakSet[ActivationStore] = weakref.WeakSet()


def watch() -> None:
    """Note every store that is made from now on."""
    init = ActivationStore.__init__

    @functools.wraps(init)
    def noting(self: ActivationStore, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _stores.add(self)

    ActivationStore.__init__ = noting  # type: ignore[method-assign]


def refuse_leftovers() -> None:
    """Raise if a store still holds something that is not garbage."""
    for _ in range(2):
        if any(store.live_bytes for store in _stores):
            gc.collect()  # a Trainer and its module refer to each other, and what they hold may do so too
    left = [store.live_bytes for store in _stores if store.live_bytes]
    if left:
        raise AssertionError(f"activation stores still hold {left} bytes after the test")
