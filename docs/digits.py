# digits.py: draws digits, and trains a small CNN to read them
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

rng = np.random.default_rng(0)
torch.manual_seed(0)
fonts = [ImageFont.load_default(size) for size in (16, 19, 22)]


def draw(count, file):
    labels = rng.integers(10, size=count)
    images = rng.normal(0, 0.15, (count, 1, 28, 28)).astype("float32")
    for image, digit in zip(images, labels, strict=True):
        picture = Image.new("L", (28, 28))
        where = rng.integers(3, 12), rng.integers(0, 6)
        ImageDraw.Draw(picture).text(where, str(digit), 255, fonts[rng.integers(3)])
        image += np.asarray(picture.rotate(rng.uniform(-20, 20))) / 255
    np.savez(file, images=images, labels=labels)
    return torch.from_numpy(images), torch.from_numpy(labels)


x, y = draw(3000, "train.npz")
draw(1000, "test.npz")
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10)),
)
optimizer = torch.optim.Adam(model.parameters(), 2e-3)
for batch in torch.randint(len(x), (300, 50)):
    loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model, "digits.pt")
