"""Precision: dtypes at every station, gathered bytes, groups of several dtypes, and what a plan may set."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_chunkmbs.materialize import convert
from tests.collectives import count_collectives
from tests.models import LENGTH, WIDTH, Block, Loader, Stack, batches, chunked
from tests.one_window import Windowed, train_window
from tests.ranks import raises_on_ranks, run_on_ranks
from tests.strategy_models import Toy, apart, fit, parameters
from tests.strategy_models import build as build_toy
from tests.strategy_models import chunked as chunked_toy

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = [3, 1, 2, 3]


class Watched(Stack):
    """Notes the dtypes of parameters, activations, tables and gradients where they are used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1, LENGTH))
        self.seen = {}
        self.hooked = set()
        for name, module in self.named_modules():
            if name in ("layers.1.up", "head"):
                module.register_forward_hook(lambda m, args, out, name=name: self.watch(name, m, args[0], out))

    def note(self, what, dtype):
        self.seen.setdefault(what, set()).add(dtype)

    def watch(self, name, module, entry, output):
        weight = module.weight
        self.note(f"{name} gathered", weight.dtype)
        self.note(f"{name} in", entry.dtype)
        self.note(f"{name} out", output.dtype)
        if weight.requires_grad and not isinstance(weight, DTensor) and id(weight) not in self.hooked:
            self.hooked.add(id(weight))
            # What autograd has added up over the chunks, and what the parameter is given.
            weight.register_hook(lambda grad: self.note(f"{name} summed", grad.dtype))
            weight.register_post_accumulate_grad_hook(lambda p: self.note(f"{name} accumulated", p.grad.dtype))

    def forward(self, tokens):
        self.note("table", self.table.dtype)
        self.note("default", torch.get_default_dtype())
        return super().forward(tokens)


class Stations(Windowed):
    """Trains with momentum and notes the dtypes of what an optimizer step sees."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        for p in self.parameters():
            self.net.note("shard", p.dtype)
            self.net.note("gradient", p.grad.dtype)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def stations(precision, sizes, strategy=None):
    reduced = set()
    torch.manual_seed(1)
    module = Stations(Watched())
    with count_collectives(on_reduce=lambda tensor: reduced.add(tensor.dtype)) as counted:
        train_window(module, batches(sizes), chunked(1, **strategy or {}), precision=precision)
    assert module.report.chunks == 3 * sum(sizes)
    states = module.trainer.optimizers[0].state.values()
    module.net.seen["state"] = {v.dtype for state in states for k, v in state.items() if k != "step"}
    module.net.seen["reduced"] = reduced
    assert torch.get_default_dtype() is FP32
    assert all(isinstance(p, DTensor) for p in module.parameters())
    return module.net.seen, counted.gathered_bytes, module.report.offloaded_bytes


EXPECTED = {
    # shard and state, gathered, activation, gradient at accumulation and reduction, buffer, default dtype
    "32-true": (FP32, FP32, FP32, FP32, FP32, FP32),
    "bf16-mixed": (FP32, BF16, BF16, FP32, FP32, FP32),
    "bf16-true": (BF16, BF16, BF16, FP32, BF16, BF16),
}


@pytest.mark.parametrize("sizes", [[4], SIZES], ids=["cut", "lockstep"])
@pytest.mark.parametrize("precision", EXPECTED)
def test_dtypes_at_every_station(precision, sizes):
    shard, gathered, activation, gradient, table, default = EXPECTED[precision]
    for seen, _, _ in run_on_ranks(2, stations, precision, sizes):
        expected = {"shard": shard, "gradient": shard, "state": shard, "reduced": gradient}
        expected |= {"table": table, "default": default}
        for name in ("layers.1.up", "head"):
            expected |= {f"{name} gathered": gathered, f"{name} in": activation, f"{name} out": activation}
            expected |= {f"{name} summed": gradient, f"{name} accumulated": gradient}
        assert seen == {name: {dtype} for name, dtype in expected.items()}


def test_mixed_gathers_and_offloads_half_the_bytes():
    [(_, full, offloaded_full), _] = run_on_ranks(2, stations, "32-true", SIZES)
    for precision in ("bf16-mixed", "bf16-true"):
        for _, half, offloaded_half in run_on_ranks(2, stations, precision, SIZES):
            assert 2 * half == full > 0
            assert 2 * offloaded_half == offloaded_full > 0


# -- what a plan sets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "gathered", "reduced"),
    [
        ({"param_dtype": "bfloat16"}, BF16, FP32),
        ({"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, BF16, BF16),
        ({"reduce_dtype": "bfloat16"}, FP32, BF16),
    ],
)
def test_dtypes_of_a_plan_without_autocast(plan, gathered, reduced):
    for seen, _, _ in run_on_ranks(2, stations, "32-true", [2, 2], {"fsdp_plan": plan}):
        assert seen["head gathered"] == seen["layers.1.up gathered"] == {gathered}
        assert seen["reduced"] == {reduced}
        # Added up in fp32 whatever they are reduced in.
        assert seen["layers.1.up summed"] == seen["head accumulated"] == seen["shard"] == seen["gradient"] == {FP32}


class Inputs(Toy):
    """Notes the dtypes of what a step and a block are given, and of what the block returns."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}
        self.model.norm = (
            nn.Identity()
        )  # on a CPU autocast leaves norms alone, and torch's refuse fp32 with bf16 weights
        self.model.layers[1].register_forward_hook(self.note)

    def note(self, _block, args, output):
        self.dtypes["block"] = (args[0].dtype, output.dtype)

    def loss(self, batch):
        x, y = batch
        self.dtypes["batch"] = (x.dtype, y.dtype)
        prediction = self.model(x)
        return (prediction.float() - y.float()).square().mean()


