"""SGD, Adam and AdamW: torch.optim's optimizers in one fused, locality-aware step."""

from loco_ext.optim.adam import Adam, AdamW
from loco_ext.optim.backward import step_in_backward
from loco_ext.optim.groups import parameter_groups
from loco_ext.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "parameter_groups", "step_in_backward"]
