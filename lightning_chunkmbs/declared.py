"""The plans of a strategy: those it was given, completed by those that a module declares."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from .coverage import Plans
from .mixin import ChunkMBSMixin
from .plans import ActivationOffloadPlan, ChunkMBSPlan, FSDPPlan, RecomputePlan, coerce_plan

_PLANS: dict[str, type] = {
    "recompute_plan": RecomputePlan,
    "activation_offload_plan": ActivationOffloadPlan,
    "chunkmbs_plan": ChunkMBSPlan,
    "fsdp_plan": FSDPPlan,
}


class DeclaredPlans:
    """What a strategy was given, by its arguments' names; plans are dataclasses, dicts of their fields or None."""

    def __init__(self, **given: Any) -> None:
        self._given = {name: coerce_plan(value, _PLANS[name], name) for name, value in given.items() if name in _PLANS}
        self._switches = {name: value for name, value in given.items() if name not in _PLANS}

    @property
    def fsdp_plan(self) -> FSDPPlan:
        """How parameters are sharded."""
        plan = self._given["fsdp_plan"]
        return plan if isinstance(plan, FSDPPlan) else FSDPPlan()

    def plans_for(self, module: Module) -> Plans:
        """Return the plans for ``module``, whose own ones stand where none were given."""
        declared: dict[str, Any] = {}
        for name, plan in self._given.items():
            if plan is None and isinstance(module, ChunkMBSMixin) and name != "fsdp_plan":
                plan = coerce_plan(getattr(module, name), _PLANS[name], f"{type(module).__name__}.{name}")
            declared[name] = plan
        return Plans(**declared, **self._switches)
