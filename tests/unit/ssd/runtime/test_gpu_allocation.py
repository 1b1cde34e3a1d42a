"""A process uses the GPUs that are allocated to its container, and no others."""

import os
from pathlib import Path
from typing import Any

import pytest

from ssd.errors import SettingsError, SetupError
from ssd.runtime.gpu_allocation import MOUNTED, GpuView, allocated_gpus, own_gpus, use_own_gpus
from ssd.settings import gpu_lists
from ssd_draft import __main__ as draft
from ssd_draft.settings import DraftSettings
from ssd_target import __main__ as target
from ssd_target.settings import TargetSettings

FOUR = tuple(f"GPU-{letter}" for letter in "abcd")


def view(
    allocated: tuple[str, ...] = (),
    num_visible: int = 0,
    *,
    chosen: tuple[str, ...] | None = None,
    is_pod: bool = True,
) -> GpuView:
    return GpuView(chosen=chosen, allocated=allocated, num_visible=num_visible, is_pod=is_pod)


@pytest.mark.parametrize(
    ("listed", "mounted", "found"),
    [
        (",".join(FOUR), (), FOUR),
        ("3,5", (), ("3", "5")),
        ("MIG-a", (), ("MIG-a",)),
        (MOUNTED, ("GPU-b", "GPU-a", "cdi"), ("GPU-a", "GPU-b")),
        (None, ("GPU-a",), ()),
        ("", (), ()),
        ("all", (), ()),
        ("void", (), ()),
        ("none", (), ()),
    ],
)
def test_the_list_of_the_device_plugin_is_ids_numbers_or_a_folder_of_names(
    listed: str | None, mounted: tuple[str, ...], found: tuple[str, ...]
) -> None:
    assert allocated_gpus(listed, mounted) == found


@pytest.mark.parametrize(
    "seen",
    [
        view(FOUR, 4),
        view(num_visible=4),
        view(),
        view(("MIG-a", "MIG-b", "MIG-c", "MIG-d"), 1),
        view(("0", "1", "2", "3"), 4),
        view(FOUR, 4, chosen=("0", "1", "2", "3")),
        view(FOUR, 8, chosen=FOUR),
        view(FOUR, 8, chosen=("GPU-d", "GPU-c", "GPU-b", "GPU-a")),
        view(num_visible=8, chosen=("0", "1", "2", "3")),
        view(num_visible=8, is_pod=False),
    ],
)
def test_a_process_that_sees_no_gpu_of_others_is_not_restricted(seen: GpuView) -> None:
    assert own_gpus(seen, 4) is None


def test_a_privileged_container_uses_only_the_gpus_that_are_allocated_to_it() -> None:
    assert own_gpus(view(FOUR, 8), 4) == FOUR
    assert own_gpus(view(("MIG-a",), 8), 1) == ("MIG-a",)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (view(FOUR[:2], 2), "4 GPUs are needed, and 2 are allocated"),
        (view(FOUR, 4, chosen=("0",)), "4 GPUs are needed, and 1 are in CUDA_VISIBLE_DEVICES"),
        (view(chosen=()), "4 GPUs are needed, and 0 are in CUDA_VISIBLE_DEVICES"),
        (view(num_visible=8), "sees 8 GPUs, 4 are needed, and nothing lists"),
        (view(("0", "1", "2", "3"), 8), "listed by number"),
        (view(("0", "1", "2", "13"), 8, chosen=("0", "1", "2", "1")), "listed by number"),
        (
            view(FOUR, 8, chosen=("GPU-a", "GPU-b", "GPU-c", "GPU-e")),
            "is GPU-a,GPU-b,GPU-c,GPU-e, and those that are allocated to it are GPU-a,GPU-b",
        ),
        (view(FOUR, 8, chosen=("0", "1", "2", "3")), "CUDA_VISIBLE_DEVICES is 0,1,2,3"),
    ],
)
def test_a_process_that_may_use_gpus_of_others_is_refused(seen: GpuView, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        own_gpus(seen, 4)


@pytest.fixture
def two_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    # Set first, so that the end of the test removes what the process sets.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("two_allocated")
def test_each_rank_needs_a_gpu_from_the_device_of_the_settings_on() -> None:
    use_own_gpus(TargetSettings(device="cuda", tensor_parallel_size=2))
    use_own_gpus(DraftSettings(device="cuda:1"))
    use_own_gpus(TargetSettings(device="cpu", tensor_parallel_size=4))
    wrong = r"^device 'cuda:1' cannot be used here: 3 GPUs are needed, and 2 are allocated$"
    with pytest.raises(SettingsError, match=wrong):
        use_own_gpus(TargetSettings(device="cuda:1", tensor_parallel_size=2))


@pytest.mark.usefixtures("two_allocated")
@pytest.mark.parametrize(
    ("process", "settings"),
    [(target, TargetSettings(device="cuda:2")), (draft, DraftSettings(device="cuda:2"))],
    ids=["target", "draft"],
)
async def test_a_process_checks_its_gpus_before_it_reads_its_model(
    process: Any, settings: Any
) -> None:
    with pytest.raises(SettingsError, match="3 GPUs are needed, and 2 are allocated"):
        await process.serve(settings)


@pytest.mark.usefixtures("two_allocated")
def test_cuda_is_restricted_to_the_allocated_gpus_if_the_container_has_more_device_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr("ssd.runtime.gpu_allocation.DEVICES", tmp_path)
    use_own_gpus(DraftSettings(device="cuda"))
    assert gpu_lists() == ("GPU-a,GPU-b", "GPU-a,GPU-b")


@pytest.mark.usefixtures("two_allocated")
@pytest.mark.parametrize(
    ("process", "settings", "value"),
    [
        (target, TargetSettings(device="cuda", channel="collective"), "EAGER"),
        (target, TargetSettings(device="cuda"), None),
        (draft, DraftSettings(device="cuda", channel="collective"), "EAGER"),
        (draft, DraftSettings(device="cuda"), None),
    ],
    ids=["target collective", "target grpc", "draft collective", "draft grpc"],
)
async def test_kernels_are_loaded_before_a_receive_of_nccl_can_delay_them(
    process: Any, settings: Any, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    with pytest.raises(SetupError):
        await process.serve(settings)
    assert os.environ.get("CUDA_MODULE_LOADING") == value  # noqa: TID251
