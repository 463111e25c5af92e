"""What is installed and what is built; names, dependencies and tool settings are in pyproject.toml."""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

# What each extension is for, said when it could not be built.
WITHOUT = {
    "plsc.ps._core": "plsc.ps is left out: its native core was not built",
    "plsc.ops._kernels": "class-parallel heads run on torch operations, on CPUs slower: their kernels were not built",
    "plsc.data._native": "images are mirrored and made floats by numpy and torch, slower: the kernels were not built",
}


class BuildNative(build_ext):
    """Compiles the C++ parts with nanobind; where that fails, the rest of plsc is installed all the same."""

    nanobind: str | None = None  # its compiled object, once the first extension has one

    def build_extension(self, ext: Extension) -> None:
        try:
            self.add_nanobind(ext)
            super().build_extension(ext)
            sources = [source for source in ext.sources if source.endswith("nb_combined.cpp")]
            self.nanobind = self.nanobind or self.compiler.object_filenames(sources, output_dir=self.build_temp)[0]
        except Exception as error:
            why = str(error) if len(str(error)) < 100 else "the compiler's messages are above"
            print(
                f"{WITHOUT[ext.name]} ({why}). Everything else works; "
                "for this part install a C++17 compiler (g++) and install plsc again.",
                file=sys.stderr,
            )

    def add_nanobind(self, ext: Extension) -> None:
        try:
            import nanobind
        except ModuleNotFoundError:
            raise RuntimeError("nanobind is missing; without build isolation, pip install nanobind first") from None
        include = Path(nanobind.include_dir())
        ext.include_dirs += [str(include), str(include.parent / "ext" / "robin_map" / "include")]
        # nanobind comes as source; setuptools wants every source under the tree it builds in.
        copy = Path(self.build_temp) / "nb_combined.cpp"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(nanobind.source_dir()) / "nb_combined.cpp", copy)
        ext.include_dirs.append(nanobind.source_dir())
        if self.nanobind is None and str(copy) not in ext.sources:
            ext.sources.append(str(copy))
        elif self.nanobind is not None:
            ext.extra_objects.append(self.nanobind)

    def copy_extensions_to_source(self) -> None:
        """Of an editable install; what was not built cannot be copied."""
        self.extensions = [ext for ext in self.extensions if Path(self.get_ext_fullpath_built(ext)).exists()]
        super().copy_extensions_to_source()

    def get_ext_fullpath_built(self, ext: Extension) -> str:
        return str(Path(self.build_lib) / self.get_ext_filename(self.get_ext_fullname(ext.name)))


def native(name: str, folder: str, *flags: str) -> Extension:
    return Extension(
        name,
        sources=[str(path) for path in sorted(Path(folder).glob("*.cc"))],
        depends=[str(path) for path in sorted(Path(folder).glob("*.h"))],
        language="c++",
        # No contraction: a row's bits do not depend on whether a compiler fuses multiply and add.
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-fno-math-errno",
            "-ffp-contract=off",
            "-fvisibility=hidden",
            "-fno-strict-aliasing",
            "-g0",
            *flags,
        ],
        define_macros=[("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None)],
        optional=True,
    )


EXTENSIONS = [
    native("plsc.data._native", "plsc/data/core"),
    native("plsc.ps._core", "plsc/ps/core"),
    # -fopenmp-simd reads the loops' hints only; no OpenMP is linked.
    native("plsc.ops._kernels", "plsc/ops/core", "-fno-trapping-math", "-fopenmp-simd"),
]

setup(
    # The CUDA kernels travel as text; CuPy compiles them at first use. cuda/ itself must be no package (see the tests).
    packages=[*find_packages(include=["plsc", "plsc.*"]), "plsc._cuda"],
    package_dir={"plsc._cuda": "cuda"},
    package_data={
        "plsc": ["py.typed", "recipes/*.toml", "serve/page/*", "ps/core/plsc_rule.h"],
        "plsc._cuda": ["*.cu", "*.cuh"],
    },
    include_package_data=False,  # else the C++ sources, being in the manifest, would go into the wheel
    ext_modules=EXTENSIONS,
    cmdclass={"build_ext": BuildNative},
)
