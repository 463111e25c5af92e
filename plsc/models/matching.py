"""Models that place things near each other: skip-gram with negative samples, two towers for queries and documents."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plsc.models.clicks import perceptron


class SkipGram(nn.Module):
    """Skip-gram with negative sampling (Mikolov et al. 2013): a word's vector foretells the words around it.

    words, contexts: modules that take ids to rows [..., D], nn.Embedding or plsc.ps.SparseEmbedding with pooling
    "none"; contexts usually start as zeros (`init="zeros"`).
    """

    def __init__(self, words: nn.Module, contexts: nn.Module) -> None:
        super().__init__()
        widths: list[Any] = [getattr(module, "embedding_dim", None) for module in (words, contexts)]
        if not isinstance(widths[0], int) or widths[0] != widths[1]:
            raise ValueError(f"words and contexts: got embedding_dim {widths[0]} and {widths[1]}, expected the same")
        self.words = words
        self.contexts = contexts

    def forward(self, word: Tensor, context: Tensor, negatives: Tensor) -> Tensor:
        """The loss, a mean over the batch: word [B], context [B], negatives [B, K], ids of words that were drawn."""
        if word.ndim != 1 or context.shape != word.shape or negatives.ndim != 2 or len(negatives) != len(word):
            got = f"{tuple(word.shape)}, {tuple(context.shape)}, {tuple(negatives.shape)}"
            raise ValueError(f"word, context, negatives: got shapes {got}, expected [B], [B], [B, K]")
        there = self.contexts(torch.cat([context.unsqueeze(1), negatives], 1))  # [B, 1 + K, D]: one look-up
        scores = (there @ self.words(word).unsqueeze(2)).squeeze(2)  # [B, 1 + K]
        return -(F.logsigmoid(scores[:, 0]) + F.logsigmoid(-scores[:, 1:]).sum(1)).mean()


class TwoTower(nn.Module):
    """Semantic matching: a tower for queries, one for documents, each a bag of tokens; near means fitting (DSSM).

    tokens: a module that takes ids [B, L] to [B, D]: nn.EmbeddingBag, or plsc.ps.SparseEmbedding with pooling "sum" or
    "mean"; `document_tokens` another one, else both towers share it. Vectors have unit length, so that an index of
    inner products finds the nearest documents.
    """

    def __init__(
        self,
        tokens: nn.Module,
        *,
        document_tokens: nn.Module | None = None,
        hidden: Sequence[int] = (128,),
        width: int = 64,
        scale: float = 20.0,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.document_tokens = tokens if document_tokens is None else document_tokens
        self.scale = scale
        self.query_tower = perceptron(_width(self.tokens), hidden, 0.0, out=width)
        self.document_tower = perceptron(_width(self.document_tokens), hidden, 0.0, out=width)

    def embed_queries(self, ids: Tensor) -> Tensor:
        return F.normalize(self.query_tower(self.tokens(ids)), dim=1)  # [B, width]

    def embed_documents(self, ids: Tensor) -> Tensor:
        return F.normalize(self.document_tower(self.document_tokens(ids)), dim=1)

    def forward(self, queries: Tensor, documents: Tensor) -> Tensor:
        """The loss: queries [B, L], documents [B, M] in pairs; the other documents of the batch are the wrong ones."""
        if len(queries) != len(documents):
            raise ValueError(f"got {len(queries)} queries and {len(documents)} documents, expected pairs")
        scores = self.scale * self.embed_queries(queries) @ self.embed_documents(documents).T  # [B, B]
        return F.cross_entropy(scores, torch.arange(len(queries), device=scores.device))


def _width(tokens: nn.Module) -> int:
    width: Any = getattr(tokens, "embedding_dim", None)
    if not isinstance(width, int):
        raise ValueError(f"tokens: got {type(tokens).__name__}, expected an EmbeddingBag or a SparseEmbedding")
    return width
