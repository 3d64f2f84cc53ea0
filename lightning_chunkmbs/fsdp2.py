"""Private parts of FSDP2; no other file touches them.

Each is reached through a function here, which says so when a torch version lacks it. Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from .counted import Counted, CountedGather
from .dtypes import accumulate_in_fp32
from .meshes import local_part
from .report import StepCounter

_PARTS = (
    "_pre_forward",
    "_post_forward",
    "_lazy_init",
    "_pre_backward",
    "_register_pre_backward_hook",
    "_root_post_backward_final_callback",
)


def fsdp_module(module: nn.Module) -> FSDPModule:
    """Return ``module`` as the FSDP2 module that it is."""
    if not isinstance(module, FSDPModule):
        raise RuntimeError(f"{type(module).__name__} is not sharded; shard() comes before this.")
    return module


def fsdp_state(module: nn.Module) -> Any:
    """Return FSDP2's state of a sharded module."""
    state = fsdp_module(module)._get_fsdp_state()
    for name in _PARTS:
        if not hasattr(state, name):
            raise RuntimeError(
                f"FSDP2's state has no {name} in torch {torch.__version__}, on which this package relies. It is "
                f"written for torch 2.11 to 2.14; install one of these."
            )
    return state


def param_groups(module: nn.Module) -> list[Any]:
    """Return the parameter groups of a sharded module; none if it has no parameters of its own."""
    state = fsdp_state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def nested_groups(block: nn.Module) -> list[nn.Module]:
    """Return the modules inside a block that are sharded by themselves."""
    return [module for module in block.modules() if module is not block and isinstance(module, FSDPModule)]


def join_groups(block: nn.Module) -> None:
    """Gather and reduce the groups nested in a block with the block's own, each by collectives of its own.

    Called before FSDP2 is initialized. The hooks of the nested modules have to be taken off.
    """
    states = [fsdp_state(module) for module in nested_groups(block)]
    if states and not hasattr(states[0], "_fsdp_param_groups"):
        raise RuntimeError(
            f"A group inside a block ({type(block).__name__}) needs torch 2.12 or newer, and this is "
            f"{torch.__version__}. Delete it from fsdp_plan.apply_modules, or its fully_shard(...) call."
        )
    for state in states:
        fsdp_state(block)._fsdp_param_groups.extend(state._fsdp_param_groups)
        state._fsdp_param_groups = []


def is_unsharded(module: nn.Module) -> bool:
    """Return whether a sharded module is gathered now."""
    return any(group.is_unsharded for group in param_groups(module))


