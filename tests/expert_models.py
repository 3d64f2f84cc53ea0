"""Small models whose blocks hold experts in groups of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.models import WIDTH, Block
from tests.one_window import Windowed
from tests.structure_models import CodeBetween, Decoder, Images, Repeated

LONG = 7  # sequences that are shorter do without experts


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        """Give each token to the expert of the highest score; an expert without tokens does not run."""
        result, best = torch.zeros_like(x), scores.argmax(-1)
        for i, expert in enumerate(self.each):
            chosen = best == i
            if chosen.any():
                result = result.masked_scatter(chosen[..., None], torch.tanh(expert(x[chosen])).to(result.dtype))
        return result * scores.amax(-1, keepdim=True)


class ExpertBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if x.shape[1] < LONG else x + self.experts(x, torch.softmax(self.router(x), -1))


class Mixture(Decoder):
    def __init__(self) -> None:
        super().__init__(block=ExpertBlock)


class FrozenExperts(Mixture):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.experts.requires_grad_(False)


class FrozenInput(Mixture):
    """No input of the first block needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.position.requires_grad_(False)


class OwnGroups(Windowed):
    """Shards its experts itself, and one of its blocks."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.layers:
            fully_shard(layer.experts, mesh=mesh)
        fully_shard(self.net.layers[1], mesh=mesh)


class CodeBetweenExperts(CodeBetween):
    """Every block is a run of autograd of its own."""

    def __init__(self) -> None:
        super().__init__(block=ExpertBlock)


class RepeatedExperts(Repeated):
    """One graph in which every block is called twice."""

    def __init__(self) -> None:
        super().__init__(block=ExpertBlock)


class SharedExperts(Mixture):
    """All blocks have the same experts."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.experts = self.layers[0].experts


class ImagesWithExperts(Images):
    """A tower that only some batches need, with experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(ExpertBlock() for _ in range(2))
        self.layers = self._modules.pop("layers")
