"""Choice of the backend, and the behaviour without the compiled library."""

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import loco_ext
from loco_ext import ops
from loco_ext.ops import backends
from loco_ext.reference import optim_step as reference
from tests.triton_runs import needs_triton

HYPER = torch.tensor([[0.5, 0.0, 0.0, 0.0]], dtype=torch.float64)


def step() -> float:
    w = torch.ones(1)
    ops.optim_step_sgd([w], [torch.ones(1)], [], HYPER)
    return w.item()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record "reference" for each call of the optimizer step that the reference ran."""
    ran: list[str] = []
    original = reference.optim_step
    monkeypatch.setattr(reference, "optim_step", lambda *arguments: (ran.append("reference"), original(*arguments)))
    return ran


def test_the_library_is_loaded():
    assert backends.library_error is None
    with loco_ext.backend("native"):
        assert step() == 0.5


def test_forced_backend_runs_and_ends_with_its_block(calls):
    step()
    assert calls == []
    with loco_ext.backend("reference"):
        assert step() == 0.5
        assert calls == ["reference"]
        with loco_ext.backend("native"):
            step()
        assert calls == ["reference"]
        step()
        assert calls == ["reference"] * 2
    with pytest.raises(KeyError), loco_ext.backend("reference"):
        raise KeyError
    step()
    assert calls == ["reference"] * 2


def test_forcing_a_backend_concerns_one_thread(calls):
    with loco_ext.backend("reference"):
        other = threading.Thread(target=step)
        other.start()
        other.join()
    assert calls == []


def test_a_backend_that_is_unknown_or_has_no_kernel_says_so_and_writes_nothing():
    with pytest.raises(ValueError, match="backend: expected one of reference, native, triton, got 'cuda'"):
        loco_ext.backend("cuda").__enter__()
    w, meta = torch.ones(1), torch.ones(1, device="meta")
    for name, param, said in (
        ("triton", w, r"triton.*optim_step has no .* for cpu tensors"),
        ("native", meta, "no native kernel for meta"),
    ):
        with loco_ext.backend(name), pytest.raises(RuntimeError, match=said):
            ops.optim_step_sgd([param], [torch.ones_like(param)], [], HYPER)
    assert w.item() == 1


@pytest.mark.parametrize(
    ("architectures", "capabilities"),
    [
        ("8.0;9.0", [(8, 0), (8, 6), (8, 9), (9, 0)]),
        ("7.5 8.6+PTX", [(7, 5), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1)]),
        ("Turing;9.0", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1)]),
    ],
)
def test_code_runs_on_later_gpus_of_its_generation_and_ptx_on_all_later_ones(architectures, capabilities):
    every = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1)]
    assert [gpu for gpu in every if backends.has_code(architectures, gpu)] == capabilities


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[str, list[str]]]]:
    """Yield a function that chooses a family's backend twice, on a GPU of capability 7.5, and returns the warnings."""

    def choose(family: str, built_for: str | None, triton: bool) -> tuple[str, list[str]]:
        library = built_for and SimpleNamespace(build_info=lambda: {"architectures": built_for})
        monkeypatch.setattr(backends, "cuda_library", library)
        monkeypatch.setattr(backends, "cuda_library_error", None if built_for else "not built")
        monkeypatch.setattr(backends, "_has_triton", lambda: triton)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        for cached in (backends._lacks_code.__wrapped__, backends._warn_once):
            cached.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (chosen,) = {backends.choose(family, torch.device("cuda", 0)) for _ in range(2)}
        return chosen, [str(warning.message) for warning in caught]

    yield choose
    backends._lacks_code.__wrapped__.cache_clear()


def test_a_gpu_that_the_library_has_no_code_for_runs_other_kernels_after_one_warning(on_gpu):
    assert on_gpu("optim_step", "7.5;8.0", triton=True) == ("native", [])
    for triton, runs in ((True, "triton"), (False, "reference")):
        chosen, (warning,) = on_gpu("optim_step", "8.0;9.0+PTX", triton)
        assert chosen == runs
        assert "code for 8.0;9.0+PTX, not for 7.5 as cuda:0 needs" in warning
    assert on_gpu("optim_step", None, triton=True) == ("triton", [])


@needs_triton
@pytest.mark.usefixtures("fresh_dynamo")
def test_torch_compile_chooses_the_kernels_of_gpus_without_a_warning(on_gpu, monkeypatch):
    def choose(x: torch.Tensor, family: str) -> torch.Tensor:
        return x + backends.NAMES.index(backends.choose(family, torch.device("cuda", 0)))

    has_triton = backends._has_triton
    on_gpu("optim_step", "7.5", triton=True)
    monkeypatch.setattr(backends, "_has_triton", has_triton)
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [compiled(torch.zeros(()), family).item() for family in ("optim_step", "block_sparse")]
    assert [backends.NAMES[int(place)] for place in found] == ["native", "triton"]


@pytest.mark.parametrize(("family", "names"), [("block_sparse", "triton"), ("optim_step", "not built")])
def test_a_gpu_without_any_kernels_runs_the_reference_after_one_warning(on_gpu, family, names):
    chosen, (warning,) = on_gpu(family, None, triton=False)
    assert chosen == "reference"
    assert f"runs its slower PyTorch reference: {'triton is' if names == 'triton' else 'the compiled CUDA'}" in warning
    assert names in warning


WITHOUT_LIBRARY = """
import sys, warnings
sys.modules["loco_ext._C"] = None  # its import fails
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    before = len(caught)
    import loco_ext
    from loco_ext import info, ops, optim  # info must not warn either
    assert len(caught) == before, "importing warns"

    conv, plain = torch.nn.Conv2d(2, 3, 3), torch.nn.Conv2d(2, 3, 3)
    plain.load_state_dict(conv.state_dict())
    optimizers = [library.AdamW(each.parameters(), lr=0.1) for library, each in ((optim, conv), (torch.optim, plain))]
    for _ in range(3):
        x = torch.randn(2, 2, 5, 5)
        for model, optimizer in zip((conv, plain), optimizers):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for a, b in zip(conv.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b)
    (ours,) = [w for w in caught if "loco_ext" in str(w.message)]
    assert ours.category is RuntimeWarning
    assert "loco_ext._C" in str(ours.message), ours.message

w = torch.ones(1)
for name, said in (("native", "could not be loaded"), ("triton", "backend 'triton'")):
    try:
        with loco_ext.backend(name):
            ops.optim_step_sgd([w], [torch.ones(1)], [], torch.tensor([[0.5, 0, 0, 0]], dtype=torch.float64))
    except RuntimeError as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"{name} ran without a library")
assert w.item() == 1
"""


@pytest.mark.slow
def test_without_the_library_the_reference_runs_after_one_warning():
    result = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARY], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
