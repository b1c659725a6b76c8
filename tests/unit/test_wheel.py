"""What scripts/wheel can know without building one."""

from __future__ import annotations

from pathlib import Path

import pytest
from vendoring import wheel
from vendoring.pin import VendorError


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
