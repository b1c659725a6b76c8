"""What Vulkan's backend needs of a machine: one sentence says what is missing, and how it is had."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvflash_ggml.errors import LibraryError
from kvflash_ggml.native import library, vulkan


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in the place of all that the loader searches, and of the GPUs' files."""
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "share"))
    monkeypatch.setattr(vulkan, "_DEV", tmp_path / "dri")
    monkeypatch.setattr(vulkan, "_SYSTEM", ())
    return tmp_path


def install(machine: Path, *names: str) -> None:
    folder = machine / "share/vulkan/icd.d"
    folder.mkdir(parents=True)
    for name in names:
        (folder / f"{name}.json").write_text("{}")


def test_without_a_driver_the_packages_are_named(machine: Path) -> None:
    assert vulkan.drivers() == []
    assert "apt install mesa-vulkan-drivers" in vulkan.why_none()
    assert "nvidia-vulkan-icd" in vulkan.why_none()


def test_drivers_are_found_where_the_loader_looks(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine, "radeon_icd", "lvp_icd")
    assert vulkan.drivers() == ["lvp_icd", "radeon_icd"]
    monkeypatch.setenv("VK_ICD_FILENAMES", str(machine / "share/vulkan/icd.d/lvp_icd.json"))
    assert vulkan.drivers() == ["lvp_icd"]
    monkeypatch.setenv("VK_DRIVER_FILES", str(machine / "none.json"))  # it comes first
    assert vulkan.drivers() == []


def test_a_gpu_that_may_not_be_opened_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine, "radeon_icd")
    node = machine / "dri/renderD128"
    node.parent.mkdir()
    node.touch()
    assert "(radeon_icd) show no GPU; GGML_VK_VISIBLE_DEVICES=0" in vulkan.why_none()
    monkeypatch.setattr(vulkan.os, "access", lambda path, mode: path != node)
    assert f"may not open {node}: usermod -aG render" in vulkan.why_none()


def test_a_container_without_the_gpus_files_is_told(machine: Path) -> None:
    install(machine, "lvp_icd")
    assert f"a container needs --device {machine / 'dri'}" in vulkan.why_none()


@pytest.mark.parametrize("backends", [["cpu", "vulkan"], ["cpu", "cuda"]])
def test_other_gpus_than_nvidias_count_for_a_build_with_vulkan(
    backends: list[str], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(machine, "radeon_icd")
    (machine / "dri").mkdir()
    (machine / "dri/renderD128").touch()
    monkeypatch.setattr(library, "supports_gpu_offload", lambda: False)
    monkeypatch.setattr(library, "build_info", lambda: {"backends": backends})
    monkeypatch.setattr(library, "library_folder", lambda: machine)
    monkeypatch.setattr(library, "Path", lambda name: machine / name.lstrip("/"))  # no GPU of NVIDIA
    monkeypatch.delenv("KVFLASH_ALLOW_CPU", raising=False)
    if "cuda" in backends:
        library.ensure_gpu_offload(-1)
        return
    with pytest.raises(
        LibraryError, match=r"it has vulkan but found no device\. Why: the Vulkan drivers \(radeon_icd\)"
    ):
        library.ensure_gpu_offload(-1)


def test_a_missing_loader_is_named() -> None:
    error = OSError("libvulkan.so.1: cannot open shared object file: No such file or directory")
    assert "apt install libvulkan1" in library._explain(Path("libggml-vulkan.so"), error)
