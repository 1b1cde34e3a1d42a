"""Which CPUs of one machine run the target, the drafts, and everything else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Which CPUs run what, as the processes' flags want them."""

    target: str
    drafts: tuple[str, ...]
    others: str
    """Threads that run no model: gRPC, HTTP, the command."""
    is_shared: bool
    """Target and drafts share a core: there is only one."""

    def num_cpus(self, *, with_drafts: bool) -> int:
        """CPUs that run a model: the target's, and the drafts' if they are in use."""
        lists = (self.target, *(self.drafts if with_drafts else ()))
        return len({cpu for listed in lists for cpu in listed.split(",")})


def plan_cpus(allowed: Sequence[int], num_drafts: int) -> CpuPlan:
    """Give the target the first half of the CPUs and the drafts the rest.

    Drafts share their half evenly; with more drafts than CPUs there they take turns.
    """
    cpus = sorted(allowed)
    if len(cpus) == 1:
        only = str(cpus[0])
        return CpuPlan(only, (only,) * num_drafts, only, is_shared=True)
    half = (len(cpus) + 1) // 2
    ours, theirs = cpus[:half], cpus[half:]
    if num_drafts == 0:
        return CpuPlan(_listed(ours), (), _listed(theirs), is_shared=False)
    shares = [theirs[i::num_drafts] or [theirs[i % len(theirs)]] for i in range(num_drafts)]
    return CpuPlan(_listed(ours), tuple(map(_listed, shares)), _listed(theirs), is_shared=False)


def one_cpu_a_core(allowed: Iterable[int], topology: Path = TOPOLOGY) -> tuple[int, ...]:
    """Return the first allowed CPU of each physical core, ascending.

    Two hardware threads of one core are no two cores. Without a topology all CPUs count.
    """
    first: dict[str, int] = {}
    for cpu in sorted(allowed):
        try:
            core = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        first.setdefault(core.strip(), cpu)
    return tuple(first.values())


def _listed(cpus: Sequence[int]) -> str:
    return ",".join(map(str, cpus))
