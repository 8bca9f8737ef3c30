"""Tests of the code that block_sparse's Triton kernels compile to, for GPUs that this machine need not have.

The tests call the launcher itself; instead of a launch, the kernel is compiled for the arguments that it received.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bench.ahead_of_time import launches, resources
from tests.covering import covering, slow
from tests.triton_runs import CUDA, count, needs_compiler, vectors

pytestmark = needs_compiler

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
KERNELS = ("product_kernel", "values_kernel", "depthwise_product_kernel", "depthwise_values_kernel")
PRODUCTS = ("forward", "input gradient", "value gradient")
TENSOR_CORES = {80: r"\bmma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma", 120: r"\bmma\.sync"}
# Bytes of shared memory that a program may use; 89 and 120 are the smaller GPUs of their generations.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
AMD, AMD_SHARED_MEMORY = "gfx942", 64 << 10
REGISTERS = 65536  # per multiprocessor
COPIES = r"cp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], 0x{:x},"  # format with the number of bytes


@dataclass(frozen=True)
class Layer:
    """Sizes of a call, which has 36 blocks on 4 output pixels."""

    batch: int
    depth: int
    width: int
    groups: int = 1
    odd: bool = False  # whether x and the output's gradient have odd strides


REFERENCE = Layer(250, 64, 64)


@dataclass(frozen=True)
class Launch:
    """The grid and options of a launch, the compiled kernel and its resources."""

    grid: tuple[int, ...]
    options: dict[str, Any]
    compiled: Any
    resources: dict[str, int]

    @property
    def form(self) -> Any:
        return self.options["FORM"]

    @property
    def threads(self) -> int:
        return 32 * self.options["num_warps"]

    @property
    def shared(self) -> int:
        return self.compiled.metadata.shared

    def count(self, pattern: str) -> int:
        """Return the number of matches of the pattern in the PTX."""
        return count(pattern, self.compiled.asm["ptx"])


def unfenced(ptx: str) -> int:
    """Return how many wgmma and tcgen05 instructions follow writes to shared memory without a fence between."""
    events = re.findall(
        r"(st\.shared|cp\.async\.wait_group)|(fence\.proxy\.async)|(wgmma\.mma_async|tcgen05\.mma)", ptx
    )
    pending, found = True, 0
    for write, fence, product in events:
        pending = bool(write) or (pending and not fence)
        found += bool(product) and pending
    return found


def needs_pipelines(arch: int) -> None:
    """Skip the test with a Triton whose tensor cores would not wait for tiles that are loaded ahead."""
    import triton
    from loco_ext.triton_kernels.block_sparse_tiles import puts_fences

    if not puts_fences(triton.__version__, (arch // 10, 0)):
        pytest.skip(f"Triton {triton.__version__} loads no tiles ahead for sm_{arch}")


def launch_of(
    call: Callable[[], object], kernels: Sequence[str], arch: int | str, compiles: bool = True, **replaced: Any
) -> Launch:
    """Return the only launch of the kernels in a call, compiled for the GPU."""
    from loco_ext.triton_kernels import block_sparse

    target = ("hip" if arch == AMD else "cuda", arch)
    ((_, grid, options, compiled),) = launches(call, block_sparse, kernels, target, compiles, **replaced)
    assert options["enable_fp_fusion"] is True, "Triton's default changes with version 3.10"
    used = resources(compiled.asm["cubin"]) if compiled is not None and arch != AMD else {}
    return Launch(grid, options, compiled, used)


def compiled_product(
    product: str,
    layer: Layer,
    dtype: torch.dtype,
    arch: int | str = 90,
    tf32: bool = False,
    compiles: bool = True,
    multiprocessors: int = 1,
    wide_values: bool = False,
) -> Launch:
    import triton
    from loco_ext.triton_kernels import block_sparse
    from loco_ext.triton_kernels.block_sparse_tiles import GpuLimits, puts_fences

    fences = arch == AMD or puts_fences(triton.__version__, divmod(int(arch), 10))
    capability = 0 if arch == AMD else int(arch) // 10
    of_gpu = GpuLimits(SHARED_MEMORY.get(arch, AMD_SHARED_MEMORY), fences, multiprocessors, capability)
    replaced = {"_tf32": lambda dtype: tf32, "_gpu": lambda device: of_gpu}
    arguments = block_sparse, product, layer, dtype, wide_values
    return launch_of(lambda: call(*arguments), KERNELS, arch, compiles, **replaced)


def compiled_transpose(x: torch.Tensor, dtype: torch.dtype, arch: int | str = 90) -> Launch:
    """Return the launch that makes the transposed view of ``x`` contiguous."""
    from loco_ext.triton_kernels import block_sparse

    return launch_of(lambda: block_sparse.block_sparse_transposed(x.transpose(1, 2), dtype), ["transpose_kernel"], arch)


def call(module: Any, product: str, layer: Layer, dtype: torch.dtype, wide_values: bool) -> None:
    gap = 1 if layer.odd else 0

    def activations(channels: int) -> torch.Tensor:
        return torch.empty(layer.batch, 4, channels + gap, dtype=dtype)[..., :channels]

    x, grad = activations(layer.groups * layer.depth), activations(layer.groups * layer.width)
    values = torch.empty(36, layer.groups, layer.depth, layer.width, dtype=F32 if wide_values else dtype)
    crow, col = torch.zeros(5, dtype=torch.int64), torch.zeros(36, dtype=torch.int64)
    if product == "forward":
        bias = torch.empty(4, layer.groups * layer.width, dtype=dtype)
        module.block_sparse_matmul(x, values, crow, col, bias)
    elif product == "input gradient":
        module.block_sparse_input_gradient(grad, values, crow, col, col)
    elif wide_values:
        module.block_sparse_value_gradient_float32(x, grad, crow, col, layer.groups)
    else:
        module.block_sparse_value_gradient(x, grad, crow, col, layer.groups)


LAYERS = {
    "reference": REFERENCE,
    "one sample": Layer(1, 64, 64),
    "rgb": Layer(64, 3, 64),
    "back to rgb": Layer(250, 64, 3),
    "100 channels": Layer(130, 100, 100),
    "256 channels": Layer(64, 256, 256),
    "large batch": Layer(1024, 64, 64),
    "to few channels": Layer(250, 64, 32),
    "groups": Layer(250, 16, 16, groups=4),
    "odd": Layer(130, 5, 7, groups=3),
    "odd strides": Layer(250, 64, 64, odd=True),
    "depthwise": Layer(250, 1, 1, groups=64),
    "depthwise, odd": Layer(3, 1, 1, groups=33, odd=True),
}
ARITHMETIC = {
    "half": (BF16, False),
    "wide values": (BF16, False),
    "tf32": (F32, True),
    "float32": (F32, False),
    "double": (F64, False),
}


def assert_two_programs_fit(launch: Launch, arch: int) -> None:
    """Assert that two programs have enough shared memory and registers of a multiprocessor."""
    assert 2 * (launch.shared + 1024) <= SHARED_MEMORY[arch] + 1024
    assert 2 * launch.resources["REG"] * launch.threads <= REGISTERS or arch == 100


@pytest.mark.parametrize(
    ("product", "arch", "dtype", "wide_values"),
    [
        *((product, 90, BF16, False) for product in PRODUCTS),
        slow(("forward", 90, BF16, True)),
        *(slow(("value gradient", arch, BF16, False)) for arch in (80, 100)),
        *(slow((product, arch, BF16, wide)) for product in PRODUCTS[:2] for arch in (80, 100, 120) for wide in (0, 1)),
        *(slow((product, 90, F16, False)) for product in PRODUCTS),
    ],
    ids=str,
)
def test_the_reference_layer_runs_on_tensor_cores_two_programs_at_a_time(product, arch, dtype, wide_values):
    needs_pipelines(arch)
    launch = compiled_product(product, REFERENCE, dtype, arch, wide_values=wide_values)
    assert launch.form.samples == 256
    # There, operands take registers, so that a product sums over half of the channels at a time.
    assert launch.form.parts == (2 if arch in (80, 120) and product != "value gradient" else 1)
    assert launch.grid == (4,)  # one program per output pixel reads its blocks, or its gradient, once
    assert launch.count(TENSOR_CORES[arch]) > 0
    assert launch.count(r"\bfma\.rn\.f32") == 0
    assert unfenced(launch.compiled.asm["ptx"]) == 0
    if launch.options["num_stages"] > 1:
        # Asynchronous copies of 16 bytes load tiles during computation; copies of 8 bytes load pixel numbers earlier.
        assert launch.count(COPIES.format(16)) >= 16 // launch.form.parts
        assert launch.count(COPIES.format(8)) >= 2
        assert_two_programs_fit(launch, arch)
    if wide_values:
        assert launch.count(r"cvt\.rn\.bf16x2\.f32") > 0
    assert launch.count(r"st\.global\S*\.v4\.b32") > 0
    assert launch.count(r"st\.global\S*\.b16") == 0
    assert launch.resources["STACK"] <= (32 if arch == 120 else 0)  # spilled outside of the loop


# Every layer and arithmetic meets every GPU and product; those of 89 and 120 have the least shared memory.
EVERYWHERE = [each.values for each in covering(LAYERS, ARITHMETIC, SHARED_MEMORY, PRODUCTS)]
ORDINARY = [("odd", "half", 90, "value gradient"), ("depthwise", "half", 90, "forward")]


@pytest.mark.parametrize(
    ("layer", "arithmetic", "arch", "product"),
    [*ORDINARY, *(slow(each) for each in EVERYWHERE if each not in ORDINARY)],
)
def test_every_layer_fits_on_the_gpu(layer, arithmetic, arch, product):
    dtype, tf32 = ARITHMETIC[arithmetic]
    launch = compiled_product(product, LAYERS[layer], dtype, arch, tf32, wide_values=arithmetic == "wide values")
    assert launch.shared <= SHARED_MEMORY[arch]
    assert launch.resources["REG"] * launch.threads <= REGISTERS
    assert launch.resources["STACK"] <= 64
    assert launch.count(r"\batom|\bred\.") == 0
    assert unfenced(launch.compiled.asm["ptx"]) == 0


def test_one_stage_where_triton_leaves_out_the_fence():
    from loco_ext.triton_kernels import block_sparse_tiles as tiles

    known = {
        (v, c): tiles.puts_fences(v, (c, 0)) for v in ("3.6.0", "3.7.0", "3.7.1", "3.10.0+git1") for c in (8, 9, 10, 12)
    }
    assert [key for key, puts in known.items() if not puts] == [(v, c) for v in ("3.6.0", "3.7.0") for c in (9, 10)]
    for arithmetic, (dtype, tf32) in ARITHMETIC.items():
        options = (dtype, tf32, tiles.GpuLimits(SHARED_MEMORY[90], fences=False), (16, 16))
        plans = tiles.product(250, 64, 64, *options, False, 1024), tiles.gradient(250, 64, 64, *options, 1024, 9)
        assert all((plan.stages == 1) == (arithmetic not in ("float32", "double")) for plan in plans)


@pytest.mark.parametrize(
    ("batch", "tf32", "fences", "tile"),
    [
        (250, False, False, (256, 64, 128)),
        (250, True, True, (256, 64, 64)),
        (60, False, True, (64, 128, 128)),
        (1000, False, True, (128, 64, 64)),
    ],
)
def test_a_gradients_tile_is_narrower_if_the_whole_batch_then_fits(batch, tf32, fences, tile):
    from loco_ext.triton_kernels import block_sparse_tiles as tiles

    gpu = tiles.GpuLimits(SHARED_MEMORY[90], fences)
    form = tiles.gradient(batch, 256, 256, F32 if tf32 else BF16, tf32, gpu, (16, 16), 64, 9.0).form
    assert (form.samples, form.depth, form.width) == tile
    assert (form.parts, form.blocks) == ((1, 1) if batch <= 256 else (2, 2))


@pytest.mark.parametrize(
    ("product", "arch"),
    [("forward", 90), *map(slow, [("forward", 80), ("input gradient", 80), ("value gradient", 100), ("forward", 100)])],
)
def test_float32_is_multiplied_as_ieee_says_unless_tf32_is_allowed(product, arch):
    needs_pipelines(arch)
    ieee = compiled_product(product, REFERENCE, F32, arch)
    assert ieee.count(r"\bfma\.rn\.f32") > 0
    assert ieee.count(r"tf32") == 0
    tf32 = compiled_product(product, REFERENCE, F32, arch, tf32=True)
    assert tf32.count(r"\bfma\.rn\.f32") == 0
    assert tf32.count(TENSOR_CORES[arch] + r"\S*tf32") > 0
    assert tf32.resources["STACK"] == 0
    assert unfenced(tf32.compiled.asm["ptx"]) == 0
    if product != "value gradient" and arch != 100:
        assert tf32.form.samples == 128
        assert_two_programs_fit(tf32, arch)


def test_float32_is_multiplied_as_in_convolutions(monkeypatch):
    from loco_ext.triton_kernels import block_sparse

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for allowed in (False, True):
            matmul.fp32_precision = "ieee" if allowed else "tf32"
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
                assert torch.backends.cudnn.conv.fp32_precision == ("tf32" if allowed else "none")
                assert block_sparse._tf32(torch.float32) == allowed
                with monkeypatch.context() as patch:
                    patch.setattr(torch.version, "hip", "7.0")
                    assert not block_sparse._tf32(torch.float32)
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("product", "arch"), [("forward", 90), slow(("input gradient", 80)), slow(("value gradient", 100))]
)
def test_float64_is_multiplied_in_float64(product, arch):
    launch = compiled_product(product, REFERENCE, F64, arch)
    tensor_cores = launch.count(r"mma\.sync\S*f64\.f64\.f64\.f64")
    # Triton compiles for the tensor cores of 10.0 from 3.8 or 3.9 on.
    assert tensor_cores > 0 or (arch not in (80, 90) and launch.count(r"\bfma\.rn\S*f64") > 0)
    assert launch.count(r"tcgen05|f32") == 0
    assert launch.resources["STACK"] == 0


@pytest.mark.parametrize(
    ("layer", "dtype", "largest"),
    [
        (Layer(250, 64, 64, odd=True), BF16, 16),
        *map(slow, [(Layer(64, 33, 33), F32, 4), (Layer(64, 100, 100), BF16, 8), (Layer(64, 102, 102), BF16, 4)]),
    ],
    ids=str,
)
def test_copies_are_as_large_as_what_divides_all_sizes(layer, dtype, largest):
    """Odd strides of activations leave blocks in vectors."""
    launch = compiled_product("forward", layer, dtype, 80)
    assert launch.count(COPIES.format(largest)) > 0
    assert largest == 16 or launch.count(COPIES.format(16)) == 0
    if layer.odd:
        assert (launch.form.x_unit, launch.form.y_unit) == (1, 16)
        assert launch.count(r"st\.global\S*\.v4\.b32") > 0


@pytest.mark.parametrize(
    ("product", "dtype"), [("forward", BF16), ("value gradient", F32), slow(("input gradient", BF16))], ids=str
)
def test_depthwise_layers_have_loads_of_16_bytes_and_no_tensor_cores(product, dtype):
    launch = compiled_product(product, LAYERS["depthwise"], dtype)
    assert launch.count(r"mma") == 0
    assert launch.count(r"ld\.global\S*\.v4\.b32") > 0
    assert launch.resources["REG"] <= 128


@pytest.mark.parametrize(
    ("product", "layer", "samples", "slices"),
    [
        ("forward", REFERENCE, 16, 1),
        ("forward", Layer(250, 64, 64, groups=64), 256, 1),
        ("input gradient", Layer(17, 64, 64), 16, 1),
        ("value gradient", REFERENCE, 256, 8),
        ("value gradient", Layer(250, 64, 64, groups=64), 256, 1),
    ],
)
def test_a_small_layer_has_programs_for_more_multiprocessors(product, layer, samples, slices):
    launch = compiled_product(product, layer, BF16, compiles=False, multiprocessors=132)
    assert (launch.form.samples, launch.form.slices) == (samples, slices)


@pytest.mark.parametrize(
    ("product", "arithmetic", "layer"),
    [
        ("forward", "half", "reference"),
        *map(slow, [("input gradient", "half", "to few channels"), ("value gradient", "half", "odd")]),
        *map(slow, [("forward", "float32", "odd"), ("value gradient", "float32", "reference")]),
        *map(slow, [("input gradient", "double", "reference"), ("value gradient", "double", "depthwise")]),
    ],
)
def test_kernels_compile_for_amd(product, arithmetic, layer):
    launch = compiled_product(product, LAYERS[layer], ARITHMETIC[arithmetic][0], AMD)
    text = launch.compiled.asm["amdgcn"]
    assert re.findall(r"vgpr_spill_count:\s*(\d+)", text) == ["0"]
    assert launch.shared <= AMD_SHARED_MEMORY
    if arithmetic == "half" and layer != "depthwise":
        assert count(r"v_mfma_f32", text) > 0


TRANSPOSED = [(BF16, BF16), (F32, BF16), (BF16, F32), (F32, F32), (F64, F64)]


@pytest.mark.parametrize(
    ("sizes", "dtypes", "arch"), covering([(64, 1024), (1024, 64), (16, 4096), (512, 16)], TRANSPOSED, CUDA), ids=str
)
def test_transposing_loads_and_stores_16_bytes_at_a_time(sizes, dtypes, arch):
    launch = compiled_transpose(torch.empty(3, *sizes, dtype=dtypes[0]), dtypes[1], arch)
    assert launch.grid == (3 * sizes[0] * sizes[1] // 4096,)
    loads, stores = (4096 * dtype.itemsize // (16 * 128) for dtype in dtypes)  # of each of 128 threads
    assert vectors(launch.compiled.asm["ptx"]) == (loads, stores)
    assert (launch.count(r"ld\.global"), launch.count(r"st\.global")) == (loads, stores)
    assert launch.count(r"cvt\.rn\.bf16x2\.f32") == (16 if dtypes == (F32, BF16) else 0)
    assert launch.resources["STACK"] == 0
    assert launch.resources["REG"] <= 64
    assert 3 * (launch.shared + 1024) <= SHARED_MEMORY[120] + 1024


@pytest.mark.parametrize("arch", [90, *map(slow, [80, 100, AMD])])
def test_transposing_odd_sizes_has_vectors_on_the_even_side(arch):
    odd = torch.empty(3, 64, 49, dtype=BF16), torch.empty(3, 49, 64, dtype=BF16)
    launches = [compiled_transpose(x, BF16, arch) for x in odd]
    if arch != AMD:
        assert [vectors(launch.compiled.asm["ptx"]) for launch in launches] == [(0, 4), (4, 0)]
        assert all(launch.resources["STACK"] == 0 for launch in launches)
