"""A count of the collectives that FSDP2 runs."""

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Collectives:
    """Calls counted so far."""

    def __init__(self) -> None:
        self.all_gathers = 0
        self.reduce_scatters = 0
        self.all_reduces = 0
        self.gathered_bytes = 0  # what all-gathers brought together


# By the names under which FSDP2 finds them in torch.distributed; 2.13 renamed the first of each pair. The old names
# call the new ones inside distributed_c10d, which is not patched, so nothing is counted twice.
_COUNTED = {
    "all_gather_single": "all_gathers",
    "all_gather_into_tensor": "all_gathers",
    "reduce_scatter_single": "reduce_scatters",
    "reduce_scatter_tensor": "reduce_scatters",
    "all_reduce": "all_reduces",
}


@contextlib.contextmanager
def count_collectives(on_reduce: Callable[[Tensor], None] = lambda tensor: None) -> Iterator[Collectives]:
    """Count the collectives that FSDP2 runs in this process.

    A group of one rank runs none: FSDP2 copies instead.

    Args:
        on_reduce: called with the input of each reduce-scatter.
    """
    counted = Collectives()
    originals = {name: getattr(dist, name) for name in _COUNTED if hasattr(dist, name)}
    try:
        for name, original in originals.items():
            setattr(dist, name, _counting(original, counted, _COUNTED[name], on_reduce))
        yield counted
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _counting(
    original: Callable[..., Any], counted: Collectives, kind: str, on_reduce: Callable[[Tensor], None]
) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        setattr(counted, kind, getattr(counted, kind) + 1)
        # FSDP2 passes tensors by keyword, tests by position: output, input.
        if kind == "all_gathers":
            counted.gathered_bytes += next(iter((*args, kwargs.get("output_tensor")))).nbytes
        if kind == "reduce_scatters":
            on_reduce(args[1] if len(args) > 1 else next(v for k, v in kwargs.items() if k.startswith("input")))
        return original(*args, **kwargs)

    return call
