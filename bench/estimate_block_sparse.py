"""Estimates of the Triton kernels of locally connected layers on GPUs, from the code that they compile to.

    python -m bench.estimate_block_sparse                    writes bench/results/block_sparse_estimate-triton.json
    python -m bench.estimate_block_sparse --layers "64-64 3x3 at 32" --gpus 90    prints a selection

No GPU is needed, and none is measured. The launchers run as usual, and the kernels are compiled for each GPU instead of
being launched. From the compiled code come registers, shared memory and the instructions of the main loop; from the
launch come the number of programs, and the bytes that they read from and write to the L2 cache. Layers have no bias.

The estimate of a product is the longest of four times, each as if the GPU did nothing else:

- HBM: the bytes of input, values and output, once each, over the memory's bandwidth. This is also the floor of the
  product; for bfloat16, 64 to 64 channels, 3x3 taps, 32x32 pixels and a batch of 250 it is
  (2 * 250 * 1024 * 64 + 8836 * 64 * 64) * 2 bytes / 3.35 TB/s = 41 us on an H100, 123 us for the three products.
- L2: the bytes that all programs read and write, over the cache's bandwidth.
- tensor cores: the operations of all tiles, padding included, over the peak rate.
- issue: the instructions of the main loop, for all of its rounds and warps, over four a cycle and multiprocessor.

"autocast" has activations in bfloat16 and values in float32, which the kernels convert. Casts before and after them
would read and write values twice, 6 bytes an element, once for the forward pass and once for the gradient.

Activations are in channels_last. Those of NCHW images are also transposed, the input and the output in the forward pass
and their gradients in the backward pass; the floor is the time in which each can be read and written once.

The last three are longer where multiprocessors have unequal numbers of programs, or none. Latencies, conflicts and what
is outside of the main loop are not counted, so that a GPU takes longer.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loco_ext.triton_kernels.launch import cdiv

from bench import ahead_of_time, generated, harness, machine, tables
from bench.bench_block_sparse import LAYERS
from bench.block_sparse_peers import Layer
from loco_ext.version import package_version


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU; operations per second count a multiplication and an addition as two."""

    name: str
    multiprocessors: int
    clock: float  # Hz, boost
    shared_memory: int  # bytes of a program; a multiprocessor has 1 KB more, and takes 1 KB from each program
    half: float  # dense, accumulated in float32
    tf32: float
    hbm: float  # bytes per second
    l2: float  # bytes per second, reading


# All but the bandwidth of L2: NVIDIA's data sheets of the A100 80GB SXM, H100 SXM and HGX B200, and the white paper of
# the RTX Blackwell architecture. Bandwidths of L2 are those measured by github.com/te42kyfo/gpu-benches (gpu-l2-cache)
# on an A100 80GB, an H100 PCIe (114 multiprocessors; cautious for SXM: an H200 reaches 9.7 TB/s) and, for capability
# 120, an L40 (Ada), scaled by multiprocessors and clock. That of the B200 is the H100's, scaled in the same way.
GPUS = {
    80: Gpu("A100", 108, 1.41e9, 163 << 10, 312e12, 156e12, 2.04e12, 5.4e12),
    90: Gpu("H100", 132, 1.83e9, 227 << 10, 989e12, 495e12, 3.35e12, 6.9e12),
    100: Gpu("B200", 148, 1.96e9, 227 << 10, 2250e12, 1100e12, 8.0e12, 10.0e12),
    120: Gpu("RTX 5090", 170, 2.41e9, 99 << 10, 209e12, 105e12, 1.79e12, 6.0e12),
}
REGISTERS = 65536  # per multiprocessor
ISSUED = 4  # instructions that a multiprocessor issues per cycle
# The dtypes of activations and of values.
ARITHMETIC = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "autocast": (torch.bfloat16, torch.float32),
    "tf32": (torch.float32, torch.float32),
}
KERNELS = ("product_kernel", "values_kernel")
REFERENCE = "64-64 3x3 at 32"
CASES = {
    REFERENCE: (250, 64),
    "64-64 3x3 at 16": (250,),
    "eFCN 2: 64-64 5x5 at 8": (250,),
    "256-256 3x3 at 8": (250,),
}
OUT = harness.RESULTS / "block_sparse_estimate-triton.json"


