"""Tests of importance landscapes, data smoothness, total variation and path counts."""

import pytest
import torch
from scipy.ndimage import correlate
from torch import nn

from loco_ext import nn as loco_nn
from loco_ext import regularizers
from tests.regularizers.networks import CLASSES, NETWORKS, images, make


def brute_force(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the exact landscape from the Jacobian of each image."""
    total = 0
    for image in x:
        jacobian = torch.autograd.functional.jacobian(lambda i: model(i[None] * 1)[0], image)  # [classes, C, H, W]
        total = total + (model(image[None] * 1).softmax(1).view(-1, 1, 1, 1) * jacobian**2).sum(0)
    n = total.detach().norm(dim=0)
    return n / n.norm() * n.numel() ** 0.5


@pytest.mark.parametrize("name", NETWORKS)
def test_the_landscape_is_that_of_the_jacobians(name):
    model, x = make(name), images()
    expected = brute_force(model.eval(), x)
    for chunk_size in (None, 3):
        found = regularizers.importance_landscape(model, x, expectation="exact", chunk_size=chunk_size)
        torch.testing.assert_close(found, expected)
    batches = [(x[:4], None), (x[4:], None)]
    torch.testing.assert_close(regularizers.importance_landscape(model, batches, expectation="exact"), expected)


def test_drawn_classes_have_the_networks_probabilities():
    model, x = make("plain"), images(1)
    with torch.no_grad():
        model[-1].weight.mul_(20)  # far from uniform
    found = regularizers.importance_landscape(model, x.expand(3000, -1, -1, -1))
    expected = brute_force(model.eval(), x)
    assert (found - expected).abs().max() < 0.1 < expected.std()


SKEWED = torch.arange(9, dtype=torch.float64).view(3, 3) - 4
LAPLACIANS = pytest.mark.parametrize("kernel", [3, 5, SKEWED], ids=["3", "5", "skewed"])


def curvature(image: torch.Tensor, kernel: int | torch.Tensor) -> torch.Tensor:
    """Return an image's Laplacian by SciPy, of an odd width or by a stencil."""
    if isinstance(kernel, int):
        width, kernel = kernel, torch.ones(kernel, kernel, dtype=torch.float64)
        kernel[width // 2, width // 2] = 1 - width**2
    return torch.from_numpy(correlate(image.numpy(), kernel.numpy(), mode="mirror"))


@LAPLACIANS
def test_the_smoothness_of_data_is_that_of_each_image_on_average(kernel):
    x = images(4)
    x[2] = 0.5  # no variation: NaN must not spread
    expected = 0
    for image in x[[0, 1, 3]]:
        n = torch.stack([curvature(channel, kernel) for channel in image]).norm(dim=0)
        expected = expected + n / n.norm() * 8
    found = regularizers.data_smoothness(x.clone().requires_grad_(), laplacian_kernel=kernel)
    torch.testing.assert_close(found, expected / 4)
    assert not found.requires_grad
    single = regularizers.data_smoothness(x.float(), laplacian_kernel=kernel)
    torch.testing.assert_close(single, (expected / 4).float())
    torch.testing.assert_close(regularizers.data_smoothness([x[:1], x[1:]], laplacian_kernel=kernel), expected / 4)


@LAPLACIANS
def test_the_curvature_loss_is_the_variance_of_the_landscapes_laplacian(kernel):
    model, x = make("plain"), images()
    expected = curvature(brute_force(model.eval(), x), kernel).var(correction=0)
    loss = regularizers.PILCRO(laplacian_kernel=kernel, expectation="exact")(model, x)
    torch.testing.assert_close(loss, expected)


def test_seeds_change_the_classes_that_are_drawn():
    model, x = make("plain"), images()

    def measure(seed):
        return regularizers.PILCRO(seed=seed)(model, x), regularizers.importance_landscape(model, x, seed=seed).max()

    first, again, other = measure(0), measure(0), measure(1)
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_total_variation_is_the_mean_over_pairs_of_neighbours():
    image = torch.rand(3, 4, dtype=torch.float64)
    pairs = [(image[i, j] - image[i + 1, j]) ** 2 for i in range(2) for j in range(4)]
    pairs += [(image[i, j] - image[i, j + 1]) ** 2 for i in range(3) for j in range(3)]
    torch.testing.assert_close(regularizers.total_variation(image), torch.stack(pairs).mean())
    for factor in (2.0**-14, 2.0**10):  # float16 holds the differences, not their squares
        part = (image * factor).half()
        torch.testing.assert_close(regularizers.total_variation(part), regularizers.total_variation(part.float()))


def stack() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 2, 2, dilation=2), nn.Flatten()
    )


def test_paths_are_counted_by_what_each_layer_reads():
    """Entries of the layers' Jacobians are not zero where there is a path; their products count the paths."""
    model, x = stack(), torch.zeros(2, 9, 9)
    counts = torch.eye(x.numel())
    for layer in model:
        outputs = layer(x[None])[0]
        reads = torch.autograd.functional.jacobian(lambda x, layer=layer: layer(x[None])[0], x) != 0
        counts = reads.float().view(outputs.numel(), -1) @ counts
        x = outputs.detach()
    assert torch.equal(regularizers.path_counts(model, (2, 9, 9)).float().flatten(), counts.mean(0))


