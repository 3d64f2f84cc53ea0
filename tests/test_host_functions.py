"""stash, load, join and split: values wait on the host in both directions, and gradients stay the same."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_chunkmbs.host_functions import grad_to_host, join, load, split, stash
from lightning_chunkmbs.host_tensor import HostTensor
from tests.hosting import FakeHost, Through, hollow
from tests.storage_tracker import StorageTracker

torch.manual_seed(0)
VALUES = torch.randn(4, 6)
GRAD = torch.randn(4, 6)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Probe(Function):
    """Identity that notes the gradients passing by."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(type(grad))
        return grad, None


def test_stash_frees_the_device_tensor():
    host = FakeHost()
    leaf = VALUES.clone().requires_grad_()
    y = leaf + 1  # saves nothing
    memory = weakref.ref(y.untyped_storage())
    h = stash(y, host.put)
    assert memory() is not None
    del y
    assert memory() is None
    assert h.requires_grad
    assert host.live == 1
    assert torch.equal(h.load(), VALUES + 1)
    assert stash(h, host.put) is h


def test_gradients_wait_on_the_host():
    host, seen = FakeHost(), []
    leaf = VALUES.clone().requires_grad_()
    h = Probe.apply(stash(leaf * 2, host.put), seen)
    assert type(h) is HostTensor
    x = load(h)
    assert type(x) is Tensor
    (x * GRAD).sum().backward()
    assert seen == [HostTensor]
    assert torch.equal(leaf.grad, GRAD * 2)
    assert host.puts == 2
    assert h.untouched


def test_load_of_a_tensor():
    host, seen = FakeHost(), []
    leaf = VALUES.clone().requires_grad_()
    assert load(leaf) is leaf
    x = load(Probe.apply(leaf * 2, seen), host.put)
    (x * GRAD).sum().backward()
    assert seen == [HostTensor]
    assert torch.equal(leaf.grad, GRAD * 2)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_join_hands_on_the_parts_of_a_gradient(dim):
    host, seen = FakeHost(), []
    leaf = VALUES.clone().requires_grad_()
    chunks = [Probe.apply(stash(piece * 2, host.put), seen) for piece in leaf.split(2, dim)]
    h = join(chunks, dim)
    assert (h.sizes, h.shape, host.loads) == ((2,) * len(chunks), leaf.shape, 0)
    torch.autograd.backward([get_gradient_edge(h)], [grad_to_host(GRAD, h.sizes, dim, host.put)])
    assert seen == [HostTensor] * len(chunks)
    assert torch.equal(leaf.grad, GRAD * 2)
    assert host.loads == len(chunks)
    assert h.untouched


@pytest.mark.parametrize("touched", [False, True])
def test_join_cuts_other_gradients(touched):
    host, seen = FakeHost(), []
    leaf = VALUES.clone().requires_grad_()
    h = join([Probe.apply(stash(piece, host.put), seen) for piece in leaf.split([1, 3])], 0)
    grad = grad_to_host(GRAD, [1, 3] if touched else [2, 2], 0, host.put)
    if touched:
        grad += 1
    h.backward(grad)
    assert seen == [Tensor, Tensor]
    assert torch.equal(leaf.grad, GRAD + touched)


def test_split_writes_gradients_into_one_tensor():
    host, seen = FakeHost(), []
    leaf = VALUES.clone().requires_grad_()
    chunks = split(Probe.apply(leaf, seen), [1, 2, 1], 0)
    assert [chunk.untyped_storage().data_ptr() for chunk in chunks] == [leaf.data_ptr()] * 3
    host.on_load = lambda: seen.append(host.live)
    grads = [grad_to_host(GRAD[:1], [1], 0, host.put), grad_to_host(GRAD[1:3], [1, 1], 0, host.put), GRAD[3:]]
    held = grads[1]  # by a hook, say
    torch.autograd.backward(chunks, grads)
    assert torch.equal(leaf.grad, GRAD)
    assert seen == [3, 2, 1, Tensor], "each part is freed when it has been read"
    assert torch.equal(held, GRAD[1:3])


def test_split_fills_gradients_that_are_missing_with_zeros():
    leaf = VALUES.clone().requires_grad_()
    chunks = split(leaf, [1, 2, 1], 0)
    (chunks[1] * 2).sum().backward()
    assert torch.equal(leaf.grad, torch.tensor([0.0, 2.0, 2.0, 0.0]).view(4, 1).expand(4, 6))


@pytest.mark.parametrize("dim", [0, 1])
def test_split_of_a_host_tensor(dim):
    host, seen = FakeHost(), []
    leaf = VALUES.clone().requires_grad_()
    h = Probe.apply(hollow(leaf * 2, host, (1, 3) if dim == 0 else (1, 5), dim), seen)
    chunks = split(h, h.sizes, dim)
    assert [type(chunk) for chunk in chunks] == [HostTensor, HostTensor]
    assert host.loads == 0
    join([stash(load(chunk) * 3, host.put) for chunk in chunks], dim).backward(GRAD)
    assert seen == [HostTensor]
    assert torch.equal(leaf.grad, GRAD * 6)

    other = split(hollow(leaf * 2, host), [2, 2], 0)  # other sizes: joined
    assert [type(chunk) for chunk in other] == [Tensor, Tensor]
    touched = hollow(leaf * 2, host)
    touched += 1
    assert torch.equal(torch.cat(split(touched, [1, 2, 1], 0)), leaf * 2 + 1)


