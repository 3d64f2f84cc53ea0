"""Precision around the loops: no inference tensors left behind, the default dtype, parameters that ranks hold whole."""

from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.loops import utilities
from torch import nn

from tests.models import Block, Loader, Stack, batches, chunked, full, make_trainer
from tests.one_window import Windowed, train_window
from tests.ranks import run_on_ranks
from tests.strategy_models import Toy, apart, build, loader, parameters, trainer_of
from tests.strategy_models import chunked as chunked_toy

SIZES = [2, 1, 2]
FP32, BF16 = torch.float32, torch.bfloat16


# -- validate, test and predict ----------------------------------------------------------------------------------------


class Looping(Windowed):
    """Notes in each kind of step whether it runs in inference mode, and the default dtype."""

    def __init__(self):
        super().__init__(Stack())
        self.entered = []

    def note(self, kind):
        self.entered.append((kind, torch.is_inference_mode_enabled(), torch.get_default_dtype()))

    def training_step(self, batch, batch_idx):
        self.note("fit")
        return super().training_step(batch, batch_idx)

    def _evaluate(self, kind, batch):
        self.note(kind)
        loss = self.net(batch)
        assert not loss.is_inference()
        return loss

    def validation_step(self, batch, batch_idx):
        self._evaluate("validate", batch)

    def test_step(self, batch, batch_idx):
        self._evaluate("test", batch)

    def predict_step(self, batch, batch_idx):
        return self._evaluate("predict", batch)


def loops(order, precision):
    """Run the loops in this order, with Lightning's choice between no_grad and inference mode as under NCCL."""
    torch.manual_seed(1)
    module, data = Looping(), batches(SIZES)
    before = torch.get_default_dtype()
    with patch.object(utilities, "_distributed_is_initialized", return_value=False):
        for loop in order:
            trainer = make_trainer(chunked(1), precision=precision, accumulate_grad_batches=len(SIZES))
            assert trainer.validate_loop.inference_mode, "there is nothing to prevent"
            if loop == "fit":
                trainer.fit(module, Loader(data), Loader(data[:1]))
            else:
                getattr(trainer, loop)(
                    module, dataloaders=Loader(data), **{} if loop == "predict" else {"verbose": False}
                )
            assert torch.get_default_dtype() is before
    assert not any(p.is_inference() for p in module.parameters())
    assert not any(inference for _, inference, _ in module.entered)
    assert {kind for kind, _, _ in module.entered} == {*order, "validate"}  # a fit validates
    return {dtype for _, _, dtype in module.entered}, {n: full(g) for n, g in module.gradients.items()}


ORDERS = [("validate", "test", "predict", "fit"), ("predict", "test", "validate", "fit", "validate", "fit")]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_loops_leave_no_inference_tensors_behind(precision):
    [(_, alone), _] = run_on_ranks(2, loops, ("fit",), precision)
    for order in ORDERS:
        for dtypes, gradients in run_on_ranks(2, loops, order, precision):
            assert dtypes == {BF16 if precision == "bf16-true" else FP32}
            assert gradients.keys() == alone.keys()
            if order.count("fit") == 1:
                assert all(torch.equal(gradients[name], alone[name]) for name in alone)


def predicted_inside():
    """Calls in a user's own inference mode leave nothing behind either."""
    torch.manual_seed(1)

    class Peeking(Windowed):
        def on_train_batch_start(self, batch, batch_idx):
            with torch.inference_mode():
                assert self.net(batch).isfinite()

    module = Peeking(Stack())
    train_window(module, batches(SIZES), chunked(1), precision="bf16-mixed")
    return len(module.losses), all(g.isfinite().all() for g in module.gradients.values())


