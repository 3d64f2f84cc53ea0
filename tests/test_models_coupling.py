"""Layers that couple the samples of a batch, in blocks that are cut: warned about or refused by name."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_chunkmbs.block import block_settings
from lightning_chunkmbs.block_buffers import BlockBuffers
from lightning_chunkmbs.checks import check_coupling
from lightning_chunkmbs.report import Notices
from tests.chunking import caught_warnings, leaf, make_twins
from tests.models import Block, chunked
from tests.one_window import accumulate, assert_close, build, micro_batches, train_window
from tests.ranks import run_on_ranks
from tests.structure_models import Decoder


class BatchNormBlock(Block):
    """Normalises over the samples too; keeps no running statistics, so that it writes no buffer either."""

    def __init__(self) -> None:
        super().__init__()
        self.over_batch = nn.BatchNorm1d(16, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.over_batch(x.transpose(1, 2)).transpose(1, 2))


class WithBatchNorm(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = BatchNormBlock()


def messages_of(**modules: nn.Module) -> list[str]:
    with caught_warnings() as messages:
        check_coupling(modules, Notices())
    return messages


def batch_norm_cut_and_whole() -> tuple[list[str], list[str]]:
    """Warnings with the block cut, and with it in recompute_plan alone, where gradients are the plain model's."""
    data, layers = micro_batches([3, 4]), "net.layers.{*}"
    with caught_warnings() as cut:
        train_window(build(WithBatchNorm), data, chunked(2))
    others = {"chunkmbs_plan": {"apply_modules": ["net.layers.{0,2}"]}, "recompute_plan": {"apply_modules": [layers]}}
    with caught_warnings() as whole:
        module = train_window(build(WithBatchNorm), data, chunked(2, **others))
    assert_close(module.gradients, accumulate(build(WithBatchNorm), [data])[0])
    return [m for m in cut if "BatchNorm" in m], [m for m in whole if "BatchNorm" in m]


def test_batch_statistics_are_warned_about_and_right_where_the_block_is_whole() -> None:
    [(cut, whole)] = run_on_ranks(1, batch_norm_cut_and_whole)
    assert len(cut) == 1
    assert "'net.layers.1.over_batch' (BatchNorm1d) takes statistics over the batch" in cut[0]
    assert "leave it in recompute_plan" in cut[0]
    assert whole == []


def test_batch_norm_that_uses_running_statistics_is_fine() -> None:
    assert messages_of(block=nn.Sequential(nn.BatchNorm2d(2).eval(), nn.GroupNorm(1, 2), nn.InstanceNorm2d(2))) == []


def test_statistics_over_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'block\.0' is a SyncBatchNorm in training mode.*eval\(\)"):
        messages_of(block=nn.Sequential(nn.SyncBatchNorm(2)))
    assert messages_of(block=nn.Sequential(nn.SyncBatchNorm(2)).eval()) == []


def test_routers_with_a_capacity_are_warned_about() -> None:
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "encoder_attention_heads": 2, "vocab_size": 8, "encoder_layers": 2}
    sizes |= {"decoder_layers": 1, "decoder_ffn_dim": 8, "decoder_attention_heads": 2, "num_experts": 2}
    torch.manual_seed(0)
    net = transformers.NllbMoeModel(transformers.NllbMoeConfig(**sizes, encoder_sparse_step=2, expert_capacity=4))
    layers = {f"encoder.layers.{i}": layer for i, layer in enumerate(net.encoder.layers)}
    (message,) = messages_of(**layers)
    assert "'encoder.layers.1.ffn.router' has expert_capacity" in message
    assert "other tokens are dropped" in message
    assert messages_of(layer=layers["encoder.layers.0"]) == []


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("chunk_mbs", [4, 2])
def test_recomputation_does_not_write_running_statistics_again(norm, chunk_mbs):
    twins = make_twins(nn.Sequential(nn.Conv1d(2, 2, 1), norm(2, track_running_stats=True)), chunk_mbs=chunk_mbs)
    block_settings(twins.block).buffers = BlockBuffers(twins.block)
    x, runs = leaf(4, 2, 5), []
    twins.block[1].register_forward_pre_hook(lambda *_: runs.append(1))
    with caught_warnings() as messages:
        twins.block(x).square().sum().backward()
    for part in reversed(x.detach().split(chunk_mbs)):
        twins.plain(part)
    assert len(runs) == 2 * (4 // chunk_mbs)
    torch.testing.assert_close(dict(twins.block.named_buffers()), dict(twins.plain.named_buffers()))
    assert any("writes its buffers" in message and "1.running_mean, 1.running_var" in message for message in messages)
