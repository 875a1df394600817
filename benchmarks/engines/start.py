"""Runs a worker: `python start.py engines.openvino_worker`.

An engine imports what it finds on the path, and the benchmarks beside this folder have names that packages have too
(transformers would take `kernels.py` for a library of that name). So nothing but the package `engines` is made known.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def make_package_known() -> None:
    """Imports the package `engines` from its folder, without its neighbours."""
    place = FOLDER / "__init__.py"
    spec = importlib.util.spec_from_file_location("engines", place, submodule_search_locations=[str(FOLDER)])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["engines"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
    make_package_known()
    del sys.argv[0]  # the worker's own name comes first, as Python would put it
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
