"""What the plans cover, and which structures of a model they fit."""

import logging
import re
import warnings

import pytest
import torch
from torch import nn

from lightning_chunkmbs.block import ChunkedBlock
from tests.ranks import raises_on_ranks, run_on_ranks
from tests.strategy_models import (
    LAYERS,
    Block,
    Net,
    Sharding,
    Toy,
    apart,
    build,
    chunked,
    fit,
    loader,
    parameters,
    stock,
    train_plainly,
)

CLOSE = 2e-6
FIRST = {"apply_modules": ["model.layers.0"]}
CHUNK = {"apply_modules": [LAYERS], "chunk_mbs": 1}


def train(kind, options):
    fit(build(kind), chunked(**options))


def refused(options, kind=Toy):
    """The one error that all ranks raise, before any training."""
    errors = raises_on_ranks(2, train, kind, options)
    assert errors[0] == errors[1]
    return errors[0]


# -- what covers what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recompute_plan": FIRST},
            r"module of chunkmbs_plan must be in recompute_plan too; 2 are not: model\.layers\.1, model\.layers\.2\.",
        ),
        (
            {"activation_offload_plan": FIRST},
            r"module of chunkmbs_plan must be in activation_offload_plan too; 2 are not: model\.layers\.1, model",
        ),
        (
            {"activation_offload_plan": {"apply_modules": [LAYERS, "model.head"]}},
            r"module of activation_offload_plan must be in recompute_plan too; 1 are not: model\.head\.",
        ),
        ({"recompute": False}, r"recompute is false and enable_chunk_mbs is true\. Write recompute: true"),
        (
            {"recompute": False, "enable_chunk_mbs": False},
            r"recompute is false and enable_activation_offload is true\. Write",
        ),
        (
            {"recompute": False, "enable_chunk_mbs": False, "enable_activation_offload": False},
            r"No plan that is switched on names a block",
        ),
        (
            {"recompute_plan": {"apply_modules": [LAYERS, "model.layers.1.up"]}},
            r"recompute_plan: .*'model\.layers\.1\.up' is inside 'model\.layers\.1'",
        ),
        ({"fsdp_plan": {"apply_modules": ["model.layers.1"]}}, r"fsdp_plan .*'model\.layers\.1' is a block"),
        (
            {"chunkmbs_plan": {"apply_modules": ["model.layer.{*}"]}},
            r"chunkmbs_plan: .*'model\.layer\.\{\*\}' matches none.*'model\.layers\.\{\*\}' \(3 modules\)",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(options, message):
    kind, text = refused(options)
    assert kind == "ValueError"
    assert re.search(message, text, re.DOTALL), text


def covered_beyond_chunks():
    """Blocks under recompute and offload alone are groups, and run one chunk for a batch."""
    module = build()
    wide = {"apply_modules": [LAYERS, "model.embed"]}
    trainer = fit(module, chunked(recompute_plan=wide, chunkmbs_plan={**FIRST, "chunk_mbs": 1}))
    assert apart(parameters(module), parameters(train_plainly(build()))) < CLOSE
    report = trainer.strategy.step_report
    assert (report.all_gathers, report.reduce_scatters, report.blocks, report.chunks) == (9, 5, 4, 4 + 3)
    assert report.offloaded_bytes == 4 * 3 * 8 * 4  # of the only chunked block

    module = build()
    everywhere = {"recompute_plan": wide, "activation_offload_plan": {"apply_modules": [LAYERS]}}
    trainer = fit(module, chunked(**everywhere, chunkmbs_plan={**FIRST, "chunk_mbs": 1}))
    assert apart(parameters(module), parameters(train_plainly(build()))) < CLOSE
    assert trainer.strategy.step_report.offloaded_bytes == (3 - 1) * 4 * 3 * 8 * 4  # the last block's only chunk stays

    module = build()
    trainer = fit(module, chunked(fsdp_plan={"apply_modules": ["model", "model.head"], "forward_prefetch": 2}))
    assert apart(parameters(module), parameters(train_plainly(build()))) < CLOSE
    report = trainer.strategy.step_report
    # The root has no parameters left of its own; model and model.head are one gather and one scatter each.
    assert (report.all_gathers, report.reduce_scatters, report.chunks) == (8, 5, 12)

    module = build()
    trainer = fit(module, chunked(fsdp_plan={"reshard_after_forward": False}))
    assert apart(parameters(module), parameters(train_plainly(build()))) < CLOSE
    report = trainer.strategy.step_report
    assert (report.all_gathers, report.reduce_scatters, report.chunks) == (4, 4, 12)


def test_blocks_outside_the_chunk_plan_and_further_groups():
    run_on_ranks(2, covered_beyond_chunks)


def without_chunking(accumulated):
    module, reference = build(), build(Sharding)
    options = {"accumulate_grad_batches": accumulated, "max_epochs": 2}
    trainer = fit(module, chunked(enable_chunk_mbs=False), loader(48), **options)
    fit(reference, stock(), loader(48), **options)
    assert len(module.seen) == len(reference.seen) == (4 if accumulated == 4 else 12)
    assert max(map(apart, module.seen, reference.seen)) < 1e-6
    assert apart(parameters(module), parameters(reference)) < CLOSE
    report = trainer.strategy.step_report
    batches = 2 if accumulated == 4 else 1  # the last window of six batches
    assert (report.blocks, report.chunks) == (3 * batches, 3 * batches)
    assert (
        report.offloaded_bytes == report.reloaded_bytes == batches * (3 - 1) * 4 * 3 * 8 * 4
    )  # the chunk that backward needs first stays
    assert report.all_gathers == 7 * batches


def without_offload():
    module = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, chunked(enable_activation_offload=False), max_epochs=2)
    ours = [str(w.message) for w in caught if "enable_activation_offload is false" in str(w.message)]
    assert apart(parameters(module), parameters(train_plainly(build(), epochs=2))) < CLOSE
    report = trainer.strategy.step_report
    assert (report.chunks, report.offloaded_bytes) == (12, 0)
    return ours


