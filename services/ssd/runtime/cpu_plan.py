"""Which CPUs of one machine run the target, the drafts and all other threads."""

import ctypes
import os
import platform
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ssd.errors import SettingsError

TOPOLOGY = Path("/sys/devices/system/cpu")
SHORT_SLICE_SECONDS = 0.0001
"""Turns of threads that run no model; the shortest that Linux has."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call by machine: neither Python nor glibc 2.40 has a function for it."""
_SCHED_ATTR = "=IIQiIQQQII"
"""``struct sched_attr``: size, policy, flags, nice, priority, runtime, deadline, period, two hints.
The runtime of the usual policy, 0, is the length of a turn."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """CPU lists in the form of the processes' flags, ``0,2``."""

    target: str
    drafts: tuple[str, ...]
    others: str
    """For threads that run no model: gRPC, HTTP, the command."""
    is_shared: bool
    """Target and drafts share a core: there is only one."""

    def num_cpus(self, *, with_drafts: bool) -> int:
        """Number of CPUs that run a model; those of the drafts only if they are in use."""
        lists = (self.target, *(self.drafts if with_drafts else ()))
        return len({cpu for listed in lists for cpu in listed.split(",")})


def plan_cpus(
    allowed: Sequence[int], num_drafts: int, without_models: Sequence[int] = ()
) -> CpuPlan:
    """Give the target the first half of the CPUs and the drafts the rest; without drafts, all.

    The drafts' half is divided evenly. With more drafts than CPUs, several drafts share one.

    *Decision*: the last CPU runs no model if each draft has more than one, and without drafts if
    there are more than two. Otherwise, all other threads run on any CPU. *Because*: with two CPUs,
    these threads take a fifth of a CPU. Tables were late in .27 of the rounds with these threads
    on the draft's CPU, and in .11 with them on any CPU (target of 50M weights, temperature 0).
    *Not chosen*: a CPU without a model where each draft has one. *Revisit when* drafts are so large
    that their share of the CPUs matters more.

    Args:
        allowed: CPUs of the models.
        num_drafts: drafts on this machine.
        without_models: CPUs that run no model, in addition to ``allowed``.
    """
    cpus = sorted(allowed)
    others = _listed(sorted(without_models))
    if len(cpus) == 1:
        only = str(cpus[0])
        return CpuPlan(only, (only,) * num_drafts, others or only, is_shared=True)
    half = (len(cpus) + 1) // 2 if num_drafts else len(cpus)
    ours, theirs = cpus[:half], cpus[half:]
    last, num_needed = (theirs, num_drafts) if num_drafts else (ours, 2)
    if not others and len(last) > num_needed:
        others = str(last.pop())
    shares = [theirs[i::num_drafts] or [theirs[i % len(theirs)]] for i in range(num_drafts)]
    others = others or _listed(cpus)
    return CpuPlan(_listed(ours), tuple(map(_listed, shares)), others, is_shared=False)


def one_cpu_a_core(allowed: Iterable[int], topology: Path = TOPOLOGY) -> tuple[int, ...]:
    """Return the first allowed CPU of each physical core, ascending.

    Hardware threads share their core. Without topology files, every CPU counts as a core.
    """
    first: dict[str, int] = {}
    for cpu in sorted(allowed):
        try:
            core = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        first.setdefault(core.strip(), cpu)
    return tuple(first.values())


def divide(cpus: Collection[int], num_shares: int) -> tuple[frozenset[int], ...]:
    """Divide CPUs into shares of neighbours; with fewer CPUs than shares, some share one."""
    ordered, count = sorted(cpus), len(cpus)
    if count < num_shares:
        return tuple(frozenset({ordered[index % count]}) for index in range(num_shares))
    bounds = [count * index // num_shares for index in range(num_shares + 1)]
    return tuple(frozenset(ordered[first:stop]) for first, stop in pairwise(bounds))


def pin(step_cpus: frozenset[int], other_cpus: frozenset[int]) -> frozenset[int]:
    """Move this thread, and the threads that it will start, to ``other_cpus``; empty for all.

    Returns:
        The CPUs to which the step thread moves itself: ``step_cpus``, or all if that is empty.

    Raises:
        SettingsError: a CPU is not allowed for this process.
    """
    allowed = os.sched_getaffinity(0)
    missing = (step_cpus | other_cpus) - allowed
    if missing:
        raise SettingsError(f"CPUs {sorted(missing)} are not among the allowed {sorted(allowed)}")
    if other_cpus:
        os.sched_setaffinity(0, other_cpus)
    return step_cpus or frozenset(allowed)


def set_slice(seconds: float) -> None:
    """Ask the scheduler for turns of this length for this thread and those that it will start.

    A thread that wakes up interrupts one with longer turns at once. This needs Linux 6.12; earlier
    kernels ignore it, and a sandbox may forbid it: turns then have the kernel's length (3 ms).

    *Decision*: step threads have turns of the kernel's length, all others short ones. *Because*: a
    commit or a table passes several threads that do little. Each waited for the end of a turn of a
    model: a table took 2.0 ms from the draft to the target, and .9 ms with short turns (embedded
    pair, two CPUs). *Not chosen*: priorities, which also change the shares of other processes.
    *Revisit when* frames pass fewer threads.

    Args:
        seconds: .0001 to .1, or 0 for the length that the kernel chooses.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    size, nice = struct.calcsize(_SCHED_ATTR), os.getpriority(os.PRIO_PROCESS, 0)
    nanoseconds = int(seconds * 1e9)
    attributes = struct.pack(_SCHED_ATTR, size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, ctypes.c_char_p(attributes), 0)


def _listed(cpus: Sequence[int]) -> str:
    return ",".join(map(str, cpus))
