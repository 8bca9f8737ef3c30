"""The processes that train together, as started by torchrun; a single process is the simplest case."""

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loco_ext.experiments.settings import SettingsError, settings_errors


@dataclass(frozen=True)
class Processes:
    """Rank of this process, number of processes, and device of this process."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Return whether this process is the one that writes files and reports."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model to call in training, which averages gradients over the processes."""
        if self.count == 1:
            return model
        return DistributedDataParallel(model, [self.device] if self.device.type == "cuda" else None)

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place, and return it."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def share_buffers(self, model: nn.Module) -> None:
        """Broadcast the first process's buffers; each process has running statistics of only its own samples."""
        if self.count > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Join the processes of this run, over NCCL on CUDA devices and Gloo on all others.

    Args:
        device: "cuda" means the device of this process's local rank, as does any index if there are several processes.

    Raises:
        SettingsError: the environment is not as torchrun sets it, or there are more processes than CUDA devices.
    """
    if "WORLD_SIZE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        yield Processes(torch.device(device))
        return
    own = _join(torch.device(device))
    # A training run makes the running variances equal before each step, of which the optimizers do not know.
    warnings.filterwarnings("ignore", "penalty: expected SyncBatchNorm")
    try:
        yield Processes(own, dist.get_rank(), dist.get_world_size())
        dist.barrier()  # torchrun ends all processes when the first fails: none may leave while another writes
    finally:
        # DDP's reference cycles keep the process group alive, and its threads abort a process that exits before them.
        gc.collect()
        dist.destroy_process_group()


def _join(device: torch.device) -> torch.device:
    if device.type == "cuda":
        rank = os.environ.get("LOCAL_RANK", "0")
        if not rank.isdecimal() or int(rank) >= torch.cuda.device_count():
            raise SettingsError(f"processes: expected a CUDA device for each, got local rank {rank}")
        device = torch.device("cuda", int(rank))
        torch.cuda.set_device(device)
    with settings_errors("processes: expected the environment that torchrun makes: "):
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device