def group_mesh(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which the group of a sharded module is gathered; None if it has no parameters."""
    groups = param_groups(module)
    return groups[0].mesh_info.mesh if groups else None


def initialize(root: nn.Module) -> None:
    """Make ``root`` the root of its groups now and not at the first call, which may be of one of its children."""
    fsdp_state(root)._lazy_init()
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                _keep_reduce_dtype(group)


def _keep_reduce_dtype(group: Any) -> None:
    """Keep a ``reduce_dtype`` that FSDP2 drops where parameters compute in it: their gradients are fp32 here."""
    if group._reduce_dtype is None:
        group._reduce_dtype = group.mp_policy.reduce_dtype


def whole_groups(root: nn.Module) -> list[str]:
    """Return the names of modules that are sharded without a ``param_dtype`` of their own."""
    modules = dict(root.named_modules())
    sharded = [name for name, module in modules.items() if isinstance(module, FSDPModule)]
    own = [name for name in sharded if param_groups(modules[name])]
    return [n or "the LightningModule" for n in own if fsdp_state(modules[n])._mp_policy.param_dtype is None]


def host_shards(root: nn.Module) -> list[nn.Parameter]:
    """Return the shards that CPU offload keeps on the host."""
    groups = [g for module in root.modules() if isinstance(module, FSDPModule) for g in param_groups(module)]
    return [param.sharded_param for group in groups for param in group.fsdp_params if param.offload_to_cpu]


def take_hooks_off(module: nn.Module) -> None:
    """Take FSDP2's forward hooks off a sharded module."""
    state = fsdp_state(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def begin_backward_once(module: nn.Module) -> None:
    """Begin a block's backward pass with the first of its chunks; FSDP2 would look for each of them what is to do."""
    state = fsdp_state(module)
    owners, begun = [state, *param_groups(module)], type(state._training_state).PRE_BACKWARD

    def pre_backward(grad: Tensor) -> Any:
        queued = state._state_ctx.post_backward_final_callback_queued
        if queued and all(owner._training_state is begun for owner in owners):
            return grad
        return type(state)._pre_backward(state, grad)

    state._pre_backward = pre_backward


def keep_casts(module: nn.Module) -> None:
    """Bring back what the hooks taken off a further group did to dtypes, for a policy its user gave it."""
    state = fsdp_state(module)
    policy = state._mp_policy
    casts_inputs = policy.param_dtype is not None and policy.cast_forward_inputs
    if not casts_inputs and policy.output_dtype is None:
        return
    if not hasattr(state, "_cast_forward_inputs"):
        raise RuntimeError(
            f"A group outside the blocks ({type(module).__name__}) with a MixedPrecisionPolicy that casts inputs or "
            f"outputs needs torch 2.12 or newer, and this is {torch.__version__}. Pass cast_forward_inputs=False and "
            f"no output_dtype to its fully_shard, or delete that call."
        )
    module.register_forward_pre_hook(lambda _m, args, kw: state._cast_forward_inputs(args, kw), with_kwargs=True)
    module.register_forward_hook(lambda _m, _args, output: state._cast_output_dtype(output))


def count_collectives(module: nn.Module, counter: StepCounter) -> None:
    """Count the collectives of a sharded module where they are issued, and time them where they are waited for."""
    groups = param_groups(module)
    if len(groups) != 1 or isinstance(groups[0]._all_gather_comm, Counted):
        return
    group = groups[0]
    if not hasattr(type(group), "wait_for_unshard"):
        raise RuntimeError(
            f"FSDP2's group has no wait_for_unshard in torch {torch.__version__}, where gathers are waited for. This "
            f"package is written for torch 2.11 to 2.14; install one of these."
        )
    gather = CountedGather(group._all_gather_comm, counter, versions=functools.partial(_shard_versions, group))
    scatter = Counted(group._reduce_scatter_comm, "reduce_scatters", "reduced_bytes", "input_tensor", counter)
    fsdp_module(module).set_custom_all_gather(gather)  # type: ignore[arg-type]
    fsdp_module(module).set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
    group.wait_for_unshard = functools.partial(_wait_for_unshard, group, gather)


def _wait_for_unshard(group: Any, gather: CountedGather) -> None:
    if group._all_gather_result is not None and gather.is_stale():
        _forget_gather(group)
        group.unshard()
    result = group._all_gather_result
    gather.waits(None if result is None else result.all_gather_work)
    type(group).wait_for_unshard(group)


@torch.no_grad()
def _shard_versions(group: Any) -> list[int]:
    """Return marks of the shards of a group, others once an operator wrote to a shard or to its local tensor."""
    shards = [param.sharded_param for param in group.fsdp_params]
    return [version for shard in shards for version in (shard._version, shard.to_local()._version)]


def _forget_gather(group: Any) -> None:
    result, group._all_gather_result = group._all_gather_result, None
    if result is not None:
        if result.all_gather_event is not None:
            group.device_handle.current_stream().wait_event(result.all_gather_event)
        if result.all_gather_work is not None:
            result.all_gather_work.wait()


def reshard(module: nn.Module) -> None:
    """Reshard a sharded module, and forget what was gathered ahead for a call of it that has not come.

    FSDP2's own ``reshard`` leaves a root gathered during its call, and keeps what is gathered ahead: old weights, if
    an optimizer steps then.
    """
    for group in param_groups(module):
        _forget_gather(group)
        group._to_sharded()


def gather_beside_computing(module: nn.Module) -> None:
    """Let a sharded module be gathered while a CPU computes.

    An accelerator has streams for that. On a CPU, FSDP2 would keep the thread that computes waiting, also for what is
    gathered ahead.
    """
    for group in param_groups(module):
        group.unshard_async_op = group.unshard_async_op or group.device.type == "cpu"


def gathered_params(module: nn.Module) -> list[Any]:
    """Return FSDP2's parameters of a sharded module's group, those that were gathered at least once."""
    return [p for group in param_groups(module) for p in group.fsdp_params if hasattr(p, "_unsharded_param")]


def trained_params(module: nn.Module) -> list[Any]:
    """Return FSDP2's parameters of a sharded module's group whose shards require gradients, gathered or not."""
    return [p for group in param_groups(module) for p in group.fsdp_params if p.sharded_param.requires_grad]


def follow_shards(module: nn.Module) -> None:
    """Let gathered parameters require gradients where their shards do now, and add these up in fp32.

    FSDP2 looks once, at the first gather; freezing or toggling parameters later would have no effect.

    Raises:
        RuntimeError: a parameter was never gathered, or one was unfrozen whose dtype is not the group's.
    """
    for group in param_groups(module):
        for param in group.fsdp_params:
            if not hasattr(param, "_unsharded_param"):
                raise RuntimeError(f"{param._param_fqn} has not been gathered where gradients are about to be made.")
            param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)
            accumulate_in_fp32(param._unsharded_param)
        _follow_dtype(group)


def _follow_dtype(group: Any) -> None:
    """Note the dtype of a group of which FSDP2 knows none, since all of it was frozen."""
    trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    if trained and group._orig_dtype is None:
        group._init_mp_dtypes()
        _keep_reduce_dtype(group)
    other = next((param for param in trained if param.orig_dtype != group._orig_dtype), None)
    if other is not None:
        raise RuntimeError(
            f"The trainable parameters of a group have one dtype, {group._orig_dtype} here, and {other._param_fqn} "
            f"({other.orig_dtype}) has been unfrozen. Convert it before training, or leave it frozen."
        )


def clear_shard_gradients(module: nn.Module, set_to_none: bool) -> None:
    """Clear the gradients of the shards of a module's group, whatever is registered on the module now."""
    for group in param_groups(module):
        for param in group.fsdp_params:
            if set_to_none:
                param.sharded_param.grad = None
            elif param.sharded_param.grad is not None:
                param.sharded_param.grad.zero_()


def versions(module: nn.Module) -> list[int]:
    """Return a mark for each gathered parameter of a module, for :func:`write_back`."""
    return [param._unsharded_param._version for param in gathered_params(module)]


@torch.no_grad()
def write_back(module: nn.Module, before: list[int]) -> None:
    """Bring to the shards what was written to gathered parameters in place since ``before``.

    Numbers that were not changed keep what their shards hold of them beyond the gathered dtype.
    """
    for param, version in zip(gathered_params(module), before, strict=True):
        if param._unsharded_param._version != version:
            shard = param.sharded_param
            # Every rank holds the whole, so it takes its part without communication.
            part = _part_of(param._unsharded_param, group_mesh(module), param.fsdp_placement)
            old, new = shard.to_local(), part.to(shard.device)
            old.copy_(torch.where(old.to(new.dtype) == new, old, new.to(old.dtype)))


def _part_of(whole: Tensor, mesh: DeviceMesh | None, placement: Shard) -> Tensor:
    """Return this rank's part of a gathered parameter, which may be sharded by tensor parallelism beside."""
    assert mesh is not None
    placements = [*[Replicate()] * (mesh.ndim - 1), placement]
    return distribute_tensor(local_part(whole), mesh, placements, src_data_rank=None).to_local()


def in_backward() -> bool:
    """Return whether autograd runs a backward pass now: what is called then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def drop_unreduced(module: nn.Module) -> None:
    """Forget gradients that a broken-off backward pass has not reduced."""
    for param in gathered_params(module):
        param._unsharded_param.grad = None
        param.unsharded_accumulated_grad = None


def has_gradient(param: Any) -> bool:
    """Return whether one of FSDP2's parameters has a gradient that waits for reduction."""
    if not hasattr(param, "_unsharded_param"):
        return False
    return param._unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None


def fill_missing(param: Any) -> None:
    """Let one of FSDP2's parameters that has no gradient take part in its reduction with zeros."""
    if not has_gradient(param):
        whole = param._unsharded_param
        whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)


def finish_backward(root: nn.Module) -> None:
    """Do what FSDP2 does at the end of a backward pass: reduce and reshard what has not been."""
    fsdp_state(root)._root_post_backward_final_callback()


def reset_pass(root: nn.Module) -> None:
    """Forget a forward or backward pass that was broken off."""
    if fsdp_state(root)._is_root is None:
        return  # none has begun: FSDP2 makes what is reset at the first
    if hasattr(root, "reset_iter_state"):
        fsdp_module(root).reset_iter_state()
        return
    context = fsdp_state(root)._state_ctx  # torch 2.11 has no public way
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    fsdp_state(root)._comm_ctx.post_forward_order.clear()
    for state in context.all_states:
        state._training_state = type(state._training_state).IDLE
        group = state._fsdp_param_group
        if group is not None:
            group.finalize_backward()
            group._training_state = type(state._training_state).IDLE
            group._to_sharded()
