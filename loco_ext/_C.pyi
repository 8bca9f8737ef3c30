"""The compiled library: host functions without torch. Its operators are in ``torch.ops.loco_ext``."""

def build_info() -> dict[str, str]:
    """The compiler, and the instruction set that the kernels were chosen for on this machine."""

def release(hold: int) -> None:
    """Frees the tensors that ``torch.ops.loco_ext.optim_step_hold`` took."""
