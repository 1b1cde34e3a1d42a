"""Flags of the processes that a command starts, and the settings of their environment."""

import pytest

from ssd.runtime.launch import Deployment
from ssd.settings import load
from ssd_cli import app
from ssd_cli.app import run
from ssd_draft.settings import DraftSettings
from ssd_target.settings import TargetSettings


@pytest.fixture
def deployments(monkeypatch: pytest.MonkeyPatch) -> list[Deployment]:
    """What ``ssd up`` would start."""
    found: list[Deployment] = []

    async def up(deployment: Deployment, **_options: object) -> None:
        found.append(deployment)
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "up", up)
    return found


def settings_of(deployment: Deployment) -> tuple[TargetSettings, DraftSettings]:
    """Return what target and draft read from flags and environment."""
    of_target = (*deployment.common_flags, *deployment.target_flags)
    of_draft = (*deployment.common_flags, *deployment.draft_flags)
    return (
        load(TargetSettings, of_target, prefix="SSD_TARGET").settings,
        load(DraftSettings, of_draft, prefix="SSD_DRAFT").settings,
    )


@pytest.mark.parametrize(
    ("given", "of_target", "of_draft"),
    [
        ([], None, None),
        (["--device", "cuda"], "cuda", "cuda"),
        (["--device", "cuda", "--draft-device", "cpu"], "cuda", "cpu"),
        (["--draft-device", "cuda:4"], None, "cuda:4"),
    ],
)
def test_a_device_is_that_of_the_drafts_too_unless_they_have_one(
    given: list[str],
    of_target: str | None,
    of_draft: str | None,
    deployments: list[Deployment],
) -> None:
    def device_of(flags: tuple[str, ...]) -> str | None:
        return flags[flags.index("--device") + 1] if "--device" in flags else None

    assert run(["up", *given]) == 130
    flags = [(each.target_flags, each.draft_flags) for each in deployments]
    assert [tuple(map(device_of, pair)) for pair in flags] == [(of_target, of_draft)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dtype", ("float32", "bfloat16")),
        ("engine", ("torch", "static")),
        ("weights", ("int8", "int4")),
    ],
)
def test_a_process_reads_from_its_environment_what_no_flag_gives(
    name: str,
    values: tuple[str, str],
    deployments: list[Deployment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for process, value in zip(("TARGET", "DRAFT"), values, strict=True):
        monkeypatch.setenv(f"SSD_{process}_{name.upper()}", value)
    assert run(["up"]) == 130
    assert run(["up", f"--{name}", "auto"]) == 130
    free, given = map(settings_of, deployments)
    assert tuple(getattr(each, name) for each in free) == values
    assert getattr(given[0], name) == "auto"


def test_a_flag_for_the_weights_of_the_draft_reaches_both_processes(
    deployments: list[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_TARGET_DRAFT_WEIGHTS", "int8")
    assert run(["up", "--draft-weights", "int4"]) == 130
    assert run(["up"]) == 130
    given, free = map(settings_of, deployments)
    assert (given[0].draft_weights, given[1].weights) == ("int4", "int4")
    assert (free[0].draft_weights, free[1].weights) == ("int8", "auto")


def test_models_can_come_from_the_environment_of_their_processes(
    deployments: list[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_TARGET_MODEL", "demo://target?widen=2")
    monkeypatch.setenv("SSD_DRAFT_MODEL", "demo://draft?widen=1")
    assert run(["up"]) == 130
    assert run(["up", "--target", "demo://target"]) == 130
    models = [(each.target, each.draft) for each in deployments]
    assert models == [
        ("demo://target?widen=2", "demo://draft?widen=1"),
        ("demo://target", "demo://draft?widen=1"),
    ]


def test_ranks_from_the_environment_are_checked_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "up", None)
    monkeypatch.setenv("SSD_TARGET_TENSOR_PARALLEL_SIZE", "8")
    assert run(["up"]) == 2
    assert "tensor_parallel_size 8: " in capsys.readouterr().err
