"""Reads the metrics page of another process."""

import asyncio
import http.client
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The process is on this machine, where a proxy cannot reach it."""


async def scrape(http_address: str, timeout_seconds: float = 10.0) -> dict[str, float]:
    """Return the samples of a process as ``samples`` does.

    Raises:
        OSError: the process cannot be reached.
        ValueError: the page is malformed.
    """
    url = f"http://{http_address}/metrics"

    def page() -> str:
        try:
            with _WITHOUT_PROXY.open(url, timeout=timeout_seconds) as answer:
                return str(answer.read().decode())
        except http.client.HTTPException as error:
            raise OSError(f"{url}: {error}") from error

    return samples(await asyncio.to_thread(page))


def samples(page: str) -> dict[str, float]:
    """Return the samples of a metrics page by their names: ``name`` or ``name{key="value"}``."""
    values = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return values
