"""``python -m ssd_draft``: read settings, find the model, construct the draft, run it."""

from ssd.runtime.sigterm import end_at_sigterm

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    end_at_sigterm(also_at_sigint=True)

from collections.abc import Sequence

from ssd.engine.models.fingerprint import weights_fingerprint
from ssd.model_files.local_model import check_model, find_model
from ssd.ports import SystemClock
from ssd.rpc.security import security_of
from ssd.runtime.cpu_plan import pin
from ssd.runtime.gpu_allocation import use_own_gpus
from ssd.runtime.process import exit_process, peer, run_process, run_until_signal
from ssd.settings import load_kernels_early
from ssd_draft.draft import Draft
from ssd_draft.settings import DraftSettings
from ssd_draft.setup import DraftSetup


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process and return its exit code."""
    return run_process("draft", DraftSettings, serve, check, argv)


async def serve(settings: DraftSettings) -> int:
    """Construct the draft and serve until a signal.

    Raises:
        SetupError: the process cannot start.
    """
    use_own_gpus(settings)
    if settings.channel == "collective":
        load_kernels_early()
    cpus = pin(settings.step_cpus, settings.other_cpus)
    model = find_model(settings, max_num_seqs=settings.max_sessions, branches=settings.branches)
    me = peer(settings, weights_fingerprint(model.folder))
    draft = Draft(DraftSetup(settings=settings, model=model, peer=me), cpus, SystemClock())
    return await run_until_signal(draft.run(), draft.drain)


def check(settings: DraftSettings) -> None:
    """Check the settings without loading the model.

    Raises:
        SetupError: the process would not start.
    """
    security_of(settings, "draft")
    check_model(settings, max_num_seqs=settings.max_sessions, branches=settings.branches)


if __name__ == "__main__":
    exit_process(main())
