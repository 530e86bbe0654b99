"""What the kernels cost on a GPU, found without one: registers, spills, shared memory, mma.

Lowers a function for CUDA, takes the Triton IR out of its custom calls and hands it to the
compiler and the assembler that the `triton` package brings. JAX has no public way to that IR, so
this is a tool for tests and benchmarks; no op depends on it. Tried with JAX 0.10.2 and triton
3.6.0; JAX 0.11 and later compile the IR while lowering and do not hand it out.
"""

import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels import triton_backend as tb


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel compiled for one architecture.

    Attributes:
        kernel: the kernel's name.
        arch: compute capability times ten: 80, 90.
        num_warps: warps per program.
        num_stages: software pipeline depth.
        registers: per thread.
        spill_bytes: spilled loads and stores together, per thread.
        shared_bytes: shared memory per program.
        mma: tensor-core instructions in the PTX.
    """

    kernel: str
    arch: int
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    mma: int


def unavailable() -> str | None:
    """Why nothing can be compiled here, or None if it can."""
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 11):
        return f"JAX {jax.__version__} does not hand out its Triton IR (0.10 does)"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "the `triton` package is not installed (pip install triton==3.6.0)"
    return None


def compile_kernels(
    function: Callable[..., Any], *args: Any, arch: int, **options: Any
) -> list[KernelReport]:
    """Compiles every kernel in `jax.jit(function)(*args)` for a compute capability.

    Args:
        function: must name its implementations.
        args: arrays or `jax.ShapeDtypeStruct`s.
        arch: 80 for an A100, 90 for an H100 or H200.
        options: keyword arguments of the function.

    Raises:
        NotImplementedError: `unavailable()` says why.
    """
    reason = unavailable()
    if reason:
        raise NotImplementedError(f"cannot compile kernels: {reason}")
    lowered = tb.lower_for_cuda(lambda *a: function(*a, **options), *args)
    return [_compile(arch, *kernel) for kernel in _triton_kernels(lowered)]


def _triton_kernels(lowered: Any) -> Iterator[tuple[str, str, int, int]]:
    """(name, Triton IR, warps, stages) of every Triton call in a lowered module."""
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    def walk(operation: Any) -> Iterator[Any]:
        for region in operation.regions:
            for block in region.blocks:
                for child in block.operations:
                    yield child.operation
                    yield from walk(child.operation)

    for operation in walk(lowered.compiler_ir("stablehlo").operation):
        if operation.name != "stablehlo.custom_call":
            continue
        if "triton" not in str(operation.attributes["call_target_name"]):
            continue
        config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
        context = ir.Context()
        dialect.register_dialect(context)
        module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes, context)
        yield (
            ir.StringAttr(config["name"]).value,
            str(module),
            ir.IntegerAttr(config["num_warps"]).value,
            ir.IntegerAttr(config["num_stages"]).value,
        )


def _compile(arch: int, name: str, ttir: str, num_warps: int, num_stages: int) -> KernelReport:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ttir")
        with open(source, "w") as file:
            file.write(ttir)
        compiled = triton_compile(
            source,
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        log = _assemble(compiled.asm["ptx"], folder)
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise RuntimeError(f"ptxas printed no register count:\n{log}")
    return KernelReport(
        kernel=name,
        arch=arch,
        num_warps=num_warps,
        num_stages=num_stages,
        registers=int(registers.group(1)),
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        shared_bytes=compiled.metadata.shared,
        mma=sum(compiled.asm["ptx"].count(op) for op in ("mma.sync", "wgmma.mma_async")),
    )


def _assemble(ptx: str, folder: str) -> str:
    import triton

    binaries = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    source = os.path.join(folder, "kernel.ptx")
    with open(source, "w") as file:
        file.write(ptx)
    target = re.search(r"\.target (\w+)", ptx)
    if target is None:
        raise RuntimeError("the compiled PTX names no target")
    errors = []
    for assembler in ("ptxas", "ptxas-blackwell"):  # newer PTX needs the newer assembler
        done = subprocess.run(
            [
                os.path.join(binaries, assembler),
                "-v",
                f"-arch={target.group(1)}",
                source,
                "-o",
                os.devnull,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return done.stderr
        errors.append(f"{assembler}: {done.stdout}{done.stderr}")
    raise RuntimeError("\n".join(errors))
