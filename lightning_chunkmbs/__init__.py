"""ChunkMBS: FSDP2 under PyTorch Lightning with one gather per block and pass for all micro-chunks of a step."""

from .averaging import ShardedWeightAveraging
from .mixin import ChunkMBSMixin
from .monitor import ChunkMBSMonitor
from .plans import ActivationOffloadPlan, ChunkMBSPlan, FSDPPlan, RecomputePlan
from .report import StepReport
from .strategy import ChunkMBSStrategy

__all__ = [
    "ActivationOffloadPlan",
    "ChunkMBSMixin",
    "ChunkMBSMonitor",
    "ChunkMBSPlan",
    "ChunkMBSStrategy",
    "FSDPPlan",
    "RecomputePlan",
    "ShardedWeightAveraging",
    "StepReport",
]
