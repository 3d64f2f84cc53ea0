"""HostTensor: for everything but memory it is a tensor like any other."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from lightning_chunkmbs.host_tensor import HostTensor
from tests.hosting import FakeHost, hollow

torch.manual_seed(0)
VALUES = torch.randn(4, 6)
OTHER = torch.randn(4, 6)
SQUARE = torch.randn(6, 6)
INDEX = torch.tensor([3, 0, 0])


class Cube(Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class Through(Function):
    """Returns its inputs, as FSDP2's Function does."""

    @staticmethod
    def forward(group, *inputs):
        return inputs

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads


def changed(change):
    """An operation that changes its argument in place and returns it."""

    def run(x):
        change(x)
        return x

    return run


def set_item(x):
    x[1:3, ::2] = 7.0


def set_masked(x):
    x[x > 0] = OTHER[x > 0]


def write_no_grad(x):
    with torch.no_grad():
        x.mul_(3)
        x[0] += 1


def write_view_twice(x):
    first = x[0]
    x.view(-1)[1::2].mul_(2)
    first.add_(5)  # sees and is seen by the other


def through_alias(x):
    x.detach()[2].zero_()
    x.data.add_(1)
    return x * 2


def hooked(x):
    x.register_hook(lambda grad: grad * 2)
    return x * 3


def autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ SQUARE


def dropped(x):
    torch.manual_seed(3)
    return F.dropout(x, 0.5)


