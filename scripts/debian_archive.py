"""Packages of Debian's archive, fetched from the mirror that apt is configured for, by apt with a state
of its own, and unpacked into the cache. Nothing is installed."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from build_cache import Failure, Progress, cache_dir, locked, run_logged

RELEASE = "bookworm"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# The program and what is fetched must share these.
NEVER_UNPACKED = {"libc6", "libgcc-s1", "libstdc++6", "gcc-12-base"}


def mirror_of(uris, release):
    """The archive's address in what `apt-get update --print-uris` prints; None where it has none."""
    found = re.search(rf"^'(\S+/)dists/{release}/(?:In)?Release'", uris, re.M)
    return found[1] if found else None


class Apt:
    """apt with sources, lists and a cache of its own; nothing counts as installed."""

    def __init__(self, folder, releases, log, progress):
        self.folder, self.log, self.progress = folder, log, progress
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        uris = subprocess.run(["apt-get", "update", "--print-uris", f"-oDir::State::lists={folder}/none"],
                              capture_output=True, text=True, check=False).stdout
        mirror = mirror_of(uris, RELEASE)
        if mirror is None:
            raise Failure(f"apt has no source of {RELEASE}, from whose mirror the packages would come; "
                          "add one to /etc/apt")
        signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
        (folder / "sources.list").write_text(
            "".join(f"deb {signed}{mirror} {release} main\n"
                    for release in releases), encoding="utf-8")
        self.run("update")

    def run(self, *command, cwd=None):
        options = {
            "Dir::Etc::sourcelist": self.folder / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": self.folder / "lists",
            "Dir::State::status": self.folder / "status",
            "Dir::Cache": self.folder / "cache",
            "Acquire::Languages": "none",
            "APT::Default-Release": RELEASE,
            "APT::Sandbox::User": "",
            "Debug::NoLocking": "1",
        }
        full = ["apt-get", *(f"-o{name}={value}" for name, value in options.items()), *command]
        try:
            run_logged(full, self.log, self.progress, cwd=cwd)
        except Failure as failure:
            raise Failure(f"{failure}\nIf a version is no longer in the archive, name its successor in "
                          "the script that wants it.") from failure

    def download(self, packages):
        """Exactly these."""
        target = self.folder / "debs"
        target.mkdir()
        self.run("download", *(f"{name}={version}" for name, version in packages), cwd=target)
        return sorted(target.glob("*.deb"))

    def download_with_needs(self, packages):
        """These and all that they depend on."""
        self.run("install", "--download-only", "--assume-yes", "--no-install-recommends",
                 *(f"{name}={version}" for name, version in packages))
        return sorted((self.folder / "cache/archives").glob("*.deb"))


def fetched(name, releases, packages, download, finish):
    """The folder in the cache that holds the unpacked packages, as finish(folder) left it."""
    digest = hashlib.sha256(repr(packages).encode()).hexdigest()[:12]
    prefix = cache_dir() / f"{name}-{digest}"
    with locked(name):
        if prefix.exists():
            return prefix
        if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
            raise Failure("apt-get or dpkg-deb is missing, which fetch and unpack Debian's packages")
        progress = Progress(f"fetching {name} from Debian's archive (once)")
        scratch = Path(tempfile.mkdtemp(dir=cache_dir()))
        try:
            (scratch / "apt").mkdir()
            apt = Apt(scratch / "apt", releases, cache_dir() / f"{name}.log", progress)
            for file in download(apt, packages):
                if file.name.split("_")[0] not in NEVER_UNPACKED:
                    subprocess.run(["dpkg-deb", "-x", str(file), str(scratch / "root")], check=True)
            finish(scratch / "root")
            os.replace(scratch / "root", prefix)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        progress.done()
    return prefix
