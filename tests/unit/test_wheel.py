"""What scripts/wheel can know without building one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from vendoring import wheel
from vendoring.pin import REPO, VendorError


@pytest.mark.parametrize(
    "environment",
    [{"CFLAGS": "-O2 -march=native"}, {"CXXFLAGS": "-mavx512f"}, {"CMAKE_ARGS": "-DCMAKE_CXX_FLAGS=-mcpu=power9"}],
)
def test_flags_for_one_cpu_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(VendorError, match="for one kind of CPU: unset it"):
        wheel.check_flags(environment)


def test_other_flags_are_the_users() -> None:
    wheel.check_flags({"CFLAGS": "-O2 -g -mno-amx-tile", "CMAKE_ARGS": "-DGGML_LTO=on", "HOME": "/x-march=y"})


def test_a_wheel_for_one_machine_is_refused() -> None:
    portable = Path("kvflash_ggml-0.1.0-cp310-abi3-manylinux_2_34_x86_64.manylinux_2_35_x86_64.whl")
    assert wheel.platform_tags(portable) == ["manylinux_2_34_x86_64", "manylinux_2_35_x86_64"]
    wheel.check_tags(portable)
    with pytest.raises(VendorError, match="for this machine alone"):
        wheel.check_tags(Path("kvflash_ggml-0.1.0-cp310-abi3-linux_x86_64.whl"))


def test_the_libraries_of_others_are_known_by_their_place() -> None:
    assert wheel.brought(
        [
            "kvflash_ggml/lib/libllama.so",
            "kvflash_ggml.libs/libgomp-a34b3233.so.1.0.0",
            "kvflash_ggml.libs/libstdc++-0123abcd.so.6",
            "kvflash_ggml-0.1.0.dist-info/RECORD",
        ]
    ) == ["libgomp", "libstdc++"]


def test_a_copyright_file_names_the_licences_beside_it() -> None:
    text = "in `/usr/share/common-licenses/GPL-3'.\n/usr/share/common-licenses/GPL. /usr/share/common-licenses/GPL-3,"
    assert wheel.referred(text) == ["GPL", "GPL-3"]


@pytest.mark.parametrize(
    ("release", "tag", "runtime"),
    [
        ("12.8", "+cu12", "nvidia-cuda-runtime-cu12>=12.8,<13"),
        ("13.0", "+cu13", "nvidia-cuda-runtime>=13.0,<14"),
    ],
)
def test_a_wheel_with_cuda_has_a_version_of_its_own_and_requires_nvidias(release: str, tag: str, runtime: str) -> None:
    metadata = (
        "Metadata-Version: 2.2\nName: kvflash-ggml\nVersion: 0.1.0\nRequires-Dist: numpy>=1.23\n\n# Title\nVersion: 9\n"
    )
    head, _, text = wheel.with_cuda(metadata, release).partition("\n\n")
    lines = head.splitlines()
    assert lines[:4] == [*metadata.splitlines()[:2], f"Version: 0.1.0{tag}", "Requires-Dist: numpy>=1.23"]
    assert lines[4] == f"Requires-Dist: {runtime}"
    assert lines[5] == f"Requires-Dist: {runtime.replace('cuda-runtime', 'cublas')}"
    assert text == "# Title\nVersion: 9\n"


def test_the_bundle_says_how_it_is_installed() -> None:
    """`scripts/wheel --bundle` does what it says."""
    text = wheel.README.format(python="Python 3.12", platform="manylinux_2_34_x86_64", extras=wheel.EXTRAS)
    lines = [shlex.split(line) for line in text.splitlines()]
    (install,) = (line for line in lines if line and line[0].endswith("/pip"))
    assert install[1:5] == ["install", "--no-index", "--find-links", "wheels"]
    extras = re.findall(r"\w+", wheel.EXTRAS.partition("[")[2])
    known = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    assert [extra for extra in extras if f"\n{extra} = [" not in known] == []
    assert [name for name in wheel.DEMO if not (REPO / name).is_file()] == []
