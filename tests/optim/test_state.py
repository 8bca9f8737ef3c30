"""Tests of checkpoints, copies and pickles: our optimizers, torch.optim's, and either loaded into the other."""

import copy
import pickle
import re
from collections import defaultdict
from threading import Thread

import numpy as np
import pytest
import torch
from torch import nn

from loco_ext import optim, sparsity
from tests.covering import covering
from tests.optim.stepping import (
    CLASSES,
    LAYOUTS,
    LOCALITY,
    RICH,
    assert_same,
    clones,
    follow,
    make_params,
    pair,
    params_of,
    through_a_file,
    train,
)
from tests.tolerances import same_bits

OWN = {"locality": LOCALITY, "state_dtype": torch.float32, "stochastic_rounding": 5}


@pytest.mark.parametrize("name", CLASSES)
def test_the_state_dict_has_torchs_keys_and_our_group_options(name):
    ours, theirs = pair(name, make_params(), **RICH[name])
    follow(ours, theirs)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["state"].keys() == other["state"].keys()
    for index, state in other["state"].items():
        assert mine["state"][index].keys() == {key for key, value in state.items() if value is not None}
        for key, value in mine["state"][index].items():
            assert (value.dtype, value.shape, value.device) == (state[key].dtype, state[key].shape, state[key].device)
    extra = mine["param_groups"][0].keys() - other["param_groups"][0].keys()
    assert extra == {"locality", "norm", "penalty", "state_dtype", "stochastic_rounding", "rounding_step"}
    assert not other["param_groups"][0].keys() - mine["param_groups"][0].keys()


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kept", [{}, {"fused": False}, {"foreach": True}], ids=str)
def test_our_options_outlive_a_torch_checkpoint(name, kept):
    theirs = getattr(torch.optim, name)(make_params(), **RICH[name], fused=not kept.get("fused", True))
    train(theirs, 2)
    own = {"locality": [LOCALITY if p.dim() == 4 else None for p in params_of(theirs)]}
    if name != "AdamW":
        own["norm"] = "l1"
    if "foreach" not in kept:
        own.update(state_dtype=torch.float32, stochastic_rounding=3)
    ours = getattr(optim, name)(clones(params_of(theirs)), **own, **kept)
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    for key, value in {"fused": None, "foreach": None, **own, **kept}.items():
        assert ours.param_groups[0][key] == value, key
    assert ours.param_groups[0]["lr"] == RICH[name]["lr"]
    twin = getattr(optim, name)(clones(params_of(theirs)), **{**RICH[name], **own, **kept})
    twin.load_state_dict(through_a_file(ours.state_dict()))
    plain = getattr(optim, name)(clones(params_of(theirs)))
    plain.load_state_dict(through_a_file(theirs.state_dict()))
    for opt in (ours, twin, plain):
        train(opt, 2)
    assert_same(ours, twin, same_bits)
    assert not torch.equal(params_of(ours)[-1], params_of(plain)[-1])


@pytest.mark.parametrize("name", CLASSES)
def test_an_nchw_checkpoint_in_a_channels_last_model_goes_on_as_before(name):
    shapes = [(4, 3, 3, 3), (2, 5, 5, 5), (6,)]
    nchw = getattr(optim, name)(make_params(shapes), **RICH[name], locality=LOCALITY)
    train(nchw, 3)
    channels_last = [nn.Parameter(LAYOUTS["channels_last"](p.detach())) for p in params_of(nchw)]
    nhwc = getattr(optim, name)(channels_last, **RICH[name], locality=LOCALITY)
    nhwc.load_state_dict(through_a_file(nchw.state_dict()))
    for p in params_of(nhwc):
        assert p.dim() != 4 or not p.is_contiguous()
        for key, value in nhwc.state[p].items():
            assert key == "step" or value.stride() == p.stride()
    for opt in (nchw, nhwc):
        train(opt, 2, start=3)
    assert_same(nchw, nhwc, same_bits)


# Some take the options from the checkpoint.
OPTIONS = {
    "locality": ({"locality": LOCALITY}, True),
    "tensor lr": ({"locality": LOCALITY, "lr": torch.tensor(0.05)}, True),
    "stochastic": ({"stochastic_rounding": 11}, True),
    "listed": ({"state_dtype": torch.float32, "locality": [None, (0.1, 0.2, 3.0), None], "maximize": True}, True),
    "foreach": ({"foreach": True, "locality": LOCALITY}, True),
    "reference": ({"fused": False, "stochastic_rounding": 2**40 + 1}, True),
    "brought along": (OWN, False),
    "numbers of numpy": (
        {"locality": (np.float64(0.5), np.float32(2)), "penalty": sparsity.RingPenalty(np.float64(0.1))},
        True,
    ),
}


