"""Long texts to measure predictions on, from Debian packages with free licences, in the cache.

  essay   An Anarchist FAQ, sections H2, H3, J5 and J7 (package anarchism, GPL-2), prose
  manual  Debian Reference (package debian-reference-en, GPL-2+), prose with commands and tables
  code    NetworkX's algorithms (package python3-networkx, BSD), Python

A model may have seen them in its training: only differences between two ways to predict them count.
"""

import gzip
import html.parser
import re
import shutil

from build_cache import Failure, sha256_of
from debian_archive import RELEASE, Apt, fetched

PACKAGES = [
    ("anarchism", "15.3-3"),
    ("debian-reference-en", "2.100"),
    ("python3-networkx", "2.8.8-1"),
]
SHA256 = {
    "essay": "53169c96325ba599d4132bfcca2de1ee5633997ff400b3bbcffdeedaece50bec",
    "manual": "ba27fbb083a924f6ea2a7b47db4e54df36c344983cd597930a0adf524ac72c43",
    "code": "a56399fbc25fd913e319e8f80a5ada5b7a067d6b620a4660ef646308eb587867",
}
ESSAY_SECTIONS = ["secH2", "secH3", "secJ5", "secJ7"]


class Paragraphs(html.parser.HTMLParser):
    """The text of a page's body: a paragraph a line, an empty line between."""

    BLOCKS = {"p", "h1", "h2", "h3", "h4", "h5", "li", "blockquote", "div", "br", "tr", "ul", "ol"}
    PASSED_OVER = {"head", "script", "style"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.blocks, self.within = [""], 0

    def handle_starttag(self, tag, attrs):
        self.within += tag in self.PASSED_OVER
        if tag in self.BLOCKS:
            self.blocks.append("")

    def handle_endtag(self, tag):
        self.within -= tag in self.PASSED_OVER
        if tag in self.BLOCKS:
            self.blocks.append("")

    def handle_data(self, data):
        if not self.within:
            self.blocks[-1] += data

    def text(self):
        lines = (re.sub(r"\s+", " ", block).strip() for block in self.blocks)
        return "\n\n".join(line for line in lines if line) + "\n"


def text_of_page(page):
    parser = Paragraphs()
    parser.feed(page)
    parser.close()
    return parser.text()


def essay(root):
    folder = root / "usr/share/doc/anarchism/html"
    pages = [(folder / f"{name}.html").read_text(encoding="utf-8", errors="replace")
             for name in ESSAY_SECTIONS]
    return "\n".join(map(text_of_page, pages))


def manual(root):
    path = root / "usr/share/debian-reference/debian-reference.en.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        text = file.read()
    return text[text.rindex("\nPreface\n") + 1:]  # what comes before is the table of contents


def code(root):
    folder = root / "usr/lib/python3/dist-packages/networkx/algorithms"
    paths = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)


MAKERS = {"essay": essay, "manual": manual, "code": code}


def keep_texts_alone(root):
    texts = {name: make(root) for name, make in MAKERS.items()}
    shutil.rmtree(root)
    root.mkdir()
    for name, text in texts.items():
        path = root / f"{name}.txt"
        path.write_text(text, encoding="utf-8")
        if sha256_of(path) != SHA256[name]:
            raise Failure(f"the text '{name}' does not have the pinned hash: {sha256_of(path)}")


def find_texts():
    """The path of each text by its name."""
    root = fetched("texts", [RELEASE], PACKAGES, Apt.download, keep_texts_alone)
    return {name: root / f"{name}.txt" for name in MAKERS}
