"""The pages of the gateway: the playground and the documentation of the API."""

import re

from tests.gateway import ScriptedTarget, fronting, get


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
        # The page runs only the contents of this version.
        assert page.count('integrity="sha384-') == len(loaded) == 2
        assert "from cdn.jsdelivr.net" in page
        status, _, program = await get(front, "/docs/docs.js")
        assert status == 200
        assert 'url: "/openapi.json"' in program
