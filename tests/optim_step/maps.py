"""Decay maps of all kinds for steps."""

import torch

from loco_ext import geometry

LOCO = geometry.decay_map(3, (0.5, 2.0))
LOCO_2D = geometry.decay_map((3, 3), (0.5, 2.0))
FULL = torch.rand(6, 5, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
# (parameter's shape, map)
ANY_MAP = {
    "3x3": ((6, 5, 3, 3), LOCO_2D),
    "5x5": ((6, 5, 5, 5), geometry.decay_map((5, 5), (2.0, 1.5, 1.0, 0.8, 0.5, 0.25))),
    "1x7": ((6, 5, 1, 7), geometry.decay_map((1, 7), (0.5, 2.0))),
    "7x1": ((6, 5, 7, 1), geometry.decay_map((7, 1), (0.5, 2.0))),
    "3d": ((4, 3, 3, 3, 3), geometry.decay_map((3, 3, 3), (0.5, 2.0))),
    "1d": ((7, 6, 3), LOCO),
    "per_block": ((23, 2, 3, 5), FULL.flatten()[:23].reshape(23, 1, 1, 1)),
    "per_input_channel": ((6, 5, 3, 3), FULL[0, :, :1, :1]),
    "full_size": ((6, 5, 3, 3), FULL),
    "single_element": ((6, 5, 3, 3), torch.tensor([0.7], dtype=torch.float64)),
    "0_dim": ((6, 5, 3, 3), torch.tensor(0.7, dtype=torch.float64)),
    "column": ((6, 5, 3, 3), FULL[0, 0, :, :1]),
    "transposed": ((6, 5, 3, 3), FULL[0, 0].t()),
    "with_gaps": ((6, 5, 3, 3), FULL[0, ::2, :, 0]),
    "expanded": ((6, 5, 3, 3), FULL[0, 0, 0].expand(3, 3)),
    "of_a_0_dim_parameter": ((), torch.tensor(0.7, dtype=torch.float64)),
    "of_an_empty_parameter": ((0, 5, 3, 3), LOCO_2D),
    "per_channel_of_an_empty_parameter": ((6, 0, 3, 3), FULL[:, :1, :1, :1]),
    "longer_than_the_table": ((2, 300, 3, 3), FULL.flatten()[:9].reshape(3, 3)),
    "of_a_large_kernel": ((3, 2, 47, 47), torch.rand(47, 47, dtype=torch.float64)),
    "full_size_and_long": ((9, 300, 3), torch.rand(9, 300, 3, dtype=torch.float64)),
}
