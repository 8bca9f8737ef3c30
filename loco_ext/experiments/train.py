"""The training loop: cross-entropy over the epochs of a :class:`Loader`, and evaluation of loss and accuracy."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from loco_ext import optim
from loco_ext.experiments.data import Dataset
from loco_ext.experiments.distillation import Teacher
from loco_ext.experiments.loader import Loader, Normalization, batches_per_epoch
from loco_ext.experiments.models import find_model
from loco_ext.experiments.precision import Precision
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.samples import Samples
from loco_ext.experiments.settings import Settings, SettingsError, budget_of, settings_errors
from loco_ext.foreign_checkpoints import without_wrappers
from loco_ext.fx.modules import unwrapped
from loco_ext.output import progress_bar
from loco_ext.penalties.strengths import convolutions
from loco_ext.regularizers import PILCRO, data_smoothness
from loco_ext.sparsity import Budget, Penalty, complexity_penalties, folded_penalties

if TYPE_CHECKING:
    from tqdm import tqdm

EVALUATION_BATCH = 500
BUDGET_SPAN = 0.1, 0.5  # parts of the training at which a Budget begins and ends


@dataclass(frozen=True)
class Epoch:
    """Metrics of one epoch: losses are means over samples, accuracies are in [0, 1], seconds are training time.

    ``measures`` holds additional measurements after the epoch, by name.
    """

    epoch: int  # counted from 1
    learning_rate: float
    train_loss: float
    train_accuracy: float  # on the augmented samples, while the weights change
    test_loss: float
    test_accuracy: float
    seconds: float
    samples_per_second: float
    measures: dict[str, float | None] = field(default_factory=dict)


def make_model(settings: Settings, data: Dataset) -> nn.Module:
    """Return the network in channels_last, which is faster; its weights are drawn on the CPU from only the seed.

    The caller's random state is unchanged.
    """
    make, _, scalable = find_model(settings.model)
    options = {"width": settings.width} if scalable else {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        model = make(data.channels, data.classes, data.size, **options)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def make_optimizer(settings: Settings, model: nn.Module, data: Dataset) -> torch.optim.Optimizer:
    """Return this package's optimizer for the model, with decay by locality on convolutions and the penalty's prox.

    Raises:
        SettingsError: the locality names a layer that the model lacks, or does not fit a kernel; all parameters of the
            model are frozen.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SettingsError(f"model: expected one with parameters to train, got {settings.model}, which has none")
    everywhere, layers = settings.locality, None
    if isinstance(everywhere, Mapping):
        (prefix, _), own = without_wrappers(model.state_dict()), dict(model.named_modules())
        # The command analyze leaves the prefix out of names.
        layers = {prefix + name if prefix + name in own else name: each for name, each in everywhere.items()}
        everywhere = None
    penalties = layer_penalties(settings, model, data) if settings.solver == "prox" else None
    options: dict[str, Any] = {"lr": settings.learning_rate, "norm": settings.norm}
    try:
        groups = optim.parameter_groups(model, settings.weight_decay, everywhere, penalties, layers)
        if settings.optimizer == "sgd":
            return optim.SGD(groups, momentum=settings.momentum, **options)
        return {"adam": optim.Adam, "adamw": optim.AdamW}[settings.optimizer](groups, **options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"locality: {str(error).removeprefix('locality: ')}") from error


def penalty_term(settings: Settings, model: nn.Module, data: Dataset) -> Callable[[], Tensor] | None:
    """Return the term that the solver "subgradient" adds to the loss: the penalty summed over all convolutions."""
    penalties = layer_penalties(settings, model, data)
    if penalties is None or settings.solver != "subgradient":
        return None
    weights = {name: module.weight for name, module in convolutions(model).items()}
    return lambda: torch.stack([penalty.value(weights[name]) for name, penalty in penalties.items()]).sum()


def layer_penalties(settings: Settings, model: nn.Module, data: Dataset) -> Mapping[str, Penalty] | None:
    """Return the penalty of each convolution, by name."""
    if settings.penalty == "complexity":
        first = next(model.parameters())
        image = data.blank(first.device).to(first.dtype)
        kinds = {"kind": settings.kind, "weighting": settings.weighting}
        return complexity_penalties(model, (image,), settings.strength, **kinds)
    penalty = settings.make_penalty()
    if penalty is None:
        return None
    if not settings.penalises_folded:
        return dict.fromkeys(convolutions(model), penalty)
    with settings_errors("folded: expected False for this model; "):
        return folded_penalties(model, penalty)


