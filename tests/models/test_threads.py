"""Threads follow the cores that are free: counters in, a number out, and no number whose bits are not the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from outpace.models.probe import probe_rows, same_bits
from outpace.models.threads import CpuUsage, ThreadGovernor, usable_cores
from tests.models.tiny_models import tiny_decoder


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu.max": "900000 100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_limits_of_a_control_group_count(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(tmp_path) == cores


class Machine:
    """Two cores of four; others and this process use as much of them as told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2})
        self.path = folder / "stat"
        self.seconds = self.own = 0.0
        self.busy = {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}
        self.write()

    def write(self) -> None:
        ticks = os.sysconf("SC_CLK_TCK")
        lines = ["cpu 0 0 0 0 0 0 0 0 0 0"]
        # user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice: a quarter of the time is stolen
        lines += [
            f"cpu{i} {int(busy * ticks * 3 / 4)} 0 0 777 55 0 0 {int(busy * ticks / 4)} 9 9"
            for i, busy in self.busy.items()
        ]
        self.path.write_text("\n".join([*lines, "intr 1 2 3"]))

    def run(self, seconds: float, *, own: float, others: float) -> None:
        """Time passes; `own` and `others` are cores kept busy among the allowed two."""
        self.seconds += seconds
        self.own += own * seconds
        for core in (1, 2):
            self.busy[core] += (own + others) * seconds / 2
        self.busy[0] += seconds  # a core that is not ours does not count
        self.write()

    def usage(self) -> CpuUsage:
        return CpuUsage(self.path, lambda: self.seconds, lambda: self.own)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_others_are_what_is_not_our_own(machine: Machine) -> None:
    usage = machine.usage()
    machine.run(2.0, own=1.2, others=0.5)
    assert usage.others() == pytest.approx(0.5, abs=0.02)
    machine.run(2.0, own=2.0, others=0.0)
    assert usage.others() == pytest.approx(0.0, abs=0.02)
    assert usage.others() is None  # no time has passed


def test_no_counters_no_change(tmp_path: Path) -> None:
    usage = CpuUsage(tmp_path / "none")
    assert usage.others() is None
    governor = ThreadGovernor(2, usage)
    assert governor.start(0.0) == 2


def test_a_core_is_given_up_at_once_and_taken_back_at_the_second_look(machine: Machine) -> None:
    governor = ThreadGovernor(2, machine.usage(), clock=lambda: machine.seconds)
    machine.run(1.0, own=0.1, others=0.1)
    assert governor.start(0.0) == 2
    seen = []
    for others in (0.0, 1.0, 1.0, 0.1, 0.1, 2.0, 0.5, 0.5, 0.7, 0.7):
        machine.run(0.6, own=0.5, others=others)
        governor.adjust()
        seen.append(torch.get_num_threads())
    #                    others: 0  1  1  .1 .1 2  .5 .5 .7 .7
    assert seen == [2, 1, 1, 1, 2, 1, 1, 1, 1, 1]


def test_between_looks_nothing_is_read(machine: Machine) -> None:
    governor = ThreadGovernor(2, machine.usage(), clock=lambda: machine.seconds)
    machine.run(1.0, own=0.0, others=0.0)
    governor.start(0.0)
    governor.adjust()
    machine.path.unlink()
    machine.seconds += 0.1
    governor.adjust()
    assert torch.get_num_threads() == 2


def test_a_number_with_other_bits_is_tried_once_and_never_used(machine: Machine) -> None:
    governor = ThreadGovernor(2, machine.usage(), clock=lambda: machine.seconds)
    machine.run(1.0, own=0.0, others=1.0)
    assert governor.start(0.0) == 1
    tried: list[int] = []
    governor.trust(lambda count: bool(tried.append(count)))
    for _ in range(6):
        machine.run(0.6, own=0.5, others=0.0)
        governor.adjust()
        assert torch.get_num_threads() == 1
    assert tried == [2]


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_one_and_two_threads_have_the_same_bits_here(quantization: str) -> None:
    decoder = tiny_decoder("llama", quantization)
    torch.set_num_threads(1)
    report = probe_rows(decoder)
    torch.set_num_threads(2)
    assert same_bits(decoder, report)
    other = tiny_decoder("llama", quantization, initializer_range=0.21)
    assert not same_bits(other, report)
