"""torch.fx graphs of models: tracing, names of operations, writes in place, and sizes that hold for every input."""
