#!/usr/bin/env python3
"""Checks what the documents name: options, commands, files, variables, links and their anchors.

check_docs.py PROGRAM [FILE...]: all documents of the tree, or these. Options are held against the
--help of the program and the parsers of the scripts, `make` targets against the Makefile, paths against the
tree. What a document names as an example that the tree lacks stands in a comment in that document:

    <!-- examples: src/policy/move_plan.cc --new-option -->
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import cli_reference

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/**/*.md", "packaging/**/*.md", "demo/**/*.md",
             "packaging/hcache.service", "packaging/deb/hcache.conf", "packaging/Dockerfile",
             "bench/**/*.py", "bench/*.sh"]
OPTION = re.compile(r"(?<![\w=/.-])(--?[A-Za-z][\w-]*)")
FOLDERS = ("src/", "apps/", "tests/", "bench/", "docs/", "scripts/", "demo/", "packaging/", "cmake/",
           ".ci/")
SOURCE = re.compile(r"[\w./+-]+\.(?:cc|h|py|sh|js|json|md|cmake|service|png|hcs|txt)")
# Names that programs write, users choose, or other projects have.
FOREIGN_FILES = {"compile_commands.json", "CMakeLists.txt", "conversation_trace.jsonl"}
# Options of programs that are not ours, by program; "" is prose that names one.
FOREIGN_OPTIONS = {"llama-server", "llama-bench", "docker", "cmake", "ctest", "curl", "sudo", "git",
                   "systemctl", "journalctl", "apt-get", "dpkg", "clang-tidy", "perf", "unshare",
                   "redis-server", "haproxy", "kubectl", "ninja", "pip", "python3", "numactl", "gcc", "clang",
                   "qemu-x86_64"}


def slugs(document):
    """The anchors of a document's headings, as GitHub makes them."""
    found, counts = set(), {}
    fenced = False
    for line in document.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        heading = re.match(r"#+\s+(.*)", line)
        if not heading or fenced:
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1)).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        counts[slug] = counts.get(slug, -1) + 1
        found.add(slug if counts[slug] == 0 else f"{slug}-{counts[slug]}")
    return found


class Known:
    """What there is: the program's verbs and their options, the scripts', the Makefile's targets."""

    def __init__(self, program):
        self.verbs = {}
        self._read_verbs(program, [])
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        self.targets = {name for names in re.findall(r"^([\w./ -]+?):(?!=)", makefile, re.M)
                        for name in names.split()}
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                                capture_output=True, text=True).stdout.splitlines()
        self.files = {name for name in listed if (ROOT / name).exists()}
        self.names = {Path(name).name for name in self.files}
        # llama-server's flags are strings in the sources of the command line.
        self.llama_flags = set()
        for name in self.files:
            if name.startswith("apps/") and "llama" in name:
                self.llama_flags |= set(OPTION.findall((ROOT / name).read_text(encoding="utf-8")))
        self.words = set()
        for name in self.files:
            if not name.endswith((".md", ".json", ".gguf", ".png", ".hcs")):
                text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
                self.words |= set(re.findall(r"\b(?:HCACHE|LLAMA)_[A-Z0-9_]+\b", text))
        self._scripts = {}

    def _read_verbs(self, program, verbs):
        text = cli_reference.help_text(program, verbs)
        self.verbs[" ".join(verbs)] = set(OPTION.findall(text))
        for verb in cli_reference.subcommands(text):
            self._read_verbs(program, [*verbs, verb])

    def script_options(self, name):
        """The options of a script of ours; None for one that has no --help."""
        if name not in self._scripts:
            text = (ROOT / name).read_text(encoding="utf-8")
            options = None
            if "argparse" in text:
                options = {"-h", "--help"}
                for call in re.findall(r"add_argument\((.*?)\)", text, re.S):
                    options |= set(re.findall(r'"(--?[a-z][\w-]*)"', call))
                if "add_common_options(parser)" in text:
                    options |= self.script_options("bench/benchlib.py")
            elif name == "bench/gpu.sh":  # hands its options on
                options = {"--batch"} | self.script_options("bench/bars.py") | self.script_options(
                    "bench/batch_bar.py")
            self._scripts[name] = options
        return self._scripts[name]

    def any_option(self, option):
        ours = set().union(*self.verbs.values()) | self.llama_flags
        return option in ours or any(
            option in (self.script_options(name) or ())
            for name in self.files
            if name.startswith(("bench/", "scripts/")) and name.endswith((".py", ".sh")))

    def has_file(self, name):
        """Whether a path of the tree, a header as it is included, or a file's bare name is there."""
        name = name.rstrip("/")
        if name in self.files or (ROOT / name).is_dir():
            return True
        if any(part in name for part in "*?["):
            return any(ROOT.glob(name))
        if "/" not in name:
            return name in self.names
        return any(file.endswith("/" + name) for file in self.files)


def expand(name):
    """tests/{unit,fault}: two names."""
    found = re.search(r"\{([^{}]*)\}", name)
    if not found:
        return [name]
    return [one for part in found.group(1).split(",")
            for one in expand(name[:found.start()] + part + name[found.end():])]


def code_of(document, text):
    """(line number, code, whether it is a block) of a document's code, continued lines joined."""
    out = []
    lines = text.splitlines()
    if document.suffix == ".py":
        # Commands in the description at the top.
        end = text.find('"""', text.find('"""') + 3)
        lines = text[:end].splitlines()
    elif document.suffix != ".md":
        lines = [re.sub(r"^# ?", "  ", line) for line in lines]
    fenced, number = False, 0
    while number < len(lines):
        line, start = lines[number], number + 1
        number += 1
        if line.startswith("```"):
            fenced = not fenced
            continue
        if fenced or re.match(r"(    |\t)\s*\S", line) or document.suffix != ".md":
            while line.endswith("\\") and number < len(lines):
                line = line[:-1] + " " + lines[number].strip()
                number += 1
            out.append((start, line.strip(), True))
        if not fenced and document.suffix == ".md":
            out += [(start, code, False) for code in re.findall(r"`([^`]+)`", line)]
    return out


