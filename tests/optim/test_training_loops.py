"""Tests of common training loops with our SGD in place of torch's: they give the same weights, bit for bit.

Factors that are powers of two make this possible: fused multiply-adds then round as torch's products and sums do.
"""

import logging

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from loco_ext import optim

SETTINGS = {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}
CLIP = 0.25  # far below these gradients' norms
LIBRARIES = (torch.optim, optim)


def make_model():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def make_data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 1, 8, 8, generator=generator), torch.arange(32) % 3)


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def assert_trained_alike(train):
    """Assert that ``train(SGD)`` returns equal modules (the model and whatever else must agree) for both libraries."""
    theirs, ours = (train(library.SGD) for library in LIBRARIES)
    start = make_model().state_dict()
    assert not torch.equal(theirs.state_dict()["0.weight"], start["0.weight"])
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name


@pytest.mark.parametrize("fused", [None, True])
def test_a_loop_with_a_scaler_accumulation_clipping_a_scheduler_and_an_average(fused):
    def train(kind):
        model = make_model()
        optimizer = kind(model.parameters(), **SETTINGS, fused=fused)
        scheduler, scaler = make_scheduler(optimizer), torch.amp.GradScaler("cpu", init_scale=64.0)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for number, (x, y) in enumerate(DataLoader(make_data(), 4)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                average.update_parameters(model)
                optimizer.zero_grad()
        return average.module

    assert_trained_alike(train)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_lightnings_trainer(precision, tmp_path):
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self, kind):
            super().__init__()
            self.model, self.kind = make_model(), kind

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = self.kind(self.parameters(), **SETTINGS)
            return {"optimizer": optimizer, "lr_scheduler": make_scheduler(optimizer)}

    def train(kind):
        """Train for two epochs; a second trainer continues from the first one's checkpoint."""
        for epochs in (1, 2):
            module = Module(kind)
            trainer = lightning.Trainer(
                **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False},
                **{"max_epochs": epochs, "gradient_clip_val": CLIP, "accumulate_grad_batches": 2},
                **_mixed(lightning.pytorch.plugins.MixedPrecision, precision),
                enable_checkpointing=False,
            )
            path = tmp_path / "last.ckpt"
            trainer.fit(module, DataLoader(make_data(), 4), ckpt_path=path if epochs == 2 else None)
            trainer.save_checkpoint(path)
        return module.model

    assert_trained_alike(train)


def _mixed(plugin, precision):
    """Return the precision options; Lightning allows float16 on the CPU only through the plugin."""
    if precision != "16-mixed":
        return {"precision": precision}
    return {"plugins": plugin(precision, "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))}


@pytest.mark.slow
def test_lightnings_fabric():
    fabric_module = pytest.importorskip("lightning.fabric")

    def train(kind):
        fabric = fabric_module.Fabric(accelerator="cpu", **_mixed(fabric_module.plugins.MixedPrecision, "16-mixed"))
        inner = make_model()
        optimizer = kind(inner.parameters(), **SETTINGS)
        scheduler = make_scheduler(optimizer)
        model, optimizer = fabric.setup(inner, optimizer)
        for x, y in fabric.setup_dataloaders(DataLoader(make_data(), 4)):
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return inner

    assert_trained_alike(train)


@pytest.mark.slow
def test_accelerate():
    accelerate = pytest.importorskip("accelerate")

    def train(kind):
        accelerate.state.AcceleratorState._reset_state()
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
        inner = make_model()
        optimizer = kind(inner.parameters(), **SETTINGS)
        prepared = accelerator.prepare(inner, optimizer, DataLoader(make_data(), 4), make_scheduler(optimizer))
        model, optimizer, loader, scheduler = prepared
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return inner

    assert_trained_alike(train)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["optimizers", "optimizer_cls_and_kwargs"])
def test_transformers_trainer(given, tmp_path):
    transformers = pytest.importorskip("transformers")

    class Classifier(nn.Sequential):
        def forward(self, x, labels):
            scores = super().forward(x)
            return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}

    data = [{"x": x, "labels": y} for x, y in make_data()]

    def train(kind):
        """Train for two epochs; a second trainer continues from the first one's checkpoint."""
        for epochs in (1, 2):
            model = Classifier(*make_model())
            settings = transformers.TrainingArguments(
                **{"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "disable_tqdm": True},
                **{"num_train_epochs": epochs, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
                **{"max_grad_norm": CLIP, "lr_scheduler_type": "constant", "save_strategy": "epoch", "bf16": True},
                **{"learning_rate": SETTINGS["lr"], "weight_decay": SETTINGS["weight_decay"]},
            )
            chosen = (kind(model.parameters(), **SETTINGS), None) if given == "optimizers" else (kind, SETTINGS)
            trainer = transformers.Trainer(model, settings, train_dataset=data, **{given: chosen})
            trainer.train(resume_from_checkpoint=epochs == 2)
        return model

    assert_trained_alike(train)
