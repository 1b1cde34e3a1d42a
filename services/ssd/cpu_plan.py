"""Which CPUs of one machine run the target, the drafts and all other threads."""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ssd.errors import SettingsError

TOPOLOGY = Path("/sys/devices/system/cpu")


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
    """Give the target the first half of the CPUs and the drafts the rest.

    The drafts' half is divided evenly. With more drafts than CPUs, several drafts share one.

    *Decision*: if each draft has more than one CPU, the last CPU runs no model. *Because*: with two
    CPUs, all other threads take a fifth of the draft's CPU, and the draft waits for it a fifth of
    its time (the embedded pair at temperature 1 on a Xeon at 2.5 GHz). *Not chosen*: these threads
    beside the target, whose forward pass is always needed. *Revisit when* drafts are so large that
    their share of the CPUs matters more.

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
    half = (len(cpus) + 1) // 2
    ours, theirs = cpus[:half], cpus[half:]
    if num_drafts == 0:
        return CpuPlan(_listed(ours), (), others or _listed(theirs), is_shared=False)
    if not others and len(theirs) > num_drafts:
        others = str(theirs.pop())
    shares = [theirs[i::num_drafts] or [theirs[i % len(theirs)]] for i in range(num_drafts)]
    others = others or _listed(theirs)
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


def _listed(cpus: Sequence[int]) -> str:
    return ",".join(map(str, cpus))
