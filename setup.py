"""The compiled kernels: LARS and LAMB, the codec of DGC, and blocks of few bits. The rest is in pyproject.toml.

They are plain C, loaded with ctypes, so one wheel serves every version of Python.
"""

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


def compiled(name: str, sources: list[str], headers: list[str] | None = None, *, contract: str = "fast") -> Extension:
    """contract: whether a * b + c may be rounded once instead of twice."""
    return Extension(
        name,
        sources,
        depends=headers or [],
        # No -ffast-math: a nan or an inf in a gradient must reach the parameter.
        extra_compile_args=["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", f"-ffp-contract={contract}"],
        extra_link_args=["-fopenmp"],
        libraries=["m"],
        # Where there is no compiler, fleetx is installed without them; `reason()` of the modules beside them says so.
        optional=True,
    )


class BuildLibraries(build_ext):
    """Name the files `_kernels.so`, without the version of Python: they do not use it."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


class WheelForAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


DGC = "src/fleetx/parts/dgc"

setup(
    ext_modules=[
        compiled("fleetx.optim._kernels", ["src/fleetx/optim/kernels.c"]),
        compiled("fleetx.parts.dgc._codec", [f"{DGC}/codec.c", f"{DGC}/decode.c"], [f"{DGC}/wire.h"]),
        compiled("fleetx.parts._blocks._blocks", ["src/fleetx/parts/_blocks/blocks.c"], contract="off"),
    ],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": WheelForAnyPython},
)
