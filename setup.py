"""The compiled kernels: LARS and LAMB, and the codec of DGC. Everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup


def compiled(name: str, sources: list[str], headers: list[str] | None = None) -> Extension:
    return Extension(
        name,
        sources,
        depends=headers or [],
        # No -ffast-math: a nan or an inf in a gradient must reach the parameter.
        extra_compile_args=["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"],
        extra_link_args=["-fopenmp"],
        libraries=["m"],
        # Where there is no compiler, fleetx is installed without them; `reason()` of the modules beside them says so.
        optional=True,
    )


DGC = "src/fleetx/parts/dgc"

setup(
    ext_modules=[
        compiled("fleetx.optim._kernels", ["src/fleetx/optim/kernels.c"]),
        compiled("fleetx.parts.dgc._codec", [f"{DGC}/codec.c", f"{DGC}/decode.c"], [f"{DGC}/wire.h"]),
    ]
)
