import pytest

from ssd.engine.runner import require_device
from ssd.errors import SettingsError


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_missing_device_is_named_and_not_replaced(device: str) -> None:
    with pytest.raises(SettingsError, match=device):
        require_device(device)


def test_a_torch_without_cuda_is_named_with_the_index_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_shape: int, device: str) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr("torch.empty", refuse)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(SettingsError, match=r"without CUDA; install a CUDA build, .*/whl/"):
        require_device("cuda:1")


def test_a_driver_that_is_too_old_is_named_with_the_one_that_torch_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = "The NVIDIA driver on your system is too old (found version 12040). Please update it."

    def refuse(*_shape: int, device: str) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr("torch.empty", refuse)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with pytest.raises(SettingsError, match=r"too old .* CUDA 13.0: CUDA 13 needs a driver of"):
        require_device("cuda")