@pytest.mark.parametrize("accumulated", [1, 4])
def test_chunking_off_leaves_recompute_and_offload(accumulated):
    run_on_ranks(2, without_chunking, accumulated)


def test_offload_off_is_warned_of_once():
    first, second = run_on_ranks(2, without_offload)
    assert len(first) == 1
    assert "stays on the device until backward" in first[0]
    assert second == []


# -- declared keywords -------------------------------------------------------------------------------------------------


class Scaled(Toy):
    """Calls its blocks with the keyword ``scale``."""

    def loss(self, batch):
        x, y = batch
        hidden = self.model.embed(x)
        for layer in self.model.layers:
            hidden = layer(hidden, scale=y[..., :1])
        return self.model.head(self.model.norm(hidden)).square().mean()


def declared_keywords():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("lightning_chunkmbs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        module = build(Scaled)
        trainer = fit(module, chunked(chunkmbs_plan=CHUNK | {"chunk_kwarg_names": ["scale", "mask"]}), max_epochs=2)
    finally:
        logger.removeHandler(handler)
    assert apart(parameters(module), parameters(train_plainly(build(Scaled), epochs=2))) < CLOSE
    assert trainer.strategy.step_report.chunks == 12
    return lines


def no_declared_keyword():
    module = build()
    try:
        fit(module, chunked(chunkmbs_plan=CHUNK | {"chunk_kwarg_names": ["mask", "bias"]}))
    except ValueError as error:
        assert not module.seen, "an optimizer step was taken"
        return str(error)


def test_a_missing_keyword_is_logged_once():
    first, second = run_on_ranks(2, declared_keywords)
    assert [line for line in first if "declared keywords" in line] == [
        "ChunkMBS: no block was called with the declared keywords ['mask']."
    ]
    assert [line for line in first if "applied" in line] == [
        "ChunkMBS applied to modules: 3 chunk (model.layers.0, model.layers.1, model.layers.2), "
        "3 recompute (model.layers.0, model.layers.1, model.layers.2), "
        "3 offload (model.layers.0, model.layers.1, model.layers.2)"
    ]
    assert second == []


def test_keywords_that_no_block_received_are_an_error_after_the_first_step():
    for message in run_on_ranks(2, no_declared_keyword):
        assert "chunk_kwarg_names declares ['mask', 'bias'], and no block was called with any of them" in message


# -- shared parameters and blocks --------------------------------------------------------------------------------------


class TiedToRoot(Toy):
    def __init__(self):
        super().__init__()
        self.model.layers.append(nn.Linear(8, 8))
        self.model.norm = nn.Linear(8, 8)
        self.model.norm.weight = self.model.layers[3].weight


class TiedBlocks(Toy):
    def __init__(self):
        super().__init__()
        self.model.layers[2].up.weight = self.model.layers[0].up.weight


class TiedInBlock(Toy):
    """A tie within a block is one parameter of one group."""

    def __init__(self):
        super().__init__()
        for layer in self.model.layers:
            layer.up, layer.down = nn.Linear(8, 8), nn.Linear(8, 8)
            layer.down.weight = layer.up.weight


class TiedRoot(Toy):
    """A tie outside the blocks stays in the root group."""

    def __init__(self):
        super().__init__()
        self.model.head = nn.Linear(4, 8)
        self.model.head.weight = nn.Parameter(self.model.embed.weight.detach())
        self.model.head.weight = self.model.embed.weight  # [8, 4]
        self.model.head.bias = nn.Parameter(torch.zeros(8))
        self.model.back = nn.Linear(8, 2)

    def loss(self, batch):
        x, y = batch
        hidden = self.model.embed(x)
        for layer in self.model.layers:
            hidden = layer(hidden)
        return (self.model.back(self.model.head(self.model.norm(hidden)[..., :4])) - y).square().mean()


class UsedTwice(Toy):
    """One block object at two places of the stack."""

    def __init__(self):
        super().__init__()
        self.model.layers = nn.ModuleList([a := Block(), Block(), a])


def shared(kind):
    module = build(kind)
    trainer = fit(module, max_epochs=2)
    plain = train_plainly(build(kind), epochs=2)
    assert max(map(apart, module.seen, plain.seen)) < 1e-6
    assert apart(parameters(module), parameters(plain)) < CLOSE
    distinct = {id(p) for p in plain.parameters()}
    assert len(list(module.parameters())) == len(distinct)
    assert trainer.strategy.step_report.chunks == 12
    return trainer.strategy.step_report


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (TiedToRoot, ["model.layers.3.weight", "model.layers.3", "model.norm.weight", "the root group"]),
        (TiedBlocks, ["model.layers.0.up.weight", "model.layers.0", "model.layers.2.up.weight", "model.layers.2"]),
    ],
)
def test_a_parameter_of_two_groups_is_refused(kind, names):
    error, message = refused({}, kind)
    assert error == "ValueError"
    assert "A parameter belongs to one group" in message
    assert "Keep tied modules out of the plans" in message
    for name in names:
        assert name in message


@pytest.mark.parametrize("kind", [TiedInBlock, TiedRoot])
def test_ties_within_a_group_are_kept(kind):
    report, _ = run_on_ranks(2, shared, kind)
    assert (report.all_gathers, report.reduce_scatters) == (7, 4)


def test_a_block_used_twice():
    report, _ = run_on_ranks(2, shared, UsedTwice)
    assert report.blocks == 3


def test_classes_change_in_place():
    run_on_ranks(2, classes_and_names)


def classes_and_names():
    module, plain = build(), build()
    fit(module)
    first, second = module.model.layers[0], module.model.layers[1]
    assert type(first) is type(second)
    assert isinstance(first, (Block, ChunkedBlock))
    assert isinstance(module.model, Net)
    assert not isinstance(module.model.head, ChunkedBlock)
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in module.named_modules()] == [n for n, _ in plain.named_modules()]
