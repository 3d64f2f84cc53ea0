"""HostTensor: for everything but memory it is a tensor like any other."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_chunkmbs.host_tensor import HostTensor
from tests.hosting import FakeHost, hollow

torch.manual_seed(0)
VALUES = torch.randn(4, 6)
OTHER = torch.randn(4, 6)


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


@pytest.mark.parametrize("keep", [0, 2])
def test_putting_away_a_host_tensor(keep):
    host = FakeHost()
    h = hollow(VALUES, host)
    again = HostTensor.put_away(h, host.put)
    assert again.parts == h.parts
    h += 1
    touched = HostTensor.put_away(h, FakeHost(keep).put)
    both = HostTensor.cat([h, again], 0)
    h += 1
    assert torch.equal(again, VALUES)
    assert torch.equal(touched, VALUES + 1)
    assert torch.equal(both, torch.cat([VALUES + 1, VALUES]))


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
    assert torch.equal(torch.empty(0).set_(fresh()), VALUES)
    assert f"{HostTensor.put_away(torch.tensor(2.5), FakeHost().put):.2f}" == "2.50"


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.tensor([], dtype=torch.long), VALUES.t(), VALUES[:, ::2]])
def test_any_layout(tensor):
    h = HostTensor.put_away(tensor, FakeHost().put)
    assert h.stride() == torch.empty_like(tensor).stride()
    assert h.whole().stride() == h.stride()
    assert torch.equal(h, tensor)


def test_inference_mode():
    with torch.inference_mode():
        h = hollow(VALUES + 0, FakeHost(1))
        assert h.untouched
        later = h.view_as(h) + 1
    assert torch.equal(later, VALUES + 1)
    h = hollow(VALUES, FakeHost())
    with torch.inference_mode():
        h.sum()
    h[0] = 1.0
    assert torch.equal(h[1:], VALUES[1:])


def test_compiled_functions():
    compiled = []

    def backend(graph, _):
        compiled.extend(node for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    def function(x):
        other = OTHER.cos()
        total = other + x
        return total.sin()

    for _ in range(2):
        leaf, expected = VALUES.clone().requires_grad_(), VALUES.clone().requires_grad_()
        torch.compile(function, backend=backend)(hollow(leaf * 1.5, FakeHost())).sum().backward()
        function(expected * 1.5).sum().backward()
        assert torch.equal(leaf.grad, expected.grad)
    assert len(compiled) <= 3, "what joins is not compiled"


def test_no_method_of_a_tensor_is_hidden():
    own = {name for name in vars(HostTensor) if not name.startswith("__")} | {"_held"}
    replaced = {"data", "data_ptr", "numpy", "tolist", "untyped_storage"}
    assert own & set(dir(Tensor)) == replaced
