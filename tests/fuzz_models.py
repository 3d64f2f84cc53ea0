"""Networks drawn at random: blocks with side arguments of many kinds, called in many ways.

A network is described by values (:class:`NetSpec`), so that a plain one and one to be trained are built alike. Nothing
in it draws random numbers or couples samples, so chunks and whole batches have the same gradients.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_chunkmbs.trees import tree_leaves

WIDTH = 8
VOCABULARY = 13
LONGEST = 7
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]
OUTPUTS = ["tensor", "tensor", "tensor", "(t,)", "(t, None)", "dict", "pair", "list"]
SIDES = ["mask", "table", "condition", "ids", "extras", "shared"]
BATCH_DIMS = {"condition": 0, "ids": 1}  # those of their own, whatever that of the hidden states is


@dataclass(frozen=True)
class BlockSpec:
    """One block: how tokens mix, what it returns, whether projections are tied, whether there is a 0-dim parameter."""

    mixing: str
    output: str
    tied: bool
    scalar: bool


@dataclass(frozen=True)
class Op:
    """One step of a forward pass; what it is about depends on ``kind``.

    Attributes:
        kind: ``call`` a block, ``no_grad`` call one without gradients, ``add`` an earlier value, compute ``between``
            blocks or ``inplace``, take a ``loss`` of what is there now.
        stack, block: which block is called.
        register: which of the two hidden states is meant.
        sides: names of the side arguments of a call.
        positional: whether the mask is a positional argument.
        earlier: which of the values so far is added, counted from the last.
        only_some: whether only some micro-batches do this.
    """

    kind: str
    stack: int = 0
    block: int = 0
    register: int = 0
    sides: tuple[str, ...] = ()
    positional: bool = False
    earlier: int = 0
    only_some: bool = False


@dataclass(frozen=True)
class NetSpec:
    """A network.

    Attributes:
        stacks: blocks of one or two stacks.
        repeated: whether the first stack has its first block at its end once more.
        program: what a forward pass does.
        batch_dim: where hidden states have the batch.
        mask_dtype: dtype of the mask.
        mask_rows: whether the mask has a row for each sample, or one for all.
        table_trained: whether the shared table is computed from a parameter.
        frozen: beginnings of the names of frozen parameters.
        tied_head: whether the head is the embedding.
    """

    stacks: tuple[tuple[BlockSpec, ...], ...]
    repeated: bool
    program: tuple[Op, ...]
    batch_dim: int
    mask_dtype: torch.dtype
    mask_rows: bool
    table_trained: bool
    frozen: tuple[str, ...]
    tied_head: bool


def draw_net(rng: random.Random) -> NetSpec:
    stacks = tuple(tuple(_draw_block(rng) for _ in range(rng.randint(1, 3))) for _ in range(rng.choice([1, 1, 2])))
    frozen = [f"stack_{s}.{i}" for s, blocks in enumerate(stacks) for i in range(len(blocks))]
    parts = [f"{name}.{part}" for name in frozen for part in ("up", "norm", "query")]
    chosen = rng.sample([*frozen, *parts, "embedding", "position", "head"], rng.choice([0, 0, 1, 2]))
    return NetSpec(
        stacks=stacks,
        repeated=rng.random() < 0.15,
        program=_draw_program(rng, stacks),
        batch_dim=rng.choice([0, 0, 1]),
        mask_dtype=rng.choice(DTYPES),
        mask_rows=rng.random() < 0.6,
        table_trained=rng.random() < 0.5,
        frozen=tuple(f"{name}." if name.startswith("stack") else name for name in chosen),
        tied_head=rng.random() < 0.25,
    )


def _draw_block(rng: random.Random) -> BlockSpec:
    return BlockSpec(rng.choice(["mean", "attention"]), rng.choice(OUTPUTS), rng.random() < 0.2, rng.random() < 0.2)


def _draw_program(rng: random.Random, stacks: tuple[tuple[BlockSpec, ...], ...]) -> tuple[Op, ...]:
    ops: list[Op] = []
    if len(stacks) > 1:
        some = rng.random() < 0.4  # blocks of a second stack may be called on some ranks only
        ops += [_draw_call(rng, 1, i, register=1, only_some=some) for i in range(len(stacks[1]))]
        ops.append(Op("merge", only_some=some))
    for i in range(len(stacks[0])):
        ops += [_draw_between(rng)] if rng.random() < 0.35 else []
        ops.append(_draw_call(rng, 0, i))
        ops += [Op("inplace")] if stacks[0][i].output == "tensor" and rng.random() < 0.15 else []
    if rng.random() < 0.25:  # blocks once more
        again = rng.sample(range(len(stacks[0])), rng.randint(1, len(stacks[0])))
        ops += [_draw_call(rng, 0, i) for i in again]
    if any(op.sides for op in ops):  # some declared keyword arrives in every step
        first = next(i for i, op in enumerate(ops) if op.kind == "call" and op.stack == 0)
        ops[first] = replace(ops[first], sides=(*(s for s in ops[first].sides if s != "extras"), "extras"))
    return (*ops, *([_draw_between(rng)] if rng.random() < 0.3 else []))


def _draw_between(rng: random.Random) -> Op:
    kind = rng.choice(["add", "add", "between", "loss", "no_grad"])
    return Op(kind, earlier=rng.randint(0, 3))


def _draw_call(rng: random.Random, stack: int, block: int, register: int = 0, only_some: bool = False) -> Op:
    sides = tuple(side for side in SIDES if rng.random() < 0.3)
    return Op("call", stack, block, register, sides, rng.random() < 0.5, only_some=only_some)


class Block(nn.Module):
    """A decoder layer that takes side arguments; ``condition``, ``table`` and ``extras`` may need gradients."""

    def __init__(self, spec: BlockSpec, batch_dim: int) -> None:
        super().__init__()
        self.spec, self.batch_dim = spec, batch_dim
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        if spec.tied:
            self.down.weight = self.up.weight
        self.scale = nn.Parameter(torch.tensor(0.7)) if spec.scalar else None

    def forward(self, x, mask=None, *, table=None, condition=None, ids=None, extras=None, shared=None):
        y = self.norm(x).transpose(0, self.batch_dim)
        if mask is not None:
            y = (y * mask.transpose(0, self.batch_dim)).to(x.dtype)
        if table is not None:
            cos, sin = (t.transpose(0, self.batch_dim) for t in table)
            y = y * cos + y.flip(-1) * sin
        if condition is not None:
            y = y * (1 + condition[:, None])
        if ids is not None:
            y = y + 0.1 * torch.cos(ids.sum(0).to(y.dtype))[..., None]
        if extras is not None:
            y = y + extras["gates"][0].transpose(0, self.batch_dim) * extras["more"][1]["weight"]
        if shared is not None:
            y = y + y @ shared
        y = self._mix(y)
        y = self.down(torch.tanh(self.up(y)))
        return self._output(x + (y if self.scale is None else y * self.scale).transpose(0, self.batch_dim))

    def _mix(self, y: Tensor) -> Tensor:
        if self.spec.mixing == "attention":
            return y + F.scaled_dot_product_attention(self.query(y), y, y, is_causal=True)
        steps = torch.arange(1, y.shape[1] + 1, dtype=y.dtype)[:, None]
        return y + self.query(y).cumsum(1) / steps

    def _output(self, x: Tensor) -> Any:
        kind = self.spec.output
        if kind == "(t,)":
            return (x,)
        if kind == "(t, None)":
            return x, None
        if kind == "dict":
            return {"x": x, "loss": torch.tanh(x).square().mean(), "best": x.detach().argmax(-1)}
        if kind == "pair":
            return x, torch.tanh(x)
        return [x, [x.mean(-1, keepdim=True)]] if kind == "list" else x


class Net(nn.Module):
    """Embedding, the program of its spec, head and loss; ``forward`` takes tokens ``[b, s]`` and ``only`` and returns
    the loss (0-dim). ``only`` tells whether the micro-batch does what only some do.
    """

    def __init__(self, spec: NetSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LONGEST, WIDTH))
        stacks = [[Block(block, spec.batch_dim) for block in blocks] for blocks in spec.stacks]
        if spec.repeated:
            stacks[0].append(stacks[0][0])
        # A second stack comes before the first, as a visual tower does.
        for i in reversed(range(len(stacks))):
            setattr(self, f"stack_{i}", nn.ModuleList(stacks[i]))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        if spec.tied_head:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(spec.frozen or ("nothing",)))

    def forward(self, tokens: Tensor, only: bool) -> Tensor:
        start = (self.embedding(tokens) + self.position[: tokens.shape[1]]).transpose(0, self.spec.batch_dim)
        self.hidden, self.losses, self.earlier = [start, start.flip(-1)], [], [start]
        for op in self.spec.program:
            if only or not op.only_some:
                getattr(self, f"_{op.kind}")(op, tokens)
        if self.spec.repeated:
            self._call(Op("call", 0, len(self.spec.stacks[0])), tokens)
        logits = self.head(self.norm(self.hidden[0].transpose(0, self.spec.batch_dim)))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + sum(self.losses)
        self.hidden, self.losses, self.earlier = [], [], []  # one that is streamed would keep its host memory
        return loss

    def _call(self, op: Op, tokens: Tensor) -> None:
        self.hidden[op.register] = self._value(self._output(op, tokens))

    def _no_grad(self, op: Op, tokens: Tensor) -> None:
        with torch.no_grad():
            output = self._output(op, tokens)
        first = output if isinstance(output, Tensor) else tree_leaves(output)[0][1]
        self.hidden[0] = self.hidden[0] + 0.5 * first

    def _output(self, op: Op, tokens: Tensor) -> Any:
        x, block = self.hidden[op.register], getattr(self, f"stack_{op.stack}")[op.block]
        self.earlier.append(x)
        sides = {side: self._side(side, tokens) for side in op.sides}
        if op.positional and "mask" in sides:
            return block(x, sides.pop("mask"), **sides)
        return block(x, **sides)

    def _value(self, output: Any) -> Tensor:
        if isinstance(output, dict):
            self.losses.append(0.1 * output["loss"])
            return output["x"]
        if isinstance(output, list):
            return output[0] * (1 + 0.5 * torch.tanh(output[1][0]))
        if isinstance(output, tuple):
            return output[0] if output[-1] is None or len(output) == 1 else output[0] + 0.5 * output[1]
        return output

    def _side(self, name: str, tokens: Tensor) -> Any:
        batch_dim, (size, length) = self.spec.batch_dim, tokens.shape
        if name == "mask":
            rows = tokens if self.spec.mask_rows else tokens[:1]
            return (rows % 3 > 0)[..., None].to(self.spec.mask_dtype).transpose(0, batch_dim)
        if name == "table":
            angles = self.position[:length] if self.spec.table_trained else torch.ones(length, WIDTH)
            return tuple(f(angles)[None].transpose(0, batch_dim) for f in (torch.cos, torch.sin))
        if name == "condition":
            return torch.tanh(self.embedding(tokens[:, 0]))
        if name == "ids":
            return torch.arange(length).expand(3, size, length) + tokens
        if name == "extras":
            gate = torch.sigmoid(self.embedding(tokens)).transpose(0, batch_dim)
            return {"gates": [gate, None], "more": ("text", {"weight": torch.tensor(0.3), "count": 3})}
        return self.shared

    def _add(self, op: Op, tokens: Tensor) -> None:
        self.hidden[0] = self.hidden[0] + self.earlier[-1 - op.earlier % len(self.earlier)]

    def _between(self, op: Op, tokens: Tensor) -> None:
        position = self.position[: tokens.shape[1]].expand(*tokens.shape, WIDTH)
        self.hidden[0] = self.hidden[0] * 1.1 + position.transpose(0, self.spec.batch_dim)

    def _inplace(self, op: Op, tokens: Tensor) -> None:
        self.hidden[0] *= 1.2

    def _loss(self, op: Op, tokens: Tensor) -> None:
        self.losses.append(0.1 * self.hidden[0].square().mean())

    def _merge(self, op: Op, tokens: Tensor) -> None:
        self.hidden[0] = self.hidden[0] + self.hidden[1]
