"""Tests of PILCRO in the loops that people train in: it adds the same gradient in each."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from loco_ext.regularizers import PILCRO, region_radius
from tests.processes import run_ranks

pytestmark = pytest.mark.slow  # imports of the libraries and starts of processes

WORLD = 2
STEPS = 3


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(4 * STEPS, 1, 8, 8, generator=generator), torch.arange(4 * STEPS) % 3)


def plain_loop() -> nn.Sequential:
    model, pilcro = make_model(), PILCRO(alpha=0.1, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(make_data(), 4):
        optimizer.zero_grad()
        loss = pilcro(model, x) + cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return model


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, msg=name)


def test_lightnings_trainer(tmp_path):
    """A callback adds the loss, as in a training step of one's own."""
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.pilcro = make_model(), PILCRO(alpha=0.1, every=2)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class FlatLandscapes(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
            self.extra = module.pilcro(module.model, batch[0])

        def on_before_backward(self, trainer, module, loss) -> None:
            loss.add_(self.extra)

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"max_epochs": 1, "enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[FlatLandscapes()], **settings, **quiet)
    trainer.fit(module, DataLoader(make_data(), 4))
    assert_same(module.model, plain_loop())


def train_rank(rank: int, result_path: str) -> None:
    """Train one step with accumulation under DDP; save the gradients."""
    model = DistributedDataParallel(make_model().double())
    pilcro = PILCRO(every=1)
    for step in range(2):
        x, y = batch(rank, step)
        context = model.no_sync() if step == 0 else torch.enable_grad()
        with context:
            (pilcro(model, x) + cross_entropy(model(x), y)).backward()
    x, _ = batch(rank, 0)
    assert torch.equal(region_radius(model.eval(), x), region_radius(model.module, x))
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    torch.save(gradients, f"{result_path}{rank}")


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(4, 1, 8, 8, generator=generator, dtype=torch.float64), torch.arange(4) % 3


def test_processes_average_the_gradients_of_their_own_landscapes(tmp_path, monkeypatch):
    run_ranks(train_rank, str(tmp_path / "rank"), count=WORLD, folder=tmp_path)
    found = [torch.load(tmp_path / f"rank{rank}") for rank in range(WORLD)]
    expected = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for rank in range(WORLD):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        model, pilcro = make_model().double(), PILCRO(every=1)
        for step in range(2):
            x, y = batch(rank, step)
            (pilcro(model, x) + cross_entropy(model(x), y)).backward()
        expected.append(copy.deepcopy({name: p.grad for name, p in model.named_parameters()}))
    for name in expected[0]:
        mean = (expected[0][name] + expected[1][name]) / WORLD
        torch.testing.assert_close(found[0][name], mean)
        torch.testing.assert_close(found[1][name], mean)
