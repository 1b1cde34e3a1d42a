"""Reads the metrics page of a process."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_SECONDS = 10.0


async def scrape(http_address: str) -> str:
    """Return the metrics page of a process."""
    return await asyncio.to_thread(_get, f"http://{http_address}/metrics")


def samples(page: str) -> dict[str, float]:
    """Return the samples of a metrics page by their names: ``name`` or ``name{key="value"}``."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return found


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
        return str(answer.read().decode())
