"""Operations on a HostTensor: values and gradients are those of a plain tensor, and each part is loaded once."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from tests.hosting import FakeHost, Through, hollow

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


class Double(Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


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
    "item": lambda x: x.sum() * float(x.detach()[0, 0]) * x.detach().mean().item(),
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
    "Function in place": Double.apply,
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
