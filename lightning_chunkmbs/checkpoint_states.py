"""Weights and optimizer states of a checkpoint into a sharded module and its optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from .places import Place

# A parameter without a gradient so far has no state in the checkpoint and needs none.
_FROM_SHARDS = StateDictOptions(strict=False)
_FROM_WHOLE = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)


class _Contents(DefaultLoadPlanner):
    """Loads what there is of what is asked for, and knows what there is."""

    paths: set[tuple[Any, ...]]  # keys from the outside in, of everything in the checkpoint

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is not None:
            self.paths = set((metadata.planner_data or {}).values())
        super().set_up_planner(state_dict, metadata, is_coordinator)


def load_sharded(place: Place, module: Module, optimizers: Sequence[Optimizer], strict: bool) -> None:
    """Load a folder with shards; all ranks call this. The optimizers are filled in place, as the module is.

    Raises:
        RuntimeError: names do not agree and ``strict``.
        KeyError: there is no state for an optimizer.
    """
    contents = _Contents(allow_partial_load=True)
    weights = get_model_state_dict(module)
    _load({"state_dict": weights}, place, contents)
    _check_names(weights, (path[1] for path in contents.paths if path[0] == "state_dict"), strict)
    set_model_state_dict(module, weights, options=StateDictOptions(strict=strict))
    for index, optimizer in enumerate(optimizers):
        key = f"optimizer_{index}"
        if not any(path[0] == key for path in contents.paths):
            raise _no_state(index)
        known = {path[2] for path in contents.paths if path[:2] == (key, "state") and len(path) > 2}
        state: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
        state["state"] = {name: value for name, value in state["state"].items() if name in known}
        own = _take_out(
            state["param_groups"], {path[2:4] for path in contents.paths if path[:2] == (key, "param_groups")}
        )
        states = {key: state}
        _load(states, place, DefaultLoadPlanner())
        for group, entries in zip(states[key]["param_groups"], own, strict=True):
            group.update(entries)
        set_optimizer_state_dict(module, optimizer, states[key], options=_FROM_SHARDS)


def _take_out(groups: list[dict[str, Any]], saved: set[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Take out of an optimizer's groups, and return, what a checkpoint has no entry for: a scheduler new since."""
    own = []
    for i, group in enumerate(groups):
        is_saved = (i, "params") in saved  # if not, torch says what is missing
        own.append({name: group[name] for name in group if is_saved and (i, name) not in saved})
        groups[i] = {name: group[name] for name in group if name not in own[i]}
    return own


def _load(states: dict[str, Any], place: Place, planner: DefaultLoadPlanner) -> None:
    dcp.load(states, checkpoint_id=place.id, planner=planner)


def load_whole(checkpoint: dict[str, Any], module: Module, optimizers: Sequence[Optimizer], strict: bool) -> None:
    """Load what one file had, and take the weights out of ``checkpoint``; all ranks call this.

    Raises:
        RuntimeError: names do not agree and ``strict``.
        KeyError: there is no state for an optimizer.
    """
    weights = checkpoint.pop("state_dict")
    _check_names(get_model_state_dict(module), weights, strict)
    _set_weights(module, weights)
    saved = checkpoint.get("optimizer_states", [])
    for index, optimizer in enumerate(optimizers):
        if index >= len(saved):
            raise _no_state(index)
        state = named_state(saved[index], module, optimizer)
        # torch takes the device from the state, and so fails without any (SGD without momentum).
        options = _FROM_WHOLE if state["state"] else _FROM_SHARDS
        set_optimizer_state_dict(module, optimizer, state, options=options)
        for name, parameter in _named_parameters(module):
            if name not in state["state"]:  # torch has made it one, and counted a step
                optimizer.state.pop(parameter, None)


def _set_weights(module: Module, weights: dict[str, Any]) -> None:
    """Set whole weights, module by module: for a model at once torch forgets all but one name of what is tied."""
    left = dict(weights)
    for prefix, part in module.named_modules(remove_duplicate=False):
        path = f"{prefix}." if prefix else ""
        keys = {name: f"{path}{name}".replace("_orig_mod.", "") for name in (*part._parameters, *part._buffers)}
        own = {name: left.pop(key) for name, key in keys.items() if key in left}
        if own:
            set_model_state_dict(part, own, options=_FROM_WHOLE)
    if left:  # what modules save beside parameters and buffers, such as the states of metrics
        module.load_state_dict(left, strict=False)


def named_state(saved: dict[str, Any], module: Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state with names of parameters where ``saved`` may have numbers.

    Strategies that shard number the parameters of the module; an optimizer's own ``state_dict`` numbers its own.
    """
    numbers = [group["params"] for group in saved["param_groups"]]
    if any(isinstance(number, str) for number in chain.from_iterable(numbers)):
        return saved
    names = [name for name, _ in _named_parameters(module)]
    place = {parameter: index for index, parameter in enumerate(module.parameters())}
    groups = [[place[p] for p in group["params"]] for group in optimizer.param_groups]
    name_of = dict(enumerate(names))
    alike = [len(group) for group in numbers] == [len(group) for group in groups]
    if alike and [sorted(group) for group in numbers] != [sorted(group) for group in groups]:
        pairs = zip(chain.from_iterable(numbers), chain.from_iterable(groups), strict=True)
        name_of = {number: names[index] for number, index in pairs}
    return {
        "state": {name_of[number]: value for number, value in saved["state"].items()},
        "param_groups": [{**g, "params": [name_of[n] for n in g["params"]]} for g in saved["param_groups"]],
    }


def _named_parameters(module: Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name.replace("_orig_mod.", ""), parameter) for name, parameter in module.named_parameters()]


def _check_names(expected: Iterable[str], found: Iterable[str], strict: bool) -> None:
    expected, found = set(expected), set(found)
    if not strict or expected == found:
        return
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    raise RuntimeError(
        f"The checkpoint is of another model: it lacks {missing[:5]} ({len(missing)} names) and has {unexpected[:5]} "
        f"({len(unexpected)} names) more. Set `strict_loading = False` on the LightningModule to load what agrees."
    )


def _no_state(index: int) -> KeyError:
    return KeyError(
        f"The checkpoint has no state of optimizer {index}; was it saved with `save_weights_only=True`? Training "
        f"continues only from a checkpoint with everything; load weights alone before `fit`, into the module."
    )
