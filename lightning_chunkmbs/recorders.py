"""Tensors that a model records from inside its blocks while they run (Hugging Face: router logits, attentions).

Transformers appends such tensors, from hooks inside the layers, to lists that a context variable holds. A chunk would
append its part, chunks run last to first, and in lockstep the graph is cut at what a block returns. So what a chunk has
appended is taken off the lists, travels as an extra output of the block call, and is put back for the micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

Recorded = dict[str, list[Tensor]]


def _open_lists() -> dict[str, list[Any]]:
    """Return the lists to which the running model records now, by their keys."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    found = collector.get() if collector is not None else None
    return {key: value for key, value in (found or {}).items() if isinstance(value, list)}


def taking_off(fn: Callable[[], Any]) -> tuple[Any, Recorded]:
    """Run ``fn`` and return its result with what was recorded meanwhile, taken off the lists."""
    lists = _open_lists()
    if not lists:
        return fn(), {}
    lengths = {key: len(values) for key, values in lists.items()}
    try:
        result = fn()
        return result, {key: values[lengths[key] :] for key, values in lists.items() if len(values) > lengths[key]}
    finally:
        for key, values in lists.items():
            del values[lengths[key] :]


def put_back(recorded: Recorded) -> None:
    """Append what was taken off to the lists of the running model."""
    lists = _open_lists()
    for key, values in recorded.items():
        if key in lists:
            lists[key].extend(values)
