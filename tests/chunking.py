"""Chunked blocks in one process, each beside the plain module that it must equal."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightning_chunkmbs.arguments import CutRule
from lightning_chunkmbs.block import make_chunked, own_forward
from lightning_chunkmbs.chunk_runs import BlockSettings
from lightning_chunkmbs.joining import OutputJoin
from lightning_chunkmbs.offload import ActivationStore
from lightning_chunkmbs.report import Notices, StepCounter

NAME = "model.layers.0"


class Twins(NamedTuple):
    """A module, its chunked copy, and what the copy counts."""

    plain: Any
    block: Any
    counter: StepCounter
    store: ActivationStore


def make_twins(module: nn.Module, *, chunk_mbs: int = 1, offload: bool = False, cut: bool = True, **rule: Any) -> Twins:
    """Return ``module`` and a chunked copy of it; ``rule`` are further fields of the copy's :class:`CutRule`."""
    block = copy.deepcopy(module)
    counter = StepCounter()
    store = ActivationStore(counter)
    chunk(
        block,
        rule=CutRule(chunk_mbs=chunk_mbs, **rule) if cut else None,
        counter=counter,
        store=store if offload else None,
    )
    return Twins(module, block, counter, store)


def chunk(
    block: nn.Module,
    *,
    rule: CutRule | None = None,
    counter: StepCounter | None = None,
    store: ActivationStore | None = None,
    notices: Notices | None = None,
    name: str = NAME,
) -> None:
    """Turn ``block`` into a chunked block that gathers nothing."""
    forward, names = own_forward(block)
    settings = BlockSettings(
        name=name,
        forward=forward,
        names=names,
        rule=rule,
        store=store,
        counter=counter or StepCounter(),
        notices=notices or Notices(),
    )
    make_chunked(block, settings)


class Recorder(nn.Module):
    """A block that keeps what each of its calls was given and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, hidden_states: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> None:
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        self.calls.append(((hidden_states,), {k: v for k, v in given.items() if v is not None} | kwargs))


def chunks_of(rule: CutRule, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """Call a block and return the arguments, by name, of each of its chunks, first to last."""
    block = Recorder()
    chunk(block, rule=rule)
    with torch.no_grad():
        block(*args, **kwargs)
    return [{"hidden_states": args[0], **kwargs} for args, kwargs in reversed(block.calls)]


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int], batch_dim: int) -> Any:
    """Join the outputs of chunks, which a block runs last to first."""
    join = OutputJoin(NAME, sizes, batch_dim)
    placed = [join.place(i, outputs[i]) for i in reversed(range(len(outputs)))]
    return join.join(placed[::-1])


@contextmanager
def caught_warnings() -> Iterator[list[str]]:
    """Collect the messages of all warnings, also of those given before."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught]


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a random tensor that needs a gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def again(*tensors: Tensor) -> list[Tensor]:
    """Return leaves equal to ``tensors``, without gradients."""
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]


def max_error(ours: list[Tensor | None], theirs: list[Tensor | None]) -> float:
    """Return the largest difference between gradients; each is there in both or in neither."""
    assert [grad is None for grad in ours] == [grad is None for grad in theirs]
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    assert max(b.abs().max().item() for _, b in pairs) > 1e-2  # else the difference says nothing
    return max((a - b).abs().max().item() for a, b in pairs)


def gradients(module: nn.Module) -> list[Tensor | None]:
    """Return the gradients of a module's parameters."""
    return [parameter.grad for parameter in module.parameters()]


def backward(output: Any) -> None:
    """Back-propagate a gradient that differs from element to element."""
    weights = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=output.dtype).view(output.shape)
    ((output * weights).sum() / 10).backward()


def count_calls(module: nn.Module) -> Callable[[], int]:
    """Count how often an inner module runs, recomputation included."""
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return lambda: len(calls)


def tiny_qwen3(layers: int = 2) -> Qwen3ForCausalLM:
    """A Qwen3 language model over 32 tokens, in training mode, with its cache left on."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).train()


def chunk_layers(model: Qwen3ForCausalLM, chunk_mbs: int = 1, store: ActivationStore | None = None) -> StepCounter:
    """Chunk the decoder layers of a Qwen3 model as a plan would, and return what counts their chunks."""
    counter, notices = StepCounter(), Notices()
    rule = CutRule(chunk_mbs, kwarg_names=("attention_mask", "position_ids", "position_embeddings"))
    for i, layer in enumerate(model.model.layers):
        chunk(layer, rule=rule, counter=counter, notices=notices, store=store, name=f"model.layers.{i}")
    return counter
