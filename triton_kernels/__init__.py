"""Triton kernels, one file per family; installed as ``loco_ext.triton_kernels``."""
