"""Tied parameters that ``configure_model`` has torn apart.

``parallelize_module`` and ``distribute_module`` put a new parameter in the place of each that they distribute. A
parameter with two names keeps its old value under the other one, and from then on each is trained by itself. So the
names that share a parameter are noted before ``configure_model``, and looked at before the module is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

_NOTED = "_chunkmbs_tied_names"


def note_ties(module: nn.Module) -> None:
    """Note which names share a parameter, before ``configure_model``."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    module.__dict__[_NOTED] = [tied for tied in names.values() if len(tied) > 1]


def check_ties(module: nn.Module) -> None:
    """Refuse a module of which parameters that were tied are not any more, since one of them was distributed.

    Raises:
        ValueError: raised on every rank, as all of them distribute the same.
    """
    now = dict(module.named_parameters(remove_duplicate=False))
    for tied in (*module.__dict__.get(_NOTED, ()), *_declared(module)):
        left = [name for name in tied if name in now]
        torn = [name for name in left if now[name] is not now[left[0]]]
        # One that was untied on purpose, by a copy say, is not distributed.
        if torn and any(isinstance(now[name], DTensor) for name in left):
            raise ValueError(
                f"{' and '.join(left)} are tied, and since configure_model they are not one parameter any more: "
                f"parallelize_module makes new ones, each trained by itself. Distribute all of them in the same way "
                f"(RowwiseParallel for an embedding and ColwiseParallel for its head both cut the vocabulary), and "
                f"tie them again at the end of configure_model: "
                + "; ".join(f"self.{name} = self.{left[0]}" for name in torn)
            )


def _declared(module: nn.Module) -> Iterator[list[str]]:
    """Names that Hugging Face models say they tie, for models that were built in ``configure_model``."""
    for prefix, inner in module.named_modules():
        ties = getattr(inner, "all_tied_weights_keys", None)
        for target, source in ties.items() if isinstance(ties, dict) else ():
            yield [f"{prefix}.{name}".lstrip(".") for name in (source, target)]
