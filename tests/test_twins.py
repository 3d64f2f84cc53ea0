"""A copy of a module that takes no memory and shares nothing with it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_chunkmbs.twins import bring_up_to_date, twin_of


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.head.weight.no_decay = True
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("steps", torch.ones(2, dtype=torch.int64))
        self.metric = MeanMetric()
        self.table = torch.ones(5, dtype=torch.bfloat16)
        self.rows = [torch.ones(2), {"x": torch.ones(1)}]
        self.owner = object()


def test_a_twin_has_everything_but_the_memory():
    module = Module()
    twin = twin_of(module, [module.owner])
    assert type(twin) is Module
    state = module.state_dict()
    assert {name: (t.shape, t.dtype) for name, t in twin.state_dict().items()} == {
        name: (t.shape, t.dtype) for name, t in state.items()
    }
    assert all(t.device.type == "meta" for t in [*twin.parameters(), *twin.buffers()])
    assert twin.head.weight is twin.embedding.weight
    assert twin.head.weight.no_decay
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in module.parameters()]
    assert twin.owner is None
    assert twin.metric.mean_value.device.type == "cpu"
    assert twin.table.dtype == torch.bfloat16
    assert twin.table.tolist() == [0.0] * 5
    assert twin.rows[1]["x"].tolist() == [0.0]


def test_a_twin_shares_nothing_that_can_be_copied():
    module = Module()
    twin = twin_of(twin_of(module, []), [])  # of a twin too
    twin.rows.append(1)
    twin.metric.mean_value += 1
    twin.head.weight.no_decay = False
    assert len(module.rows) == 2
    assert module.metric.mean_value == 0
    assert module.head.weight.no_decay
    assert module.embedding.weight.device.type == "cpu"


def test_what_cannot_be_copied_is_shared():
    module = Module()
    module.head.lock = threading.Lock()
    module.generator = (x for x in ())
    twin = twin_of(module, [])
    assert twin.head.lock is module.head.lock
    assert twin.generator is module.generator
    assert twin.rows is not module.rows
    assert twin.head.weight is twin.embedding.weight


def test_of_a_container_only_what_cannot_be_copied_is_shared():
    module = Module()
    module.box = {"lock": threading.Lock(), "n": [1]}
    twin = twin_of(module, [])
    twin.box["n"].append(2)
    assert twin.box["lock"] is module.box["lock"]
    assert module.box["n"] == [1]


def test_modules_that_are_no_children_and_arrays_take_no_memory():
    module = Module()
    module.teachers = [nn.Linear(3, 3)]
    module.data = np.ones(3)
    twin = twin_of(module, [])
    assert twin.teachers[0].weight.tolist() == torch.zeros(3, 3).tolist()
    assert type(twin.teachers[0].weight) is nn.Parameter
    assert twin.data is module.data


def test_a_twin_follows_what_is_set_later():
    module = Module()
    module.phase = None
    twin = twin_of(module, [])
    module.phase, module.rows_seen, module.of_mine = "heavy", [1], [module.head]
    module.frozen.eval()
    module.head.weight.requires_grad_(False)
    bring_up_to_date(twin, module)
    twin.rows_seen.append(2)
    assert (twin.phase, module.rows_seen, twin.of_mine) == ("heavy", [1], [twin.head])
    assert [m.training for m in twin.modules()] == [m.training for m in module.modules()]
    assert not twin.embedding.weight.requires_grad
    assert twin.head.weight.device.type == "meta"


class _Secret:
    def __deepcopy__(self, memo: object) -> object:
        raise RuntimeError("mine")


def test_a_copy_with_an_error_of_its_own_is_no_obstacle():
    module = Module()
    module.secret = _Secret()
    assert twin_of(module, []).secret is module.secret


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_a_twin_of_a_large_module_takes_no_memory(dtype):
    with torch.device("meta"):
        module = nn.Linear(2, 2)
        module.register_buffer("huge", torch.empty(2**40, dtype=dtype))
    assert twin_of(module, []).huge.shape == (2**40,)
