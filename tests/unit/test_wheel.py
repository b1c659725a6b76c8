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


def test_a_wheel_with_cuda_requires_nvidias() -> None:
    new, old = wheel.cuda_requirements("13.0"), wheel.cuda_requirements("12.8")
    assert new == ["nvidia-cuda-runtime>=13.0,<14", "nvidia-cublas>=13.0,<14"]
    assert old == ["nvidia-cuda-runtime-cu12>=12.8,<13", "nvidia-cublas-cu12>=12.8,<13"]
    metadata = "Name: kvflash-ggml\nVersion: 0.1.0\n\n# Title\n\nName: none\n"
    told = "Name: kvflash-ggml\nVersion: 0.1.0\nRequires-Dist: a>=1\nRequires-Dist: b\n\n# Title\n\nName: none\n"
    assert wheel.requiring(metadata, ["a>=1", "b"]) == told


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
