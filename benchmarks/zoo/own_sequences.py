"""Our own models of sequences: taggers, captioners, translators, language models."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

from benchmarks.zoo.entry import Call, Entry

WORDS = 60


class Tagger(nn.Module):
    """A bidirectional LSTM of two layers; answers for each word and for the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, 24, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.tags = nn.Linear(48, 9)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        steps, (h, _) = self.lstm(self.words(ids))
        return self.tags(steps), self.tags(torch.cat([h[-2], h[-1]], -1))


class PackedTagger(nn.Module):
    """Packs its steps by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 40, batch_first=True)
        self.tags = nn.Linear(40, 9)

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(self.words(ids), lengths, True, enforce_sorted=False)
        steps, (h, _) = self.lstm(packed)
        return self.tags(pad_packed_sequence(steps, batch_first=True)[0]), self.tags(h[-1])


class LengthsInside(PackedTagger):
    """Finds the lengths itself, from the padding."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(ids, (ids != 0).sum(1).clamp(min=1).cpu())


class PackedIn(nn.Module):
    """Takes a packed sequence and gives one back."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(24, 32)
        self.lstm = nn.LSTM(32, 32)
        self.out = nn.Linear(32, 6)

    def forward(self, steps: PackedSequence) -> PackedSequence:
        steps = self.lstm(self.gru(steps)[0])[0]
        return steps._replace(data=self.out(steps.data))


class Captioner(nn.Module):
    """A picture's features are the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            *[nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()],
            *[nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
        )
        self.image = nn.Linear(32, 32)
        self.words = nn.Embedding(WORDS, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, 48, batch_first=True)
        self.drop = nn.Dropout()
        self.out = nn.Linear(48, WORDS)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        first = self.image(self.cnn(image)).unsqueeze(1)
        steps, _ = self.lstm(torch.cat([first, self.words(ids)], 1))
        return self.out(self.drop(steps))


class Translator(nn.Module):
    """GRU encoder, and a cell with attention that is fed its own best word."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.steps = steps
        self.words = nn.Embedding(WORDS, 32)
        self.encoder = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(64, 32)
        self.key, self.query = nn.Linear(64, 32), nn.Linear(32, 32, bias=False)
        self.cell = nn.GRUCell(32 + 64, 32)
        self.out = nn.Linear(32, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        seen, last = self.encoder(self.words(ids))
        h = torch.tanh(self.bridge(torch.cat([last[0], last[1]], -1)))
        word, scores = torch.zeros_like(ids[:, 0]), []
        for _ in range(self.steps):
            weight = (self.key(seen) @ self.query(h).unsqueeze(-1)).softmax(1)
            h = self.cell(torch.cat([self.words(word), (weight * seen).sum(1)], -1), h)
            scores.append(self.out(h))
            word = scores[-1].argmax(-1)
        return torch.stack(scores, 1)


class TiedLM(nn.Module):
    """The output's weight is the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.out = nn.Linear(32, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.words(ids))[0])


