"""The device mesh, and what each of its dimensions is for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from .process_groups import once

DATA, REPLICATE, SHARD, TENSOR = "data_parallel", "replicate", "shard", "tensor_parallel"


@dataclass(frozen=True)
class Meshes:
    """A device mesh and parts of it.

    Attributes:
        whole: all devices, with the dimensions ``data_parallel`` and ``tensor_parallel``.
        shard: what ``fully_shard`` takes: ``data_parallel``, or ``replicate`` × ``shard``.
        timeout: of collectives over parts of the ranks; None is torch's own.
    """

    whole: DeviceMesh
    shard: DeviceMesh
    timeout: timedelta | None = field(default=None, compare=False)

    @classmethod
    def make(
        cls,
        device_type: str,
        data: int | str,
        replicate: int,
        tensor: int | str,
        timeout: timedelta | None = None,
    ) -> Meshes:
        """Return the mesh of all ranks, where ``"auto"`` data takes what the others leave; all ranks must call this.

        Raises:
            ValueError: the number of replicas does not divide the data-parallel size.
            RuntimeError: the sizes do not use all ranks.
        """
        tensor = int(tensor)
        data = max(dist.get_world_size() // tensor, 1) if data == "auto" else int(data)
        _check_sizes(dist.get_world_size(), data, replicate, tensor)
        key = device_type, data, replicate, tensor, timeout
        return once(("meshes", *key), partial(cls._make, *key))

    @classmethod
    def _make(cls, device_type: str, data: int, replicate: int, tensor: int, timeout: timedelta | None) -> Meshes:
        whole = init_device_mesh(device_type, (data, tensor), mesh_dim_names=(DATA, TENSOR))
        _set_timeout(whole, timeout)
        if replicate == 1:
            return cls(whole, whole[DATA], timeout)
        # From below, since torch deprecates flattened dimensions in a mesh: samplers ask for "data_parallel".
        split = whole._unflatten(DATA, (replicate, data // replicate), (REPLICATE, SHARD))
        _set_timeout(split, timeout)
        return cls(whole, split[REPLICATE, SHARD], timeout)

    @cached_property  # a mesh makes a new one of its dimensions each time
    def data(self) -> DeviceMesh:
        """Ranks with data of their own, 1-dimensional."""
        return self.whole[DATA]

    @cached_property
    def tensor(self) -> DeviceMesh:
        """Ranks that share each layer and its data, 1-dimensional."""
        return self.whole[TENSOR]

    def groups_holding(self, parameter: DTensor) -> list[dist.ProcessGroup]:
        """Return the groups whose ranks hold the same part of a sharded parameter."""
        names = parameter.device_mesh.mesh_dim_names or ()
        split = dict(zip(names, parameter.placements, strict=True))
        meshes = [self.tensor, *([self.shard[REPLICATE]] if self.shard.ndim == 2 else [])]
        held = [m for m in meshes if isinstance(split.get((m.mesh_dim_names or ("",))[0], Replicate()), Replicate)]
        return [m.get_group() for m in held if m.size() > 1]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; one that is not distributed is its own part; in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of this process's part of a 1-dimensional mesh."""
    return dist.get_process_group_ranks(mesh.get_group())


def sharded_over(devices: int, replicate: int, tensor: int | str) -> int:
    """Return over how many of ``devices`` a group is sharded.

    Raises:
        RuntimeError, ValueError: the sizes do not use all devices.
    """
    data = max(devices // int(tensor), 1)
    _check_sizes(devices, data, replicate, int(tensor))
    return data // replicate


def check_tensor_parallel_size(size: object) -> None:
    """Refuse what cannot be a number of ranks."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"tensor_parallel_size must be a number of ranks, 1 or more, but got {size!r}; write "
            f"tensor_parallel_size: 1 for none."
        )


def _set_timeout(mesh: DeviceMesh, timeout: timedelta | None) -> None:
    """Give the groups of parts of the ranks the timeout that the group of all has; torch gives them its default."""
    private = getattr(dist.distributed_c10d, "_set_pg_timeout", None)  # up to torch 2.13; without it the default stays
    set_timeout = getattr(dist, "set_timeout", private)
    if timeout is None or set_timeout is None:
        return
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD:  # which may be the user's own
            with warnings.catch_warnings():  # torch sets it for gloo and NCCL, and warns about others
                warnings.simplefilter("ignore", UserWarning)
                set_timeout(timeout, group)


def _check_sizes(world_size: int, data: int, replicate: int, tensor: int) -> None:
    if data * tensor != world_size:
        raise RuntimeError(
            f"data_parallel_size times tensor_parallel_size must be the number of processes, {world_size}, and the "
            f"sizes are data_parallel_size={data} and tensor_parallel_size={tensor}. Write data_parallel_size: auto."
        )
    if data % replicate:
        raise ValueError(
            f"fsdp_plan.replicate_size must divide data_parallel_size, since replicas have equally many shards; it is "
            f"{replicate}, and data_parallel_size is {data}. Write a replicate_size that divides {data}."
        )
