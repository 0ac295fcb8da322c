"""Our own models of pictures, sounds, volumes and points."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from benchmarks.zoo.entry import Call, Entry


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.PReLU(outputs)
    )


class UNet(nn.Module):
    """Two levels, skips, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, 16), _block(16, 32)])
        self.middle = _block(32, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.mix, self.after = _block(64, 32), _block(32, 16)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        deep = F.interpolate(self.middle(F.max_pool2d(second, 2)), scale_factor=2)
        both = self.mix(torch.cat([second, deep], 1))
        return self.out(self.after(torch.cat([first, self.up(both)], 1)))


class VAE(nn.Module):
    """Draws its code from a distribution, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.mean, self.spread = nn.Linear(16 * 64, 12), nn.Linear(16 * 64, 12)
        self.decoder = nn.Sequential(
            *[nn.Linear(12, 16 * 64), nn.ReLU(), nn.Unflatten(1, (16, 8, 8))],
            *[nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)],
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.encoder(x)
        mean, spread = self.mean(seen), self.spread(seen)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        return self.decoder(code), mean, spread


class Generator(nn.Module):
    """Noise to pictures; a style that scales channels."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(16, 32 * 16)
        self.style = nn.Linear(16, 32)
        self.ups = nn.Sequential(
            *[nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU()],
            *[nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU()],
            *[nn.Conv2d(8, 3, 3, padding=1), nn.Tanh()],
        )

    def forward(self, noise: Tensor) -> Tensor:
        x = self.start(noise).view(-1, 32, 4, 4)
        return self.ups(x * (1 + self.style(noise)[:, :, None, None]))


class Critic(nn.Module):
    """Spectral norms in the old or the new way; one output."""

    def __init__(self, new: bool) -> None:
        super().__init__()
        wrap = parametrizations.spectral_norm if new else spectral_norm
        self.features = nn.Sequential(
            *[wrap(nn.Conv2d(3, 16, 3, 2, 1)), nn.LeakyReLU(0.2)],
            *[wrap(nn.Conv2d(16, 32, 3, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten()],
        )
        self.middle = nn.Linear(32 * 16, 48)
        self.out = wrap(nn.Linear(48, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.leaky_relu(self.middle(self.features(x)), 0.2)).squeeze(1)


class Vocoder(nn.Module):
    """Weight norms in the old or the new way; mel spectra to a wave."""

    def __init__(self, new: bool) -> None:
        super().__init__()
        wrap = parametrizations.weight_norm if new else weight_norm
        self.start = wrap(nn.Conv1d(16, 32, 7, padding=3))
        self.up = wrap(nn.ConvTranspose1d(32, 16, 8, 4, 2))
        self.mix = nn.Conv1d(16, 16, 3, padding=2, dilation=2)
        self.out = wrap(nn.Conv1d(16, 1, 7, padding=3))

    def forward(self, mels: Tensor) -> Tensor:
        x = self.up(F.leaky_relu(self.start(mels), 0.1))
        return torch.tanh(self.out(x + self.mix(F.leaky_relu(x, 0.1))))


class Siamese(nn.Module):
    """One tower for both pictures; it is held under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(
            *[nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()],
            *[nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 32)],
        )
        self.right = self.left
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return self.scale * F.cosine_similarity(self.left(one), self.right(two))


class Mixer(nn.Module):
    """An MLP-mixer: a matrix over places, one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return self.out(x.mean(1))


class Paddings(nn.Module):
    """Circular, reflected, replicated and 'same' padding, dilation, groups, odd kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Conv2d(3, 16, 3, padding=1, padding_mode="circular"), nn.ELU()],
            *[nn.Conv2d(16, 16, (3, 5), padding="same", dilation=2), nn.ELU()],
            *[nn.Conv2d(16, 32, 3, padding=1, padding_mode="reflect", groups=4), nn.ELU()],
            *[nn.Conv2d(32, 32, (1, 7), padding=(0, 3), padding_mode="replicate"), nn.ELU()],
            *[nn.Conv2d(32, 24, 4, 2, padding="valid", bias=False), nn.ELU()],
        )
        self.out = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


class Super(nn.Module):
    """Super-resolution with PixelShuffle and channel attention."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(16, 4, 1),
            nn.ReLU(),
            nn.Conv2d(4, 16, 1),
            nn.Sigmoid(),
        )
        self.up = nn.Sequential(
            nn.Conv2d(16, 64, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(16, 3, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.start(x)
        y = self.body(first)
        return self.up(first + y * self.gate(y)) + F.interpolate(x, scale_factor=2, mode="bilinear")


class Volume(nn.Module):
    """A one-channel volume to classes, in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Conv3d(1, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2)],
            *[nn.Conv3d(16, 32, (3, 1, 3), padding=(1, 0, 1)), nn.InstanceNorm3d(32, affine=True)],
            *[nn.ReLU(), nn.ConvTranspose3d(32, 16, 2, 2), nn.ReLU(), nn.AdaptiveMaxPool3d(1)],
        )
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x).flatten(1))


class Boxes(nn.Module):
    """A detector of one stage: for each picture a dictionary of what passes a threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.head = nn.Conv2d(32, 2 * 5, 1)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        found = []
        for image in images:
            y = self.head(self.body(image[None]))[0].view(2, 5, -1)
            score, place = y[:, 4].sigmoid().flatten(), y[:, :4].permute(0, 2, 1).reshape(-1, 4)
            keep = score > score.mean()
            found.append({"boxes": place[keep], "scores": score[keep]})
        return found


class NeRF(nn.Module):
    """Rays to colours: harmonics, a skip, a density of one output, compositing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", 2.0 ** torch.arange(4) * math.pi, persistent=False)
        self.first = nn.Sequential(nn.Linear(27, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(48 + 27, 48), nn.ReLU())
        self.density, self.colour = nn.Linear(48, 1), nn.Linear(48 + 3, 3)

    def forward(self, start: Tensor, way: Tensor) -> tuple[Tensor, Tensor]:
        depth = torch.linspace(0.2, 2, 8)
        points = start[:, None] + way[:, None] * depth[:, None]
        waves = points[..., None] * self.rates
        code = torch.cat([points, waves.sin().flatten(-2), waves.cos().flatten(-2)], -1)
        x = self.second(torch.cat([self.first(code), code], -1))
        alpha = 1 - torch.exp(-F.softplus(self.density(x)[..., 0]) * 0.2)
        colour = self.colour(torch.cat([x, way[:, None].expand(-1, 8, -1)], -1)).sigmoid()
        past = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
        weight = alpha * past
        return (weight[..., None] * colour).sum(1), weight.sum(1)


class PointNet(nn.Module):
    """Points as a set: 1x1 convolutions, a maximum, a transform that the points choose."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(32, 9)
        )
        self.points = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1)
        )
        self.out = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, points: Tensor) -> Tensor:
        turn = self.turn(points).view(-1, 3, 3) + torch.eye(3)
        return self.out(self.points(turn @ points).amax(-1))


class Diffusion(nn.Module):
    """A denoiser that is told the time: sines, scale and shift, attention over places."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 64))
        self.into = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.GroupNorm(8, 32)
        self.block = nn.Conv2d(32, 32, 3, padding=1)
        self.qkv, self.proj = nn.Conv2d(32, 96, 1), nn.Conv2d(32, 32, 1)
        self.out = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(8) / 2)
        waves = t[:, None] * rates
        scale, shift = self.time(torch.cat([waves.sin(), waves.cos()], 1))[..., None, None].chunk(
            2, 1
        )
        x = self.into(x)
        x = x + self.block(F.silu(self.norm(x) * (1 + scale) + shift))
        q, k, v = self.qkv(x).flatten(2).chunk(3, 1)
        weight = torch.softmax(q.transpose(1, 2) @ k / 32**0.5, -1)
        return self.out(x + self.proj((v @ weight.transpose(1, 2)).view_as(x)))


class Spatial(nn.Module):
    """A spatial transformer, whose last layer starts at zero weights."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(
            nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32), nn.ReLU()
        )
        self.theta = nn.Linear(32, 6)
        nn.init.zeros_(self.theta.weight)
        self.theta.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])
        self.read = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        theta = self.theta(self.find(x)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.read(F.grid_sample(x, grid, align_corners=False))


class Capsules(nn.Module):
    """Routing by agreement over capsules; weights in a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 5, 2)
        self.caps = nn.Conv2d(32, 32, 3, 2)
        self.W = nn.Parameter(torch.randn(5, 16, 8, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        u = self.caps(F.relu(self.conv(x))).flatten(1).view(len(x), -1, 8)
        votes = torch.einsum("cnij,bnj->bcni", self.W, u[:, :16])
        b = torch.zeros_like(votes[..., 0])
        for _ in range(2):
            s = (b.softmax(1)[..., None] * votes).sum(2)
            v = s * s.norm(dim=-1, keepdim=True) / (1 + s.square().sum(-1, keepdim=True))
            b = b + (votes * v[:, :, None]).sum(-1)
        return v.norm(dim=-1)


class Vision1d(nn.Module):
    """A spectrum is computed inside: STFT, then convolutions; float buffers of a filter bank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        self.register_buffer("bank", torch.rand(12, 17))
        self.layers = nn.Sequential(
            nn.Conv1d(12, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 32, 3, 2), nn.ReLU()
        )
        self.out = nn.Linear(32, 4)

    def forward(self, wave: Tensor) -> Tensor:
        power = torch.stft(wave, 32, 16, window=self.window, return_complex=True).abs() ** 2
        return self.out(self.layers(torch.log1p(self.bank @ power)).mean(-1))


def _named() -> nn.Module:
    """Return layers under names, one of them that looks like a pattern."""
    return nn.Sequential(
        OrderedDict(
            [
                ("stem", nn.Conv2d(3, 16, 3, 2, 1)),
                ("scale[0]", nn.Conv2d(16, 32, 1)),
                ("act*", nn.ReLU()),
                ("pool", nn.AdaptiveAvgPool2d(2)),
                ("flat", nn.Flatten()),
                ("re:head", nn.Linear(128, 32)),
                ("out", nn.Linear(32, 3)),
            ]
        )
    )


def _images() -> Call:
    return ([torch.rand(3, 16, 16), torch.rand(3, 24, 16), torch.rand(3, 16, 32)],), {}


ENTRIES = (
    Entry("own/unet", UNet, ("3x16x16",)),
    Entry("own/vae", VAE, ("1x16x16",)),
    Entry("own/gan-generator", Generator, ("16",), settled=True),
    Entry("own/gan-critic-spectral-old", lambda: Critic(new=False), ("3x16x16",)),
    Entry("own/gan-critic-spectral-new", lambda: Critic(new=True), ("3x16x16",)),
    Entry("own/vocoder-weight-norm-old", lambda: Vocoder(new=False), ("16x12",)),
    Entry("own/vocoder-weight-norm-new", lambda: Vocoder(new=True), ("16x12",)),
    Entry("own/siamese", Siamese, ("float32:1x1x16x16", "float32:1x1x16x16")),
    Entry("own/mlp-mixer", Mixer, ("3x16x16",)),
    Entry("own/conv-paddings", Paddings, ("3x16x16",)),
    Entry("own/super-resolution", Super, ("3x12x12",)),
    Entry("own/volume", Volume, ("float32:1x1x8x8x8",), settled=True),
    Entry("own/detector-list", Boxes, example=_images, watch=("body", "head")),
    Entry("own/nerf", NeRF, ("start=float32:1x3", "way=float32:1x3")),
    Entry("own/point-net", PointNet, ("3x20",), settled=True),
    Entry("own/diffusion", Diffusion, ("float32:1x3x8x8", "float32:1")),
    Entry("own/spatial-transformer", Spatial, ("1x16x16",)),
    Entry("own/capsules", Capsules, ("1x16x16",)),
    Entry("own/spectrum-inside", Vision1d, ("256",)),
    Entry("own/named-like-patterns", _named, ("3x16x16",)),
)
