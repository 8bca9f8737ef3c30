"""Reference implementations in plain PyTorch, one file per family: short, obvious, and right in float64.

They define what every kernel must compute, serve devices without one, and stand in where the library is not built.
"""
