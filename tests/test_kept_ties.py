"""Tied parameters under tensor parallelism: tied again they train as one, torn apart they are refused."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from lightning_chunkmbs.kept_ties import check_ties, note_ties
from tests.mesh_models import WORLD, Meshed, data_of, own_data, strategy_of
from tests.one_window import accumulate, assert_close, build, gradients, train_window
from tests.ranks import raises_on_ranks, run_on_ranks
from tests.structure_models import Tied

MESH = "tensor parallel"


class TiedAgain(Meshed):
    """Distributes the embedding as its head and ties them again."""

    def configure_model(self) -> None:
        done = self._whole
        super().configure_model()
        if not done:
            mesh, rows = self.device_mesh["tensor_parallel"], _rows()
            parallelize_module(self.net, mesh, {"embedding": rows})
            self.net.head.weight = self.net.embedding.weight


def _rows() -> RowwiseParallel:
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())


class BuiltThere(Meshed):
    """Builds its model in ``configure_model``; the model says what it ties, as those of Hugging Face do."""

    def configure_model(self) -> None:
        self.net = build(Tied)
        self.net.all_tied_weights_keys = {"head.weight": "embedding.weight"}
        super().configure_model()


def torn(kind: type[Meshed]) -> None:
    train_window(kind(build(Tied if kind is Meshed else nn.Identity)), own_data(MESH), strategy_of(MESH))


def test_a_torn_tie_is_refused():
    for kind in (Meshed, BuiltThere):
        for name, message in raises_on_ranks(WORLD, torn, kind):
            assert name == "ValueError"
            assert "net.embedding.weight and net.head.weight are tied" in message
            assert "self.net.head.weight = self.net.embedding.weight" in message


def tied_again() -> None:
    expected, _ = accumulate(build(Tied), data_of(MESH))
    module = train_window(TiedAgain(build(Tied)), own_data(MESH), strategy_of(MESH))
    assert module.report.chunks > 4 * 3
    assert module.net.head.weight is module.net.embedding.weight
    assert_close(module.gradients, expected)
    assert "head.weight" not in gradients(module.net)


def test_tied_again_it_trains_as_in_one_process():
    run_on_ranks(WORLD, tied_again)


def test_what_is_untied_on_purpose_or_gone_is_left_alone():
    net = build(Tied)
    note_ties(net)
    check_ties(net)
    net.head.weight = nn.Parameter(torch.zeros_like(net.head.weight))
    check_ties(net)
    del net.head
    check_ties(net)
