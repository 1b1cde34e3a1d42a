"""Fields of the playground."""

import shutil
import subprocess

import pytest
from tests.processes import ROOT

FIELDS = ROOT / "services" / "ssd_gateway" / "playground" / "fields.js"


@pytest.mark.parametrize(
    ("prompt", "seed", "words"),
    [
        ("x", "", ""),
        ("x", "0", ""),
        ("x", "9007199254740991", ""),
        (" \n", "", "Enter a text."),
        ("x", "abc", "“abc” is not an integer from 0 to 9007199254740991"),
        ("x", "1.5", "“1.5” is not an integer"),
        ("x", "-1", "“-1” is not an integer"),
        # As a number, it equals the next one.
        ("x", "9007199254740992", "“9007199254740992” is not an integer"),
        ("x", "9" * 400, "is not an integer"),
    ],
)
def test_the_playground_names_a_field_that_is_wrong(prompt: str, seed: str, words: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not on PATH: the fields of the playground are not tested")
    program = (
        f"import {{ mistake }} from {FIELDS.as_uri()!r};"
        "process.stdout.write(mistake(...process.argv.slice(1)));"
    )
    done = subprocess.run(
        [node, "--input-type=module", "-e", program, "--", prompt, seed],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert words in done.stdout
    assert bool(words) == bool(done.stdout)
