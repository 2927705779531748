#!/usr/bin/env python3
"""scripts/check_docs.py on the tree's own documents, and on documents with planted mistakes.

check_docs_test.py PROGRAM
"""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
import check_docs  # noqa: E402

PROGRAM = ""


class CheckDocs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.known = check_docs.Known(PROGRAM)

    def planted(self, text):
        """What is found in a page of this text."""
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.md"
            page.write_text(text, encoding="utf-8")
            checker = check_docs.Checker(self.known)
            checker.check(page)
            return "\n".join(checker.wrong)

    def assert_found(self, text, message):
        self.assertIn(message, self.planted(text))

    def test_the_documents_of_the_tree_name_what_is_there(self):
        checker = check_docs.Checker(self.known)
        for document in check_docs.documents():
            checker.check(document)
        self.assertEqual(checker.wrong, [])

    def test_the_script_fails_where_something_is_wrong(self):
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.md"
            page.write_text("    hcache serve --no-such-option\n", encoding="utf-8")
            done = subprocess.run([sys.executable, SCRIPTS / "check_docs.py", PROGRAM, page],
                                  capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("page.md:1: hcache serve has no option --no-such-option", done.stderr)

    def test_right_names_pass(self):
        found = self.planted(
            "# A page\n\nSee [below](#a-part) and `src/base/log.cc`, `base/env.h`, `tests/{unit,fault}`.\n"
            "Set `--quota`, or `HCACHE_MODEL`, or llama-server's `--ctx-size`.\n\n## A part\n\n"
            "    hcache serve -m model.gguf --ctx 4096 \\\n      --dram 1GiB     # more\n"
            "    make test && docker run --cap-add x\n    bench/bars.py --quick --bars 1\n"
            "<!-- examples: src/policy/new.cc -->\nAdd `src/policy/new.cc`.\n")
        self.assertEqual(found, "")

    def test_a_wrong_option_of_a_verb_is_found(self):
        self.assert_found("    hcache serve -m model.gguf --shared-keys\n",
                          "page.md:1: hcache serve has no option --shared-keys")
        # Another verb's.
        self.assert_found("```\nhcache store stat --ctx 4096\n```\n",
                          "hcache store stat has no option --ctx")
        self.assert_found("Run `build/release/bin/hcache plan --histori 4096`.\n",
                          "hcache plan has no option --histori")

    def test_a_wrong_option_behind_a_continued_line_is_found(self):
        self.assert_found("    hcache serve -m model.gguf \\\n      --dramm 1GiB\n",
                          "page.md:1: hcache serve has no option --dramm")

    def test_a_wrong_option_in_prose_is_found(self):
        self.assert_found("With `--quotas 3` it is bounded.\n", "has the option --quotas")

    def test_a_wrong_option_of_a_script_is_found(self):
        self.assert_found("    bench/bars.py --bar 1\n", "bench/bars.py has no option --bar")

    def test_wrong_verbs_and_targets_are_found(self):
        self.assert_found("    hcache server -m x\n", "hcache has no verb server")
        self.assert_found("    make tests\n", "the Makefile has no target tests")

    def test_wrong_paths_and_variables_are_found(self):
        self.assert_found("See `src/store/stor.cc`.\n", "src/store/stor.cc is not in the tree")
        self.assert_found("See `src/{store,engin}`.\n", "src/engin is not in the tree")
        unknown = "HCACHE_" + "MODELL"  # in two pieces: this file is searched, too
        self.assert_found(f"Set `{unknown}`.\n", f"nothing reads {unknown}")

    def test_broken_links_and_anchors_are_found(self):
        self.assert_found("# Top\n\n[there](nowhere.md)\n", "page.md:3: the link nowhere.md leads nowhere")
        self.assert_found("# Top\n\n[there](#topp)\n", "page.md has no heading for #topp")


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
