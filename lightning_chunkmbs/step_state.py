"""The state of torch that a step may change while it runs, so that steps can take turns in one thread.

The only file that touches the private stacks of saved-tensor hooks and of function and dispatch modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

_hooks: Any = torch._C._autograd
# What `torch.nn.attention.sdpa_kernel` sets, for every device.
_cuda = torch.backends.cuda
_ATTENTION = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
)


class ThreadState(NamedTuple):
    """Grad mode, autocast, attention kernels, default dtype and device, saved-tensor hooks and modes of the thread."""

    grad: bool
    dtype: torch.dtype
    device: torch.device | None
    autocast: tuple[bool, ...]  # on the CPU and on the accelerator, if there is one
    autocast_dtypes: tuple[torch.dtype, ...]
    autocast_cache: bool
    attention: tuple[bool, ...]
    saved_hooks: tuple[tuple[Any, Any], ...]
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]

    @classmethod
    def now(cls) -> ThreadState:
        """Return the state of the running thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            dtype=torch.get_default_dtype(),
            device=_device.CURRENT_DEVICE,
            autocast=tuple([torch.is_autocast_enabled(d) for d in _devices()]),
            autocast_dtypes=tuple([torch.get_autocast_dtype(d) for d in _devices()]),
            autocast_cache=torch.is_autocast_cache_enabled(),
            attention=tuple([enabled() for enabled, _ in _ATTENTION]),
            saved_hooks=_saved_hooks(),
            function_modes=tuple(_get_current_function_mode_stack()),
            dispatch_modes=tuple(_get_current_dispatch_mode_stack()),
        )

    def apply(self, now: ThreadState | None = None) -> None:
        """Put the running thread, whose state is ``now``, into this state."""
        now = now or ThreadState.now()
        if self.grad != now.grad:
            torch.set_grad_enabled(self.grad)
        if self.dtype != now.dtype:
            torch.set_default_dtype(self.dtype)
        _device.CURRENT_DEVICE = self.device
        if True in self.autocast or True in now.autocast:
            torch.clear_autocast_cache()
        if self.autocast != now.autocast or self.autocast_dtypes != now.autocast_dtypes:
            for device, enabled, dtype in zip(_devices(), self.autocast, self.autocast_dtypes, strict=True):
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
        if self.autocast_cache != now.autocast_cache:
            torch.set_autocast_cache_enabled(self.autocast_cache)
        if self.attention != now.attention:
            for (_, enable), on in zip(_ATTENTION, self.attention, strict=True):
                enable(on)
        _swap(now.saved_hooks, self.saved_hooks, _hooks._pop_saved_tensors_default_hooks, _push_saved_hooks)
        _swap(now.function_modes, self.function_modes, _pop_function_mode, _push_function_mode)
        _swap(now.dispatch_modes, self.dispatch_modes, _pop_dispatch_mode, _push_dispatch_mode)


@functools.cache
def _devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _swap(old: tuple[Any, ...], new: tuple[Any, ...], pop: Callable[[], Any], push: Callable[[Any], Any]) -> None:
    """Take what differs off a stack and put the new entries on it."""
    if not old and not new:
        return
    same = 0
    while same < min(len(old), len(new)) and old[same] is new[same]:
        same += 1
    for _ in old[same:]:
        pop()
    for entry in new[same:]:
        push(entry)


def _saved_hooks() -> tuple[tuple[Any, Any], ...]:
    """Return the stack of saved-tensor hooks, which torch only lets one pop."""
    if _hooks._top_saved_tensors_default_hooks(False) is None:
        return ()
    taken = []
    while (top := _hooks._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        _hooks._pop_saved_tensors_default_hooks()
    for hooks in reversed(taken):
        _push_saved_hooks(hooks)
    return tuple(reversed(taken))


def _push_saved_hooks(hooks: tuple[Any, Any]) -> None:
    _hooks._push_saved_tensors_default_hooks(*hooks)
