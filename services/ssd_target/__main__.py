"""``python -m ssd_target``: read settings, find the model, construct the target, run it."""

from ssd.runtime.sigterm import end_at_sigterm

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    end_at_sigterm(also_at_sigint=True)

from collections.abc import Sequence

from ssd.engine.models.fingerprint import weights_fingerprint
from ssd.observability.tracing import check_endpoint
from ssd.ports import SystemClock
from ssd.rpc.security import security_of
from ssd.runtime.cpu_plan import pin
from ssd.runtime.gpu_allocation import use_own_gpus
from ssd.runtime.process import exit_process, peer, run_process, run_until_signal
from ssd.settings import load_kernels_early
from ssd_target.models import check_models, find_models
from ssd_target.settings import TargetSettings
from ssd_target.target import TargetProcess


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process and return its exit code."""
    return run_process("target", TargetSettings, serve, check, argv)


async def serve(settings: TargetSettings) -> int:
    """Construct the target and serve until a signal.

    Raises:
        SetupError: the process cannot start.
    """
    use_own_gpus(settings)
    if settings.channel == "collective":
        load_kernels_early()
    cpus = pin(settings.step_cpus, settings.other_cpus)
    models = find_models(settings)
    me = peer(settings, weights_fingerprint(models.target.folder))
    target = TargetProcess(settings, models, me, cpus, SystemClock())
    return await run_until_signal(target.run(), target.drain)


def check(settings: TargetSettings) -> None:
    """Check the settings without loading the model.

    Raises:
        SetupError: the process would not start.
    """
    check_endpoint(settings.otlp_endpoint)
    security_of(settings, "target")
    settings.link_credentials()
    check_models(settings)


if __name__ == "__main__":
    exit_process(main())
