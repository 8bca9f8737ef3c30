"""Fixtures that tests of several measures share."""

import pytest
import torch.distributed as dist


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
