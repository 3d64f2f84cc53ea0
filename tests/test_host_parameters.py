"""Backends for parameters on the host. The rest of CPU offload needs an accelerator."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_chunkmbs import ChunkMBSStrategy
from lightning_chunkmbs.host_parameters import backend_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIXED = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [(None, CUDA, MIXED), (None, CPU, "gloo"), (MIXED, CUDA, MIXED), ("gloo", CUDA, "gloo"), ("gloo", CPU, "gloo")],
)
def test_the_backend_reduces_on_the_host(given, device, expected):
    default = "gloo" if device is CPU else "nccl"
    assert backend_for(given, default, device) == expected


@pytest.mark.parametrize("given", ["nccl", "cuda:nccl"])
def test_a_backend_that_does_not_is_refused_with_the_one_to_write(given):
    with pytest.raises(ValueError, match=rf"where '{given}' cannot reduce.*process_group_backend='cpu:gloo,cuda:nccl'"):
        backend_for(given, "nccl", CUDA)


def test_a_group_that_others_started_is_looked_at():
    started = patch.object(dist, "is_initialized", return_value=True)
    refused = pytest.raises(RuntimeError, match="started before the Trainer has the backend 'cuda:nccl' only")
    with started, patch.object(dist, "get_backend_config", return_value="cuda:nccl"), refused:
        backend_for(None, "nccl", CUDA)
    with started, patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"):
        assert backend_for(None, "nccl", CUDA) == MIXED


@pytest.mark.parametrize("offload", [False, True])
def test_the_strategy_asks_for_it(offload):
    strategy = ChunkMBSStrategy(fsdp_plan={"cpu_offload": offload})
    with patch.object(type(strategy), "root_device", CUDA):
        assert strategy._get_process_group_backend() == (MIXED if offload else "nccl")
