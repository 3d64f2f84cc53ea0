"""What a model must look like before plans are applied to it; refused here, on every rank, before any collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from .dtypes import Dtypes
from .fsdp2 import group_mesh
from .meshes import Meshes
from .report import Notices

_CAPACITIES = ("capacity_factor", "expert_capacity")  # as routers that drop tokens call what they keep


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
        further: other modules that get groups of their own, outside blocks and inside, by name.
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
    _check_nested(root, blocks, further)
    _check_shared(root, {**blocks, **further})
    if dtypes.shards is None:
        made = {name: modules[name] for name in modules if name and isinstance(modules[name], FSDPModule)}
        _check_dtypes(root, {**blocks, **further, **made})


def check_coupling(blocks: Mapping[str, nn.Module], notices: Notices) -> None:
    """Look in blocks that are cut for layers whose result for a sample depends on the others of the batch.

    Warns of batch statistics and of routers with a capacity. What couples samples in another way is not seen.

    Args:
        blocks: chunked blocks by name.
        notices: where warnings go.

    Raises:
        ValueError: a layer takes statistics over all ranks, whose numbers of chunks may differ.
    """
    inner = [(f"{b}.{n}".rstrip("."), m) for b, block in blocks.items() for n, m in block.named_modules()]
    norms = [(name, m) for name, m in inner if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]
    synced = next((name for name, m in norms if isinstance(m, nn.SyncBatchNorm)), None)
    if synced is not None:
        raise ValueError(
            f"A block that is cut runs no collective for each chunk: ranks may have different numbers of chunks. "
            f"'{synced}' is a SyncBatchNorm in training mode. Take its block out of all plans (recomputation would "
            f"repeat its collective too), use GroupNorm, or freeze its statistics with eval() before the fit."
        )
    cure = "Take its block out of chunkmbs_plan and leave it in recompute_plan: it is then one chunk per micro-batch"
    if norms:
        notices.warn(
            "batch statistics",
            f"'{norms[0][0]}' ({type(norms[0][1]).__name__}) takes statistics over the batch, and its block is cut: "
            f"they are those of a chunk. {cure}. Or use GroupNorm, or eval() before the fit.",
        )
    routers = [(n, a) for n, m in inner for a in _CAPACITIES if isinstance(getattr(m, a, None), (int, float))]
    if routers:
        notices.warn(
            "capacity",
            f"'{routers[0][0]}' has {routers[0][1]}, and its block is cut: where tokens of several samples compete for "
            f"an expert's capacity, those of a chunk do now, and other tokens are dropped than in the whole batch. "
            f"{cure}. Or turn the capacity off.",
        )


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
    inner = {p for m in block.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    own = [p for p in block.parameters() if p not in inner]
    if not isinstance(block, FSDPModule) and any(_is_sharded(p, meshes) for p in own):
        parents = [n for n, m in modules.items() if isinstance(m, FSDPModule) and name.startswith(f"{n}." if n else "")]
        owner = max(parents, key=len, default="")
        raise ValueError(
            f"The block '{name}' must be a group of its own, and its parameters are in the group of "
            f"'{owner or 'the LightningModule'}' already. Delete the fully_shard(...) call for that module, or call it "
            f"after fully_shard(...) for each block."
        )


def _check_nested(root: nn.Module, blocks: Mapping[str, nn.Module], further: Mapping[str, nn.Module]) -> None:
    """Refuse a group inside a block that is used elsewhere too, or whose parameters are in the block's own group."""
    asked = set(further.values())
    nested: dict[nn.Module, str] = {}
    for name, block in blocks.items():
        inner = [m for m in block.modules() if m is not block and (m in asked or isinstance(m, FSDPModule))]
        nested |= dict.fromkeys(inner, name)
        held = [m for m in inner if not isinstance(m, FSDPModule) and isinstance(block, FSDPModule)]
        if any(isinstance(p, DTensor) for m in held for p in m.parameters()):
            raise ValueError(
                f"fsdp_plan names a group inside the block '{name}', which is a group with all it holds already. "
                f"Delete the fully_shard(...) call for the block, or the names inside it from fsdp_plan.apply_modules."
            )
    for name, module in root.named_modules(remove_duplicate=False):
        if module in nested and not name.startswith(f"{nested[module]}."):
            raise ValueError(
                f"A group inside a block is gathered with it, and that of the block '{nested[module]}' is used as "
                f"'{name}' too. Take it out of fsdp_plan.apply_modules, delete a fully_shard(...) call for it, or give "
                f"each block a module of its own."
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
