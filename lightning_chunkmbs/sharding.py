"""FSDP2 groups of a model, and the calls that run with its root group gathered.

The only file that touches FSDP2's private parts; they are reached through the few functions at its end, which say so
when a torch version lacks them.

[Note: hooks taken off]
FSDP2 gathers and reduces in forward hooks. For blocks, the root and every further group outside blocks these hooks are
taken off the modules and called by hand: around all chunks of a block call, and around a whole step for the root.

[Note: further groups]
A group outside the blocks (a model inside the LightningModule, a head) is gathered when a step begins and stays so.
Without hooks of its own it is reduced and resharded by FSDP2's final callback of backward, like the root group: one
gather and one reduce-scatter, wherever and however often its modules are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from .report import StepCounter

# Agrees with the other ranks on a number: takes this rank's, returns the least of all.
Agree = Callable[[int], int]


def make_agree(mesh: DeviceMesh) -> Agree:
    """Return a function that agrees over the ranks of ``mesh``, on the host; every rank must call this."""
    group = dist.new_group(dist.get_process_group_ranks(mesh.get_group()), backend="gloo")

    def agree(number: int) -> int:
        value = torch.tensor(number)
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=group)
        return int(value)

    return agree


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    further: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    forward_prefetch: int,
) -> None:
    """Put each block, each further module and what is left of ``root`` into an FSDP2 group of its own.

    Modules that are sharded already keep their group. 0-dim parameters stay whole (FSDP2 refuses them).

    Args:
        root: the LightningModule.
        blocks: blocks, in the order in which they run.
        further: modules outside the blocks, inner ones before outer ones.
        mesh: 1-dimensional data-parallel mesh.
        reshard_after_forward: whether blocks are gathered again for backward.
        forward_prefetch: how many of the next blocks are gathered while one runs.
    """
    whole = {p for p in root.parameters() if p.ndim == 0 and not isinstance(p, DTensor)}
    for module in blocks:
        if not isinstance(module, FSDPModule):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=whole)
    for module in (*further, root):
        if not isinstance(module, FSDPModule):
            fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=whole)
    if forward_prefetch:
        for i, module in enumerate(blocks):
            _fsdp(module).set_modules_to_forward_prefetch([_fsdp(m) for m in blocks[i + 1 : i + 1 + forward_prefetch]])


def gather_around(module: nn.Module, body: Callable[[list[Tensor]], Any], tensors: list[Tensor]) -> Any:
    """Run ``body(tensors)`` as one forward call of ``module`` for FSDP2, whose hooks were taken off."""
    state = _state(module)
    (tensors,), _ = state._pre_forward(module, (tensors,), {})
    return state._post_forward(module, (tensors,), body(tensors))


class ShardedModel:
    """A model in FSDP2 groups, and the calls that may use it.

    Args:
        root: the LightningModule, sharded by :func:`shard`.
        blocks: its blocks.
        counter: counts the collectives.
    """

    def __init__(self, root: nn.Module, blocks: Sequence[nn.Module], counter: StepCounter) -> None:
        self.root = root
        self.blocks = list(blocks)
        inside = {module for block in blocks for module in block.modules()}
        self.further = [m for m in root.modules() if isinstance(m, FSDPModule) and m not in inside and m is not root]
        self._counter = counter
        self._inside = False
        self._opened: list[bool] = []
        self._outside = ExitStack()
        for module in (root, *self.further, *self.blocks):
            _take_hooks_off(module)
            _count_collectives(module, counter)
        for module in self.further:
            _keep_casts(module)
        for module in (root, *root.children()):
            if module not in inside and any(True for _ in module.parameters()):
                module.register_forward_pre_hook(self._before_call, prepend=True)
                module.register_forward_hook(self._after_call, always_call=True)

    # -- one step ----------------------------------------------------------------------------------------------------

    def call(self, fn: Callable[..., Any], *args: Any, backward_follows: bool, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)`` with the root group and the further groups gathered.

        Args:
            fn: what to run, for example ``module.training_step``.
            args: its positional arguments.
            backward_follows: keep them gathered for a backward pass through the result.
            kwargs: its keyword arguments.
        """
        with self.cleaned_on_error():
            self._enter()
            output = fn(*args, **kwargs)
            return self._leave(output, keep=backward_follows and torch.is_grad_enabled())

    def _enter(self) -> None:
        # A forward pass without backward leaves groups gathered; an optimizer step would make them stale.
        for module in self._groups:
            module.reshard()
        _state(self.root)._pre_forward(self.root, (), {})
        for module in self.further:
            _fsdp(module).unshard()
        self._inside = True

    def _leave(self, output: Any, *, keep: bool) -> Any:
        self._inside = False
        output = _state(self.root)._post_forward(self.root, (), output)
        if not keep:
            self.reset()
        return output

    @property
    def _groups(self) -> Iterator[FSDPModule]:
        return (_fsdp(module) for module in (self.root, *self.further, *self.blocks))

    # -- backward and optimizer inside a step (manual optimization) --------------------------------------------------

    def before_backward(self, loss: Tensor) -> None:
        """Tell FSDP2 of a backward pass that starts at ``loss`` inside a step.

        FSDP2 learns of a backward pass from hooks on what a step returns; here the step has not returned yet.
        """
        if self._inside:
            _state(self.root)._register_pre_backward_hook(loss)

    def after_backward(self) -> None:
        """Gather again what a backward pass inside a step has resharded."""
        if self._inside:
            self._gather()

    def after_optimizer_step(self) -> None:
        """Gather the new parameters when the optimizer stepped inside a step."""
        if self._inside:
            for module in self._groups:
                module.reshard()
            self._gather()

    def _gather(self) -> None:
        for module in (self.root, *self.further):
            _fsdp(module).unshard()

    # -- a backward pass of several runs (lockstep) ------------------------------------------------------------------

    @contextmanager
    def root_held(self) -> Iterator[Callable[[], None]]:
        """Hold back reduction and resharding of the root and further groups until the yielded function is called."""
        self._hold_root(True)
        try:
            yield lambda: self._hold_root(False)
        finally:
            self._hold_root(False)

    def _hold_root(self, held: bool) -> None:
        for module in (self.root, *self.further):
            _fsdp(module).set_requires_gradient_sync(not held, recurse=False)
            _fsdp(module).set_reshard_after_backward(not held, recurse=False)
        _fsdp(self.root).set_is_last_backward(not held)

    def reduce_root(self) -> None:
        """Reduce the root and further groups if no run of autograd has done it, because no block was called."""
        if any(_is_unsharded(module) for module in (self.root, *self.further)):
            start = torch.zeros((), device=next(self.root.parameters()).device, requires_grad=True) + 0
            _state(self.root)._register_pre_backward_hook(start)
            start.backward()

    # -- calls outside a step ----------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the root group and the further groups gathered inside; nothing inside may be back-propagated after."""
        with self._counter.paused(), self.cleaned_on_error():
            if self._inside:
                yield
            else:
                self._enter()
                yield
                self._leave(None, keep=False)

    def _before_call(self, _module: nn.Module, _args: Any) -> None:
        """Forward pre-hook of the root and its children: gather around a call made outside a step."""
        opens = not self._inside
        if opens:
            self._outside.enter_context(self._counter.paused())
            self._enter()
        self._opened.append(opens)

    def _after_call(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if self._opened and self._opened.pop():
            self._outside.close()
            return self._leave(output, keep=torch.is_grad_enabled())
        return None

    # -- recovery ----------------------------------------------------------------------------------------------------

    @contextmanager
    def cleaned_on_error(self) -> Iterator[None]:
        """Reshard everything and forget the pass when an exception leaves the context."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Reshard every group and forget a pass that will not be finished."""
        self._inside = False
        self._opened.clear()
        self._outside.close()
        for module in self._groups:
            module.reshard()
        _reset_pass(self.root)


# -- private parts of FSDP2 ------------------------------------------------------------------------------------------


class _Collective(Protocol):
    def allocate(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class _Counted:
    """A collective of FSDP2 that counts its calls."""

    def __init__(self, collective: _Collective, name: str, counter: StepCounter) -> None:
        self._collective = collective
        self._name = name
        self._counter = counter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._counter.add(self._name)
        return self._collective(*args, **kwargs)


def _fsdp(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise RuntimeError(f"{type(module).__name__} is not sharded; shard() comes before this.")
    return module


def _state(module: nn.Module) -> Any:
    """Return FSDP2's state of a sharded module."""
    state = _fsdp(module)._get_fsdp_state()
    for name in ("_pre_forward", "_post_forward", "_lazy_init", "_register_pre_backward_hook"):
        if not hasattr(state, name):
            raise RuntimeError(
                f"FSDP2's state has no {name} in torch {torch.__version__}, on which this package relies. It is "
                f"written for torch 2.11 to 2.14; install one of these."
            )
    return state


def _param_groups(module: nn.Module) -> list[Any]:
    state = _state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def _is_unsharded(module: nn.Module) -> bool:
    return any(group.is_unsharded for group in _param_groups(module))


def group_mesh(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which the group of a sharded module is gathered; None if it has no parameters."""
    groups = _param_groups(module)
    return groups[0].mesh_info.mesh if groups else None


def initialize(root: nn.Module) -> None:
    """Make ``root`` the root of its groups now and not at the first call, which may be of one of its children."""
    _state(root)._lazy_init()


def _take_hooks_off(module: nn.Module) -> None:
    state = _state(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def _keep_casts(module: nn.Module) -> None:
    """Bring back what the hooks taken off a further group did to dtypes, for a policy its user gave it."""
    state = _state(module)
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


def _count_collectives(module: nn.Module, counter: StepCounter) -> None:
    groups = _param_groups(module)
    if len(groups) != 1 or isinstance(groups[0]._all_gather_comm, _Counted):
        return
    gather = _Counted(groups[0]._all_gather_comm, "all_gathers", counter)
    scatter = _Counted(groups[0]._reduce_scatter_comm, "reduce_scatters", counter)
    _fsdp(module).set_custom_all_gather(gather)  # type: ignore[arg-type]
    _fsdp(module).set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]


def _reset_pass(root: nn.Module) -> None:
    if hasattr(root, "reset_iter_state"):
        _fsdp(root).reset_iter_state()
        return
    context = _state(root)._state_ctx  # torch 2.11 has no public way
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    _state(root)._comm_ctx.post_forward_order.clear()
    for state in context.all_states:
        state._training_state = type(state._training_state).IDLE
        group = state._fsdp_param_group
        if group is not None:
            group.finalize_backward()
            group._training_state = type(state._training_state).IDLE
            group._to_sharded()