def inputs(precision, plan):
    module = build_toy(Inputs)
    fit(module, chunked_toy(fsdp_plan=plan), precision=precision)
    assert len(module.seen) == 3
    return module.dtypes


@pytest.mark.parametrize(
    ("precision", "plan", "batch", "block"),
    [
        ("bf16-mixed", {}, FP32, (BF16, BF16)),
        ("bf16-mixed", {"cast_forward_inputs": True}, BF16, (BF16, BF16)),
        ("bf16-mixed", {"output_dtype": "float32"}, FP32, (FP32, FP32)),
        ("bf16-true", {"cast_forward_inputs": True}, BF16, (BF16, BF16)),
    ],
)
def test_inputs_and_outputs(precision, plan, batch, block):
    for dtypes in run_on_ranks(2, inputs, precision, plan):
        assert dtypes == {"batch": (batch, batch), "block": block}


# -- groups of several dtypes ------------------------------------------------------------------------------------------


class Adapted(Block):
    """A frozen bf16 layer with a trainable fp32 adapter."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False).to(BF16)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x) + self.adapter(x)


class Finetuned(Stack):
    def __init__(self, block=Adapted):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))


def adapters(block, precision):
    torch.manual_seed(1)
    module = Windowed(Finetuned(block))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    train_window(module, batches(SIZES), chunked(1), precision=precision)
    changed = {n for n, p in module.named_parameters() if not torch.equal(p.full_tensor(), before[n])}
    dtypes = {n: p.dtype for n, p in module.named_parameters() if n.startswith("net.layers.0")}
    return {n.removeprefix("net.layers.0.") for n in changed & dtypes.keys()}, set(dtypes.values())


def test_frozen_parameters_of_another_dtype():
    for changed, dtypes in run_on_ranks(2, adapters, Adapted, "bf16-mixed"):
        assert changed == {"adapter.weight", "adapter.bias"}
        assert dtypes == {BF16, FP32}


class TwoDtypes(Block):
    def __init__(self):
        super().__init__()
        self.down.to(BF16)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_trainable_parameters_of_two_dtypes_are_refused_with_both_names(precision):
    for error, message in raises_on_ranks(2, adapters, TwoDtypes, precision):
        assert error == "ValueError"
        assert "in net.layers.0 'net.layers.0.norm_1.weight' is torch.float32" in message
        assert "'net.layers.0.down.weight' is torch.bfloat16. Convert one of them, freeze it, or give" in message


def test_bf16_true_makes_one_dtype_of_two():
    for changed, dtypes in run_on_ranks(2, adapters, TwoDtypes, "bf16-true"):
        assert "down.weight" in changed
        assert dtypes == {BF16}


class Thawed(Windowed):
    """Its blocks are frozen until the second step."""

    def on_train_batch_start(self, batch, batch_idx):
        self.net.layers.requires_grad_(batch_idx > 0)


def thawed(precision, block):
    torch.manual_seed(1)
    module = Thawed(Finetuned(block))
    before = module.net.layers[0].up.weight.detach().clone()
    trainer = fit(module, chunked(1), Loader(batches([2, 2])), precision=precision)
    assert trainer.global_step == 2
    weight = module.net.layers[0].up.weight
    return (weight.full_tensor() - before).abs().max().item() > 0, weight.dtype, weight.grad.dtype


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", FP32), ("bf16-true", BF16)])
def test_a_group_frozen_at_first_trains_in_its_dtype(precision, dtype):
    assert run_on_ranks(2, thawed, precision, Block) == [(True, dtype, dtype)] * 2


class HalfFrozen(Block):
    """Trains one bf16 layer; the other layers are fp32."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.down.to(BF16).requires_grad_(True)