def test_a_call_in_inference_mode_before_training():
    assert run_on_ranks(2, predicted_inside) == [(3, True)] * 2


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Remembering(Toy):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def resumed(precision, distributed, folder):
    """How far a resumed run ends from the uninterrupted one, and the dtypes of its optimizer's state."""
    ends = []
    for epochs, start in ((2, None), (1, None), (2, f"{folder}/checkpoint")):
        plan = {"cast_forward_inputs": precision == "bf16-true"}
        strategy = chunked_toy(fsdp_plan=plan, save_distributed_checkpoint=distributed)
        module, trainer = build(Remembering), trainer_of(strategy, max_epochs=epochs, precision=precision)
        trainer.fit(module, loader(), ckpt_path=start)
        if epochs == 1:
            trainer.save_checkpoint(f"{folder}/checkpoint")
        ends.append(parameters(module))
    state = trainer.optimizers[0].state.values()
    return apart(ends[2], ends[0]), apart(ends[1], ends[0]) > 0, {s["exp_avg"].dtype for s in state}


@pytest.mark.parametrize(("precision", "distributed"), [("bf16-mixed", True), ("bf16-true", False)])
def test_a_resumed_run_ends_as_the_uninterrupted_one(precision, distributed, tmp_path):
    dtype = BF16 if precision == "bf16-true" else FP32
    assert run_on_ranks(2, resumed, precision, distributed, str(tmp_path)) == [(0, True, {dtype})] * 2


# -- the default dtype -------------------------------------------------------------------------------------------------


class Making(Stack):
    """Makes tensors of the default dtype in its steps, before, inside and after blocks."""

    def __init__(self):
        super().__init__()
        self.made = set()
        self.layers[1].register_forward_pre_hook(lambda *_: self.made.add(torch.zeros(1).dtype))

    def forward(self, tokens):
        self.made.add(torch.zeros(1).dtype)
        loss = super().forward(tokens)
        self.made.add(torch.zeros(1).dtype)
        return loss


def default_dtype(fails):
    torch.manual_seed(1)
    module = Windowed(Making())
    outside = []
    module.on_train_batch_end = lambda *_: outside.append(torch.get_default_dtype())
    if fails:
        module.net.loss = lambda x, tokens: (_ for _ in ()).throw(ArithmeticError)
        with pytest.raises(ArithmeticError):
            train_window(module, batches(SIZES), chunked(1), precision="bf16-true")
    else:
        train_window(module, batches(SIZES), chunked(1), precision="bf16-true")
    return module.net.made, set(outside), torch.get_default_dtype()


@pytest.mark.parametrize("fails", [False, True])
def test_lockstep_in_bf16_true_leaves_the_default_dtype_alone(fails):
    for made, outside, after in run_on_ranks(2, default_dtype, fails):
        assert made == {BF16}
        assert outside == {FP32}  # the micro-batches that were put aside
        assert after is FP32


# -- parameters that every rank holds whole ----------------------------------------------------------------------------


class Gated(Block):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return super().forward(x) * self.gate


class GatedStack(Stack):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(3))


def gates(precision, sizes):
    torch.manual_seed(1)
    net = GatedStack()
    plain = GatedStack()
    plain.load_state_dict(net.state_dict())
    if precision == "bf16-true":
        plain.to(BF16)
    module = Windowed(net)
    summed = set()

    def watch(block, _args):
        if block.gate.grad_fn is None and not getattr(block, "watched", False):
            block.watched = True
            block.gate.register_hook(lambda grad: summed.add(grad.dtype))

    net.layers[1].register_forward_pre_hook(watch)
    data = batches(sizes)
    train_window(module, data, chunked(1), precision=precision)
    gate = net.layers[1].gate
    plain.double()
    for batch in data:
        (plain(batch) / len(data)).backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.ndim == 0}
    errors = [abs(module.gradients[n].double() - g).item() for n, g in expected.items()]
    scale = max(g.abs().item() for g in expected.values())
    return summed, gate.dtype, module.gradients["layers.1.gate"].dtype, max(errors) / scale


@pytest.mark.parametrize("sizes", [[64], [2] * 32], ids=["cut", "lockstep"])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", FP32), ("bf16-true", BF16)])
def test_gradients_of_whole_parameters_add_up_in_fp32(precision, dtype, sizes):
    for summed, parameter, gradient, error in run_on_ranks(2, gates, precision, sizes):
        assert summed == {FP32}
        assert parameter is gradient is dtype
        assert error < 0.06  # of products in bf16