OPERATIONS = {
    "add": lambda x: x + OTHER,
    "radd": lambda x: 1 - x,
    "mul itself": lambda x: x * x,
    "matmul": lambda x: x @ SQUARE,
    "linear": lambda x: F.linear(x, SQUARE),
    "einsum": lambda x: torch.einsum("bi,bj->ij", x, OTHER),
    "baddbmm": lambda x: torch.bmm(x[None], SQUARE[None]),
    "row": lambda x: x[1],
    "slices": lambda x: x[1:, ::2],
    "full slice": lambda x: x[:],
    "fancy": lambda x: x[INDEX],
    "mask": lambda x: x[VALUES > 0],
    "newaxis": lambda x: x[None, ..., None],
    "iterate": lambda x: [row * i for i, row in enumerate(x)],
    "unpack": lambda x: torch.stack(list(x)[::-1]),
    "cat": lambda x: torch.cat([x, OTHER, x]),
    "split": lambda x: x.split([1, 3]),
    "chunk": lambda x: x.chunk(2, dim=1),
    "view": lambda x: x.view(2, 12),
    "view -1": lambda x: x.view(-1),
    "same view": lambda x: x.view(4, 6).view_as(x) * 2,
    "reshape": lambda x: x.reshape(3, 8),
    "transpose": lambda x: x.t() @ OTHER,
    "permute": lambda x: x.permute(1, 0).contiguous(),
    "expand": lambda x: x.expand(3, 4, 6) * 2,
    "flatten": lambda x: x.flatten().unsqueeze(0),
    "clone": lambda x: x.clone(),
    "double": lambda x: x.double(),
    "to itself": lambda x: x.to(torch.float32),
    "cpu": lambda x: x.cpu() * 2,
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "rms norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "gelu": F.gelu,
    "where": lambda x: torch.where(x > 0, x, OTHER),
    "masked fill": lambda x: x.masked_fill(VALUES > 0, 0.0),
    "gather": lambda x: x.gather(1, torch.zeros(4, 2, dtype=torch.long)),
    "index select": lambda x: x.index_select(0, INDEX),
    "max": lambda x: x.max(dim=1),
    "sort": lambda x: x.sort(dim=1),
    "topk": lambda x: x.topk(2),
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: x.norm(),
    "mse": lambda x: F.mse_loss(x, OTHER),
    "item": lambda x: x.sum() * float(x[0, 0]) * x.mean().item(),
    "numpy": lambda x: x * torch.from_numpy(np.asarray(x.detach()) * 2),
    "tolist": lambda x: x * torch.tensor(x.tolist()),
    "like": lambda x: x * torch.ones_like(x) + x.new_zeros(6),
    "as_tensor": lambda x: torch.as_tensor(x) * x.new_tensor([2.0]),
    "dropout": dropped,
    "autocast": autocast,
    "vmap": lambda x: torch.vmap(lambda row: row.sin())(x),
    "foreach": lambda x: torch._foreach_mul([x, OTHER], 2.0),
    "out": lambda x: torch.mul(x.detach(), 2, out=torch.empty(4, 6)) + x,
    "parameter": lambda x: torch.nn.Parameter(x.detach()) + x,
    "Function that saves": Cube.apply,
    "Function that returns": lambda x: Through.apply(None, x, x * 2),
    "checkpoint": lambda x: checkpoint(lambda y: (y * 2).sin(), x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(lambda y: (y * 2).sin(), x, use_reentrant=True),
    "tensor hook": hooked,
    "alias": through_alias,
    "iadd": changed(lambda x: x.__iadd__(OTHER)),
    "mul_": changed(lambda x: x.mul_(OTHER)),
    "mul_ of a view": changed(lambda x: x[1].mul_(2)),
    "add_ of a same view": changed(lambda x: x.view_as(x).add_(OTHER)),
    "two views": changed(write_view_twice),
    "setitem": changed(set_item),
    "masked setitem": changed(set_masked),
    "no_grad write": changed(write_no_grad),
    "copy_": changed(lambda x: x.copy_(OTHER)),
    "add_ as an argument": lambda x: torch.zeros(4, 6).add_(x),
    "setitem of another": changed(lambda x: torch.zeros(4, 6).__setitem__(slice(1, 2), x[:1])),
}


def tensors(result):
    return [result] if isinstance(result, Tensor) else [leaf for item in result for leaf in tensors(item)]


def run(operation, cut):
    """The operation's results and the gradient of what its argument was made of."""
    leaf = VALUES.clone().requires_grad_()
    x = cut(leaf * 1.5)
    results = tensors(operation(x))
    floats = [r for r in results if r.requires_grad]
    sum((r.float() * torch.arange(r.numel()).view(r.shape)).sum() for r in floats).backward()
    return [r.detach().clone() for r in results], leaf.grad


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_equal_those_of_a_tensor(name):
    host = FakeHost()
    results, grad = run(OPERATIONS[name], lambda y: hollow(y, host))
    expected, expected_grad = run(OPERATIONS[name], lambda y: y)
    for got, want in zip(results, expected, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert torch.equal(got, want)
    assert torch.equal(grad, expected_grad)
    assert host.puts == 3
    assert host.most_loads <= 1, "each part is loaded once, however many operations there are"


def test_what_needs_no_values_loads_nothing():
    host = FakeHost()
    h = hollow(VALUES.clone().requires_grad_() * 2, host)
    assert (h.shape, h.size(0), h.ndim, len(h), h.stride()) == ((4, 6), 4, 2, 4, (6, 1))
    assert (h.dtype, h.device.type, h.is_floating_point(), h.numel(), h.element_size()) == (
        torch.float32,
        "cpu",
        1,
        24,
        4,
    )
    assert torch.is_tensor(h)
    assert isinstance(h, Tensor)
    assert h.requires_grad
    assert not h.is_leaf
    assert h.grad_fn is not None
    assert h.contiguous() is h
    assert h.float() is h
    assert repr(h) == "HostTensor(shape=(4, 6), dtype=torch.float32, device=cpu, 3 parts on the host)"
    assert f"{h.detach()}".startswith("HostTensor")
    assert (h.sizes, h.parts_dim, [part.shape[0] for part in h.parts]) == ((1, 2, 1), 0, [1, 2, 1])
    for alias in (h.detach(), h.data, h.view(4, 6), h.view_as(h), h.expand_as(h)):
        assert type(alias) is HostTensor
        assert alias.untouched
    for new in (torch.zeros_like(h), torch.empty_like(h), h.new_ones(2)):
        assert type(new) is Tensor
    assert host.loads == 0
    assert h.untouched


def test_aliases_share_what_is_joined():
    host = FakeHost()
    h = hollow(VALUES, host)
    alias, viewed = h.detach(), h.view_as(h)
    alias[0] = 1.0
    assert not h.untouched
    assert h._version == 1
    assert torch.equal(h[0], torch.ones(6))
    assert torch.equal(viewed[0], torch.ones(6))
    assert (host.loads, host.live, h.parts) == (3, 0, ())


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_parts_on_the_device_are_not_written_to(keep):
    host = FakeHost(keep)
    whole = hollow(VALUES, host)
    single = HostTensor.put_away(VALUES, FakeHost(keep).put)
    whole += 1
    single.load().add_(1)
    assert torch.equal(whole, VALUES + 1)
    assert torch.equal(single, VALUES)
    assert host.puts == 3 - keep


def test_a_kept_tensor_changed_in_place_is_an_error():
    tensor = VALUES.clone()
    h = HostTensor.put_away(tensor, FakeHost(1).put)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"\(4, 6\).*modified by an inplace operation.*x = x \+ y"):
        h.load()


def test_joining_frees_parts_one_by_one():
    host, seen = FakeHost(), []
    h = hollow(VALUES, host)
    host.on_load = lambda: seen.append(host.live)
    h.whole()
    assert seen == [3, 2, 1]
    assert host.live == 0


def test_a_failed_join_can_be_repeated():
    host = FakeHost()
    h = hollow(VALUES, host)
    host.on_load = lambda: 1 / (host.live - 1)
    with pytest.raises(ZeroDivisionError):
        h.whole()
    assert host.live == 1
    host.on_load = lambda: None
    assert torch.equal(h, VALUES)


def test_shapes_that_change_in_place_are_refused():
    h = HostTensor.put_away(VALUES, FakeHost().put)
    for change in (h.t_, lambda: h.unsqueeze_(0), lambda: h.resize_(3), h.squeeze_):
        with pytest.raises(RuntimeError, match=r"changes the shape.*x = x.t\(\)"):
            change()
    assert h.untouched


def test_setting_data_replaces_the_values_of_one_alias():
    h = HostTensor.put_away(VALUES, FakeHost().put)
    alias = h.detach()
    alias.data = torch.ones(2)
    assert torch.equal(alias + 0, torch.ones(2))
    assert torch.equal(h, VALUES)
    h.data = HostTensor.put_away(OTHER, FakeHost().put)
    assert torch.equal(h, OTHER)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_copies_and_files_hold_plain_tensors(requires_grad):
    h = hollow(VALUES, FakeHost()).requires_grad_(requires_grad)
    file = io.BytesIO()
    torch.save({"h": h}, file)
    file.seek(0)
    for plain in (copy.deepcopy(h), pickle.loads(pickle.dumps(h)), torch.load(file)["h"], copy.deepcopy([h, h])[1]):
        assert type(plain) is Tensor
        assert plain.requires_grad == requires_grad
        assert torch.equal(plain, VALUES)
    copied = copy.deepcopy([h, h])
    assert copied[0] is copied[1]
    if requires_grad:
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(h.view_as(h))
        with pytest.raises(RuntimeError, match="requires grad"):
            h.numpy()


def test_memory_is_that_of_the_joined_tensor():
    def fresh():
        return hollow(VALUES, FakeHost())

    assert fresh().tolist() == VALUES.tolist()
    assert np.array_equal(fresh().numpy(), VALUES.numpy())
    assert np.array_equal(np.from_dlpack(fresh()), VALUES.numpy())
    assert torch.equal(torch.from_dlpack(fresh()), VALUES)
    assert fresh().untyped_storage().nbytes() == VALUES.nbytes
    h = fresh()
    assert h.data_ptr() == h.whole().data_ptr() == h.untyped_storage().data_ptr() != 0
    h.numpy()[0] = 2.0
    assert torch.equal(h[0], torch.full((6,), 2.0))


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.tensor([], dtype=torch.long), VALUES.t(), VALUES[:, ::2]])
def test_any_layout(tensor):
    h = HostTensor.put_away(tensor, FakeHost().put)
    assert h.stride() == torch.empty_like(tensor).stride()
    assert h.whole().stride() == h.stride()
    assert torch.equal(h, tensor)


def test_inference_mode():
    with torch.inference_mode():
        h = hollow(VALUES, FakeHost())
        assert h.untouched
        later = h.view_as(h) + 1
    assert torch.equal(later, VALUES + 1)
    h = hollow(VALUES, FakeHost())
    with torch.inference_mode():
        h.sum()
    h[0] = 1.0
    assert torch.equal(h[1:], VALUES[1:])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions(backend):
    def function(x):
        return (x * 2).sin().sum()

    compiled = torch.compile(function, backend=backend)
    leaf, expected = VALUES.clone().requires_grad_(), VALUES.clone().requires_grad_()
    compiled(hollow(leaf * 1.5, FakeHost())).backward()
    function(expected * 1.5).backward()
    assert torch.equal(leaf.grad, expected.grad)


def test_no_method_of_a_tensor_is_hidden():
    own = {name for name in vars(HostTensor) if not name.startswith("__")} | {"_held"}
    replaced = {"data", "data_ptr", "numpy", "tolist", "untyped_storage"}
    assert own & set(dir(Tensor)) == replaced