def make_budget(
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset,
    processes: Processes,
    samples: int = 1,
) -> Budget | None:
    """Return the budget that makes the network smaller while it trains, or None if there is none.

    Args:
        samples: number of samples in the batch whose latency counts.

    Raises:
        SettingsError: the model cannot be made as small, or has no layer of ``round_to`` channels.
    """
    chosen = budget_of(settings)
    if chosen is None:
        return None
    check_rounding(settings.round_to, model)
    steps = settings.epochs * batches_per_epoch(len(data.train.labels), settings.batch_size, processes.count)
    begin, end = (round(share * (steps - 1)) for share in BUDGET_SPAN)
    options: dict[str, Any] = {name: getattr(settings, name) for name in ("method", "granularity", "round_to")}
    options |= {chosen[0]: chosen[1], "example_inputs": data.blank(processes.device, samples)}
    weights = {name: getattr(module, "weight", None) for name, module in unwrapped(model).named_modules()}
    # Layers that do not train have no gradients, by which their filters could be compared.
    options["skip"] = [name for name, w in weights.items() if isinstance(w, nn.Parameter) and not w.requires_grad]
    with settings_errors():  # it cannot be met
        return Budget(model, optimizer, begin=begin, end=end + 1, **options)


def check_rounding(round_to: int, model: nn.Module) -> None:
    """Raise SettingsError if no layer has as many channels, so that all numbers of channels would stay."""
    widest = max((weight.shape[0] for weight in model.parameters() if weight.dim() > 1), default=1)
    if round_to > widest:
        raise SettingsError(f"round_to: expected at most {widest}, the channels of the widest layer, got {round_to}")


def make_pilcro(settings: Settings, data: Dataset, normalization: Normalization) -> PILCRO | None:
    """Return the regulariser of the importance landscape, or None without one.

    Args:
        normalization: on the CPU, as the images.

    Raises:
        SettingsError: the images are too small for a Laplacian.
    """
    if settings.pilcro is None:
        return None
    if data.size < 2:
        raise SettingsError(f"pilcro: expected images of at least 2x2 pixels, got {data.name}, {data.size}x{data.size}")
    options: dict[str, Any] = {}
    if settings.pilcro == "target":
        batches = (normalization(batch) for batch in data.train.images.split(EVALUATION_BATCH))
        options = {"target": data_smoothness(batches), "reduction": "mean"}
    return PILCRO(settings.pilcro, settings.alpha, seed=settings.seed, **options)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset,
    settings: Settings,
    processes: Processes,
    *,
    label: str,
    start: int = 0,
    precision: Precision | None = None,
    budget: Budget | None = None,
    teacher: Teacher | None = None,
    after_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> list[Epoch]:
    """Train ``model`` in place from epoch ``start``, counted from 0, to the last; return the metrics of each.

    Args:
        model: maps images to logits; on the processes' device.
        label: text in front of the progress bar, which goes to stderr.
        precision: precision of the steps, with its state if the run is resumed; None makes a new one from the settings.
        budget: what makes the model smaller, with its state if the run is resumed.
        teacher: network whose outputs the model learns.
        after_epoch: called in every process with the metrics of each epoch.
    """
    history = []
    normalization = Normalization(data.train)
    pilcro = make_pilcro(settings, data, normalization)  # before the normalization moves to the device
    loader = Loader(
        data.train,
        normalization,
        processes.device,
        batch_size=settings.batch_size,
        seed=settings.seed,
        augmented=settings.augment and data.augmented,
        cropped=settings.crop,
        shuffled=settings.shuffle,
        rank=processes.rank,
        processes=processes.count,
    )
    if pilcro is not None:
        pilcro.load_state_dict({"calls": start * len(loader)})
    test = data.test.to(processes.device)
    term = penalty_term(settings, model, data)
    precision = precision or Precision(settings.amp, processes.device)
    steps = (settings.epochs - start) * len(loader)
    deterministic = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)
    statistics: AbstractContextManager[Any] = nullcontext()
    if settings.penalises_folded and processes.count > 1:  # the penalty depends on running variances
        statistics = optimizer.register_step_pre_hook(lambda *_: processes.share_buffers(model))
    with deterministic, statistics, progress_bar(steps, label, unit="step", shown=processes.first) as progress:
        for epoch in range(start, settings.epochs):
            rate = settings.learning_rate_of(epoch)
            for group in optimizer.param_groups:
                group["lr"] = rate
            # Wrapped anew in each epoch: after its first step DDP sums in another order, which a resumed run would not
            # have.
            called = processes.wrap(model)
            begin = time.perf_counter()
            with _seeded_dropout(settings.seed, epoch, processes):
                found = train_epoch(
                    called, optimizer, loader, epoch, progress, term, precision, pilcro, budget, teacher
                )
                sums = processes.sum(found).tolist()
            seconds = time.perf_counter() - begin
            processes.share_buffers(model)
            losses, correct, count = sums
            tested = evaluate(model, test, normalization, processes)
            figures = Epoch(epoch + 1, rate, losses / count, correct / count, *tested, seconds, count / seconds)
            progress.set_postfix_str(f"test accuracy {figures.test_accuracy:.1%}", refresh=False)
            history.append(figures)
            after_epoch(figures)
    return history


