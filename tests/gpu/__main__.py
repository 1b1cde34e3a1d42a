"""``python -m tests.gpu``, ``make gpu-check``: run the checks of ``conftest`` and report them.

Exit code: 0 if no check failed or timed out, also if a speed target is missed; else 1; 2 or 4 if
the checks cannot run here, 130 after Ctrl-C.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.packages import ADDED, missing_requirements, requirements

FOLDER = Path(__file__).parent


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    ``--missing`` prints the requirements that are missing here, and ``--added`` those that a GPU
    machine may lack, one a line.
    """
    if list(argv) == ["--added"]:
        bounds = requirements()
        sys.stdout.writelines(f"{bounds[each]}\n" for each in ADDED.values())
        return 0
    missing = missing_requirements()
    if list(argv) == ["--missing"]:
        sys.stdout.writelines(f"{each}\n" for each in missing)
        return 0
    if missing:
        sys.stderr.write(
            f"error: missing packages: {' '.join(missing)}\n"
            "hint: on a machine with a network and the same Python, run\n"
            f"        pip download --only-binary :all: -d wheels {shlex.join(missing)}\n"
            "      then copy the folder here, and run 'make gpu-check WHEELS=wheels'\n"
        )
        return 2
    # One of the packages that can be missing.
    import pytest  # noqa: PLC0415

    own = (str(FOLDER), "-c", str(FOLDER / "gpu_check.ini"), "--output", "gpu_check.json")
    return int(pytest.main([*own, *argv]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
