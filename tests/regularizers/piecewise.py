"""Small piecewise linear networks, and their bends and gradients found unit by unit with autograd."""

import itertools
import math

import torch
from torch import nn
from torch.nn import functional

from loco_ext import nn as loco_nn


class FunctionalNorm(nn.BatchNorm2d):
    """Batch normalisation by a function, as timm's with an activation inside."""

    def forward(self, x):
        norm = self.running_mean, self.running_var, self.weight, self.bias
        return functional.batch_norm(x, *norm, self.training, 0.1, self.eps)


class Residual(nn.Module):
    """Convolutions with a residual sum, a strided shortcut and batch normalisations."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Conv2d(4, 4, 3, padding=1)
        self.shortcut = nn.Sequential(nn.Conv2d(3, 4, 1, stride=2), FunctionalNorm(4))
        self.end = nn.ReLU()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.relu(self.stem(x))
        y = self.last(self.act(self.norm(self.conv(x))))
        y += self.shortcut(x)
        return self.fc(self.end(y).mean((2, 3)))


class ResidualVectors(nn.Module):
    """Linear layers with sums, a difference, a product, parts and a concatenation, in code that branches on sizes."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(9, 5), nn.Linear(5, 5), nn.Linear(10, 4)
        self.a, self.b, self.c = nn.ReLU(), nn.LeakyReLU(0.2), nn.Hardtanh(-0.3, 0.2)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 5))

    def forward(self, x):
        if x.shape[-1] != self.first.in_features:
            return x
        one = self.a(self.first(x))
        two = one - self.b(self.second(one)) * self.scale / 2 + 0.1
        return self.c(self.third(torch.cat([*one.split(2, 1), two], 1)))


class Functional(nn.Module):
    """The same as the network "cnn", by functions and methods."""

    def __init__(self, modules):
        super().__init__()
        self.conv, self.second, self.fc = modules[0], modules[3], modules[7]

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv(x), inplace=True), 3, stride=2, padding=1)
        weight, bias = self.second.weight, self.second.bias
        y = functional.avg_pool2d(torch.relu(functional.conv2d(x, weight, bias, padding=1)), 2)
        return self.fc(y.view(x.size(0), -1))


def networks():
    """Return float64 networks in evaluation mode by name, with the shapes of their inputs."""
    torch.manual_seed(3)
    pixels, cnn = (2, 5, 4), [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    cnn += [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3)]
    local = loco_nn.LocallyConnected2d(2, 3, 3, padding=1, input_size=(5, 4)).grow(1)
    local.reset_parameters(like="linear")
    found = {
        "mlp": (nn.Sequential(nn.Flatten(), *mlp(40, 8, 7, 6)), pixels),
        "narrow mlp": (nn.Sequential(*mlp(3, 8, 7)), (3,)),
        "small fields": (
            nn.Sequential(nn.Conv2d(2, 2, (2, 1)), nn.ReLU(), nn.Conv2d(2, 1, (1, 2)), nn.LeakyReLU()),
            pixels,
        ),
        "cnn": (nn.Sequential(*cnn), pixels),
        "pool first": (
            nn.Sequential(
                nn.MaxPool2d(2, 2, ceil_mode=True),
                nn.Conv2d(2, 3, 2, padding=1, dilation=2),
                nn.PReLU(3),
                nn.ZeroPad2d((1, 0, 0, 0)),
                nn.MaxPool2d((2, 1), 1, dilation=(2, 1)),
                nn.Conv2d(3, 2, 1),
                nn.ReLU6(),
            ),
            pixels,
        ),
        "residual": (Residual(), pixels),
        "residual vectors": (ResidualVectors(), (9,)),
        "local": (nn.Sequential(local, nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten(), *mlp(12, 5)), pixels),
        "1d": (
            nn.Sequential(
                nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(3, 2, 2), nn.LeakyReLU()
            ),
            (1, 12),
        ),
    }
    for model, _ in found.values():
        model.double().eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                for statistic in (module.running_var, module.weight):
                    nn.init.uniform_(statistic, 0.5, 2.0)
                for statistic in (module.running_mean, module.bias):
                    nn.init.normal_(statistic, std=0.3)
    return found


def network(name, samples, seed):
    """Return the network of that name, and random inputs."""
    model, shape = networks()[name]
    return model, torch.randn(samples, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(*sizes):
    """Return linear layers with ReLUs behind all, as a list."""
    return [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]


def bends(model, x):
    """Return the names of the modules of all bends, and the bends, as a function of one sample ``x``, [...]."""
    found = []

    def record(name, module):
        def hook(module, args):
            found.extend((name, z) for z in _bends_of(module, args[0][0].clone()))

        return module.register_forward_pre_hook(hook)

    hooks = [record(name, module) for name, module in model.named_modules() if not list(module.children())]
    try:
        model(x.unsqueeze(0))
    finally:
        for hook in hooks:
            hook.remove()
    names, values = zip(*found, strict=True)
    return names, torch.stack(values)


def _bends_of(module, x):
    if isinstance(module, nn.ReLU | nn.LeakyReLU | nn.PReLU):
        return [*x.flatten()]
    if isinstance(module, nn.ReLU6):
        return [*x.flatten(), *(x - 6).flatten()]
    if isinstance(module, nn.Hardtanh):
        return [*(x - module.min_val).flatten(), *(x - module.max_val).flatten()]
    if isinstance(module, nn.MaxPool1d | nn.MaxPool2d):
        return _pool_bends(module, x)
    return []


def _pool_bends(pool, x):
    """Return the differences of the largest number of each window to the others, window by window."""
    axes = x.dim() - 1
    each = [
        o if isinstance(o, tuple) else (o,) * axes for o in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    ]
    result = []
    for channel in x:
        for place in _places(pool.forward(x.unsqueeze(0)).shape[2:]):
            taps = []
            for tap in _places(each[0]):
                at = tuple(i * s + t * d - p for i, t, s, p, d in zip(place, tap, *each[1:], strict=True))
                if all(0 <= a < length for a, length in zip(at, channel.shape, strict=True)):
                    taps.append(channel[at])
            values = torch.stack(taps)
            best = int(values.argmax())
            result += [values[best] - value for i, value in enumerate(values) if i != best]
    return result


def _places(shape):
    return torch.cartesian_prod(*map(torch.arange, shape)).view(-1, len(shape)).tolist()


def gradients(model, x):
    """Return the bends ``[units]`` of one sample and their gradients ``[units, ...]``, by autograd."""
    x = x.clone().requires_grad_()
    names, values = bends(model, x)
    ones = torch.eye(len(values), dtype=values.dtype)
    (each,) = torch.autograd.grad(values, x, ones, is_grads_batched=True)
    return names, values.detach(), each


def smallest_ratio(values, gradients, p):
    """Return the smallest ratio of a bend to the dual norm of its gradient, and which bend it is of."""
    q = math.inf if p == 1 else 1 if p == math.inf else p / (p - 1)
    largest = gradients.flatten(1).abs().amax(1)
    norms = (gradients.flatten(1) / largest.clamp(min=1e-300)[:, None]).norm(q, dim=1) * largest
    ratios = torch.where(norms == 0, math.inf, values.abs() / norms)
    return ratios.min().item(), int(ratios.argmin())