@contextmanager
def _seeded_dropout(seed: int, epoch: int, processes: Processes) -> Iterator[None]:
    """Seed dropout only by epoch and process inside the ``with``, and restore the random state on exit."""
    (state,) = np.random.SeedSequence([seed, epoch, processes.rank]).generate_state(1, np.uint64)
    with torch.random.fork_rng([processes.device] if processes.device.type == "cuda" else []):
        torch.manual_seed(int(state))
        yield


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    epoch: int,
    progress: "tqdm[Any]",
    term: Callable[[], Tensor] | None = None,
    precision: Precision | None = None,
    pilcro: PILCRO | None = None,
    budget: Budget | None = None,
    teacher: Teacher | None = None,
) -> Tensor:
    """Train for one pass; ``term`` and ``pilcro`` are added to the minimised loss, not to the returned one.

    Args:
        budget: its step follows the optimizer's.
        teacher: its loss is minimised in place of the cross-entropy.

    Returns:
        float64 [3] on the device, without synchronisation: this process's sum of cross-entropies, number of correct
        predictions, and number of samples.
    """
    model.train()
    precision = precision or Precision(False, loader.device)
    losses, correct, counts = [], [], []
    for images, labels, share in loader.epoch(epoch):
        optimizer.zero_grad()
        # This comes before the forward pass, so that the memory of both is not needed at the same time.
        extra = None if pilcro is None else pilcro(model, images)
        with precision.autocast():
            logits = model(images)
            loss = cross_entropy(logits, labels)
            minimised = loss if teacher is None else teacher.loss(logits, images, labels)
        objective = minimised * share if share != 1 else minimised
        if extra is not None:
            objective = objective + extra
        precision.step(objective if term is None else objective + term(), optimizer)
        if budget is not None:
            with settings_errors():
                budget.step()
        losses.append(loss.detach())
        correct.append((logits.detach().argmax(1) == labels).sum())
        counts.append(len(labels))
        progress.update()
    weights = torch.tensor(counts, dtype=torch.float64, device=loader.device)
    total = torch.stack(losses).double() @ weights
    return torch.stack([total, torch.stack(correct).sum().double(), weights.sum()])


def measure_accuracies(data: Dataset, processes: Processes, *models: nn.Module) -> list[float]:
    """Return the accuracy of each model, on the processes' device, on all test samples; see :func:`evaluate`."""
    normalization, test = Normalization(data.train).to(processes.device), data.test.to(processes.device)
    return [evaluate(model, test, normalization, processes)[1] for model in models]


@torch.no_grad()
def evaluate(
    model: nn.Module, samples: Samples, normalization: Normalization, processes: Processes
) -> tuple[float, float]:
    """Return the mean loss and the accuracy (top 1). Leaves ``model`` in evaluation mode."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=processes.device)
    images, labels = (part[processes.rank :: processes.count] for part in samples)
    for batch, expected in zip(images.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH), strict=True):
        logits = model(normalization(batch))
        sums[0] += cross_entropy(logits, expected, reduction="sum").double()
        sums[1] += (logits.argmax(1) == expected).sum()
    loss, correct = (processes.sum(sums) / len(samples.labels)).tolist()
    return loss, correct
