"""Small models whose blocks are called in many ways."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import BLOCKS, VOCABULARY, WIDTH, Block

LONGEST = 8


class Decoder(nn.Module):
    """A small language model for sequences of any length; subclasses call its blocks in their own way."""

    def __init__(self, blocks: int = BLOCKS, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.position[: tokens.shape[1]]

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.run(self.embed(tokens)), tokens)


class DeepSupervision(Decoder):
    def forward(self, tokens):
        x, losses = self.embed(tokens), []
        for layer in self.layers:
            x = layer(x)
            losses.append(self.loss(x, tokens))
        return torch.stack(losses).sum()


class CodeBetween(Decoder):
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) * 1.5 + self.position[: x.shape[1]]
        return self.loss(x, tokens)


class CodeInPlace(Decoder):
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            x += self.position[: x.shape[1]]
            x.mul_(2)
        return self.loss(x, tokens)


class TwoTowers(Decoder):
    """A tower's output is added to the input of the blocks."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__(block=block)
        self.patches = nn.Embedding(VOCABULARY, WIDTH)
        self.tower = nn.ModuleList(Block() for _ in range(2))

    def see(self, tokens: Tensor) -> Tensor:
        y = self.patches(tokens).flip(1)
        for layer in self.tower:
            y = layer(y)
        return y

    def forward(self, tokens):
        return self.loss(self.run(self.embed(tokens) + self.see(tokens)), tokens)


class OneEmbedding(TwoTowers):
    """The tower and the blocks take the output of the same embedding."""

    def forward(self, tokens):
        x = y = self.embed(tokens)
        for layer in self.tower:
            y = layer(y)
        return self.loss(self.run(x.flip(1) + y), tokens)


class EmbeddingSkip(Decoder):
    """The output of the embedding is added again between blocks and after the last."""

    def forward(self, tokens):
        x = start = torch.tanh(self.embed(tokens))
        for layer in self.layers:
            x = layer(x) + start
        return self.loss(x + start, tokens)


class EmbeddingLoss(Decoder):
    """A loss on the output of the embedding."""

    def forward(self, tokens):
        x = torch.tanh(self.embed(tokens))
        return self.loss(self.run(x), tokens) + x.square().mean()


class ConditionedBlock(Block):
    def forward(self, x, *, condition):
        return super().forward(x * (1 + condition[:, None]))


class Conditioned(Decoder):
    """All blocks take a vector that was computed once, as in a diffusion transformer."""

    def __init__(self):
        super().__init__(block=ConditionedBlock)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, tokens):
        x = self.embed(tokens)
        condition = self.time(self.position[tokens[:, 0] % LONGEST])
        for layer in self.layers:
            x = layer(x, condition=condition)
        return self.loss(x, tokens)


class TwoPasses(Decoder):
    """Two views of the same batch, one pass each, and a loss on the pair."""

    def forward(self, tokens):
        first, second = self.run(self.embed(tokens)), self.run(self.embed(tokens.flip(1)))
        likeness = F.cosine_similarity(first.mean(1), second.mean(1)).mean()
        return self.loss(first, tokens) - likeness


class Repeated(Decoder):
    """Blocks that run twice, one pass after the other."""

    def forward(self, tokens):
        return self.loss(self.run(self.run(self.embed(tokens))), tokens)


class ContrastedDepths(Decoder):
    """A loss on the hidden states of two depths."""

    def forward(self, tokens):
        first = self.layers[0](self.embed(tokens))
        last = self.layers[2](self.layers[1](first))
        return self.loss(last, tokens) + F.cosine_similarity(first, last, dim=-1).mean()


class Tied(Decoder):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight


class FrozenEmbeddings(Decoder):
    def __init__(self):
        super().__init__()
        self.embedding.requires_grad_(False)
        self.position.requires_grad_(False)


class SkipAroundTwo(Decoder):
    def forward(self, tokens):
        x = self.layers[0](self.embed(tokens))
        return self.loss(x + self.layers[2](self.layers[1](x)), tokens)


class SkipIntoABlock(Decoder):
    def forward(self, tokens):
        x = self.layers[0](self.embed(tokens))
        return self.loss(self.layers[2](x + self.layers[1](x)), tokens)


class TupleBlock(Block):
    """Also takes and returns a gate, and returns what needs no gradient."""

    def forward(self, x, gate):
        return super().forward(x * torch.sigmoid(gate)[..., None]), gate + x.mean(-1), None, x.detach().argmax(-1)


class Tuples(Decoder):
    def __init__(self):
        super().__init__(block=TupleBlock)

    def forward(self, tokens):
        x = self.embed(tokens)
        gate = x.sum(-1)
        for layer in self.layers:
            x, gate, nothing, best = layer(x, gate)
            assert nothing is None
            assert best.shape == tokens.shape
        return self.loss(x, tokens) + gate.square().mean()


class DictBlock(Block):
    def forward(self, x):
        return {"hidden": super().forward(x), "scores": [x.square().mean(-1)]}


class Dicts(Decoder):
    def __init__(self):
        super().__init__(block=DictBlock)

    def forward(self, tokens):
        x, scores = self.embed(tokens), []
        for layer in self.layers:
            output = layer(x)
            x, scores = output["hidden"], [*scores, *output["scores"]]
        return self.loss(x, tokens) + torch.stack(scores).mean()


class CrossBlock(Block):
    def forward(self, x, *, memory):
        return super().forward(x + torch.softmax(x @ memory.mT, -1) @ memory)


class SharedMemory(TwoTowers):
    """Every block takes the output of a tower."""

    def __init__(self):
        super().__init__(CrossBlock)

    def forward(self, tokens):
        x, memory = self.embed(tokens), self.see(tokens)
        for layer in self.layers:
            x = layer(x, memory=memory)
        return self.loss(x, tokens)


class DataDependentDepth(Decoder):
    """Batches of fewer than three samples leave the second block out."""

    def forward(self, tokens):
        x = self.layers[0](self.embed(tokens))
        if len(tokens) >= 3:
            x = self.layers[1](x)
        return self.loss(self.layers[2](x), tokens)


class LateImages(TwoTowers):
    """Batches with an image (an even number of samples) send it through a tower, the others do not."""

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.loss(self.run(x if len(tokens) % 2 else x + self.see(tokens)), tokens)


class Images(LateImages):
    """The same with the tower defined before the blocks, so that it runs before them in lockstep."""

    def __init__(self):
        super().__init__()
        self.layers = self._modules.pop("layers")


class MaskedImages(Images):
    """The blocks of the tower take a keyword, which batches without images therefore do not give."""

    def __init__(self):
        super().__init__()
        for i in range(len(self.tower)):
            self.tower[i] = ConditionedBlock()

    def see(self, tokens: Tensor) -> Tensor:
        y = self.patches(tokens).flip(1)
        for layer in self.tower:
            y = layer(y, condition=y.mean(1))
        return y
