#!/usr/bin/env python3
"""What the build's scripts decide: which sources are compiled together, what the manual page says,
which Vulkan SDK is used."""

import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "scripts"))
import debian_archive  # noqa: E402
import man_page  # noqa: E402
import texts  # noqa: E402
import unity_groups  # noqa: E402
import vulkan_sdk  # noqa: E402


class Texts(unittest.TestCase):
    def test_a_page_becomes_its_paragraphs(self):
        page = ("<html><head><title>no</title><style>p {}</style></head><body><h1>A &amp;\n B</h1>"
                "<p>One <b>bold</b>\nword.<p>Two.<ul><li>first<li>second</ul><script>x</script></body>")
        self.assertEqual(texts.text_of_page(page), "A & B\n\nOne bold word.\n\nTwo.\n\nfirst\n\nsecond\n")

    def test_every_text_has_a_hash(self):
        self.assertEqual(set(texts.MAKERS), set(texts.SHA256))
        self.assertTrue(all(len(digest) == 64 for digest in texts.SHA256.values()))


class UnityGroups(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def groups(self, *texts, size=8):
        """Which of the files with these texts are compiled together, by number."""
        files = []
        for number, text in enumerate(texts):
            file = self.folder / f"{number}.cc"
            file.write_text(text, encoding="utf-8")
            files.append(str(file))
        return [[files.index(file) for file in group] for group in unity_groups.grouped(files, size)]

    @staticmethod
    def unnamed(line):
        return f"namespace hcache {{\nnamespace {{\n\n{line}\n\n}}  // namespace\n}}  // namespace hcache\n"

    def test_files_without_a_common_name_go_together_up_to_the_size(self):
        texts = [self.unnamed(f"int f{i}() {{ return {i}; }}") for i in range(5)]
        self.assertEqual(self.groups(*texts, size=2), [[0, 1], [2, 3], [4]])

    def test_files_that_define_the_same_name_do_not(self):
        for line in ("constexpr int kMany = 3;", "struct Case {\n  int x;\n};",
                     "Status run(int a,\n  int b) {}", "enum class Kind { kOne };",
                     "const std::vector<std::string> kParts{};",
                     "template <typename T>\nT seconds(T t) {}"):
            self.assertEqual(self.groups(self.unnamed(line), self.unnamed("int other;"),
                                         self.unnamed(line)), [[0, 1], [2]], line)

    def test_a_name_for_the_same_thing_may_be_repeated(self):
        self.assertEqual(self.groups("using model::Tool;\n", "using model::Tool;\n"), [[0, 1]])
        self.assertEqual(self.groups("using model::Tool;\n", "using api::Tool;\n"), [[0], [1]])
        self.assertEqual(self.groups("using Json = nlohmann::json;\n", "using api::Json;\n"), [[0], [1]])

    def test_members_and_calls_are_no_definitions(self):
        self.assertEqual(self.groups(self.unnamed("int f() {\n  int count = 0;\n  return g();\n}"),
                                     self.unnamed("int h() {\n  int count = 0;\n  return g();\n}")), [[0, 1]])


class ManPage(unittest.TestCase):
    def test_options_come_with_what_they_do(self):
        _, usage, options = man_page.parse(
            "Does things\nUsage: hcache do [OPTIONS]\n\nOptions:\n"
            "  -h,--help                       Print this help message and exit\n"
            "  --kv-type f32|f16|bf16|q8_0=f16 type of the KV cache\n"
            "  --state-type native|f32|f16|bf16|q8=native\n"
            "                                  type of saved hidden states\n")
        self.assertEqual(usage, "hcache do [OPTIONS]")
        self.assertEqual(options[1:], [["--kv-type f32|f16|bf16|q8_0=f16", "type of the KV cache"],
                                       ["--state-type native|f32|f16|bf16|q8=native",
                                        "type of saved hidden states"]])

    def test_text_is_no_request(self):
        self.assertEqual(man_page.escape(".x's \\ -y"), "\\&.x\\(aqs \\e \\-y")


class VulkanSdk(unittest.TestCase):
    """In a made-up root of a file system."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        patch = mock.patch.object(vulkan_sdk, "SYSTEM", self.root)
        patch.start()
        self.addCleanup(patch.stop)

    def write(self, path, text=""):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755)

    def install(self, headers):
        """An SDK with headers of version 1.3.`headers`."""
        self.write("usr/include/vulkan/vulkan_core.h", f"""
// Version of this file
#define VK_HEADER_VERSION {headers}
#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION(0, 1, 3, VK_HEADER_VERSION)
""")
        self.write("usr/lib/x86_64-linux-gnu/libvulkan.so")
        self.write("usr/share/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake")
        self.write("usr/bin/glslc", "#!/bin/sh\necho shaderc v2024\n")
        path = mock.patch.dict("os.environ", {"PATH": f"{self.root}/usr/bin:/usr/bin:/bin"})
        path.start()
        self.addCleanup(path.stop)

    def test_an_installed_one_is_used_if_it_is_recent(self):
        self.install(275)
        sdk = vulkan_sdk.find_sdk()
        self.assertEqual(sdk.identity, "1.3.275 shaderc v2024")
        for path in sdk.cmake_options().values():
            self.assertTrue(path.exists(), path)
        (self.root / "usr/lib/x86_64-linux-gnu/libvulkan.so").unlink()
        self.assertIsNone(vulkan_sdk.system_sdk())
        self.install(239)
        self.assertIsNone(vulkan_sdk.system_sdk())

    def test_elsewhere_than_on_debian_12_what_is_missing_is_named(self):
        self.write("etc/os-release", "ID=debian\nVERSION_CODENAME=trixie\n")
        with self.assertRaisesRegex(vulkan_sdk.Failure, "libvulkan-dev, glslc and spirv-headers"):
            vulkan_sdk.find_sdk()
        with self.assertRaisesRegex(vulkan_sdk.Failure, "mesa-vulkan-drivers"):
            vulkan_sdk.find_lavapipe()
        self.write("usr/share/vulkan/icd.d/lvp_icd.x86_64.json")
        self.assertEqual(vulkan_sdk.find_lavapipe(),
                         (self.root / "usr/share/vulkan/icd.d/lvp_icd.x86_64.json", None))

    def test_the_mirror_is_the_one_that_apt_uses(self):
        uris = ("'http://mirror.example/debian-security/dists/bookworm-security/InRelease' x 0\n"
                "'http://mirror.example/debian/dists/bookworm/InRelease' y 0\n")
        self.assertEqual(debian_archive.mirror_of(uris, "bookworm"), "http://mirror.example/debian/")
        self.assertIsNone(debian_archive.mirror_of(uris, "trixie"))


if __name__ == "__main__":
    unittest.main()
