"""Every tensor that outpace makes says its type and its device: torch's defaults belong to the caller.

A tensor of another type or on another device than meant is at best a wrong number; C would write over other memory.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest
from torch.utils._device import _device_constructors

import outpace

PACKAGE = Path(outpace.__file__).parent
NATIVE = PACKAGE / "models" / "native"
FILES = sorted(PACKAGE.rglob("*.py"))
# fmt: off
CREATORS = frozenset({
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_permuted",
    "empty_quantized", "empty_strided", "eye", "fftfreq", "full", "hamming_window", "hann_window", "kaiser_window",
    "linspace", "logspace", "nested_tensor", "normal", "ones", "rand", "randint", "randn", "randperm", "range",
    "rfftfreq", "scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor",
    "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
})
# fmt: on
TYPED = frozenset({"frombuffer"})
"""Always on the CPU, but of the default type unless told otherwise."""
DEFAULT_ONLY = frozenset({"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "get_default_dtype"})
"""Cannot be told, or ask for what must not matter. (As annotations, without a call, they are harmless.)"""


def faults(source: str) -> Iterator[str]:
    """Calls that make tensors as torch's defaults say, as "line: call"."""
    nodes = list(ast.walk(ast.parse(source)))
    calls = {node.func: node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if _hides(node):
            yield f"{node.lineno}: {ast.unparse(node)}, which hides where tensors are made"
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[0] == "torch":
            yield from _fault_of(node, calls.get(node))


def _hides(node: ast.AST) -> TypeGuard[ast.Import | ast.ImportFrom]:
    """Whether it is an import by which tensors could be made without the word "torch"."""
    if isinstance(node, ast.ImportFrom):
        names = CREATORS | TYPED | DEFAULT_ONLY - {"Tensor"}
        return node.module in ("torch", "torch.fft", "torch.nested") and any(a.name in names for a in node.names)
    return isinstance(node, ast.Import) and any(
        a.name == "torch" and a.asname not in (None, "torch") for a in node.names
    )


def _fault_of(name: ast.Attribute, call: ast.Call | None) -> Iterator[str]:
    told = set() if call is None else {keyword.arg for keyword in call.keywords}
    needed = {"dtype", "device"} if name.attr in CREATORS else {"dtype"} if name.attr in TYPED else set()
    if not needed <= told:
        yield f"{name.lineno}: {ast.unparse(call or name)} lacks {' and '.join(sorted(needed - told))}"
    if call is not None and name.attr in DEFAULT_ONLY:
        yield f"{name.lineno}: {ast.unparse(call)} cannot be told a type and a device"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_tensor_depends_on_the_defaults(file: Path) -> None:
    found = list(faults(file.read_text(encoding="utf-8")))
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "x = torch.empty(3)",
        "x = torch.empty(3, dtype=torch.float32)",
        "x = torch.tensor(ids, device='cpu')",
        "x = torch.frombuffer(memory)",
        "x = torch.fft.fftfreq(3)",
        "x = torch.Tensor(3)",
        "make = torch.zeros",
        "from torch import zeros",
        "import torch as t",
        "def f():\n    return [torch.arange(n) for n in range(3)]",
    ],
)
def test_a_fault_is_found(source: str) -> None:
    assert len(list(faults(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "x = torch.empty(3, dtype=torch.float32, device='cpu')",
        "x = torch.frombuffer(memory, dtype=torch.int8)",
        "def f(x: torch.Tensor) -> torch.Tensor:\n    return x.new_empty(3)",
        "x = torch.empty_like(y)",
        "x = numpy.zeros(3)",
        "import torch.nn.functional as F",
        "from torch import Tensor",
    ],
)
def test_what_is_no_fault_passes(source: str) -> None:
    assert not list(faults(source))


def test_the_list_holds_all_that_torch_moves_to_the_default_device() -> None:
    moved = {function.__name__ for function in _device_constructors()}
    assert {name.removeprefix("fft_") for name in moved} <= CREATORS


def test_the_kernels_get_addresses_in_one_way() -> None:
    takers = {file.name for file in NATIVE.glob("*.py") if "data_ptr" in file.read_text(encoding="utf-8")}
    assert takers == {"pointers.py"}
