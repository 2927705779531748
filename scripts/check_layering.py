#!/usr/bin/env python3
"""Fails when a file includes a header that its module must not know.

The ladder (docs/architecture.md): data flows one way, and a module sees only what stands in its
row. Per-target include directories enforce most of it in the build; this check also catches what
they cannot see: a transitive include that happens to compile, and reaching into another module's
private headers.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# module: what it may include, itself aside. "ggml" and "llama" are third-party headers. A folder in
# a module may have a row of its own.
LADDER = {
    "base": set(),
    "policy": {"base"},
    "eval": {"base"},
    "store": {"base", "policy"},
    "model": {"base", "ggml", "llama"},
    "engine": {"base", "model", "ggml"},
    "libllama": {"base", "model", "ggml", "llama", "llama's own"},
    "state": {"base", "policy", "store", "model", "engine", "libllama", "ggml"},
    "scheduler": {"base", "policy"},
    "serving": {"base", "policy", "store", "model", "engine", "libllama", "state", "scheduler"},
    "sim": {"base", "policy", "scheduler"},
    # Below `server`: bytes on a socket; JSON and text; what was said before. server/service joins
    # them with what runs requests.
    "server/http": {"base"},
    "server/api": {"base", "policy", "model"},
    "server/page": set(),
    "server/conversations": {"base", "model", "store"},
    "server/batches": {"base", "server/api"},
    # Joins nothing: it starts servers of one model and passes requests on to them.
    "server/router": {"base", "server/http", "server/api", "server/page"},
    # A model that makes vectors needs nothing of what conversations need.
    "server/encoder": {"base", "model", "libllama", "ggml", "server/http", "server/api"},
    "server": {"base", "policy", "store", "model", "engine", "libllama", "state", "scheduler",
               "serving",
               "server/http", "server/api", "server/page", "server/conversations",
               "server/batches"},
}
EVERYTHING = set(LADDER) | {"ggml", "llama", "llama's own"}
# Headers are named after the last folder: "http/server.h" belongs to server/http.
PREFIXES = {module.rsplit("/", 1)[-1]: module for module in LADDER}

THIRD_PARTY = [
    (re.compile(r"(ggml|gguf)[a-z0-9-]*\.h$"), "ggml"),
    (re.compile(r"llama(-cpp)?\.h$"), "llama"),
    # Of libllama's sources, installed nowhere.
    (re.compile(r"llama-[a-z0-9-]+\.h$"), "llama's own"),
    # llama.cpp's common library, whose headers have no prefix of their own.
    (re.compile(r"(chat|common|sampling|json|json-schema-to-grammar|jinja/.*|peg-parser)\.h$"),
     "llama"),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def module_of_include(path, bracket, name):
    """The module (or third party) that an include names; None where the ladder is not concerned."""
    head = name.split("/", 1)[0]
    if "/" in name and head in PREFIXES:
        return PREFIXES[head]
    if bracket == '"' and (path.parent / name).exists():
        return None  # a private header beside the file
    for pattern, owner in THIRD_PARTY:
        if pattern.match(name):
            return owner
    return None


def module_of_file(path):
    """The row that a file under src/ falls under: its folder's, or its module's."""
    parts = path.relative_to(ROOT / "src").parts
    folder = "/".join(parts[:2])
    return folder if folder in LADDER else parts[0]


def check(path, allowed, errors):
    module = module_of_file(path) if path.is_relative_to(ROOT / "src") else None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        bracket, name = match.groups()
        where = f"{path.relative_to(ROOT)}:{number}"
        if name.startswith("../"):
            errors.append(f"{where}: includes {name}; name headers from their module's root")
            continue
        owner = module_of_include(path, bracket, name)
        if owner is None or owner == module:
            continue
        if owner not in allowed:
            errors.append(f"{where}: {module or path.parent.name} must not include {name} ({owner})")
        elif owner in LADDER and not (ROOT / "src" / owner / "include" / name).exists():
            errors.append(f"{where}: {name} is not a public header of {owner}")


def main():
    errors = []
    count = 0
    for folder in ("src", "apps"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in (".h", ".cc"):
                continue
            count += 1
            parts = path.relative_to(ROOT).parts
            if parts[0] == "apps":
                check(path, EVERYTHING - {"llama"}, errors)
            elif module_of_file(path) not in LADDER:
                errors.append(f"{path.relative_to(ROOT)}: src/{parts[1]} has no row in the ladder")
            else:
                check(path, LADDER[module_of_file(path)], errors)
    for error in errors:
        print(error, file=sys.stderr)
    if errors:
        return 1
    print(f"layering: ok ({count} files)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
