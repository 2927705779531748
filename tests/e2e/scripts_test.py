#!/usr/bin/env python3
"""What the build's scripts decide: which sources are compiled together, what the manual page says."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "scripts"))
import man_page  # noqa: E402
import unity_groups  # noqa: E402


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


if __name__ == "__main__":
    unittest.main()
