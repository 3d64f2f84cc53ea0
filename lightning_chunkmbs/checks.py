"""What a model must look like before plans are applied to it; refused here, on every rank, before any collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .dtypes import Dtypes
from .fsdp2 import group_mesh
from .meshes import Meshes


def check_structure(
    root: nn.Module,
    blocks: Mapping[str, nn.Module],
    further: Mapping[str, nn.Module],
    meshes: Meshes,
    dtypes: Dtypes,
) -> None:
    """Refuse modules that cannot be chunked or sharded as asked.

    Args:
        root: the LightningModule.
        blocks: its blocks by name.
        further: modules outside blocks that get groups of their own, by name.
        meshes: what its dimensions of devices are for.
        dtypes: dtypes of the model.

    Raises:
        TypeError: a module is wrapped in a way that hides its blocks.
        ValueError: groups of the model contradict those asked for, share parameters, or train several dtypes.
    """
    modules = dict(root.named_modules())
    for name, module in modules.items():
        if isinstance(module, FullyShardedDataParallel):
            raise TypeError(f"'{name}' is wrapped by FullyShardedDataParallel; this strategy shards it. Unwrap it.")
    for name, block in blocks.items():
        _check_wrappers(name, block, modules)
        _check_groups(name, block, modules, meshes)
    for name, module in modules.items():
        _check_mesh("block" if name in blocks else "module", name, module, meshes)
    _check_shared(root, {**blocks, **further})
    if dtypes.shards is None:
        made = {name: modules[name] for name in modules if name and isinstance(modules[name], FSDPModule)}
        _check_dtypes(root, {**blocks, **further, **made})


def _check_wrappers(name: str, block: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    path = [(".".join(name.split(".")[: i + 1])) for i in range(name.count(".") + 1)]
    wrapper = next((p for p in path if isinstance(modules.get(p), CheckpointWrapper)), None)
    if wrapper is not None:
        raise TypeError(
            f"recompute_plan recomputes the block '{name}' already, and '{wrapper}' has a checkpoint wrapper. Delete "
            f"the line that applies it (checkpoint_wrapper(...) or apply_activation_checkpointing(...))."
        )
    if isinstance(block, OptimizedModule) or block._compiled_call_impl is not None:
        raise TypeError(
            f"The block '{name}' is compiled; compiling the whole loop over chunks is not supported. Delete the "
            f"torch.compile(...) or .compile() line for it, and write compile_blocks: true in fsdp_plan."
        )


def _check_mesh(kind: str, name: str, module: nn.Module, meshes: Meshes) -> None:
    own = group_mesh(module) if isinstance(module, FSDPModule) else None
    if own is not None and own != meshes.shard:
        label = f"The {kind} '{name}'" if name else "The LightningModule"
        cure = "Delete its fully_shard(...) call"
        if meshes.shard.ndim == 1:  # one of replicas × shards is not at hand in configure_model
            cure = "Pass mesh=self.device_mesh['data_parallel'] to its fully_shard(...), or delete that call"
        raise ValueError(f"{label} is sharded over another mesh ({own}) than the strategy's ({meshes.shard}). {cure}.")


def _check_groups(name: str, block: nn.Module, modules: Mapping[str, nn.Module], meshes: Meshes) -> None:
    for child_name, child in block.named_modules():
        if child is not block and isinstance(child, FSDPModule):
            raise ValueError(
                f"A group inside a block is not supported yet; '{name}.{child_name}' has one and would be gathered "
                f"again for every chunk. Delete the fully_shard(...) call for it."
            )
    if not isinstance(block, FSDPModule) and any(_is_sharded(p, meshes) for p in block.parameters()):
        parents = [n for n, m in modules.items() if isinstance(m, FSDPModule) and name.startswith(f"{n}." if n else "")]
        owner = max(parents, key=len, default="")
        raise ValueError(
            f"The block '{name}' must be a group of its own, and its parameters are in the group of "
            f"'{owner or 'the LightningModule'}' already. Delete the fully_shard(...) call for that module, or call it "
            f"after fully_shard(...) for each block."
        )


def _is_sharded(parameter: Tensor, meshes: Meshes) -> bool:
    """Return whether FSDP2 holds a parameter; one of tensor parallelism alone is a DTensor too."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return names is not None and names != meshes.tensor.mesh_dim_names


def _check_shared(root: nn.Module, groups: Mapping[str, nn.Module]) -> None:
    """Refuse a parameter that two groups would hold: FSDP2 shards it twice and the tie is lost."""
    owners: dict[int, tuple[str, str]] = {}
    for group, name, parameter in _owned(root, groups):
        owner, first = owners.setdefault(id(parameter), (group, name))
        if owner != group and parameter.ndim:
            raise ValueError(
                f"A parameter belongs to one group, and '{first}' (in {owner}) is the same parameter as '{name}' (in "
                f"{group}). Keep tied modules out of the plans, so that both are in the root group, or untie them."
            )


def _check_dtypes(root: nn.Module, groups: Mapping[str, nn.Module]) -> None:
    """Refuse a group that trains parameters of several dtypes: FSDP2 reduces their gradients together."""
    firsts: dict[str, tuple[str, nn.Parameter]] = {}
    for group, name, parameter in _owned(root, groups):
        if not parameter.requires_grad or (parameter.ndim == 0 and not isinstance(parameter, DTensor)):
            continue
        first_name, first = firsts.setdefault(group, (name, parameter))
        if first.dtype != parameter.dtype:
            raise ValueError(
                f"The trainable parameters of a group have one dtype, and in {group} '{first_name}' is {first.dtype} "
                f"and '{name}' is {parameter.dtype}. Convert one of them, freeze it, or give its module a group of its "
                f"own with fsdp_plan.apply_modules (outside blocks)."
            )


def _owned(root: nn.Module, groups: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield each parameter under each of its names, with the name of the group that would hold it."""
    names = {module: name for name, module in groups.items()}
    seen: set[tuple[int, str]] = set()

    def walk(module: nn.Module, prefix: str, group: str) -> Iterator[tuple[str, str, nn.Parameter]]:
        group = names.get(module, group)
        if (id(module), group) in seen:
            return
        seen.add((id(module), group))
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield group, prefix + name, parameter
        for name, child in module.named_children():
            yield from walk(child, f"{prefix}{name}.", group)

    yield from walk(root, "", "the root group")