@dataclass(frozen=True)
class Call:
    """The sizes of one product: a layer, a batch, bytes of an element of activations and values, and blocks by row.

    Rows are output pixels, and input pixels for the gradient of the input; ``summed`` and ``channels`` are those of the
    input and the output of a group in the product.
    """

    layer: Layer
    batch: int
    itemsize: int
    values_itemsize: int
    blocks: list[int]
    summed: int
    channels: int
    activations: int  # elements of the product's input and output, or of both inputs of the gradient of values

    @property
    def nnz(self) -> int:
        return sum(self.blocks)

    def values(self) -> int:
        """Return the bytes of all values."""
        return self.nnz * self.layer.groups * self.summed * self.channels * self.values_itemsize

    def floor(self) -> int:
        """Return the bytes that any implementation reads or writes."""
        return self.activations * self.itemsize + self.values()


@dataclass(frozen=True)
class Work:
    """The work of all programs of a launch."""

    l2_bytes: int
    operations: int
    steps: int  # rounds of the main loop


def product_work(call: Call, form: Any) -> Work:
    """Return the work of ``product_kernel``: each block of a row takes a tile of the input and a block of values."""
    sample_tiles, width_tiles = cdiv(call.batch, form.samples), cdiv(call.channels, form.width)
    groups = call.layer.groups
    x = call.nnz * groups * width_tiles * call.batch * call.summed * call.itemsize
    y = len(call.blocks) * groups * call.batch * call.channels * call.itemsize
    steps = call.nnz * groups * sample_tiles * width_tiles * form.parts
    operations = 2 * steps * form.samples * form.depth * form.width
    return Work(x + y + sample_tiles * call.values(), operations, steps)


def values_work(call: Call, form: Any) -> Work:
    """Return the work of ``values_kernel``: each block takes a tile of the input, some blocks one of the gradient.

    If all samples are in one tile, a program reads the gradient once for its share of a row's blocks; otherwise once
    for each of the tiles that hold the gradients of some blocks.
    """
    depth_tiles, width_tiles = cdiv(call.summed, form.depth), cdiv(call.channels, form.width)
    groups, parts = call.layer.groups, cdiv(call.batch, form.samples)
    shares = [
        count * (one + 1) // form.slices - count * one // form.slices
        for count in call.blocks
        for one in range(form.slices)
    ]
    tiles = sum(cdiv(share, form.blocks) for share in shares)
    reads = len(shares) if form.parts == 1 else tiles
    x = call.nnz * groups * width_tiles * call.batch * call.summed * call.itemsize
    grad = reads * groups * depth_tiles * call.batch * call.channels * call.itemsize
    steps = tiles * groups * depth_tiles * width_tiles * parts
    operations = 2 * steps * form.samples * form.blocks * form.depth * form.width
    return Work(x + grad + call.values(), operations, steps)


def calls(layer: Layer, batch: int, dtype: torch.dtype, of_values: torch.dtype) -> Iterator[tuple[str, Call, Any]]:
    """Yield the name, the sizes and the launcher's call of each product of a training step."""
    from loco_ext.triton_kernels import block_sparse

    pattern = layer.pattern()
    transposed = pattern.transpose()
    depth, width = layer.channels_in // layer.groups, layer.channels_out // layer.groups
    x = torch.empty(batch, pattern.n_in, layer.channels_in, dtype=dtype)
    grad = torch.empty(batch, pattern.n_out, layer.channels_out, dtype=dtype)
    values = torch.empty(pattern.nnz, layer.groups, depth, width, dtype=of_values)
    by_output = pattern.crow_indices, pattern.col_indices
    gradient = "block_sparse_value_gradient" + ("" if of_values == dtype else "_float32")
    sizes = layer, batch, dtype.itemsize, of_values.itemsize
    rows, columns = pattern.crow_indices.diff().tolist(), transposed.crow_indices.diff().tolist()
    both = x.numel() + grad.numel()
    yield (
        "forward",
        Call(*sizes, rows, depth, width, both),
        lambda: block_sparse.block_sparse_matmul(x, values, *by_output, None),
    )
    yield (
        "gradient of the input",
        Call(*sizes, columns, width, depth, both),
        lambda: block_sparse.block_sparse_input_gradient(grad, values, *transposed),
    )
    yield (
        "gradient of values",
        Call(*sizes, rows, depth, width, both),
        lambda: getattr(block_sparse, gradient)(x, grad, *by_output, layer.groups),
    )


def compiled(launch: Any, arch: int, tf32: bool) -> tuple[str, int, dict[str, Any], Any]:
    """Return the kernel's name, its number of programs, its options and its code for a GPU; launches nothing."""
    from loco_ext.triton_kernels import block_sparse, block_sparse_tiles

    of_gpu = block_sparse_tiles.GpuLimits(
        GPUS[arch].shared_memory, multiprocessors=GPUS[arch].multiprocessors, capability=arch // 10
    )
    replaced: dict[str, Any] = {"_tf32": lambda _dtype: tf32, "_gpu": lambda _device: of_gpu}
    ((name, grid, options, code),) = ahead_of_time.launches(launch, block_sparse, KERNELS, ("cuda", arch), **replaced)
    return name, grid[0], options, code


