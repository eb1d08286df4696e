"""A small byte-level decoder-only transformer, after Radford et al., GPT-2 (2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the model. `width` must be a multiple of `heads`."""

    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64
    dropout: float = 0.0


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, context, width) to the same shape."""
        x = x + self._attend(self.norm_1(x))
        hidden = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + F.dropout(hidden, self.dropout, self.training)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """The model: maps bytes to a distribution over the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_initialise)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Map byte values (batch, context), int64, to logits (batch, context, 256)."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.bytes(text) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
