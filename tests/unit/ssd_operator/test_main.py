"""When the operator is ready; in virtual time."""

import asyncio
import json
from typing import Any, cast

import pytest
from tests.unit.ssd_operator.memory_cluster import MemoryCluster
from tests.unit.ssd_operator.resources import SETTINGS
from tests.unit.ssd_operator.virtual_time import in_virtual_time, pass_by
from tests.unit.ssd_operator.world import DEMO, DRAFTS

from ssd_operator.__main__ import Operator, main
from ssd_operator.children.objects import KINDS
from ssd_operator.observe.cluster import BusyError, ClusterError, ForbiddenError
from ssd_operator.runtime import metrics
from ssd_operator.runtime.api_server import ApiServer

DENIED = ForbiddenError("denied by a policy")


def test_the_settings_are_printed_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config", "--log-level", "debug"]) == 0
    assert json.loads(capsys.readouterr().out)["log_level"] == "debug"


@pytest.mark.parametrize(
    ("faults", "is_ready"),
    [
        ({DRAFTS: DENIED}, True),
        (dict.fromkeys(KINDS, DENIED), False),
        ({DRAFTS: BusyError("503")}, False),
    ],
)
@in_virtual_time
async def test_an_operator_is_ready_although_an_object_is_denied_for_ever_but_not_all(
    faults: dict[Any, ClusterError], *, is_ready: bool
) -> None:
    cluster, key = MemoryCluster(write_faults=faults), (SETTINGS.pod_namespace, "demo")
    cluster.create_resource(key, DEMO)
    operator = Operator(SETTINGS, cast("ApiServer", cluster))
    work = [asyncio.ensure_future(each) for each in (operator._lists.run(), operator._start())]
    await pass_by(60.0)
    assert operator._is_ready()[0] is is_ready
    for task in work:
        task.cancel()
    await operator._queue.close()
    await operator._engines.close()
    # The gauges of conditions are of the process.
    metrics.set_conditions(key, ())