@pytest.mark.parametrize(
    ("name", "options", "dtype"), covering(CLASSES, OPTIONS, [torch.float32, torch.bfloat16]), ids=str
)
def test_a_resumed_run_ends_with_the_same_bits(name, options, dtype):
    options, given = OPTIONS[options]
    shapes = [(33, 5), (4, 3, 3, 3), (7,)]
    whole, cut = (getattr(optim, name)(make_params(shapes, dtype), **RICH[name] | options) for _ in range(2))
    train(whole, 5)
    train(cut, 3)
    resumed = getattr(optim, name)(clones(params_of(cut)), **RICH[name] | options if given else {})
    resumed.load_state_dict(through_a_file(cut.state_dict()))
    assert_same(resumed, cut, same_bits)
    assert {key: resumed.param_groups[0][key] for key in options} == options
    assert resumed.param_groups[0]["rounding_step"] == (3 if "stochastic_rounding" in options else 0)
    train(resumed, 2, start=3)
    assert_same(whole, resumed, same_bits)


@pytest.mark.parametrize("name", CLASSES)
def test_stochastic_rounding_depends_on_its_seed_and_on_the_step(name):
    """Otherwise resuming to the same bits would prove nothing."""
    runs = []
    for seed, first_step in ((1, 0), (1, 0), (2, 0), (1, 3)):
        params = make_params([(64, 64)], torch.bfloat16)
        optimizer = getattr(optim, name)(params, **RICH[name], stochastic_rounding=seed)
        optimizer.param_groups[0]["rounding_step"] = first_step
        train(optimizer, 2)
        runs.append(params[0].detach())
    assert same_bits(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], runs[3])


def test_loading_into_a_group_with_another_state_dtype_follows_the_loaded_option():
    first = optim.SGD(make_params(dtype=torch.bfloat16), **RICH["SGD"])
    train(first, 2)
    second = optim.SGD(clones(params_of(first)), state_dtype=torch.float32)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["state_dtype"] is None
    assert {second.state[p]["momentum_buffer"].dtype for p in params_of(second)} == {torch.bfloat16}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("steps", [1, 3], ids=["collected", "cached"])
@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_equal_and_on_its_own(name, steps, make_copy):
    model = nn.Conv2d(2, 3, 3, dtype=torch.bfloat16)
    ours = getattr(optim, name)(model.parameters(), **RICH[name], **OWN)
    train(ours, steps)
    copied, twin = make_copy((model, ours))
    assert type(twin) is type(ours)
    assert params_of(twin)[0] is copied.weight
    assert_same(ours, twin, same_bits)
    before = copied.weight.detach().clone()
    train(ours, 2, start=steps)
    assert same_bits(copied.weight.detach(), before)
    train(twin, 2, start=steps)
    assert_same(ours, twin, same_bits)
    twin.add_param_group({"params": make_params([(2, 2, 3, 3)])})
    assert twin.param_groups[1]["locality"] == LOCALITY


@pytest.mark.parametrize("saved_names", [False, True])
@pytest.mark.parametrize("loaded_names", [False, True])
def test_named_and_unnamed_checkpoints_load_into_one_another(saved_names, loaded_names):
    def make(named):
        model = nn.Linear(2, 2)
        return optim.Adam(model.named_parameters() if named else model.parameters())

    saved, loaded = make(saved_names), make(loaded_names)
    train(saved, 2)
    loaded.load_state_dict(through_a_file(saved.state_dict()))
    names = loaded.state_dict()["param_groups"][0].get("param_names")
    assert names == (["weight", "bias"] if saved_names or loaded_names else None)
    assert [loaded.state[p]["exp_avg"].tolist() for p in params_of(loaded)] == [
        saved.state[p]["exp_avg"].tolist() for p in params_of(saved)
    ]


