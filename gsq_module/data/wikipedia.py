"""Articles of the English Wikipedia that come as a test file in the package gensim: prose that works offline."""

from __future__ import annotations

import bz2
import importlib.util
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from gsq_module.data.sources import TextSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILE = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_NEXT = "Next: pip install --no-deps -r requirements/benchmarks.txt"
_UNREAD = re.compile(r"^(file|image|category|[a-z]{2,3}(-[a-z]+)?):", re.IGNORECASE)
"""Links that are no words of a sentence: pictures, categories, other languages."""
_ASIDE = re.compile(r"<(ref|gallery|math|timeline)\b([^>]*/>|.*?</\1 *>)", re.IGNORECASE | re.DOTALL)
_APPENDIX = re.compile(
    r"^=+ *(see also|references|notes|footnotes|bibliography|further reading|sources|external links) *=+ *$.*",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
"""The lists that end an article."""


class WikipediaArticles(TextSource):
    """The articles in gensim's test data (CC BY-SA 3.0, dump of 2016), from A on, without markup, tables and lists of
    references. Needs the packages gensim, which is not imported, and mwparserfromhell.
    """

    def check(self) -> None:
        self._file()
        if importlib.util.find_spec("mwparserfromhell") is None:
            raise FileNotFoundError(f"WikipediaArticles: the package mwparserfromhell is not installed. {_NEXT}")

    def documents(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        self.check()
        with bz2.open(self._file()) as file:
            for _, page in ElementTree.iterparse(file):
                if page.tag.endswith("}page"):
                    # Redirects have no text of their own; other name spaces hold no articles.
                    if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None:
                        yield f"{page.findtext('{*}title')}\n\n{plain_text(page.findtext('{*}revision/{*}text') or '')}"
                    page.clear()

    def _file(self) -> Path:
        spec = importlib.util.find_spec("gensim")  # found without importing it, as in Speeches
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"WikipediaArticles: the package gensim is not installed. {_NEXT}")
        file = Path(spec.submodule_search_locations[0]) / "test" / "test_data" / _FILE
        if not file.is_file():
            raise FileNotFoundError(f"WikipediaArticles: this gensim comes without {file}. {_NEXT}")
        return file


def plain_text(markup: str) -> str:
    """What of an article's wikitext a reader reads as running text."""
    import mwparserfromhell

    code = mwparserfromhell.parse(_ASIDE.sub("", _APPENDIX.sub("", markup)))
    for link in code.filter_wikilinks():
        if _UNREAD.match(str(link.title).strip()):
            _remove(code, link)
    for tag in code.filter_tags(matches=lambda node: node.tag == "table"):
        _remove(code, tag)
    lines = (line.strip() for line in code.strip_code().splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _remove(code, node) -> None:
    with suppress(ValueError):  # inside of one that is gone already
        code.remove(node)
