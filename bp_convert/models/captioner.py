"""The image captioner: features of an image and the words so far give the next word (paper,
section IV-C)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Captioner(nn.Module):
    """Two branches, added at each step, and an LSTM that reads the sum.

    Args:
        vocabulary: words.
        features: length of the image's feature vector.
        num_classes: outputs; by default the vocabulary.

    Shape:
        image (N, features), tokens (N, T) of integers, logits (N, num_classes).
    """

    def __init__(
        self, vocabulary: int = 8256, features: int = 4096, num_classes: int | None = None
    ) -> None:
        super().__init__()
        self.image = nn.Linear(features, 128)
        self.words = nn.Embedding(vocabulary, 256)
        self.language = nn.LSTM(256, 256, batch_first=True)
        self.meaning = nn.Linear(256, 128)
        self.decoder = nn.LSTM(128, 1000, batch_first=True)
        self.classifier = nn.Linear(1000, num_classes or vocabulary)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits of the next word."""
        seen = F.relu(self.image(image))[:, None]  # (N, 1, 128), for every step
        said = self.meaning(self.language(self.words(tokens))[0])  # (N, T, 128)
        steps, _ = self.decoder(seen + said)  # (N, T, 1000)
        logits: Tensor = self.classifier(steps[:, -1])
        return logits
