"""Modules that call fully_shard, checkpoint_wrapper or torch.compile themselves, as stock users' modules do."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_chunkmbs import ChunkMBSMixin
from tests.collectives import count_collectives
from tests.ranks import raises_on_ranks, run_on_ranks
from tests.strategy_models import (
    LAYERS,
    Sharding,
    Toy,
    all_sharded,
    apart,
    build,
    chunked,
    fit,
    live_bytes,
    loader,
    parameters,
    stock,
    train_plainly,
    trainer_of,
)

CLOSE = 2e-6


class BlocksAndHead(Sharding):
    """Leaves the rest of the model to the strategy."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for module in (*self.model.layers, self.model.head):
            fully_shard(module, mesh=mesh)


class SomeBlocks(Sharding):
    def configure_model(self):
        fully_shard(self.model.layers[1], mesh=self.device_mesh["data_parallel"])


class Everything(Sharding):
    """Shards the head and the LightningModule too."""

    def configure_model(self):
        fully_shard(self.model.head, mesh=self.device_mesh["data_parallel"])
        super().configure_model()
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class EverythingBelow(Sharding):
    """Shards the LightningModule, not the model in it."""

    def configure_model(self):
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class Inside(Sharding):
    """Shards a part of a block."""

    def configure_model(self):
        fully_shard(self.model.layers[2].up, mesh=self.device_mesh["data_parallel"])
        super().configure_model()


class WithOptions(Sharding):
    """Options of its own on every call."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        policy = MixedPrecisionPolicy(output_dtype=torch.float32)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model.head, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)


class DeclaredSharding(ChunkMBSMixin, Sharding):
    chunkmbs_plan = {"apply_modules": [LAYERS], "chunk_mbs": 1}  # noqa: RUF012


def existing_groups(kind, strategy=None):
    module, reference = build(kind), build(Sharding)
    trainer = trainer_of(strategy or chunked(), max_epochs=2, limit_val_batches=2)
    with count_collectives() as counted:
        trainer.fit(module, loader(), loader())
    fit(reference, stock(), max_epochs=2)
    assert len(module.seen) == 6
    assert max(map(apart, module.seen, reference.seen)) < 1e-6
    assert apart(parameters(module), parameters(reference)) < CLOSE
    assert all_sharded(module)
    assert live_bytes(trainer) == 0
    assert trainer.strategy.step_report.chunks == 12
    assert (
        trainer.strategy.step_report.offloaded_bytes == (3 * 4 - 1) * 3 * 8 * 4
    )  # the chunk that backward needs first stays
    assert module.reports == [module.reports[0]] * 6
    report = module.reports[0]
    groups = report.reduce_scatters
    assert counted.reduce_scatters == 6 * groups
    assert counted.all_gathers == 6 * report.all_gathers + 4 * groups
    return report.all_gathers, groups


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        # The root has parameters of its own except where the user shards self.model: then that group is its stand-in.
        (Sharding, 4),
        (BlocksAndHead, 5),
        (SomeBlocks, 4),
        (Everything, 5),
        (EverythingBelow, 4),
    ],
)
def test_a_module_with_groups_of_its_own_trains_as_under_the_stock_strategy(kind, groups):
    for gathers, scatters in run_on_ranks(2, existing_groups, kind):
        assert (gathers, scatters) == (groups + 3, groups)  # three blocks are gathered twice


def test_options_of_groups_are_kept():
    for gathers, scatters in run_on_ranks(2, existing_groups, WithOptions):
        assert (gathers, scatters) == (5, 5)  # blocks stay gathered between their forward and their backward


def test_a_group_inside_a_block_is_gathered_with_it():
    for gathers, scatters in run_on_ranks(2, existing_groups, Inside):
        assert (gathers, scatters) == (5 + 4, 5)


def test_groups_and_the_mixin():
    for gathers, _ in run_on_ranks(2, existing_groups, DeclaredSharding, "chunkmbs"):
        assert gathers == 7


class CastingHead(Sharding):
    """A group whose policy casts what goes in and out."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        fully_shard(self.model.head, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh)

    def loss(self, batch):
        hook = self.model.head.register_forward_hook(lambda _m, args, out: self.dtypes.add((args[0].dtype, out.dtype)))
        try:
            return super().loss(batch)
        finally:
            hook.remove()