def test_unfreezing_another_dtype_says_so():
    for error, message in raises_on_ranks(2, thawed_later, "bf16-mixed"):
        assert error == "RuntimeError"
        assert "torch.bfloat16 here, and net.layers.0.norm_1.weight (torch.float32) has been unfrozen" in message


class Later(Windowed):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx:
            self.net.layers.requires_grad_(True)


def thawed_later(precision):
    fit(Later(Finetuned(HalfFrozen)), chunked(1), Loader(batches([2, 2])), precision=precision)


# -- groups that a user made -------------------------------------------------------------------------------------------


class OwnGroups(Toy):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.model.layers[0], mesh=mesh)
        self.gathered = {}
        for i in (0, 1):
            self.model.layers[i].up.register_forward_hook(
                lambda m, _args, _out, i=i: self.gathered.__setitem__(i, m.weight.dtype)
            )


def own_groups():
    module = build_toy(OwnGroups)
    with warnings.catch_warnings(record=True) as caught:
        fit(module, precision="bf16-mixed")
    assert len(module.seen) == 3
    return module.gathered, [str(w.message) for w in caught]


def test_groups_that_a_user_made_keep_their_policy_with_a_warning():
    (first, warned), (second, _) = run_on_ranks(2, own_groups)
    assert first == second == {0: FP32, 1: BF16}
    [message] = [message for message in warned if "Parameters are gathered in torch.bfloat16" in message]
    assert re.search(
        r"except for groups that were sharded before without it: model.layers.0\. Pass mp_policy=", message
    )


# -- parameters that a step writes -------------------------------------------------------------------------------------


class Clamping(Toy):
    """Clamps a parameter outside blocks in its steps."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.model.head.weight.clamp_(max=0.1)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def clamped():
    module = build_toy(Clamping)
    before = module.model.head.weight.detach().clone()
    fit(module, precision="bf16-mixed")
    return before, module.model.head.weight.full_tensor().detach()


def test_what_a_step_writes_leaves_other_numbers_in_fp32():
    for before, after in run_on_ranks(2, clamped):
        above = before.to(BF16) > 0.1
        assert 0 < above.sum() < above.numel()
        assert torch.equal(after[~above], before[~above])
        assert torch.equal(after[above], torch.full_like(after[above], torch.tensor(0.1, dtype=BF16).item()))


# -- another precision, and host parameters ----------------------------------------------------------------------------


def another_precision():
    module = build_toy()
    fit(module, precision="bf16-mixed")
    fit(module, precision="32-true")


def test_a_module_keeps_its_precision():
    for error, message in raises_on_ranks(2, another_precision):
        assert error == "RuntimeError"
        assert "keeps the plans, devices and precision it was first run with" in message


def on_the_host(precision):
    module, plain = build_toy(), build_toy()
    with warnings.catch_warnings(record=True) as caught:
        fit(module, chunked_toy(fsdp_plan={"cpu_offload": True}), precision=precision, gradient_clip_val=0.1)
    fit(plain, precision=precision, gradient_clip_val=0.1)
    return apart(parameters(module), parameters(plain)), [str(w.message) for w in caught]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_cpu_offload_on_a_cpu_changes_nothing(precision):
    (first, warned), (second, _) = run_on_ranks(2, on_the_host, precision)
    assert first == second == 0
    assert sum("cpu_offload has no effect on a CPU" in message for message in warned) == 1


def test_tables_that_no_checkpoint_has_keep_their_dtype():
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_buffer("mean", torch.ones(2))
    net[0].register_buffer("inv_freq", 1 / 10000 ** torch.linspace(0, 1, 8), persistent=False)
    table = net[0].inv_freq.clone()
    convert(net, BF16)
    assert (net[0].weight.dtype, net[0].mean.dtype) == (BF16, BF16)
    assert net[0].inv_freq.dtype is FP32
    assert torch.equal(net[0].inv_freq, table)
