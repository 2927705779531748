"""What ggml's Vulkan backend is built with, and Mesa's software device (lavapipe) to test it on.

The system's own headers, loader, shader compiler and driver where they are recent enough. Debian 12's
headers are not: there newer ones are fetched from Debian's archive, from the mirror that apt is
configured for, by apt with a state of its own, and unpacked into the cache. Nothing is installed.
"""

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from build_cache import Failure, cache_dir
from debian_archive import RELEASE, Apt, fetched

# VK_EXT_layer_settings, which ggml's C++ uses.
LEAST_HEADERS = (1, 3, 275)

BACKPORTS = f"{RELEASE}-backports"
RELEASES = [RELEASE, BACKPORTS, "trixie"]  # the last one for the headers
# (package, version); the loader and the compiler are this release's own, since the later ones want
# a later C library.
SDK_PACKAGES = [
    ("libvulkan1", "1.3.239.0-1"),
    ("libvulkan-dev", "1.4.309.0-1"),
    ("spirv-headers", "1.6.1+1.4.309.0-1"),
    ("glslc", "2023.2-1"),
    ("libshaderc1", "2023.2-1"),
]
LAVAPIPE_PACKAGES = [
    ("mesa-vulkan-drivers", "25.0.7-2~bpo12+1"),
    ("libdrm2", "2.4.123-1~bpo12+1"),
    ("libdrm-amdgpu1", "2.4.123-1~bpo12+1"),
    ("libdrm-common", "2.4.123-1~bpo12+1"),
]
GLSLC = "glslc"  # in the root of what is unpacked

# Where distributions put libraries and the descriptions of their drivers.
LIBRARY_FOLDERS = ["usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib"]
ICD_FOLDERS = ["usr/share/vulkan/icd.d", "etc/vulkan/icd.d"]
SYSTEM = Path("/")


@dataclass
class Sdk:
    """Where the pieces are, and what names them in the key of a build."""

    identity: str
    include: Path
    library: Path
    glslc: Path
    spirv_headers: Path

    def cmake_options(self):
        return {
            "Vulkan_INCLUDE_DIR": self.include,
            "Vulkan_LIBRARY": self.library,
            "Vulkan_GLSLC_EXECUTABLE": self.glslc,
            "SPIRV-Headers_DIR": self.spirv_headers,
        }


def header_version(include):
    """(1, 3, 239) of the headers in a folder; () where there are none."""
    try:
        text = (include / "vulkan" / "vulkan_core.h").read_text(encoding="utf-8")
    except OSError:
        return ()
    last = re.search(r"#define VK_HEADER_VERSION (\d+)", text)
    first = re.search(
        r"#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION\(0, (\d+), (\d+), VK_HEADER_VERSION\)",
        text)
    return (int(first[1]), int(first[2]), int(last[1])) if first and last else ()


def first_existing(paths):
    return next((path for path in paths if path.exists()), None)


def system_sdk():
    """The installed one; None where a piece is missing or too old."""
    include = SYSTEM / "usr/include"
    version = header_version(include)
    library = first_existing(SYSTEM / folder / "libvulkan.so" for folder in LIBRARY_FOLDERS)
    spirv = first_existing(SYSTEM / folder / "cmake/SPIRV-Headers"
                           for folder in ["usr/share", *LIBRARY_FOLDERS])
    glslc = shutil.which("glslc")
    if version < LEAST_HEADERS or not (library and spirv and glslc):
        return None
    compiler = subprocess.run([glslc, "--version"], capture_output=True, text=True, check=True)
    identity = ".".join(map(str, version)) + " " + " ".join(compiler.stdout.split())
    return Sdk(identity, include, library, Path(glslc), spirv)


def release_name():
    try:
        text = (SYSTEM / "etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^VERSION_CODENAME=(\w+)$", text, re.M)
    return found[1] if found else ""


def add_compiler(root):
    """A way to run the compiler with its library beside it, whatever the environment."""
    script = root / GLSLC
    script.write_text('#!/bin/sh\nroot=${0%/*}\nLD_LIBRARY_PATH=$root/' + LIBRARY_FOLDERS[0] +
                      ' exec "$root/usr/bin/glslc" "$@"\n', encoding="ascii")
    script.chmod(0o755)


def only_tested_shaders(sdk):
    """The same with a compiler that passes over what the tests of devices don't use."""
    template = Path(__file__).with_name("tested_glslc.sh.in")
    text = template.read_text(encoding="utf-8").replace("@REAL_GLSLC@", str(sdk.glslc))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    script = cache_dir() / f"glslc-tested-{digest}"
    if not script.exists():
        scratch = script.with_suffix(f".{os.getpid()}")
        scratch.write_text(text, encoding="utf-8")
        scratch.chmod(0o755)
        scratch.rename(script)
    return replace(sdk, identity=f"{sdk.identity} tested-{digest}", glslc=script)


# ---- What the build and the tests ask for ---------------------------------------------------


def find_sdk(shaders="all"):
    """The system's, or Debian's in the cache; for all shaders, or only for those that are `tested`."""
    sdk = whole_sdk()
    return only_tested_shaders(sdk) if shaders == "tested" else sdk


def whole_sdk():
    installed = system_sdk()
    if installed is not None:
        return installed
    if release_name() != RELEASE:
        least = ".".join(map(str, LEAST_HEADERS))
        raise Failure(f"Vulkan's headers of version {least} or later, its loader, glslc and the SPIR-V "
                      "headers are not all installed; install the like of Debian's libvulkan-dev, glslc "
                      "and spirv-headers")
    root = fetched("vulkan-sdk", RELEASES, SDK_PACKAGES, Apt.download, add_compiler)
    return Sdk(" ".join(f"{name}={version}" for name, version in SDK_PACKAGES),
               root / "usr/include", root / LIBRARY_FOLDERS[0] / "libvulkan.so", root / GLSLC,
               root / "usr/share/cmake/SPIRV-Headers")


def find_icd(root):
    """The description of lavapipe under a root; None where it is not there."""
    return next((path for folder in ICD_FOLDERS for path in sorted((root / folder).glob("lvp_icd*.json"))),
                None)


def find_lavapipe():
    """(description of the driver for the loader, folder of libraries that it needs or None)."""
    if release_name() == RELEASE:
        root = fetched("lavapipe", RELEASES, LAVAPIPE_PACKAGES, Apt.download_with_needs, lambda _: None)
        return find_icd(root), root / LIBRARY_FOLDERS[0]
    installed = find_icd(SYSTEM)
    if installed is None:
        raise Failure("Mesa's software device for Vulkan (lavapipe) is not installed; install the like of "
                      "Debian's mesa-vulkan-drivers")
    return installed, None
