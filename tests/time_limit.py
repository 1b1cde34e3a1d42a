"""The end of a run that may take only so long, as in CI."""

import os
import time

ENDS_AT = time.monotonic() + float(os.environ.get("TEST_SECONDS", "inf"))  # noqa: TID251 - of the run, no setting
"""Tests that would begin later are skipped."""
