"""Networks of half and a quarter of ResNet-8's MACs on CIFAR-10: our budgets, fewer channels, and pruning by a peer.

    python -m studies.budget_cifar10 --data DIR      takes many hours on one core; adds to studies/results/
    python -m studies.budget_cifar10 --data DIR --images 10000      takes some two hours
    python -m studies.budget_cifar10 --data DIR --images 10000 --branches attention --runs runs/budget_attention
    python -m studies.budget_cifar10 --data DIR --time      then measures latencies, on a CPU that is quiet

All ways have the same recipe, epochs and seeds, and thus order of samples and augmentations, so that differences are
paired, by seed and by the device that trained. Each network is added to the results when it is trained, and is not
trained again: the study may be stopped at any time, and go on elsewhere. Networks may be trained on a GPU; latencies
are those of the CPU.

Ways that are *distilled* learn the outputs of the dense network as well, which has been trained for all epochs with the
same seed. Its training is a cost beside the epochs that all ways have, the same for all that are distilled. Narrower
networks learn from it in all epochs, those that are pruned at the cut in the epochs after it.

With ``--branches attention``, each residual branch ends with attention to channels. With ``--branches groups``, a
branch is a 1x1 convolution, one of 3x3 in groups of four channels, and a 1x1 convolution, as in ResNeXt (Xie et al.,
2017). With ``--branches inverted``, its 3x3 convolution is depthwise and has four times as many channels, as in
MobileNetV2 (Sandler et al., 2018).
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import Optimizer

from bench import harness, machine
from loco_ext import geometry, sparsity
from loco_ext.experiments import settings
from loco_ext.experiments.data import Dataset, load
from loco_ext.experiments.distillation import Teacher
from loco_ext.experiments.loader import Loader, Normalization
from loco_ext.experiments.models import ResidualBlock
from loco_ext.experiments.processes import Processes
from loco_ext.experiments.train import make_budget, make_model, make_optimizer, measure_accuracies
from loco_ext.folders import owned
from loco_ext.output import replacing
from loco_ext.sparsity.budget.distillation import TEMPERATURE, WEIGHT
from studies import summaries, tables
from studies.fitting import fit
from studies.options import Data, Device, Runs
from studies.result_file import Record, ResultFile

WIDTHS = np.arange(64, 0, -1) / 64
CUT = 0.5  # part of the training after which networks that shrink at once or gradually have their last size
TIMED = {1: "1 image", 64: "64 images"}
EFFORT = harness.Effort(min_rounds=20, min_seconds=1.0, builds=2)
PRUNING_STEPS = 200  # steps of Torch-Pruning from the whole network to none
CPU = torch.device("cpu")
PLAIN = "convolutions"
BRANCHES = (PLAIN, "attention", "groups", "inverted")


class Attention(nn.Module):
    """Attention to channels of CBAM (Woo et al., 2018, eq. 2): two layers see the means and the maxima of channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(4, channels // 4)
        self.gate = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x.mean((2, 3))) + self.gate(x.amax((2, 3)))
        return x * torch.sigmoid(gates)[:, :, None, None]


