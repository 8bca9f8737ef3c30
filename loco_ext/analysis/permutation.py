"""Importance of single inputs: by resampling them over a data set, and by gradients, which Lemma 1 says is near."""

import torch
from torch import Tensor, nn

from loco_ext import compiler
from loco_ext.analysis.target_logits import check_classifier, check_int64, gradients_of_targets, of_targets
from loco_ext.argument_checks import check_count
from loco_ext.fx.modules import unwrapped
from loco_ext.regularizers.evaluation import constant, measuring


@compiler.disable
def permutation_importance(
    model: nn.Module, x: Tensor, targets: Tensor, units: Tensor, *, draws: int = 2, seed: int = 0
) -> Tensor:
    """Return the mean squared change of a logit when an input is drawn anew from the data.

    It is ``E_x[(E_u[h(x with input i set to u)] - h(x))^2]`` (eq. 10), where ``u`` is the same input of another image
    of ``x`` and ``h`` is the logit of the image's target. The square is estimated by products of two different draws,
    which has no bias. The estimate can therefore be negative where the importance is almost zero.

    Args:
        model: maps images to logits [N, classes]; it is evaluated in evaluation mode, and its flags are restored.
        x: floating-point images of shape ``(N, C, H, W)``; values are drawn from all of them, with replacement.
        targets: int64 classes of shape ``(N,)``.
        units: int64 of shape ``(K, 3)``: channel, row and column of each input to measure.
        draws: number of draws for each image and input, at least 2; each takes one forward pass over ``x``.
        seed: seed of the draws, which are made on the CPU.

    Returns:
        float64 CPU tensor of shape ``(K,)``.

    Raises:
        TypeError: ``model`` is not a module, ``x`` is not a floating-point tensor, ``targets`` or ``units`` is not an
            int64 tensor, or ``draws`` or ``seed`` is not an int.
        ValueError: shapes do not fit, a unit is outside the images, there are fewer than two draws, or a target is
            none of the model's classes.

    Source:
        Moens, Yu, Salimi-Khorshidi, "PILCRO: Making Importance Landscapes Flat Again", Lemma 1 and appendix A.

    Example:
        >>> import torch
        >>> from loco_ext import analysis
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> x, targets = torch.rand(8, 1, 2, 2), torch.zeros(8, dtype=torch.int64)
        >>> analysis.permutation_importance(model, x, targets, torch.tensor([[0, 1, 1]])).shape
        torch.Size([1])
    """
    check_classifier(model, x, targets)
    _check_units(units, x)
    check_count("draws", draws, smallest=2)
    check_count("seed", seed)
    generator, model = torch.Generator().manual_seed(seed), unwrapped(model)
    with measuring(model, x.device), torch.no_grad():
        found = torch.zeros(len(units), dtype=torch.float64, device="cpu")
        whole = of_targets(model(x.clone()), x, targets).double()  # the model may write to its input
        for place, (channel, row, column) in enumerate(units.tolist()):
            changed, sums, squares = x.clone(), torch.zeros_like(whole), torch.zeros_like(whole)
            for _ in range(draws):
                others = torch.randint(len(x), (len(x),), generator=generator, device="cpu").to(x.device)
                changed[:, channel, row, column] = x[others, channel, row, column]
                difference = of_targets(model(changed.clone()), x, targets) - whole
                sums += difference
                squares += difference.square()
            found[place] = ((sums.square() - squares) / (draws * (draws - 1))).mean()
    return found


@compiler.disable
def gradient_importance(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Return Lemma 1's estimate of the importance by resampling, ``V[x_i] E[(dh/dx_i)^2]`` for all inputs.

    The variance is the biased one over the images.

    Args:
        model, x, targets: as for :func:`permutation_importance`.

    Returns:
        float64 CPU tensor of shape ``(C, H, W)``.

    Raises:
        TypeError, ValueError: as :func:`permutation_importance`; the output cannot be differentiated.

    Source:
        Moens, Yu, Salimi-Khorshidi, "PILCRO: Making Importance Landscapes Flat Again", Lemma 1 and appendix A.

    Example:
        >>> import torch
        >>> from loco_ext import analysis
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)).double()
        >>> x, targets = torch.rand(8, 1, 2, 2, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
        >>> found = analysis.gradient_importance(model, x, targets)
        >>> torch.allclose(found.flatten(), x.flatten(1).var(0, correction=0) * model[1].weight[0].square())
        True
    """
    check_classifier(model, x, targets)
    model = unwrapped(model)
    with measuring(model, x.device):
        gradient = gradients_of_targets(model, x, constant(targets))
    variances = x.detach().double().var(0, correction=0)
    return (variances * gradient.double().square().mean(0)).cpu()


def _check_units(units: Tensor, x: Tensor) -> None:
    check_int64("units", units)
    if units.dim() != 2 or units.shape[1] != 3:
        raise ValueError(f"units: expected shape (K, 3), got {tuple(units.shape)}")
    if ((units.cpu() < 0) | (units.cpu() >= torch.tensor(x.shape[1:], device="cpu"))).any():
        raise ValueError(f"units: expected channels, rows and columns of images {tuple(x.shape[1:])}, got others")