class Projected(nn.Module):
    """An LSTM with a projection, the batch on its second axis, and a given start."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(24, 48, 2, proj_size=16)
        self.out = nn.Linear(16, 5)

    def forward(self, steps: Tensor) -> Tensor:
        x = steps.transpose(0, 1)
        h = torch.zeros(2, x.shape[1], 16, dtype=x.dtype)
        c = torch.ones(2, x.shape[1], 48, dtype=x.dtype)
        return self.out(self.lstm(x, (h, c))[0][-1])


class Cells(nn.Module):
    """LSTM cells in a loop, with a state that starts at a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(32) / 4)
        self.first, self.second = nn.LSTMCell(16, 32), nn.LSTMCell(32, 32)
        self.rnn = nn.RNN(32, 24, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(24, 4)

    def forward(self, steps: Tensor) -> Tensor:
        h1 = c1 = h2 = c2 = self.start.expand(len(steps), -1)
        made = []
        for x in steps.unbind(1):
            h1, c1 = self.first(x, (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            made.append(h2)
        return self.out(self.rnn(torch.stack(made, 1))[0][:, -1])


class Stateful(nn.Module):
    """Keeps its state from call to call, as a player of games does."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, 4)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, steps: Tensor) -> Tensor:
        if self.state is not None and self.state[0].shape[1] != len(steps):
            self.state = None
        made, (h, c) = self.lstm(steps, self.state)
        self.state = (h.detach(), c.detach())
        return self.out(made)


class Padded(nn.Module):
    """torch's encoder with a mask of padding, which goes a fast path of nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32))
        self.out = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        padding = padding & ~padding.all(1, keepdim=True)
        return self.out(self.encoder(self.words(ids), src_key_padding_mask=padding).sum(1))


class Causal(nn.Module):
    """Layers before norms with a causal mask, no fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.places = nn.Parameter(torch.randn(16, 32) / 8)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.out(self.encoder(x, mask=mask, is_causal=True))


class Whole(nn.Module):
    """torch's own nn.Transformer, the batch on its second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.both = nn.Transformer(32, 4, 1, 1, 64)
        self.out = nn.Linear(32, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.words(source).transpose(0, 1), self.words(target).transpose(0, 1)
        mask = self.both.generate_square_subsequent_mask(len(y))
        return self.out(self.both(x, y, tgt_mask=mask)).transpose(0, 1)


class Attention(nn.Module):
    """Self-attention written out: one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Rotary(nn.Module):
    """A decoder whose tables of angles are made at the first call and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.attend = Attention(32, 4)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.RMSNorm(32)
        self.table: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if self.table is None or len(self.table) < ids.shape[1]:
            steps = torch.arange(ids.shape[1], dtype=x.dtype)
            rates = torch.exp(-torch.arange(32, dtype=x.dtype) / 8)
            self.table = torch.outer(steps, rates).cos()
        x = x * self.table[: ids.shape[1]]
        x = x + self.attend(self.norm(x))
        x = x + self.down(F.silu(self.up(self.norm(x))))
        return F.linear(x, self.words.weight)


class Latent(nn.Module):
    """nn.MultiheadAttention from learnt queries, with weights, other widths of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, 32) / 6)
        self.cross = nn.MultiheadAttention(32, 4, kdim=24, vdim=16, batch_first=True)
        self.same = nn.MultiheadAttention(32, 4, add_bias_kv=True, batch_first=True)
        self.key, self.value = nn.Linear(20, 24), nn.Linear(20, 16)
        self.out = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        queries = self.queries.expand(len(x), -1, -1)
        y, seen = self.cross(queries, self.key(x), self.value(x))
        y = y + self.same(y, y, y, need_weights=False)[0]
        return self.out(y), seen


class Sentences(nn.Module):
    """A one-dimensional CNN over words, as for sentences; filters of three widths."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.filters = nn.ModuleList(nn.Conv1d(32, 24, width) for width in (2, 3, 4))
        self.out = nn.Linear(72, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).transpose(1, 2)
        return self.out(torch.cat([F.relu(one(x)).amax(-1) for one in self.filters], -1))


class Causal1d(nn.Module):
    """A WaveNet: dilated convolutions padded on the left, gates, skips."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 16, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(3))
        self.ways = nn.ModuleList(nn.Conv1d(16, 32, 1) for _ in range(3))
        self.end = nn.Sequential(nn.ReLU(), nn.Conv1d(16, 32, 1), nn.ReLU(), nn.Conv1d(32, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.start(x), 0
        for gate, way in zip(self.gates, self.ways, strict=True):
            a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            more, skip = way(a.tanh() * b.sigmoid()).chunk(2, 1)
            x, total = x + more, total + skip
        return self.end(total)


class CTC(nn.Module):
    """Speech to letters: strided convolutions, a GRU, log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *[nn.Conv1d(16, 32, 5, 2, 2), nn.BatchNorm1d(32), nn.Hardtanh(0, 20)],
            *[nn.Conv1d(32, 32, 5, 2, 2, groups=4), nn.GELU()],
        )
        self.gru = nn.GRU(32, 24, 2, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(48)
        self.out = nn.Linear(48, 12)

    def forward(self, mels: Tensor) -> Tensor:
        steps, _ = self.gru(self.convs(mels).transpose(1, 2))
        return self.out(self.norm(steps)).log_softmax(-1)


class StateSpace(nn.Module):
    """A diagonal state space with complex poles, run as a convolution by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 32), nn.Linear(32, 5)
        self.rate = nn.Parameter(torch.rand(32, 4))
        self.register_buffer("turn", torch.arange(4) * 1j * math.pi)
        self.mix = nn.Parameter(torch.randn(32, 4, dtype=torch.cfloat) / 2)

    def forward(self, x: Tensor) -> Tensor:
        u = self.into(x).transpose(1, 2)
        steps = torch.arange(u.shape[-1])
        poles = self.turn - self.rate.exp()
        kernel = (self.mix[..., None] * torch.exp(poles[..., None] * steps / 8)).sum(1).real
        y = torch.fft.irfft(
            torch.fft.rfft(u, 2 * u.shape[-1]) * torch.fft.rfft(kernel, 2 * u.shape[-1])
        )
        return self.out(F.gelu(y[..., : u.shape[-1]]).transpose(1, 2))


class Bag(nn.Module):
    """nn.EmbeddingBag over words with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 32, mode="mean")
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        return self.layers(self.bag(flat, torch.arange(0, len(flat), ids.shape[1])))


class CRF(nn.Module):
    """A tagger that gives back the best path: integers, found by Viterbi."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 16, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(32, 5)
        self.moves = nn.Parameter(torch.randn(5, 5))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(self.lstm(self.words(ids))[0])
        best, back = scores[:, 0], []
        for step in scores[:, 1:].unbind(1):
            value, place = (best[:, :, None] + self.moves).max(1)
            best = value + step
            back.append(place)
        path = [best.argmax(1)]
        for place in reversed(back):
            path.append(place.gather(1, path[-1][:, None])[:, 0])
        return scores, torch.stack(path[::-1], 1)


class TwoTables(nn.Module):
    """Tables of two sizes; ids of one are too large for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(12, 16), nn.Embedding(90, 16)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.layers(torch.cat([self.users(user), self.items(item)], -1)).squeeze(-1)


def _with_lengths() -> Call:
    return (torch.randint(1, WORDS, (3, 8)), torch.tensor([8, 5, 3])), {}


def _packed() -> Call:
    return (pack_sequence([torch.randn(n, 24) for n in (7, 5, 2)]),), {}


IDS = f"int64:1x8<{WORDS}"

ENTRIES = (
    Entry("own/tagger-bilstm", Tagger, (IDS,)),
    Entry("own/tagger-packed", PackedTagger, example=_with_lengths),
    Entry("own/tagger-lengths-inside", LengthsInside, ("int64:1x8<4",)),
    Entry("own/packed-sequence-in", PackedIn, example=_packed),
    Entry("own/captioner", Captioner, ("float32:1x3x32x32", f"int64:1x7<{WORDS}")),
    Entry("own/translator-gru", Translator, (IDS,)),
    Entry("own/tied-lstm-lm", TiedLM, (IDS,)),
    Entry("own/lstm-projected", Projected, ("6x24",)),
    Entry("own/recurrent-cells", Cells, ("5x16",)),
    Entry("own/stateful-lstm", Stateful, ("5x16",)),
    Entry("own/stateful-lstm-ran", Stateful, ("5x16",), ran=True),
    Entry("own/encoder-padded", Padded, ("int64:1x8<4",)),
    Entry("own/encoder-causal", Causal, (IDS,)),
    Entry("own/nn-transformer", Whole, (IDS, f"int64:1x6<{WORDS}")),
    Entry("own/rotary-cached", Rotary, (IDS,)),
    Entry("own/rotary-cached-ran", Rotary, (IDS,), ran=True),
    Entry("own/latent-attention", Latent, ("6x20",)),
    Entry("own/sentence-cnn", Sentences, (IDS,)),
    Entry("own/wavenet", Causal1d, ("1x32",)),
    Entry("own/speech-ctc", CTC, ("16x24",)),
    Entry("own/state-space-complex", StateSpace, ("12x8",)),
    Entry("own/embedding-bag", Bag, (IDS,)),
    Entry("own/tagger-crf", CRF, (IDS,)),
    Entry("own/two-tables", TwoTables, ("user=int64:1<12", "item=int64:1<90")),
)
