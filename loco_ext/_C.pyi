"""The compiled library: host functions without torch. Its operators are in ``torch.ops.loco_ext``."""

def build_info() -> dict[str, str]:
    """The compiler, and the instruction set that the kernels were chosen for on this machine."""

def release(hold: int) -> None:
    """Frees the tensors that ``torch.ops.loco_ext.optim_step_hold`` took."""

def block_sparse_levels() -> list[str]:
    """The instruction sets that the block-sparse kernels can use on this machine, best first."""

def use_block_sparse_level(name: str) -> None:
    """From now on these kernels: one of :func:`block_sparse_levels`, for tests and measurements."""