def casting_head():
    module, reference = build(CastingHead), build(CastingHead)
    module.dtypes, reference.dtypes = set(), set()
    fit(module)
    fit(reference, stock())
    assert max(map(apart, module.seen, reference.seen)) < 1e-6
    assert {seen for _, seen in module.dtypes} >= {torch.float32}
    assert apart(module.seen[0], train_plainly(build()).seen[0]) > 1e-5, "nothing was cast"


def test_a_policy_of_a_further_group_acts():
    run_on_ranks(2, casting_head)


# -- refused -----------------------------------------------------------------------------------------------------------


class ModelOnly(Toy):
    def configure_model(self):
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class SelfOnly(Toy):
    def configure_model(self):
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class OtherMesh(Toy):
    """Replicated over both ranks, sharded over one."""

    def configure_model(self):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(self.model.layers[1], mesh=mesh)


class OtherMeshOutside(Toy):
    """A group of one rank: its gradients would stay each rank's own."""

    def configure_model(self):
        fully_shard(self.model.head, mesh=self.device_mesh["tensor_parallel"])


class OtherMeshOfRoot(Toy):
    def configure_model(self):
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["tensor_parallel"])


class Checkpointed(Toy):
    def configure_model(self):
        self.model.layers[1] = checkpoint_wrapper(self.model.layers[1])


class CheckpointedStack(Toy):
    def configure_model(self):
        self.model = checkpoint_wrapper(self.model)


class Compiled(Toy):
    def configure_model(self):
        self.model.layers[0] = torch.compile(self.model.layers[0])


class CompiledInPlace(Toy):
    def configure_model(self):
        self.model.layers[2].compile()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (
            ModelOnly,
            "ValueError",
            r"block 'model\.layers\.0' must be a group .*group of 'model' already\. Delete",
        ),
        (SelfOnly, "ValueError", r"block 'model\.layers\.0' must be .*group of 'the LightningModule' already\. Delete"),
        (
            OtherMesh,
            "ValueError",
            r"block 'model\.layers\.1' is sharded over another mesh .*mesh=self\.device_mesh\['d",
        ),
        (OtherMeshOutside, "ValueError", r"'model\.head' is sharded over another mesh .*mesh=self\.device_mesh\["),
        (OtherMeshOfRoot, "ValueError", r"sharded over another mesh .*mesh=self\.device_mesh\["),
        (Checkpointed, "TypeError", r"the block 'model\.layers\.1' already, .*Delete the line .*checkpoint_wrapper"),
        (
            CheckpointedStack,
            "TypeError",
            r"the block 'model\..*layers\.0' already, and 'model' has a checkpoint",
        ),
        (Compiled, "TypeError", r"The block 'model\.layers\.0' is compiled.*Delete the torch\.compile"),
        (CompiledInPlace, "TypeError", r"The block 'model\.layers\.2' is compiled.*Delete the torch\.compile"),
    ],
)
def test_what_hides_a_block_is_refused_by_name(kind, error, message):
    pattern = "re:model\\..*layers\\.[0-9]+" if kind is CheckpointedStack else LAYERS
    for found, text in raises_on_ranks(2, train, kind, pattern):
        assert found == error
        assert re.search(message, text, re.DOTALL), text


def train(kind, pattern):
    fit(build(kind), chunked(chunkmbs_plan={"apply_modules": [pattern]}))


class Renamed(Toy):
    """What a configure_model makes is what the patterns see."""

    def configure_model(self):
        if len(self.model.layers) == 3:
            self.model.layers.extend([type(self.model.layers[0])(), nn.Identity()])


def built_late():
    module, plain = build(Renamed), build(Renamed)
    torch.manual_seed(5)
    plain.configure_model()
    torch.manual_seed(5)
    trainer = fit(module)
    assert trainer.strategy.step_report.blocks == 5
    assert apart(parameters(module), parameters(train_plainly(plain))) < CLOSE


def test_blocks_made_in_configure_model():
    run_on_ranks(2, built_late)
