"""Problems whose minimum of loss and penalty is known: sizes, optimizers that reach it, and how near."""

KERNELS, CHANNELS, SIZE = 6, 3, 3
STRENGTH = 0.25
# Tolerance of the comparison with the minimum; the optimizers' last steps are far smaller.
CLOSE = 1e-4
CASES = {
    "SGD": ("SGD", {"lr": 0.3}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "dampening": ("SGD", {"lr": 0.2, "momentum": 0.8, "dampening": 0.5}),
    "Adam": ("Adam", {"lr": 0.02}),
    "amsgrad": ("Adam", {"lr": 0.02, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.02, "weight_decay": 0.0}),
}
