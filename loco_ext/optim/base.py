"""The code shared by SGD, Adam and AdamW: group options, checkpoints, and gathering parameters for the fused step.

A step collects the parameters of all groups into batches (usually one batch) and makes one operator call per batch. The
next step makes the same calls again if only gradients and hyper-parameters differ (``step_cache.py``). Groups
with ``foreach=True`` or ``differentiable=True`` are stepped by torch's own functions, after the decay map has been
applied.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from loco_ext import compiler
from loco_ext.ops.prox_after_step import proxes_of
from loco_ext.ops.step_args import Flags, Rule
from loco_ext.optim.folded import folded_steps
from loco_ext.optim.locality import as_tuples, even_kernels, looks_like_convolution
from loco_ext.optim.options import (
    OWN_DEFAULTS,
    OWN_OPTIONS,
    Group,
    check_hyper,
    check_own,
    device_lr,
    is_zero,
    lr_for,
    uses_torch,
    with_options,
)
from loco_ext.optim.penalty import from_plain, to_plain
from loco_ext.optim.plan import Batch, StepPlan, make_plan, resolve_negated_grads, same_objects, select
from loco_ext.optim.states import add_states, check_states, restore_states
from loco_ext.optim.step_cache import CachedBatch, StepCache
from loco_ext.optim.torch_path import check_torch_step, step_with_torch
from loco_ext.reference.dtypes import compute_dtype
from loco_ext.reference.optim_step import prox_sizes
from loco_ext.warning import warn_caller

# Keys that choose an implementation; a checkpoint of torch.optim does not carry them over.
_IMPLEMENTATION_KEYS = ("foreach", "fused")


def _check_hyper_of(groups: Sequence[Group]) -> None:
    """Raise if a hyper-parameter of one of the groups is unusable, as they may be changed between steps."""
    for group in groups:
        check_hyper(group)


def as_hyper(rows: list[list[float]]) -> Tensor:
    """Return the rows of hyper-parameters as the operators take them: a float64 CPU tensor."""
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _says_how(option: Any) -> bool:
    """Return whether a locality or a norm is given and differs from the default."""
    return any(entry is not None for entry in option) if isinstance(option, list) else option not in (None, "l2")


def _make_plain(_: Optimizer, state: dict[str, Any]) -> None:
    """Give the groups of a state dict the form that checkpoints store."""
    for group in state["param_groups"]:
        group["locality"], group["penalty"] = to_plain(group["locality"]), to_plain(group["penalty"])


class LocalityOptimizer(Optimizer):
    """Mixin that stands in front of a torch.optim class among the bases."""

    _plans: list[StepPlan]
    _cache: StepCache | None
    _collected: list[Tensor]  # the parameters of the last step if our operators made all of it
    _warned = False  # whether the warning about kernels of an even size has been given
    _stepped_in_backward: tuple[Tensor, ...] = ()  # see step_in_backward

    def _construct(self, arguments: dict[str, Any]) -> None:
        """Check the constructor's arguments, given by name, and construct as torch.optim's class does."""
        own = {name: arguments[name] for name in OWN_OPTIONS}
        options = {name: value for name, value in arguments.items() if name not in ("self", "params", *own)}
        check_hyper(options)
        super().__init__(with_options(arguments["params"], own), **options)
        self.defaults.update(own)
        self._refresh()
        self._warn_if_idle(self.param_groups)

    def _refresh(self) -> None:
        self._saving = RLock()  # one thread at a time adds its hook to those of a state dict
        self._plans = []
        self._cache = None
        self._collected = []

    @compiler.disable  # as torch.optim's method is
    def add_param_group(self, param_group: Group) -> None:
        """Add a group; see :meth:`torch.optim.Optimizer.add_param_group`. Its options are checked first."""
        super().add_param_group(param_group)
        try:
            check_hyper(self.param_groups[-1])
            self._check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise
        self._refresh()
        if "locality" in self.defaults:  # otherwise the constructor goes on, and warns of all groups at its end
            self._warn_if_idle(self.param_groups[-1:])

    def _warn_if_idle(self, added: list[Group]) -> None:
        """Warn of decay options (locality, norm) that act on nothing, neither in the added groups nor in any other.

        Groups often repeat the options of others: a group of biases may have the locality of the weights, which decay.
        """
        idle = []
        for name in ("locality", "norm"):
            decays = [group["weight_decay"] for group in self.param_groups if _says_how(group[name])]
            if any(_says_how(group[name]) for group in added) and all(map(is_zero, decays)):
                idle.append(name)
        if idle:
            warn_caller(f"{', '.join(idle)}: expected a weight_decay above 0 to act on, got 0, so that nothing decays")
        if not any(isinstance(group["locality"], tuple) for group in added):
            return
        local = [group["params"] for group in self.param_groups if isinstance(group["locality"], tuple)]
        params = [param for each in local for param in each]
        if params and not any(map(looks_like_convolution, params)):
            shapes = [tuple(param.shape) for param in params[:4]]
            warn_caller(f"locality: expected a convolution's weight among the parameters, got none in {shapes}")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether GradScaler passes grad_scale and found_inf to step() instead of unscaling and skipping itself.

        As in torch.optim, it does so only with ``fused=True``, because gradients can then not be clipped between
        unscaling and the step. torch's own functions cannot take a scale. With step_in_backward, step() has to learn
        that there is a scaler.
        """
        fused = all(group["fused"] and not uses_torch(group) for group in self.param_groups)
        return fused or bool(self._stepped_in_backward)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore the assignment that torch.optim's classes make for ``fused=True``; ours follows the groups."""

    def _check_group(self, group: Group) -> StepPlan:
        """Check the options that this package adds, and return the group's plan; the group may be a new one."""
        group.setdefault("rounding_step", 0)
        group["locality"] = as_tuples(group["locality"])
        check_own(group)
        group["penalty"] = from_plain(group["penalty"])
        plan = make_plan(group)
        if (shapes := even_kernels(group["params"], group["locality"])) and not self._warned:
            self._warned = True
            warn_caller(f"locality: kernels of an even size have no centre tap, their decay stays uniform: {shapes}")
        return plan

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one optimization step; return the loss of ``closure``, if given, which reevaluates the model."""
        # The step is one operator call, from which a compiler gains nothing; asking here is cheaper than a wrapper.
        return self._step_uncompiled(closure) if torch.compiler.is_compiling() else self._step(closure)

    @compiler.disable
    def _step_uncompiled(self, closure: Callable[[], Any] | None) -> Any:
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if self._stepped_in_backward:
            self._check_stepped(found_inf)
        if found_inf is not None and found_inf.is_cpu and found_inf.item() != 0:
            return loss
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            self._step_groups()
        return loss

    def _check_stepped(self, found_inf: Tensor | None) -> None:
        """Raise if backward has stepped weights by a gradient that was scaled or incomplete."""
        if found_inf is not None:
            raise RuntimeError("step_in_backward: expected gradients without a GradScaler's factor, got a step of one")
        if any(weight.grad is not None for weight in self._stepped_in_backward):
            raise RuntimeError("step_in_backward: expected weights that the loss depends on by their layer alone")

    def _step_groups(self) -> None:
        if not self._step_again():
            self._step_anew()
        for group in self.param_groups:
            if group["stochastic_rounding"] is not None:
                group["rounding_step"] += 1

    def _step_again(self) -> bool:
        """Make the step by the arguments of the one before; return False, with nothing changed, if they do not fit."""
        cache, self._cache = self._cache, None
        groups = self.param_groups
        if cache is None or not cache.fill(self._plans, groups, self.state):
            return False
        for batch in cache.batches:
            batch.hyper[:] = self._rows(batch.args)
        made = cache.step()
        cache.forget()
        if made:
            self._cache = cache
        return made

    def _step_anew(self) -> None:
        plans = self._current_plans()
        for plan in plans:
            resolve_negated_grads(plan.params)
        for prepare in dict.fromkeys(prepare for plan in plans for prepare in plan.preparations):
            prepare()
        with folded_steps(self, plans) if any([plan.folded for plan in plans]) else nullcontext():
            self._step_plans(plans)

    def _step_plans(self, plans: list[StepPlan]) -> None:
        before, self._collected = self._collected, []
        by_torch = [pair for pair in zip(self.param_groups, plans, strict=True) if uses_torch(pair[0])]
        for group, plan in by_torch:
            self._check_numbers(group)
            check_torch_step(group, plan, self.state)
        batches = self._collect(plans)
        for batch in batches:
            batch.localize()
            batch.check_capture()
            batch.hyper = as_hyper(self._rows(batch))
        if self._nothing_may_change(batches):
            return
        if len(batches) + len(by_torch) > 1:
            # All batches are checked before the first is stepped; with found_inf set, a step only makes its checks.
            for batch in batches:
                replace(batch, found_inf=torch.ones((), device=batch.params[0].device)).launch()
        for group, plan in by_torch:
            own_step = inspect.unwrap(super().step.__func__)  # type: ignore[attr-defined]
            step_with_torch(self, group, plan, partial(own_step, self))
            self._shrink(group, plan)
        for batch in batches:
            batch.launch()
            self._keep_created(batch)
        if not by_torch:
            self._collected = [param for batch in batches for param in batch.params]
            # A cache that no next step fits would be made in vain: other parameters may have gradients in each step.
            if same_objects(self._collected, before) and StepCache.possible(plans, batches):
                self._cache = StepCache(plans, [CachedBatch(batch, self.state) for batch in batches])

    def _collect(self, plans: list[StepPlan]) -> list[Batch]:
        """Return the parameters of all groups that the fused step serves; groups of the same key share a batch."""
        batches: dict[object, Batch] = {}
        ordinal = 0
        for index, (group, plan) in enumerate(zip(self.param_groups, plans, strict=True)):
            for device, selected in ({} if uses_torch(group) else select(plan)).items():
                batch = self._batch(group, device, batches)
                batch.add(plan, selected, index, ordinal)
                add_states(batch, group, batch.params[-len(selected) :], self.state)
            ordinal += len(plan.params)
        return list(batches.values())

    def _nothing_may_change(self, batches: list[Batch]) -> bool:
        """Return whether found_inf is set; read it from a GPU only if uninitialised buffers would be written."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None or not any(any(batch.first) for batch in batches):
            return False
        return found_inf.item() != 0

    def _keep_created(self, batch: Batch) -> None:
        """Keep the states that a step has created, now that it has been made."""
        for param, name, tensor in batch.created:
            self.state[param][name] = tensor
        batch.created = []

    def _current_plans(self) -> list[StepPlan]:
        plans = self._plans
        if len(plans) != len(self.param_groups) or not all(map(StepPlan.fits, plans, self.param_groups)):
            self._plans = plans = [self._check_group(group) for group in self.param_groups]
        return plans

    def _rows(self, batch: Batch) -> list[list[float]]:
        """Return the batch's rows of ``hyper``, and give it the scalars that its device reads."""
        device = batch.params[0].device
        scalars = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        batch.grad_scale, batch.found_inf = (None if scalar is None else scalar.to(device) for scalar in scalars)
        groups = [self.param_groups[i] for i in batch.groups]
        lrs = [device_lr(group, device) for group in groups]
        batch.lrs = [lr for lr in lrs if lr is not None]
        places = iter(range(len(batch.lrs)))
        batch.lr_index = [-1 if lr is None else next(places) for lr in lrs] if batch.lrs else []
        pairs = zip(groups, lrs, strict=True)
        try:
            rows = [[float(group["lr"]) if lr is None else 0.0, *map(float, self._hyper(group))] for group, lr in pairs]
            valid = all([self._rule.are_valid(row) for row in rows])
        except (TypeError, ValueError):
            _check_hyper_of(groups)
            raise
        if not valid:
            _check_hyper_of(groups)
        return rows

    def _check_numbers(self, group: Group) -> None:
        """Raise if torch's functions, which check nothing, would step by an unusable number; tensors are not read."""
        try:
            numbers = [0.0 if isinstance(value, Tensor) else value for value in (group["lr"], *self._hyper(group))]
            valid = self._rule.are_valid(list(map(float, numbers)))
        except (TypeError, ValueError):
            valid = False
        if not valid:
            check_hyper(group)

    def _batch(self, group: Group, device: str, batches: dict[object, Batch]) -> Batch:
        """Return the one of ``batches`` for parameters of the group on a device; if there is none, add an empty one."""
        flags = Flags(
            maximize=bool(group["maximize"]),
            l1=group["norm"] == "l1",
            nesterov=bool(group.get("nesterov")),
            amsgrad=bool(group.get("amsgrad")),
            decoupled=bool(group.get("decoupled_weight_decay")),
        )
        states, reference = len(self._state_names(group)), group["fused"] is False
        seed, step = group["stochastic_rounding"], group["rounding_step"]
        key = device, flags, states, reference, seed, step
        if key not in batches:
            lists: list[list[Tensor]] = [[] for _ in range(states)]
            batches[key] = Batch(
                rule=self._rule, flags=flags, states=lists, reference=reference, seed=seed, rounding_step=step
            )
        return batches[key]

    _rule: Rule

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        """Return the group's row of ``hyper`` without the learning rate."""
        raise NotImplementedError

    def _state_names(self, group: Group) -> tuple[str, ...]:
        """Return the keys of the states that each parameter of the group has, without the step count."""
        names = self._rule.states
        return names if group[self._rule.optional] else names[:-1]

    def _prox_sizes(self, groups: Sequence[Group], params: Sequence[Tensor]) -> list[tuple[Any, Tensor | None]]:
        """Return the size of the prox of each parameter's last step, and its metric times that size, if it has one."""
        rows, lasts, steps = [], [], []
        for group, param in zip(groups, params, strict=True):
            state, names = self.state.get(param, {}), self._state_names(group)
            last = state.get(names[-1]) if names else None
            lasts.append(None if last is None else last.to(compute_dtype(param.dtype)))
            rows.append((lr_for(param, group), *self._hyper(group)))
            steps.append(state.get("step"))
        return prox_sizes(self._rule, rows, lasts, steps)

    def _shrink(self, group: Group, plan: StepPlan) -> None:
        """Apply the prox of the group's penalties after a step by torch's own functions."""
        for param, penalty in zip(plan.params, plan.penalties, strict=False):
            if penalty is None or param.grad is None:
                continue
            wide = param.to(compute_dtype(param.dtype))
            param.copy_(proxes_of([penalty], [wide], self._prox_sizes([group], [param]))[0])

    @compiler.disable
    def state_dict(self) -> dict[str, Any]:
        """Return torch.optim's state dict; penalties are tuples of class name and settings, loadable without code."""
        # The user's hooks get what is saved.
        with self._saving, self.register_state_dict_post_hook(_make_plain, prepend=True):
            return super().state_dict()

    @compiler.disable
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class or of the torch.optim class of the same name.

        Group keys that the checkpoint lacks keep their present values; a torch.optim checkpoint also leaves ``foreach``
        and ``fused`` as they are. States get the dtype that the group asks for and the strides of their parameters.

        Raises:
            TypeError, ValueError: naming a state that does not fit its parameter. Nothing is changed then.
        """

        loaded: dict[str, Any] = {}

        def check(_: Optimizer, given: dict[str, Any]) -> None:
            check_states(self.param_groups, given)
            loaded.update(given)

        with (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: restore_states(self, loaded), prepend=True),
        ):
            super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state.get("param_groups", [])  # none if states alone are replaced, as torch.optim accepts
        present = (groups and getattr(self, "param_groups", None)) or [{}] * len(groups)
        for group, old in zip(groups, present, strict=True):
            if "locality" not in group:  # the checkpoint is torch.optim's
                group.update({key: old[key] for key in _IMPLEMENTATION_KEYS if key in old})
            for key, value in {**OWN_DEFAULTS, **old}.items():
                group.setdefault(key, value)
            group["locality"] = as_tuples(group["locality"])
            group["penalty"] = from_plain(group["penalty"], old.get("penalty"))
        super().__setstate__(state)
        self._refresh()