def grouped(residual: nn.Sequential, size: int, expansion: int) -> nn.Sequential:
    """Return a branch whose 3x3 convolution has groups, with as many channels before and after as the given one.

    Args:
        size: channels of a group.
        expansion: channels inside the branch, for each that comes out.
    """
    first: Any = residual[0]
    last: Any = residual[-1]
    groups = max(1, expansion * last.num_features // size)
    inner = size * groups
    options: dict[str, Any] = {"padding": 1, "stride": first.stride, "groups": groups, "bias": False}
    return nn.Sequential(
        *(nn.Conv2d(first.in_channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
        *(nn.Conv2d(inner, inner, 3, **options), nn.BatchNorm2d(inner), nn.ReLU()),
        *(nn.Conv2d(inner, last.num_features, 1, bias=False), nn.BatchNorm2d(last.num_features)),
    )


@dataclass(frozen=True)
class Study:
    """The training that all networks have in common."""

    dataset: Dataset
    runs: Path
    model: str
    epochs: int
    device: torch.device = CPU
    branches: str = PLAIN

    def training(self, seed: int = 0, width: float = 1.0) -> settings.Settings:
        values = {"model": self.model, "data": "cifar10", "epochs": self.epochs, "weight_decay": 5e-4}
        return settings.from_preset("quick", **values, seed=seed, width=width)

    @property
    def cut(self) -> int:
        """Epoch after which networks have their last size."""
        return round(CUT * self.epochs)

    @cached_property
    def images(self) -> torch.Tensor:
        return self.dataset.blank(self.device)

    def network(self, seed: int, width: float = 1.0, kernel_size: int = 3) -> nn.Module:
        """Return an untrained network; kernels of 3x3 may have another size."""
        network = make_model(self.training(seed, width), self.dataset)
        torch.manual_seed(seed)
        for name, module in list(network.named_modules()):
            if isinstance(module, ResidualBlock) and self.branches == "attention":
                module.residual.append(Attention(module.residual[-1].num_features))  # type: ignore[arg-type]
            if isinstance(module, ResidualBlock) and self.branches == "groups":
                module.residual = grouped(module.residual, size=4, expansion=1)
            if isinstance(module, ResidualBlock) and self.branches == "inverted":
                module.residual = grouped(module.residual, size=1, expansion=4)
            if not isinstance(module, nn.Conv2d):
                continue
            options: dict[str, Any] = {"bias": False}
            if module.kernel_size == (1, 1) and module.stride != (1, 1):
                # oneDNN's backward of a strided 1x1 convolution of few channels writes out of bounds
                # (uxlfoundation/oneDNN#6035), and networks may come to have few.
                pointwise = nn.Conv2d(module.in_channels, module.out_channels, 1, **options)
                pointwise.weight = module.weight
                network.set_submodule(name, nn.Sequential(nn.AvgPool2d(1, module.stride[0]), pointwise))
            elif module.kernel_size == (3, 3) and kernel_size != 3:
                options |= {"stride": module.stride, "padding": kernel_size // 2}
                larger = nn.Conv2d(module.in_channels, module.out_channels, kernel_size, **options)
                network.set_submodule(name, larger)
        return network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def fit(
        self,
        network: nn.Module,
        seed: int,
        epochs: range | None = None,
        *,
        optimizer: Optimizer | None = None,
        budget: sparsity.Budget | None = None,
        distilled: bool = False,
    ) -> nn.Module:
        """Train a network in place for some epochs of the recipe, by default all; return it."""
        teacher = Teacher(self.dense(seed, self.epochs).eval(), WEIGHT, TEMPERATURE) if distilled else None
        training = self.training(seed)
        optimizer = optimizer or make_optimizer(training, network, self.dataset)
        epochs = range(self.epochs) if epochs is None else epochs
        return fit(network, optimizer, self.dataset, training, epochs, budget, teacher)

    def dense(self, seed: int, epochs: int) -> nn.Module:
        """Return the network after this number of epochs of the recipe, which are trained once for all ways."""
        return self._dense(seed, epochs)[0]

    def _dense(self, seed: int, epochs: int) -> tuple[nn.Module, Optimizer]:
        """Return the network and its optimizer; epochs beyond the cut continue the network of the cut."""
        network, path = self.network(seed), self.runs / f"dense-{seed}-{epochs}.pt"
        optimizer, begin = make_optimizer(self.training(seed), network, self.dataset), 0
        if path.exists():
            state = torch.load(path, self.device, weights_only=True)
            network.load_state_dict(state["network"])
            optimizer.load_state_dict(state["optimizer"])
            return network, optimizer
        if epochs > self.cut:
            (network, optimizer), begin = self._dense(seed, self.cut), self.cut
        self.fit(network, seed, range(begin, epochs), optimizer=optimizer)
        with replacing(path) as temporary:
            torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
        return network, optimizer

    def batches(self, seed: int, count: int = 10) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return some batches of training images and labels."""
        options: dict[str, Any] = {"batch_size": 128, "seed": seed, "augmented": True}
        loader = Loader(self.dataset.train, Normalization(self.dataset.train), self.device, **options)
        return [(x, y) for (x, y, _), _ in zip(loader.epoch(0), range(count), strict=False)]

    def macs(self, network: nn.Module) -> int:
        return self.compacted(network)[1].macs_after

    def compacted(self, network: nn.Module) -> tuple[nn.Module, sparsity.Report]:
        return sparsity.compact(network.eval(), self.images, cost="macs")

    @cached_property
    def whole(self) -> int:
        """MACs of the dense network."""
        return self.compacted(self.network(0))[1].macs_before

    def error(self, network: nn.Module) -> float:
        """Return the test error in percent."""
        return 100 * (1 - measure_accuracies(self.dataset, Processes(self.device), network)[0])

    def file(self, record: Record) -> Path:
        """Return where a trained network is kept, so that it can be timed later."""
        return self.runs / f"{record['way']}-{record['share']}-{record['seed']}-{record['device']}.pt"

    def latencies(self, network: nn.Module) -> dict[str, float]:
        """Return the latency of a network over that of the dense one, both compacted, measured in turn."""
        return {name: self._ratio(network, self.network(0), count) for count, name in TIMED.items()}

    def latency_budget(self, network: nn.Module, dense: nn.Module) -> float:
        """Return the latency of a network over that of the dense one, the first compacted, the other as it is."""
        return self._ratio(network, dense, max(TIMED), compacted=False)

    def _ratio(self, network: nn.Module, dense: nn.Module, count: int, compacted: bool = True) -> float:
        images = torch.randn(count, *self.images.shape[1:])
        both = {"this": sparsity.compact(network.eval(), images)[0], "dense": dense.eval()}
        if compacted:
            both["dense"] = sparsity.compact(dense, images)[0]
        calls = {key: partial(each, images) for key, each in both.items()}
        with torch.inference_mode():
            return harness.compare(partial(dict, calls), EFFORT, TIMED[count]).ratio("this", "dense")


def dense(study: Study, seed: int, share: float) -> nn.Module:
    """Train the whole network."""
    return study.dense(seed, study.epochs)


def width(study: Study, seed: int, share: float, distilled: bool = False) -> nn.Module:
    """Train a network of uniformly fewer channels."""
    return study.fit(_narrower(study, seed, share), seed, distilled=distilled)


def _narrower(study: Study, seed: int, share: float) -> nn.Module:
    fits = (w for w in WIDTHS if study.macs(study.network(0, float(w))) <= share * study.whole)
    return study.network(seed, float(next(fits)))


def kernels(study: Study, seed: int, share: float) -> nn.Module:
    """Train a network of smaller kernels: each layer has as many of the next size as fit, the others are smaller."""
    network = study.network(seed)
    layers = _convolutions(network)
    rings = torch.tensor(geometry.ring_list((3, 3), "half")).view(3, 3)
    sizes = [(rings >= gone).float() for gone in range(3)]
    for larger, smaller in pairwise(sizes):
        for part in np.linspace(1, 0, 65):
            masked = copy.deepcopy(network)
            for layer, own in zip(layers, _convolutions(masked), strict=True):
                count = math.floor(part * layer.out_channels)
                masks = torch.stack([larger] * count + [smaller] * (layer.out_channels - count))
                mask = masks[:, None].expand_as(own.weight).to(own.weight.device)
                prune.custom_from_mask(own, "weight", mask.clone())
            if study.macs(masked) <= share * study.whole:
                return study.fit(masked, seed)
    raise ValueError(f"share: expected at least that of 1x1 kernels, got {share}")


def _convolutions(network: nn.Module) -> list[nn.Conv2d]:
    return [m for m in network.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]


def gradually(study: Study, seed: int, share: float, **options: Any) -> nn.Module:
    """Train the network with a budget that falls until the cut."""
    return _shrinking(study, study.network(seed), seed, macs=share, **options)


def from_larger_kernels(study: Study, seed: int, share: float) -> nn.Module:
    """Train a network of 5x5 kernels and remove rings until its MACs are this share of those with 3x3 kernels."""
    network = study.network(seed, kernel_size=5)
    return _shrinking(study, network, seed, macs=share * study.whole / study.macs(network), granularity="rings")


def gradually_as_fast(study: Study, seed: int, share: float) -> nn.Module:
    """Train with a latency budget that falls until the cut, to the latency of the narrower network on the CPU."""
    if study.device != CPU:
        raise ValueError(f"device: expected the CPU, whose latency is the budget, got {study.device}")
    network = study.network(seed)
    latency = study.latency_budget(_narrower(study, seed, share), network)
    return _shrinking(study, network, seed, latency=latency, samples=max(TIMED))


def _shrinking(study: Study, network: nn.Module, seed: int, samples: int = 1, **options: Any) -> nn.Module:
    training = replace(study.training(seed), **{"granularity": "filters"} | options)
    optimizer = make_optimizer(training, network, study.dataset)
    budget = make_budget(training, network, optimizer, study.dataset, Processes(study.device), samples)
    return study.fit(network, seed, optimizer=optimizer, budget=budget)


def from_scratch(study: Study, seed: int, share: float) -> nn.Module:
    """Train the network that is left of :func:`at_once` from new weights."""
    network = _shrunk(study, seed, share)
    torch.manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear):
            module.reset_parameters()
    return study.fit(network, seed)


def at_once(study: Study, seed: int, share: float, distilled: bool = False, **options: Any) -> nn.Module:
    """Train the network, shrink it at the cut, and train what is left."""
    network = _shrunk(study, seed, share, **options)
    return study.fit(network, seed, range(study.cut, study.epochs), distilled=distilled)


def as_fast(study: Study, seed: int, share: float) -> nn.Module:
    """Train the network, shrink it at the cut until it is as fast as the narrower network, and train what is left.

    Its MACs may be more. Latencies are those of the CPU, wherever the network is trained. The shrunk network is kept:
    one that was found on a quiet machine may be trained on another.
    """
    path = study.runs / f"fast-{share}-{seed}-{study.cut}.pt"
    if not path.exists():
        study.dense(seed, study.cut)
        with replacing(path) as temporary:
            torch.save(_as_fast(replace(study, device=CPU), seed, share), temporary)
    network = torch.load(path, study.device, weights_only=False)
    return study.fit(network, seed, range(study.cut, study.epochs))


def _as_fast(study: Study, seed: int, share: float) -> nn.Module:
    half, images = study.dense(seed, study.cut), study.images.expand(max(TIMED), -1, -1, -1)
    latency = study.latency_budget(_narrower(study, seed, share), half)
    options: dict[str, Any] = {"batches": study.batches(seed), "granularity": "filters", "latency": latency}
    return sparsity.shrink_to(half, images, **options)[0]


def _shrunk(study: Study, seed: int, share: float, **options: Any) -> nn.Module:
    half = study.dense(seed, study.cut)
    options = {"batches": study.batches(seed), "granularity": "filters"} | options
    return sparsity.shrink_to(half, study.images, macs=share, **options)[0]


def torch_pruning(
    study: Study, seed: int, share: float, sparse: bool = False, global_pruning: bool = True, distilled: bool = False
) -> nn.Module:
    """Train the network, with sparse learning or without, prune it at the cut by group norms, and train what is left.

    Args:
        global_pruning: groups of all layers are compared; otherwise all layers lose the same share of their filters.
    """
    import torch_pruning as tp

    network = _sparsely_trained(study, seed) if sparse else study.dense(seed, study.cut)
    options: dict[str, Any] = {"global_pruning": global_pruning, "pruning_ratio": 1.0, "max_pruning_ratio": 0.95}
    options |= _pruner_options(network) | {"iterative_steps": PRUNING_STEPS}
    pruner = tp.pruner.BasePruner(network, study.images, **options)
    for _ in range(PRUNING_STEPS):
        if study.macs(copy.deepcopy(network)) <= share * study.whole:
            return study.fit(network, seed, range(study.cut, study.epochs), distilled=distilled)
        pruner.step()
    raise ValueError(f"share: expected one that Torch-Pruning reaches, got {share}")


def _sparsely_trained(study: Study, seed: int) -> nn.Module:
    """Return the network as it is at the cut after Torch-Pruning's sparse learning, trained once for all shares."""
    import torch_pruning as tp

    network, path = study.network(seed), study.runs / f"sparse-{seed}-{study.cut}.pt"
    if path.exists():
        network.load_state_dict(torch.load(path, study.device, weights_only=True))
        return network
    optimizer = make_optimizer(study.training(seed), network, study.dataset)
    regularizer = tp.pruner.GroupNormPruner(network, study.images, **_pruner_options(network))
    handle = optimizer.register_step_pre_hook(lambda *_: regularizer.regularize(network))
    study.fit(network, seed, range(study.cut), optimizer=optimizer)
    handle.remove()
    with replacing(path) as temporary:
        torch.save(network.state_dict(), temporary)
    return network


def _pruner_options(network: nn.Module) -> dict[str, Any]:
    import torch_pruning as tp

    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    return {"importance": tp.importance.GroupMagnitudeImportance(), "ignored_layers": linear}


@dataclass(frozen=True)
class Way:
    """How networks of a budget are made: training function, shares of the MACs, and the way to compare with."""

    train: Callable[[Study, int, float], nn.Module]
    shares: tuple[float, ...] = (0.5, 0.25)
    reference: str = "uniform width"


def distilled(train: Callable[..., nn.Module], **options: Any) -> Way:
    """Return the way that learns the outputs of the dense network as well."""
    return Way(partial(train, distilled=True, **options), reference="uniform width, distilled")


WAYS = {
    "dense": Way(dense, (1.0,), "dense"),
    "uniform width": Way(width),
    "uniform kernels": Way(kernels),
    "shrink_to": Way(at_once),
    "shrink_to, by fours": Way(partial(at_once, round_to=4)),
    "shrink_to, by eights": Way(partial(at_once, round_to=8)),
    "shrink_to, latency": Way(as_fast),
    "Budget": Way(gradually),
    "Budget, by fours": Way(partial(gradually, round_to=4)),
    "Budget, latency": Way(gradually_as_fast),
    "Budget, penalty": Way(partial(gradually, method="penalty")),
    "Budget, rings": Way(partial(gradually, granularity="rings")),
    tables.PEER: Way(torch_pruning),
    "Torch-Pruning, local": Way(partial(torch_pruning, global_pruning=False)),
    "Torch-Pruning, sparse": Way(partial(torch_pruning, sparse=True)),
    "shrink_to, from scratch": Way(from_scratch),
    "Budget, rings of 5x5": Way(from_larger_kernels, (1.0,), "dense"),
    "uniform width, distilled": distilled(width),
    "shrink_to, distilled": distilled(at_once),
    "shrink_to, by eights, distilled": distilled(at_once, round_to=8),
    "Torch-Pruning, global, distilled": distilled(torch_pruning),
}


def summary(networks: Sequence[Record]) -> list[Record]:
    """Return the errors of each way and share, their paired differences from those of others, MACs and latencies."""
    found: dict[tuple[float, str], dict[tuple[int, str], Record]] = {}
    for record in networks:
        found.setdefault((record["share"], record["way"]), {})[record["seed"], record["device"]] = record
    arms = []
    for (share, way), records in sorted(found.items(), key=lambda item: (-item[0][0], list(WAYS).index(item[0][1]))):
        arm: Record = {"way": way, "share": share, "networks": len(records)}
        arm["error"] = float(np.mean([record["error"] for record in records.values()]))
        arm["differences"] = {}
        for reference in sorted({WAYS[way].reference, tables.PEER} - {way}):
            others = found.get((share, reference), {})
            pairs = [pair for pair in records if pair in others]
            errors, theirs = ([each[pair]["error"] for pair in pairs] for each in (records, others))
            if len(pairs) > 1:
                compared = summaries.compare(np.array(errors), np.array(theirs))
                names = ("difference", "difference_standard_error")
                arm["differences"][reference] = {name: compared[name] for name in names}
            elif pairs:
                arm["differences"][reference] = {"difference": errors[0] - theirs[0]}
        arm["macs"] = float(np.mean([record["macs"] for record in records.values()]))
        timed = [record["latencies"] for record in records.values() if "latencies" in record]
        arm["latencies"] = {
            name: float(np.median([each[name] for each in timed])) if timed else None for name in TIMED.values()
        }
        arms.append(arm)
    return arms


def main(
    data: Data,
    runs: Runs = Path("runs/budget_cifar10"),
    model: Annotated[str, typer.Option(help="Network, resnet8 or resnet20.")] = "resnet8",
    seeds: Annotated[int, typer.Option(min=1, help="Networks per way and share.")] = 3,
    first: Annotated[int, typer.Option(min=0, help="First seed: processes share the work by seeds.")] = 0,
    epochs: Annotated[int, typer.Option(min=2, help="Epochs of each network.")] = 20,
    images: Annotated[int, typer.Option(min=1, help="Training images, the first of all 50,000.")] = 50_000,
    ways: Annotated[str, typer.Option(help="Ways to train, separated by semicolons; all if empty.")] = "",
    device: Device = "cpu",
    branches: Annotated[str, typer.Option(help=f"Residual branches: {', '.join(BRANCHES)}.")] = PLAIN,
    time: Annotated[bool, typer.Option("--time", help="Time the trained networks, on the CPU; train none.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file of the results.")] = None,
) -> None:
    """Train the networks that the results lack, add them to the JSON file one by one, print the table."""
    trained_on = CPU if time else torch.device(device)
    study = Study(load("cifar10", data).first(images), runs, model, epochs, trained_on, branches)
    if branches not in BRANCHES:
        raise typer.BadParameter(f"branches: expected one of {BRANCHES}, got {branches!r}")
    name = f"budget_cifar10-{model}-{images}-{epochs}{'' if branches == PLAIN else f'-{branches}'}.json"
    out = out or tables.RESULTS / name
    chosen = [way.strip() for way in ways.split(";")] if ways else list(WAYS)
    if unknown := [way for way in chosen if way not in WAYS]:
        raise typer.BadParameter(f"ways: expected some of {list(WAYS)}, got {unknown}")
    facts = {"settings": asdict(study.training()), "training_samples": images, "branches": branches}
    results = ResultFile("budget_cifar10", out, lambda networks: {"arms": summary(networks)}, **facts)

    with owned(runs):
        if time:
            add_latencies(study, results)
        else:
            add_networks(study, results, product(range(first, first + seeds), chosen))
    results.show()


def add_networks(study: Study, results: ResultFile, wanted: Iterable[tuple[int, str]]) -> None:
    """Train the networks of seeds and ways that the results lack."""

    def measure(key: Record) -> Record:
        network = WAYS[key["way"]].train(study, key["seed"], key["share"])
        measured = {"error": study.error(network), "macs": study.macs(network) / study.whole}
        with replacing(study.file(key)) as temporary:
            torch.save(network.cpu(), temporary)
        return measured

    for seed, way in wanted:
        for share in WAYS[way].shares:
            key = {"way": way, "share": share, "seed": seed, "device": machine.device_name(study.device)}
            results.once(key, partial(measure, key))


def add_latencies(study: Study, results: ResultFile) -> None:
    """Measure the latencies of the networks that the results have and the folder keeps."""
    for record in results.networks():
        if study.file(record).exists():
            network = torch.load(study.file(record), CPU, weights_only=False)
            results.extend(record, {"latencies": study.latencies(network)})


if __name__ == "__main__":
    typer.run(main)
