"""``python -m ssd_bench.gpu_check.child NAME DEVICE SCRATCH RESULT``: the process of one check."""

import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ssd.child import end_with_parent
from ssd.errors import SSDError
from ssd_bench.gpu_check.checks import CHECKS
from ssd_bench.gpu_check.outcome import (
    Environment,
    Figure,
    Outcome,
    SkipError,
    WrongResultError,
)


def run_check(name: str, environment: Environment) -> Outcome:
    """Run a check in this process. Errors that no check expects pass through."""
    module, _, attribute = CHECKS[name].function.partition(":")
    try:
        check: Callable[[Environment], dict[str, Figure]] = getattr(
            import_module(f"ssd_bench.gpu_check.{module}"), attribute
        )
        return Outcome(status="passed", figures=check(environment))
    except SkipError as error:
        return Outcome(status="skipped", reason=str(error))
    except (WrongResultError, SSDError) as error:
        return Outcome(status="failed", reason=" ".join(str(error).split()))


def main() -> None:
    """Run the check of the command line and write its outcome; end with the command."""
    end_with_parent(signal.SIGKILL)
    name, device, scratch, result = sys.argv[1:]
    outcome = run_check(name, Environment(device=device, scratch=Path(scratch)))
    Path(result).write_text(outcome.to_json())


if __name__ == "__main__":
    main()
