#!/usr/bin/env python3
"""Installs the Debian package with dpkg into a folder of its own, uses it, and removes it again.

package_test.py DEB NATIVE_PROGRAM MODEL

The folder has a dpkg database of its own, so no rights are needed, and nothing of this machine
changes. NATIVE_PROGRAM is the program as built for this machine: where the package chooses the same
kernels, it must give the very same answers.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from serving import ROOT, Server, two_layers

DEB = NATIVE = MODEL = ""
LEAST_CPU = ("Nehalem", "ssse3 sse4_1 sse4_2 popcnt", "x86-64-v2")  # of 2008
USUAL_CPU = ("Haswell", "ssse3 sse4_1 sse4_2 popcnt avx avx2 f16c fma bmi2", "x86-64-v3")  # of 2013


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False,
                          **options)
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="hcache-package.")
        cls.addClassCleanup(folder.cleanup)
        cls.root = Path(folder.name) / "root"
        cls.state = Path(folder.name) / "state"
        database = cls.root / "var/lib/dpkg"
        for name in ("info", "updates", "triggers"):
            (database / name).mkdir(parents=True)
        for name in ("status", "available"):
            (database / name).touch()
        cls.dpkg("--install", DEB)
        cls.program = cls.root / "usr/bin/hcache"

    @classmethod
    def dpkg(cls, *options):
        # The libraries that it depends on are this machine's, which another test checks.
        as_root = [] if os.geteuid() == 0 else ["fakeroot"]  # it sets owners
        return run(*as_root, "dpkg", f"--root={cls.root}", "--force-not-root", "--force-script-chrootless",
                   "--force-depends", "--force-bad-path", f"--log={cls.root}/dpkg.log", *options,
                   env={**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"})

    def answer(self, program, *options):
        out = run(program, "run", "-m", MODEL, "--no-store", "--temperature", "0", "--max-tokens", "32",
                  "--json", "--state-dir", self.state, "-p", "What is a lighthouse for?", *options)
        return json.loads(out)["reply_tokens"]

    def test_1_holds_what_it_should(self):
        files = {path.relative_to(self.root).as_posix() for path in self.root.rglob("*")
                 if path.is_file() and "dpkg" not in path.parts[-3:] and "var" not in path.parts}
        targets = run(sys.executable, ROOT / "scripts/third_party.py", "cpu-target", "--portable").strip()
        expected = {f"usr/lib/hcache/libggml-cpu-{target}.so" for target in targets.split(";")}
        expected |= {"usr/bin/hcache", "usr/lib/systemd/system/hcache.service",
                     "usr/share/man/man1/hcache.1.gz", "usr/share/doc/hcache/copyright",
                     "etc/hcache/hcache.conf"}
        self.assertEqual(files - {"dpkg.log"}, expected)
        unit = (self.root / "usr/lib/systemd/system/hcache.service").read_text(encoding="utf-8")
        self.assertIn("ExecStart=/usr/bin/hcache serve ", unit)
        # It will hold keys.
        self.assertEqual((self.root / "etc/hcache/hcache.conf").stat().st_mode & 0o777, 0o600)

    def test_2_depends_on_what_it_uses(self):
        depends = run("dpkg-deb", "--field", DEB, "Depends")
        names = {part.split()[0] for part in depends.split(",")}
        for name in ("libc6", "libstdc++6", "libgomp1", "libssl3", "libcurl4", "libsqlite3-0"):
            self.assertIn(name, names)
        for name in names:
            self.assertIn("installed", run("dpkg-query", "-W", "-f", "${Status}", name))
        self.assertEqual(run("dpkg-deb", "--field", DEB, "Architecture").strip(), "amd64")

    def test_3_every_kernel_finds_all_symbols(self):
        def symbols(file, which):
            lines = run("nm", "--dynamic", which, file).splitlines()
            return {line.split()[-1].split("@")[0] for line in lines}

        offered = symbols(self.program, "--defined-only")
        for kernel in sorted((self.root / "usr/lib/hcache").iterdir()):
            needed = {name for name in symbols(kernel, "--undefined-only")
                      if name.startswith(("ggml", "gguf", "quantize", "dequantize", "_ZN4ggml"))}
            self.assertGreater(len(needed), 50)
            self.assertEqual(needed - offered, set(), kernel.name)

    def test_4_answers_as_the_native_program(self):
        for engine in ("own", "llama"):
            self.assertEqual(self.answer(self.program, "--engine", engine),
                             self.answer(NATIVE, "--engine", engine))

    def test_5_runs_on_older_machines(self):
        qemu = shutil.which("qemu-x86_64")
        if not qemu:
            self.skipTest("qemu-x86_64 is not installed (package qemu-user)")
        isolate = ["unshare", "--mount", "--map-root-user"]
        if subprocess.run([*isolate, "true"], capture_output=True, check=False).returncode != 0:
            self.skipTest("this machine lets nobody have mounts of his own")
        for cpu, flags, target in (LEAST_CPU, USUAL_CPU):
            with self.subTest(cpu), tempfile.TemporaryDirectory() as folder:
                # The emulator shows the program this machine's /proc/cpuinfo.
                cpuinfo = Path(folder) / "cpuinfo"
                cpuinfo.write_text(f"flags\t\t: fpu sse2 {flags}\n", encoding="ascii")
                out = Path(folder) / "out.json"
                model = two_layers(NATIVE, folder)  # the emulator is slow
                script = 'mount --bind "$1" /proc/cpuinfo && shift && exec "$@"'
                command = [*isolate, "sh", "-c", script, "sh", cpuinfo,
                           qemu, "-cpu", cpu, self.program, "bench", "throughput", "-m", model,
                           "--prompt", "8", "--gen", "2", "--depth", "0", "--reps", "1", "--state-dir",
                           self.state, "--json", out]
                # Else the program would start itself again, outside the emulator.
                run(*command, env={**os.environ, "GOMP_SPINCOUNT": "5000"})
                found = json.loads(out.read_text(encoding="utf-8"))
                self.assertEqual(found["machine"]["cpu_target"], target)

    def test_6_serves(self):
        with Server(str(self.program), "-m", MODEL, "--state-dir", str(self.state)) as server:
            answer = server.chat([{"role": "user", "content": "Say hello."}], max_tokens=8)
            self.assertTrue(answer["choices"][0]["message"]["content"].strip())
            self.assertEqual(server.stop(), 0, server.errors())

    def test_7_has_a_manual_page(self):
        page = run("sh", "-c", f"gunzip -c {self.root}/usr/share/man/man1/hcache.1.gz")
        done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-P-cbou"], input=page,
                              capture_output=True, text=True, check=True)
        self.assertEqual(done.stderr, "")
        text = " ".join(done.stdout.split())
        for words in ("hcache - language models", "hcache bench restore", "--quota BYTES=0",
                      "--kv-type f32|f16|bf16|q8_0=f16 type of the KV cache", "EXIT STATUS",
                      "--max-queued-per-key", "130 interrupted"):
            self.assertIn(words, text)

    def test_8_leaves_nothing(self):
        self.dpkg("--remove", "hcache")
        self.assertFalse((self.root / "usr").exists())
        self.assertTrue((self.root / "etc/hcache/hcache.conf").exists())  # it is the user's
        self.dpkg("--purge", "hcache")
        left = {path.name for path in self.root.iterdir()} - {"var", "dpkg.log"}
        self.assertEqual(left, set())

    def test_9_make_install_puts_the_native_program_under_a_prefix(self):
        prefix = self.root.parent / "prefix"
        run("make", "-C", ROOT, "install", f"PREFIX={prefix}")
        self.assertEqual({path.relative_to(prefix).as_posix() for path in prefix.rglob("*")
                          if path.is_file()},
                         {"bin/hcache", "lib/systemd/system/hcache.service",
                          "share/man/man1/hcache.1.gz", "share/doc/hcache/copyright"})
        self.assertEqual(run(prefix / "bin/hcache", "--version"), run(NATIVE, "--version"))
        unit = (prefix / "lib/systemd/system/hcache.service").read_text(encoding="utf-8")
        self.assertIn(f"ExecStart={prefix}/bin/hcache serve ", unit)


if __name__ == "__main__":
    MODEL = sys.argv.pop()
    NATIVE = Path(sys.argv.pop()).resolve()
    DEB = Path(sys.argv.pop()).resolve()
    unittest.main(verbosity=2)