def test_autograd_adds_gradients_of_all_kinds():
    host = FakeHost()
    leaf = VALUES.clone().requires_grad_()
    h = stash(leaf * 2, host.put)
    (load(h) * GRAD + load(h) * 2 + h * 3).sum().backward()
    assert torch.equal(leaf.grad, (torch.full((4, 6), 3.0) + 2 + GRAD) * 2)
    first, second = (HostTensor.put_away(GRAD, host.put) for _ in range(2))
    for total in (first + second, first + GRAD, GRAD + second):
        assert type(total) is Tensor
        assert torch.equal(total, GRAD * 2)


def test_gradients_accumulate_in_a_hollow_leaf():
    host = FakeHost()
    leaf = hollow(VALUES, host).requires_grad_()
    for passes in (1, 2):
        leaf.backward(HostTensor.put_away(GRAD, host.put))
        assert torch.equal(leaf.grad, GRAD * passes)
    assert leaf.untouched


def test_gradients_of_another_shape_or_dtype():
    host = FakeHost()
    h = hollow(VALUES.clone().requires_grad_(), host)
    with pytest.raises(RuntimeError, match="shape"):
        torch.autograd.backward([h], [HostTensor.put_away(GRAD[:2], host.put)])
    leaf = VALUES.clone().requires_grad_()
    hollow(leaf, host).backward(HostTensor.put_away(GRAD.double(), host.put))
    assert leaf.grad.dtype == torch.float32


def test_a_function_like_fsdp2s_keeps_everything_hollow():
    host, seen = FakeHost(), []
    leaf = VALUES.clone().requires_grad_()
    before = [Probe.apply(stash(row * 2, host.put), seen) for row in leaf.split(1)]
    after = Through.apply(None, *before)
    assert [h.untouched for h in after] == [True] * 4
    for h in reversed(after):
        h.register_hook(lambda grad: seen.append("hook"))
    torch.autograd.backward([get_gradient_edge(load(h)) for h in after], list(GRAD.split(1)))
    assert seen.count(HostTensor) == 4
    assert seen.count("hook") == 4
    assert host.loads == 8
    assert torch.equal(leaf.grad, GRAD * 2)


def test_second_derivatives():
    def second(put_away, bring):
        leaf = VALUES.clone().requires_grad_()
        x = bring(put_away(leaf**3))
        (grad,) = torch.autograd.grad((x**2).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.sum(), leaf)[0]

    host = FakeHost()
    expected = second(lambda y: y, lambda y: y)
    assert torch.equal(second(lambda y: stash(y, host.put), load), expected)
    chunked = second(lambda y: hollow(y, host), lambda h: torch.cat([load(c) for c in split(h, h.sizes, 0)]))
    assert torch.allclose(chunked, expected)


def layers(n):
    torch.manual_seed(1)
    return [torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Linear(12, 6)) for _ in range(n)]


def gradients(parameters):
    return [p.grad.clone() for p in parameters]


def streamed(blocks, rows, host, early_stop=True):
    """Run ``blocks`` over micro-chunks of two rows that wait on the host, and back-propagate a loss."""
    chunks = list(split(rows, [2] * (len(rows) // 2), 0))
    for block in blocks:
        for i in reversed(range(len(chunks))):
            with set_checkpoint_early_stop(early_stop):
                y = checkpoint(lambda h, block=block: block(load(h, host.put)), chunks[i], use_reentrant=False)
            chunks[i] = stash(y, host.put)
            del y
    grads = []
    for h in chunks:
        x = load(h.detach()).requires_grad_()
        (grad,) = torch.autograd.grad(x.square().sum(), x)
        grads.append(grad_to_host(grad, [2], 0, host.put))
        del x, grad
    edges = [get_gradient_edge(h) for h in chunks]
    del chunks, h
    torch.autograd.backward(edges, grads)


def plain(blocks, rows):
    chunks = list(rows.split(2))
    for block in blocks:
        for i in reversed(range(len(chunks))):
            chunks[i] = block(chunks[i])
    sum(x.square().sum() for x in chunks).backward()


@pytest.mark.parametrize("saved", ["torch's own", "hooks"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointed_chunks(early_stop, saved):
    blocks, host, rows, packed = layers(4), FakeHost(), torch.randn(16, 6), []
    parameters = [p for block in blocks for p in block.parameters()]
    expected_rows = rows.clone().requires_grad_()
    plain(blocks, expected_rows)
    expected = gradients([expected_rows, *parameters])
    for p in parameters:
        p.grad = None
    rows.requires_grad_()
    if saved == "hooks":
        with saved_tensors_hooks(lambda t: packed.append(type(t)) or t, lambda t: t):
            streamed(blocks, rows, host, early_stop)
        assert packed.count(HostTensor) == 3 * 8, "what checkpoint saves is hollow"
    else:
        streamed(blocks, rows, host, early_stop)
    for got, want in zip(gradients([rows, *parameters]), expected, strict=True):
        assert torch.equal(got, want)
    assert host.puts == 4 * 8 + 5 * 8, "each output, and each gradient of an output or of the input"
    assert host.live == 0
    assert host.loads == 8 + 2 * 3 * 8 + 5 * 8, "for each loss, each run of a block and from each gradient"


def peak_of_chunks(chunks):
    blocks, host, rows = layers(4), FakeHost(), torch.randn(2 * chunks, 6, requires_grad=True)
    with StorageTracker(keep=lambda t: t.shape == (2, 6)) as tracker:
        streamed(blocks, rows, host)
    assert host.puts == 9 * chunks
    return tracker.peak


def test_device_memory_does_not_grow_with_the_chunks():
    peaks = {n: peak_of_chunks(n) for n in (4, 32)}
    chunk = torch.empty(2, 6).nbytes
    for n, peak in peaks.items():
        assert peak - 2 * n * chunk <= 2 * chunk, "besides the input and its gradient"
    assert peaks[32] - 2 * 32 * chunk == peaks[4] - 2 * 4 * chunk
