"""The team of threads: everybody comes, phases end together, tasks go round once."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter

import pytest
import torch

from outpace.models.native.library import library
from outpace.models.native.structures import Format
from tests.models.native.calls import multiply, num_tasks
from tests.models.native.kinds import make, pack


class MemberStruct(ctypes.Structure):
    _fields_ = [("team", ctypes.c_void_p), ("size", ctypes.c_int), ("index", ctypes.c_int), ("turn", ctypes.c_int)]


Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(MemberStruct))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_member_comes_once_on_a_thread_of_its_own(threads: int) -> None:
    seen: list[tuple[int, int]] = []
    idents: set[int] = set()

    @Work
    def work(_: int, member: ctypes._Pointer[MemberStruct]) -> None:
        seen.append((member.contents.size, member.contents.index))
        idents.add(threading.get_ident())
        library().meet(member)

    library().run_team(threads, work, None)
    assert sorted(seen) == [(threads, index) for index in range(threads)]
    assert len(idents) == threads


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_nobody_leaves_a_phase_before_all_have_come(threads: int) -> None:
    phases = 40
    arrived: Counter[int] = Counter()
    early: list[tuple[int, int]] = []
    lock = threading.Lock()

    @Work
    def work(_: int, member: ctypes._Pointer[MemberStruct]) -> None:
        for phase in range(phases):
            with lock:
                arrived[phase] += 1
            library().meet(member)
            with lock:
                if arrived[phase] != threads:
                    early.append((phase, arrived[phase]))

    library().run_team(threads, work, None)
    assert early == []
    assert arrived == {phase: threads for phase in range(phases)}


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (100, 1000), (1000, 100), (20, 20_000)])
def test_the_tasks_of_a_product_cover_its_outputs_once(outputs: int, inputs: int) -> None:
    matrix = pack(make("F32", outputs, inputs)[0], Format.F32)
    count, rows = num_tasks(matrix), torch.ones(3, inputs)
    written = torch.stack([multiply(matrix, rows, tasks=[task]).isfinite() for task in range(count)])
    assert (written.sum(0) == 1).all()
    assert (count > 1) == (outputs * inputs > 10_000), "several tasks where there is work for several"