class Checker:
    def __init__(self, known):
        self.known = known
        self.wrong = []

    def check(self, document):
        text = document.read_text(encoding="utf-8")
        examples = set(" ".join(re.findall(r"<!-- examples:(.*?)-->", text, re.S)).split())
        text_without = re.sub(r"<!--.*?-->", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)

        def complain(number, what):
            name = document.relative_to(ROOT) if document.is_relative_to(ROOT) else document
            self.wrong.append(f"{name}:{number}: {what}")

        if document.suffix == ".md":
            self.check_links(document, text_without, complain)
        for number, code, block in code_of(document, text_without):
            self.check_command(code, examples, block, lambda what, n=number: complain(n, what))
            self.check_names(code, examples, lambda what, n=number: complain(n, what))

    def check_links(self, document, text, complain):
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            fenced ^= line.startswith("```")
            if fenced:
                continue
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
                if re.match(r"\w+:", target):
                    continue
                path, _, anchor = target.partition("#")
                file = (document.parent / path).resolve() if path else document
                if not file.exists():
                    complain(number, f"the link {target} leads nowhere")
                elif anchor and file.suffix == ".md" and anchor not in slugs(file):
                    complain(number, f"{file.name} has no heading for #{anchor}")

    def check_command(self, code, examples, block, complain):
        """A command's options and targets; in prose an option must be anybody's."""
        code = re.sub(r"\$\([^)]*\)", "x", code)
        try:
            words = shlex.split(code, comments=block)
        except ValueError:  # half of a quotation
            words = code.split()
        command = []
        for word in [*words, ";"]:
            if word in (";", "|", "||", "&&", "&", ">", "2>", "<"):
                self.check_words(command, code, examples, block, complain)
                command = []
            elif word not in ("sudo", "exec", "…"):
                command.append(word)

    def check_words(self, words, code, examples, block, complain):
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if not words:
            return
        program, rest = words[0].removeprefix("./"), words[1:]
        if program.startswith("HCACHE_OPTIONS="):
            program, rest = "hcache", ["serve", *rest]
        if program.rsplit("/", 1)[-1] == "hcache":
            verbs = []
            while rest and " ".join([*verbs, rest[0]]) in self.known.verbs:
                verbs.append(rest.pop(0))
            allowed = self.known.verbs[" ".join(verbs)] | {"--help", "--version"}
            if verbs[:1] == ["serve"]:
                allowed |= self.known.llama_flags
            if not verbs and rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]) and block:
                complain(f"hcache has no verb {rest[0]}")
            self.check_options(f"hcache {' '.join(verbs)}".strip(), rest, allowed, examples, complain)
        elif program in self.known.files and program.startswith(("bench/", "scripts/")):
            allowed = self.known.script_options(program)
            if allowed is not None:
                self.check_options(program, rest, allowed, examples, complain)
        elif program == "make":
            for word in rest:
                if re.fullmatch(r"[a-z][\w-]*", word) and word not in self.known.targets | examples:
                    complain(f"the Makefile has no target {word}")
        elif program not in FOREIGN_OPTIONS and not block:
            for option in OPTION.findall(code):
                if option.startswith("--") and option not in examples and \
                        not self.known.any_option(option):
                    complain(f"no program of ours has the option {option}")

    @staticmethod
    def check_options(program, words, allowed, examples, complain):
        for word in words:
            option = re.fullmatch(OPTION.pattern + r"(?:=.*)?", word)
            if option and option.group(1) not in allowed | examples:
                complain(f"{program} has no option {option.group(1)}")

    def check_names(self, code, examples, complain):
        """Paths and variables."""
        for word in re.split(r"[\s,;:()'\"|=]+(?![^{]*\})", code):
            word = word.strip(".").removeprefix("./")
            if not word or re.search(r"[<>$…~]|^/|^\w+:/|[A-Z]{3,}", word) or word.startswith("build/"):
                continue
            is_path = word.startswith(FOLDERS) or SOURCE.fullmatch(word)
            for name in expand(word) if is_path else []:
                if name in examples or Path(name).name in FOREIGN_FILES:
                    continue
                if not self.known.has_file(name) and self.looks_ours(name, code):
                    complain(f"{name} is not in the tree")
        for variable in re.findall(r"\bHCACHE_[A-Z0-9_]+\b", code):
            if variable not in self.known.words | examples:
                complain(f"nothing reads {variable}")

    @staticmethod
    def looks_ours(name, code):
        """A bare name on a command line is the user's own file."""
        return "/" in name and name.startswith(FOLDERS) or code.strip() == name


def documents():
    return sorted({file for pattern in DOCUMENTS for file in ROOT.glob(pattern)})


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="the program hcache")
    parser.add_argument("files", nargs="*", type=Path, help="(default: every document of the tree)")
    args = parser.parse_args()
    os.environ.pop("COLUMNS", None)
    checker = Checker(Known(args.program))
    chosen = [file.resolve() for file in args.files] or documents()
    for document in chosen:
        checker.check(document)
    for line in checker.wrong:
        print(line, file=sys.stderr)
    if checker.wrong:
        sys.exit(f"docs: {len(checker.wrong)} things named wrongly")
    print(f"docs: ok ({len(chosen)} documents)")


if __name__ == "__main__":
    main()
