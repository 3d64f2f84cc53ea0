"""ChunkMBS: FSDP2 under PyTorch Lightning with one gather per block and pass for all micro-chunks of a step."""

from .averaging import ShardedWeightAveraging
from .mixin import ChunkMBSMixin
from .plans import ActivationOffloadPlan, ChunkMBSPlan, FSDPPlan, RecomputePlan
from .report import StepReport
from .strategy import ChunkMBSStrategy

__all__ = [
    "ActivationOffloadPlan",
    "ChunkMBSMixin",
    "ChunkMBSPlan",
    "ChunkMBSStrategy",
    "FSDPPlan",
    "RecomputePlan",
    "ShardedWeightAveraging",
    "StepReport",
]