DAMAGES = {
    "shape": (lambda value: value[:-1], ValueError, "expected its parameter's shape"),
    "integers": (lambda value: value.long(), ValueError, "expected dense floating-point numbers, got torch.int64"),
    "sparse": (lambda value: value.to_sparse(), ValueError, "expected dense floating-point numbers"),
    "no data": (lambda value: value.to("meta"), ValueError, "expected a tensor with data"),
    "list": (lambda value: value.tolist(), TypeError, "expected a tensor, got list"),
}
DAMAGED_STEPS = {
    "negative": (-3.0, ValueError, "expected a finite number of at least 0, got -3.0"),
    "NaN": (torch.tensor(torch.nan), ValueError, "expected a finite number of at least 0, got nan"),
    "several": (torch.ones(2), ValueError, "expected a finite number of at least 0, got a tensor"),
    "text": ("3", TypeError, "expected a finite number of at least 0, got str"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_damaged_state_is_named_and_nothing_changes(name):
    ours = getattr(optim, name)(make_params(), **RICH[name])
    train(ours, 2)
    saved = copy.deepcopy(ours.state_dict())
    moments = [key for key in saved["state"][1] if key != "step"]
    damages = [(key, change(saved["state"][1][key]), *said) for change, *said in DAMAGES.values() for key in moments]
    if "step" in saved["state"][1]:
        damages += [("step", *damage) for damage in DAMAGED_STEPS.values()]
    for key, value, error, said in damages:
        bad = {**saved, "state": {**saved["state"], 1: saved["state"][1] | {key: value}}}
        with pytest.raises(error, match=re.escape(f"state[1]['{key}']: {said}")):
            ours.load_state_dict(bad)
    for lost in ("step", "exp_avg", "exp_avg_sq") if "step" in saved["state"][1] else ():
        rest = {key: value for key, value in saved["state"][1].items() if key != lost}
        with pytest.raises(ValueError, match=rf"state\[1\]: expected step, .*, got one without {lost}"):
            ours.load_state_dict({**saved, "state": {**saved["state"], 1: rest}})
    with pytest.raises(ValueError, match="group"):
        ours.load_state_dict(getattr(optim, name)(make_params([(3,)])).state_dict())
    for bad, said in (({**saved, "state": []}, "state: "), ({**saved, "state": {1: []}}, "state[1]: ")):
        with pytest.raises(TypeError, match=re.escape(f"{said}expected a dict")):
            ours.load_state_dict(bad)
    assert str(ours.state_dict()) == str(saved)
    saved["state"][1][moments[0]].fill_(torch.nan)  # training that diverges saves such states
    ours.load_state_dict(saved)


@pytest.mark.parametrize("name", CLASSES)
def test_what_a_checkpoints_group_lacks_stays(name):
    """Another class, an older version, or somebody who made the file smaller, may have left options out."""
    ours, same = (getattr(optim, name)(make_params(), **RICH[name], locality=LOCALITY) for _ in range(2))
    saved = ours.state_dict()["param_groups"][0]
    groups = [{key: value for key, value in saved.items() if key != lost} for lost in saved if lost != "params"]
    for group in (*groups, {key: saved[key] for key in ("params", "lr")}):
        ours.load_state_dict({"state": {}, "param_groups": [group]})
        assert ours.state_dict()["param_groups"] == same.state_dict()["param_groups"]
    train(ours, 2)
    train(same, 2)
    assert_same(ours, same)


def test_a_load_hook_may_change_states_whatever_their_dtype():
    """The hook's states are loaded, not those of the dict that was passed in; hooks after it see them."""
    (p,) = make_params([(4,)], torch.bfloat16)
    ours = optim.SGD([p], **RICH["SGD"], state_dtype=torch.float32)
    train(ours, 1)
    value = 1 + 2.0**-20  # bfloat16 cannot represent it

    def replace(_, state_dict):
        state = {0: {"momentum_buffer": torch.full((4,), value)}}
        return {**state_dict, "state": state}

    ours.register_load_state_dict_pre_hook(replace)
    seen = []
    ours.register_load_state_dict_post_hook(lambda given: seen.append(given.state[p]["momentum_buffer"].tolist()))
    for _ in range(2):
        ours.load_state_dict(ours.state_dict())
    assert seen == [[value] * 4] * 2
    assert len(ours._optimizer_load_state_dict_pre_hooks) == 1  # our own hooks are removed again


def test_hooks_of_a_state_dict_get_what_is_saved_and_may_return_another_dict():
    ours = optim.SGD(make_params([(2, 1, 3, 3)]), penalty=sparsity.RingPenalty(0.5))
    loadable = []
    ours.register_state_dict_post_hook(lambda _, state: loadable.append(through_a_file(state)), prepend=True)
    ours.register_state_dict_post_hook(lambda _, state: {"optimizer": state})
    for _ in range(2):
        assert ours.state_dict()["optimizer"] == loadable.pop()
    assert len(ours._optimizer_state_dict_post_hooks) == 2  # our own hook is removed again


@pytest.mark.parametrize("name", CLASSES)
def test_states_alone_may_be_reset_by_setstate_as_in_torch(name):
    ours, theirs = pair(name, make_params(), **RICH[name])
    follow(ours, theirs)
    for optimizer in (ours, theirs):
        optimizer.__setstate__({"state": defaultdict(dict)})
    follow(ours, theirs)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_the_defaults_are_arguments_of_another_optimizer(name):
    options = {**RICH[name], **OWN, "weight_decay": 0.1}
    ours = getattr(optim, name)(make_params(), **options)
    other = type(ours)(make_params(), **ours.defaults)
    train(ours, 2)
    train(other, 2)
    assert_same(ours, other)


def test_threads_may_save_at_once():
    ours = optim.SGD(make_params([(2, 1, 3, 3)]), penalty=sparsity.RingPenalty(0.5))
    saved = []
    other = Thread(target=lambda: saved.append(ours.state_dict()))

    def hook(*_):
        if other.ident is None:
            other.start()
            other.join(0.2)

    for each in (hook, lambda *_: None):
        ours.register_state_dict_post_hook(each)
    saved.append(ours.state_dict())
    other.join()
    assert saved[0] == saved[1]


def test_a_group_may_be_appended_with_the_defaults():
    params = make_params([(3,), (3,)])
    ours = optim.SGD(params[:1], lr=0.5)
    ours.param_groups.append({**ours.defaults, "params": params[1:]})
    expected = params[1].detach() - 0.5
    params[1].grad = torch.ones(3)
    ours.step()
    assert torch.equal(params[1].detach(), expected)
