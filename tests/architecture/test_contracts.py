import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd.telemetry import SystemClock  # noqa: F401  (proves that the packages are importable)