def estimate(product: str, call: Call, launch: Any, arch: int, tf32: bool) -> dict[str, Any]:
    """Return the resources of a product's compiled code, and the estimated seconds."""
    gpu = GPUS[arch]
    name, programs, options, code = compiled(launch, arch, tf32)
    form, warps, cubin = options["FORM"], options["num_warps"], code.asm["cubin"]
    work = (product_work if name == "product_kernel" else values_work)(call, form)
    used, shared = ahead_of_time.resources(cubin), code.metadata.shared
    (kernel,) = ahead_of_time.disassembled(cubin).values()
    loop = len(kernel.main_loop())
    resident = min((gpu.shared_memory + 1024) // (shared + 1024), REGISTERS // (32 * warps * used["REG"]))
    busy = programs / (cdiv(programs, gpu.multiprocessors) * gpu.multiprocessors)
    seconds = {
        "HBM": call.floor() / gpu.hbm,
        "L2": work.l2_bytes / (gpu.l2 * busy),
        "tensor cores": work.operations / ((gpu.tf32 if tf32 else gpu.half) * busy),
        "issue": work.steps * loop * warps / (ISSUED * gpu.clock * gpu.multiprocessors * busy),
    }
    casts = 6 * call.values() // call.values_itemsize if call.values_itemsize > call.itemsize else 0
    transposes = 2 * call.activations * call.itemsize
    return {
        "loop": loop,
        "registers": used["REG"],
        "warps": warps,
        "resident": resident,
        "programs": programs,
        "l2_bytes": work.l2_bytes,
        "casts": casts / gpu.hbm if product != "gradient of the input" else 0.0,
        "transposes": transposes / gpu.hbm if product != "gradient of values" else 0.0,
        "seconds": seconds,
        "estimate": max(seconds.values()),
        "bound": max(seconds, key=lambda bound: seconds[bound]),
    }


def estimates(layer: str, batch: int, arithmetic: str, arch: int) -> list[dict[str, Any]]:
    """Return the record of each product of a case."""
    case = {"gpu": GPUS[arch].name, "layer": layer, "batch": batch, "arithmetic": arithmetic}
    return [
        case | {"product": product} | estimate(product, call, launch, arch, arithmetic == "tf32")
        for product, call, launch in calls(LAYERS[layer], batch, *ARITHMETIC[arithmetic])
    ]


def summary(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return sums over the products of each training step, and the kernels of the first layer."""
    case, steps = ("gpu", "layer", "batch", "arithmetic"), []
    for _, products in itertools.groupby(records, key=lambda record: [record[key] for key in case]):
        each = list(products)
        sums = {key: sum(record[key] for record in each) for key in ("estimate", "casts", "transposes")}
        floor = sum(record["seconds"]["HBM"] for record in each)
        steps.append({key: each[0][key] for key in case} | {"floor": floor} | sums)
    left_out = ("casts", "transposes", "seconds")
    first = [record for record in records if all(record[key] == records[0][key] for key in ("layer", "batch"))]
    return {"results": steps, "kernels": [{k: v for k, v in record.items() if k not in left_out} for record in first]}


def main(argv: Sequence[str] | None = None) -> int:
    """Estimate all cases or those chosen, print tables, and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.estimate_block_sparse", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--layers", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--arithmetic", nargs="*", choices=ARITHMETIC, default=list(ARITHMETIC))
    parser.add_argument("--gpus", nargs="*", type=int, choices=GPUS, default=list(GPUS), help="compute capabilities")
    parser.add_argument("--out", type=Path, help="JSON file; a run of all cases has one in bench/results")
    arguments = parser.parse_args(argv)
    everything = all(getattr(arguments, name) == parser.get_default(name) for name in ("layers", "arithmetic", "gpus"))
    records = [
        record
        for layer in arguments.layers
        for batch in CASES[layer]
        for arithmetic in arguments.arithmetic
        for arch in arguments.gpus
        for record in estimates(layer, batch, arithmetic, arch)
    ]
    versions = {"triton": package_version("triton")}
    report = {"benchmark": "block_sparse_estimate", "machine": machine.describe() | versions, **summary(records)}
    generated.publish(report, arguments.out or (OUT if everything else None), tables.RENDERERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
