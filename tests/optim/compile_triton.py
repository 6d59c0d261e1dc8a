"""Compiles every kernel of the modules named for GPUs that need not be there: `compile_triton.py ARCH,... MODULE...`.

Prints a line for each: the kernel, the target in its PTX, and the bytes of its machine code.
"""

from __future__ import annotations

import sys
from importlib import import_module

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fleetx.base.triton_kernels import OPTIONS

# What an argument of this name is. All others are constants with these values.
TYPES = {
    **dict.fromkeys(("g", "u", "v", "p", "u_out", "v_out"), "*fp32"),
    **dict.fromkeys(("numbers", "sums", "norms", "factor"), "*fp64"),
    **dict.fromkeys(("counts", "heads", "addresses", "before", "indices"), "*i64"),
    **dict.fromkeys(("chunks", "tops", "bins", "state"), "*i32"),
    **dict.fromkeys(("momentum", "decay"), "fp32"),
    "n": "i32",
}
CONSTANTS = {"chunk": 8192, "block": 1024, "nesterov": True, "decays": True, "shift": 10, "width": 1024}


def main(archs, *modules):
    for module in map(import_module, modules):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                signature = {arg: TYPES.get(arg, "constexpr") for arg in kernel.arg_names}
                if module.__name__ == "fleetx.parts.dgc.triton_kernels" and name == "count_kernel":
                    signature["counts"] = "*i32"
                constants = {arg: CONSTANTS[arg] for arg, kind in signature.items() if kind == "constexpr"}
                for arch in archs.split(","):
                    source, options = ASTSource(kernel, signature, constants), {"num_warps": 4, **OPTIONS}
                    made = triton.compile(source, target=GPUTarget("cuda", int(arch), 32), options=options)
                    target = next(line for line in made.asm["ptx"].splitlines() if line.startswith(".target"))
                    print(name, target.split()[1], len(made.asm["cubin"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
