"""Reference implementations in plain PyTorch, one file per family: short, obvious, and accurate in float64.

They define what every kernel must compute, serve devices without kernels, and are the fallback without the library.
"""
