"""Parameters kept on the host (``cpu_offload``): the backends that their collectives need."""

from __future__ import annotations

import torch
import torch.distributed as dist

_GLOO = "gloo"


def backend_for(given: str | None, default: str, device: torch.device) -> str:
    """Return the backend of torch.distributed for parameters on the host and computation on ``device``.

    Norms of host gradients are reduced on the host, which NCCL and its like cannot do.

    Args:
        given: the backend that a user asked for.
        default: the backend of ``device``.
        device: where parameters are gathered.

    Raises:
        ValueError: ``given`` cannot reduce on the host.
        RuntimeError: neither can the process group, which was started by others.
    """
    mixed = f"cpu:{_GLOO},{device.type}:{default}"
    if dist.is_initialized() and not _reduces_on_host(found := dist.get_backend_config()):
        raise RuntimeError(
            f"fsdp_plan.cpu_offload keeps gradients on the host, and the process group that was started before the "
            f"Trainer has the backend {found!r} only. Start it with init_process_group({mixed!r}), or leave that to "
            f"the Trainer."
        )
    if given is not None and not _reduces_on_host(given):
        raise ValueError(
            f"fsdp_plan.cpu_offload keeps gradients on the host, where {given!r} cannot reduce them. Write "
            f"process_group_backend={mixed!r}, or leave it out."
        )
    return given or (default if device.type == "cpu" else mixed)


def _reduces_on_host(backend: str) -> bool:
    return backend == _GLOO or any(part.startswith("cpu:") for part in backend.split(","))
