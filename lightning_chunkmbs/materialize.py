"""Filling a module that was built on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .fsdp2 import host_shards
from .meshes import local_part


def materialize(root: nn.Module, device: torch.device) -> None:
    """Allocate and initialise on ``device`` every parameter and buffer of ``root`` that is on the meta device.

    Other tensors are left alone, and tied parameters stay tied. Initialisation is the modules' own: ``init_weights()``
    of the outermost modules that have it (Hugging Face models), else ``reset_parameters()``. Every rank initialises its
    own shards.

    Raises:
        RuntimeError: something stays uninitialised; the message lists it. Raised on every rank.
    """
    names = [name for name, tensor in _tensors(root) if tensor.is_meta]
    if not names:
        return
    _allocate(root, device)
    marks = {name: (tensor, tensor._version) for name, tensor in _tensors(root) if name in set(names)}
    # On CPU, DTensor draws each shard from the rank's own generator: equal seeds would repeat rows on every rank.
    with torch.random.fork_rng(devices=[], enabled=device.type == "cpu"):
        if device.type == "cpu":
            torch.manual_seed(torch.initial_seed() + (dist.get_rank() if dist.is_initialized() else 0))
        _initialize(root, {name.rpartition(".")[0] for name in names})
    left = [name for name, tensor in _tensors(root) if name in marks and _is_untouched(tensor, *marks[name])]
    _refuse_uninitialized(_on_any_rank(left))


def move(root: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to ``device``, all but the shards that CPU offload keeps on the host."""
    if not host_shards(root):
        root.to(device)
        return
    for _, tensor in _tensors(root):
        if not isinstance(tensor, DTensor):  # FSDP2 has put shards where they belong
            tensor.data = tensor.data.to(device)


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def _allocate(root: nn.Module, device: torch.device) -> None:
    """Replace meta tensors by memory filled with NaN (or the least integer), by which uninitialised ones are known."""
    made: dict[int, Tensor] = {}
    on_host = {id(shard) for shard in host_shards(root)}
    for module in root.modules():
        both: list[dict[str, Any]] = [module._parameters, module._buffers]
        for slots in both:
            for name, tensor in slots.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        place = torch.device("cpu") if id(tensor) in on_host else device
                        made[id(tensor)] = _blank(tensor, place)
                    slots[name] = made[id(tensor)]


def convert(root: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating parameters and buffers to ``dtype``, all but buffers that no checkpoint has.

    Those are computed from the model's settings (rotary frequencies, say), and rounded they would be others: of 4096
    positions the last would turn by more than half a circle too much.
    """
    tables = [
        (module, name, module._buffers[name])
        for module in root.modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    ]
    root.to(dtype)
    for module, name, table in tables:
        module._buffers[name] = table


@torch.no_grad()
def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    blank = torch.empty_like(tensor, device=device)
    local = local_part(blank)
    if local.is_floating_point() or local.is_complex():
        local.fill_(float("nan"))
    elif local.dtype is not torch.bool:
        local.fill_(torch.iinfo(local.dtype).min)
    return nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank


def _initialize(root: nn.Module, owners: set[str]) -> None:
    """Run the initialisers of the modules named in ``owners``, or of the outermost module above that has one."""
    done: list[str] = []
    for name, module in root.named_modules():
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in done):
            continue
        below = any(owner == name or owner.startswith(f"{name}.") for owner in owners)
        if below and name and callable(getattr(module, "init_weights", None)):
            module.init_weights()
            done.append(name)
        elif name in owners and callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()


def _is_untouched(tensor: Tensor, blank: Tensor, version: int) -> bool:
    if tensor is not blank:
        return tensor.is_meta
    local = local_part(tensor)
    if local.dtype is torch.bool or local.numel() == 0:
        return local.numel() > 0 and tensor._version == version
    if local.is_floating_point() or local.is_complex():
        return bool(local.isnan().any())
    return bool((local == torch.iinfo(local.dtype).min).any())


def _on_any_rank(names: list[str]) -> list[str]:
    """Return the names that some rank lists: a shard can be empty on one rank and not on another."""
    if not dist.is_initialized():
        return names
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, names)
    return list(dict.fromkeys(name for one in everyone for name in one))


def _refuse_uninitialized(names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        raise RuntimeError(
            f"A module built on the meta device initialises all its parameters and buffers in init_weights() or "
            f"reset_parameters(); these stayed uninitialised: {shown}. Give their modules a reset_parameters() that "
            f"fills them, or build them outside the meta device."
        )
