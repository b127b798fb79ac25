"""Builds the C++ core with CMake; everything else stands in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        cuda = os.environ.get("UNICRON_CUDA", "AUTO").upper()
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={library.parent}",
            f"-DUNICRON_CUDA={cuda}",
            f"-DUNICRON_WERROR={os.environ.get('UNICRON_WERROR', 'ON')}",
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", "_core", "-j", jobs], check=True)
        self.print_summary(build, library)

    def print_summary(self, build: Path, library: Path) -> None:
        cache = dict(
            line.split("=", 1)
            for line in (build / "CMakeCache.txt").read_text().splitlines()
            if "=" in line and not line.startswith(("#", "//"))
        )
        cuda = next((value for name, value in cache.items() if name.startswith("CMAKE_CUDA_COMPILER:")), "")
        rows = {
            "version": self.distribution.get_version(),
            "python": sys.version.split()[0],
            "c++ compiler": cache.get("CMAKE_CXX_COMPILER:FILEPATH", "?"),
            "build type": cache.get("CMAKE_BUILD_TYPE:STRING", "?"),
            "cuda": cuda if cuda and "NOTFOUND" not in cuda else "no",
            "module": f"{library} ({library.stat().st_size >> 10} KiB)",
        }
        print("unicron build summary", *(f"  {name:13} {value}" for name, value in rows.items()), sep="\n")


setup(ext_modules=[Extension("unicron._core", sources=[])], cmdclass={"build_ext": CMakeBuild})
