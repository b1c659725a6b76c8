"""What Vulkan's backend needs of a machine, and what is missing: the loader, a driver, a device. Nothing is loaded."""

from __future__ import annotations

import os
from pathlib import Path

LOADER = "libvulkan.so.1 is Vulkan's loader: apt install libvulkan1 (Debian, Ubuntu)"

NO_DRIVER = (
    "no Vulkan driver is installed: apt install mesa-vulkan-drivers for AMD and Intel (Debian, Ubuntu); NVIDIA's is "
    "nvidia-vulkan-icd on Debian, and comes with nvidia-driver-... on Ubuntu"
)

_DEV = Path("/dev/dri")
_SYSTEM = (Path("/etc"), Path("/usr/local/etc"))


def drivers() -> list[str]:
    """Return the names of the installed drivers' manifests, which the loader reads."""
    named = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    if named:
        found = [Path(name) for name in named.split(os.pathsep)]
    else:
        home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
        roots = [*_SYSTEM, *(Path(root).expanduser() for root in (home, *shared.split(os.pathsep)))]
        found = [file for root in roots for file in (root / "vulkan/icd.d").glob("*.json")]
    return sorted({file.stem for file in found if file.is_file()})


def render_nodes() -> list[Path]:
    """Return the files through which programs use GPUs of this machine, other than NVIDIA's."""
    return sorted(_DEV.glob("renderD*"))


def why_none() -> str:
    """Say in one sentence why Vulkan shows no GPU here, and what to do."""
    known = drivers()
    if not known:
        return NO_DRIVER
    names = ", ".join(known)
    nodes = render_nodes()
    closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        return f"this user may not open {closed[0]}: usermod -aG render NAME, and log in again"
    where = "" if nodes else f", and there is no {_DEV}/renderD*: a container needs --device {_DEV}"
    return (
        f"the Vulkan drivers ({names}) show no GPU{where}; GGML_VK_VISIBLE_DEVICES=0 takes the first device that "
        "vulkaninfo --summary lists, also a software one"
    )
