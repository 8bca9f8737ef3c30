"""Sizes of all filters at once for a budget of multiply-accumulates, parameters or latency."""
