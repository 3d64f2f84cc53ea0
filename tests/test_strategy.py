"""ChunkMBSStrategy as an object: its arguments, the mixin, the registry, devices and precision."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision

from lightning_chunkmbs import (
    ActivationOffloadPlan,
    ChunkMBSMixin,
    ChunkMBSPlan,
    ChunkMBSStrategy,
    FSDPPlan,
    RecomputePlan,
    StepReport,
)
from lightning_chunkmbs.block import ChunkedBlock
from lightning_chunkmbs.precision import ChunkMBSPrecision
from tests.ranks import raises_on_ranks, run_on_ranks
from tests.strategy_models import (
    LAYERS,
    SAMPLES,
    Sharding,
    Toy,
    apart,
    build,
    chunked,
    dataset,
    fit,
    parameters,
    stock,
    train_plainly,
    trainer_of,
)

CLOSE = 2e-6
MODULES = {"apply_modules": [LAYERS]}


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunkmbs_plan": MODULES | {"chunk_size": 2}}, r"chunkmbs_plan has no key 'chunk_size'.* did you mean"),
        ({"chunkmbs_plan": {"chunk_mbs": 2}}, r"chunkmbs_plan must have the key 'apply_modules'"),
        ({"recompute_plan": MODULES | {"savings": 1}}, r"recompute_plan has no key 'savings'"),
        ({"activation_offload_plan": MODULES | {"pinned": 1}}, r"activation_offload_plan has no key 'pinned'"),
        ({"fsdp_plan": {"reshard": True}}, r"fsdp_plan has no key 'reshard'"),
        ({"chunkmbs_plan": MODULES | {"chunk_tokens": 1}}, r"chunk_tokens is for packed sequences"),
        ({"chunkmbs_plan": [LAYERS]}, r"chunkmbs_plan must be a ChunkMBSPlan, a dict of its fields, or None"),
        ({"chunkmbs_plan": RecomputePlan(**MODULES)}, r"chunkmbs_plan must be a ChunkMBSPlan"),
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size must be a number of ranks.*got 0; write .*: 1 for none"),
    ],
)
def test_impossible_arguments_are_refused_by_name(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ChunkMBSStrategy(**options)


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="chunk_mbs_plan"):
        ChunkMBSStrategy(chunk_mbs_plan=MODULES)


def test_what_needs_a_run_says_so():
    strategy = ChunkMBSStrategy(chunkmbs_plan=MODULES)
    assert strategy.step_report == StepReport()
    with pytest.raises(RuntimeError, match="plans have not been applied yet"), strategy.gathered():
        pass
    with pytest.raises(RuntimeError):
        strategy.device_mesh  # noqa: B018


class Declared(ChunkMBSMixin, Toy):
    chunkmbs_plan = ChunkMBSPlan(apply_modules=[LAYERS], chunk_mbs=2)
    activation_offload_plan = MODULES


class Owned(Toy):
    configured = 0

    def configure_model(self):
        self.configured += 1


class DeclaredOnOwned(ChunkMBSMixin, Owned):
    chunkmbs_plan = {"apply_modules": [LAYERS], "chunk_mbs": 2}  # noqa: RUF012


class DeclaredInFull(ChunkMBSMixin, Toy):
    chunkmbs_plan = ChunkMBSPlan(apply_modules=[LAYERS])
    recompute_plan = RecomputePlan(apply_modules=[LAYERS, "model.embed"])
    activation_offload_plan = ActivationOffloadPlan(apply_modules=[LAYERS])


class Undeclared(ChunkMBSMixin, Toy):
    pass


class WrongKey(ChunkMBSMixin, Toy):
    chunkmbs_plan = {"apply_modules": [LAYERS], "chunk_size": 2}  # noqa: RUF012


def plans_as(kind):
    make = {"dict": dict, "dataclass": None}[kind]
    types = {
        "chunkmbs_plan": ChunkMBSPlan,
        "recompute_plan": RecomputePlan,
        "activation_offload_plan": ActivationOffloadPlan,
        "fsdp_plan": FSDPPlan,
    }
    fields = dict.fromkeys(types, MODULES) | {"fsdp_plan": {"forward_prefetch": 2}}
    return {name: (make or types[name])(**fields[name]) for name in types}


def ways_to_declare():
    plain = train_plainly(build())

    def trained(module, strategy, kept=1):
        trainer = fit(module, strategy)
        assert isinstance(trainer.strategy, ChunkMBSStrategy)
        assert apart(parameters(module), parameters(plain)) < CLOSE
        report = trainer.strategy.step_report
        assert report.all_gathers == 2 * report.blocks + 1
        assert report.offloaded_bytes == (3 * 4 - kept) * 3 * 8 * 4  # the chunk that backward needs first stays
        return report.blocks, report.chunks

    assert trained(build(), ChunkMBSStrategy(**plans_as("dict"))) == (3, 12)
    assert trained(build(), ChunkMBSStrategy(**plans_as("dataclass"))) == (3, 12)
    assert trained(build(Declared), "chunkmbs", kept=2) == (3, 6)
    assert trained(build(Declared), ChunkMBSStrategy(), kept=2) == (3, 6)
    assert trained(build(Declared), ChunkMBSStrategy(chunkmbs_plan=MODULES | {"chunk_mbs": 3}), kept=3) == (3, 6)
    assert trained(build(Declared), ChunkMBSStrategy(chunkmbs_plan=MODULES)) == (3, 12)
    owned = build(DeclaredOnOwned)
    assert trained(owned, "chunkmbs", kept=2) == (3, 6)
    assert owned.configured == 1
    assert trained(build(Owned), ChunkMBSStrategy(chunkmbs_plan=MODULES)) == (3, 12)
    assert trained(build(DeclaredInFull), "chunkmbs") == (4, 13)
    assert trained(build(DeclaredInFull), ChunkMBSStrategy(recompute_plan=MODULES)) == (3, 12)


def with_another_strategy():
    module, plain = build(DeclaredSharding), build(Sharding)
    fit(module, stock())
    fit(plain, stock())
    assert apart(parameters(module), parameters(plain)) == 0
    assert not isinstance(module.model.layers[0], ChunkedBlock)


class DeclaredSharding(ChunkMBSMixin, Sharding):
    chunkmbs_plan = MODULES


def test_plans_are_declared_in_every_way():
    run_on_ranks(2, ways_to_declare)


def test_a_module_with_the_mixin_trains_under_another_strategy():
    run_on_ranks(2, with_another_strategy)


def train(kind, strategy, options=None):
    fit(build(kind), strategy if isinstance(strategy, str) else ChunkMBSStrategy(**(options or {})))


@pytest.mark.parametrize("strategy", ["chunkmbs", None])
@pytest.mark.parametrize("kind", [Toy, Undeclared])
def test_without_a_plan_the_error_says_how_to_declare_one(kind, strategy):
    for error, message in raises_on_ranks(2, train, kind, strategy):
        assert error == "ValueError"
        assert "ChunkMBSStrategy(chunkmbs_plan=ChunkMBSPlan(apply_modules=" in message
        assert "class MyModule(ChunkMBSMixin, LightningModule)" in message


def test_a_wrong_key_in_the_mixin_is_refused_by_name():
    for error, message in raises_on_ranks(2, train, WrongKey, "chunkmbs"):
        assert error == "ValueError"
        assert "WrongKey.chunkmbs_plan has no key 'chunk_size'" in message


# -- devices -----------------------------------------------------------------------------------------------------------


class Sampling(Toy):
    """Keeps the first number of each sample it trains on."""

    def __init__(self):
        super().__init__()
        self.trained_on = []

    def training_step(self, batch, batch_idx):
        self.trained_on += batch[0][:, 0, 0].tolist()
        return super().training_step(batch, batch_idx)


def sampled(size):
    module = build(Sampling)
    trainer = trainer_of(chunked() if size is None else chunked(data_parallel_size=size))
    # A loader without a sampler for several ranks, as users write it.
    trainer.fit(module, torch.utils.data.DataLoader(dataset(), batch_size=4))
    mesh = module.device_mesh
    assert mesh is trainer.strategy.device_mesh
    assert mesh.mesh_dim_names == ("data_parallel", "tensor_parallel")
    assert (mesh["data_parallel"].size(), mesh["tensor_parallel"].size()) == (2, 1)
    assert len(module.reports) == 3
    return module.trained_on


@pytest.mark.parametrize("size", [None, "auto", 2])
def test_each_rank_gets_its_own_data(size):
    first, second = run_on_ranks(2, sampled, size)
    everything = dataset().tensors[0][:, 0, 0].tolist()
    assert len(first) == len(second) == SAMPLES // 2
    assert sorted(first + second) == sorted(everything)


def too_few_devices():
    fit(build(), chunked(data_parallel_size=1))


def test_data_parallel_size_must_use_all_devices():
    for error, message in raises_on_ranks(2, too_few_devices):
        assert error == "RuntimeError"
        assert "data_parallel_size=1" in message or "Number of" in message


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["chunkmbs", None], ids=["by name", "object"])
@pytest.mark.parametrize("precision", ["16-true", "64-true", "8-mixed"])
def test_other_precisions_are_one_clear_error(precision, strategy):
    with pytest.raises(ValueError, match=rf"(?i)precision.*'{precision}'") as caught:
        Trainer(accelerator="cpu", strategy=strategy or ChunkMBSStrategy(), precision=precision, logger=False)
    assert "\n" not in str(caught.value)


def test_half_precision_with_scaled_losses_is_refused():
    # Given by name for a GPU, this plugin reaches the strategy. (On a CPU, Lightning replaces it, with a warning.)
    plugin = MixedPrecision("16-mixed", "cuda", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"given '16-mixed'\. Write Trainer\(precision='bf16-mixed'\)"):
        ChunkMBSStrategy().precision_plugin = plugin


class OwnPrecision(Precision):
    pass


@pytest.mark.parametrize("strategy", ["chunkmbs", None], ids=["by name", "object"])
@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (DoublePrecision, r"given '64-true'"),
        (OwnPrecision, r"brings its own precision plugin, and the Trainer was given OwnPrecision"),
    ],
)
def test_precision_plugins_are_refused(plugin, message, strategy):
    with pytest.raises((ValueError, TypeError), match=message):
        Trainer(accelerator="cpu", strategy=strategy or ChunkMBSStrategy(), plugins=[plugin()], logger=False)


@pytest.mark.parametrize(
    ("precision", "found"),
    [(None, "32-true"), ("32", "32-true"), (32, "32-true"), ("bf16-mixed", "bf16-mixed"), ("bf16-true", "bf16-true")],
)
def test_supported_precisions(precision, found):
    trainer = Trainer(accelerator="cpu", strategy="chunkmbs", precision=precision, logger=False)
    assert trainer.precision == found
    assert type(trainer.precision_plugin) is ChunkMBSPrecision
    assert trainer.precision_plugin.device_type == "cpu"


def test_the_plugin_may_be_given_itself():
    plugin = ChunkMBSPrecision("bf16-mixed", "cpu")
    trainer = Trainer(accelerator="cpu", strategy="chunkmbs", plugins=[plugin], logger=False)
    assert trainer.precision_plugin is plugin
    with pytest.raises(ValueError, match="given '16-mixed'"):
        ChunkMBSPrecision("16-mixed")