@pytest.mark.parametrize(
    "layer",
    [
        *(nn.Conv1d(1, 2, 3), loco_nn.LocallyConnected1d(1, 2, 3, input_size=5), nn.Linear(5, 3)),
        *(nn.Dropout(), nn.ReLU(), nn.ReLU(inplace=True)),
    ],
    ids=str,
)
def test_a_layer_alone_is_a_model(layer):
    assert torch.equal(regularizers.path_counts(layer, (1, 5)), regularizers.path_counts(nn.Sequential(layer), (1, 5)))
    x = torch.rand(3, 1, 5) + 0.5
    for measure in (regularizers.region_radius, regularizers.count_regions):
        torch.testing.assert_close(measure(layer.eval(), x), measure(nn.Sequential(layer), x))


class Code(nn.Module):
    """A layer and a function of its result."""

    def __init__(self, function, layer=nn.Linear):
        super().__init__()
        self.layer, self.function = layer(3, 3), function

    def forward(self, x):
        return self.function(self.layer(x))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_paths_of_branches_add_up():
    model = Code(lambda x: torch.cat([x + x.relu(), x.view(x.size(0), -1)], 1))
    assert regularizers.path_counts(model, (3,)).tolist() == [1.5] * 3
    assert regularizers.path_counts(nn.Sequential(model, nn.Linear(6, 1)), (3,)).tolist() == [9.0] * 3


def hooked(model):
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


COUNTED_WRONGLY = {
    "an output tensor, got tuple": lambda: Code(lambda x: (x, x)),
    "hooks, got some at the model itself": lambda: hooked(nn.Sequential(nn.Linear(3, 3))),
    r"max_pool1d\(\)": lambda: Code(lambda x: nn.functional.max_pool1d(x, 2)),
    r"sigmoid\(\)": lambda: Code(torch.sigmoid),
    r"mul\(\)": lambda: Code(lambda x: x * 3),
    "the tensor layer.weight": lambda: Code(nn.ReLU(), Doubled),
    "hooks, got some at layer": lambda: Code(nn.ReLU(), lambda *sizes: nn.utils.weight_norm(nn.Linear(*sizes))),
    "ParametrizedLinear": lambda: Code(
        nn.ReLU(), lambda *sizes: nn.utils.parametrizations.weight_norm(nn.Linear(*sizes))
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("said", COUNTED_WRONGLY)
def test_operations_whose_paths_would_be_counted_wrongly_are_refused(said):
    with pytest.raises(TypeError, match=f"model: expected .*{said}"):
        regularizers.path_counts(COUNTED_WRONGLY[said](), (3,))


MODEL, X = nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES)), torch.rand(2, 3, 8, 8)
WRONG = {
    "x: expected images of shape": lambda: regularizers.importance_landscape(MODEL, X[0]),
    r"x\[1\]: expected a tensor": lambda: regularizers.importance_landscape(MODEL, [X, "y"]),
    "x: expected a tensor or an iterable of batches, got int": lambda: regularizers.importance_landscape(MODEL, 5),
    r"x\[0\]: expected a tensor, got tuple": lambda: regularizers.data_smoothness([()]),
    "x: expected at least one batch": lambda: regularizers.importance_landscape(MODEL, []),
    r"model: expected an output of shape \(2, classes\)": lambda: regularizers.importance_landscape(nn.Identity(), X),
    r"model: expected an output tensor of shape \(batch, classes\), got tuple": lambda: (
        regularizers.importance_landscape(nn.MaxPool2d(2, return_indices=True), X, expectation="exact")
    ),
    "model: expected a module": lambda: regularizers.importance_landscape(len, X),
    "expectation: expected one of": lambda: regularizers.importance_landscape(MODEL, X, expectation="mean"),
    "seed: expected an int of 64 bits": lambda: regularizers.importance_landscape(MODEL, X, seed=2**70),
    "chunk_size: expected at least 1": lambda: regularizers.importance_landscape(MODEL, X, chunk_size=0),
    "laplacian_kernel: expected an odd": lambda: regularizers.data_smoothness(X, laplacian_kernel=4),
    "laplacian_kernel: expected at most 15": lambda: regularizers.data_smoothness(X, laplacian_kernel=17),
    r"image: expected shape \(H, W\)": lambda: regularizers.total_variation(X),
    "input_size: expected an int": lambda: regularizers.path_counts(stack(), "2"),
    "expected linear layers, ReLUs and flattening, got MaxPool2d at 1": lambda: regularizers.path_counts(
        nn.Sequential(nn.Conv2d(1, 1, 3), nn.MaxPool2d(2)), (1, 8, 8)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    with pytest.raises((TypeError, ValueError), match=message):
        WRONG[message]()
