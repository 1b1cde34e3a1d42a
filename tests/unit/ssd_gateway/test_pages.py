"""The pages of the gateway: the playground and the documentation of the API."""

import re
import shutil
import subprocess

import pytest
from tests.gateway import ScriptedTarget, fronting, get
from tests.processes import ROOT

FIELDS = ROOT / "services" / "ssd_gateway" / "playground" / "fields.js"


async def test_the_playground_loads_nothing_from_elsewhere() -> None:
    async with fronting(ScriptedTarget()) as front:
        status, headers, page = await get(front, "/")
        assert status == 200
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
        for path in ("style.css", "app.js", "fields.js", "lane.js", "stream.js"):
            status, _, text = await get(front, f"/playground/{path}")
            assert status == 200
            assert "//cdn" not in text
        assert 'src="/playground/app.js"' in page
    async with fronting(ScriptedTarget(), playground=False) as front:
        assert (await get(front, "/"))[0] == 404


async def test_the_documentation_states_where_its_program_comes_from() -> None:
    async with fronting(ScriptedTarget(), playground=False) as front:
        status, headers, page = await get(front, "/docs")
        assert status == 200
        loaded = re.findall(r'(?:src|href)="(https:[^"]*)"', page)
        (origin,) = {each.rpartition("/")[0] + "/" for each in loaded}
        assert f"script-src 'self' {origin};" in headers["content-security-policy"]
        # Other contents than those of this version are not run.
        assert page.count('integrity="sha384-') == len(loaded) == 2
        assert "from cdn.jsdelivr.net" in page
        status, _, program = await get(front, "/docs/docs.js")
        assert status == 200
        assert 'url: "/openapi.json"' in program


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
