"""Wikipedia articles out of gensim's test data: found without gensim's code, read without markup."""

from __future__ import annotations

import bz2
import sys

import pytest

from gsq_module.data import WikipediaArticles
from gsq_module.data.wikipedia import _FILE, plain_text

MARKUP = """{{Infobox|x=1}}
'''Tin''' is a [[metal|soft metal]].<ref name="a">A book, p. 1</ref><ref name="b" /> It melts<!-- low --> early.
[[File:Tin.jpg|thumb|A picture of [[tin]]]] [[fr:Étain]]
{| class="wikitable"
| cell
|}
== Uses ==
It is for [http://example.org/ cans].
== References ==
* [[A book]]
"""
PAGE = "<page><title>{title}</title><ns>{ns}</ns>{more}<revision><text>{text}</text></revision></page>"


def test_what_is_left_is_what_one_reads() -> None:
    pytest.importorskip("mwparserfromhell")
    assert plain_text(MARKUP) == "Tin is a soft metal. It melts early.\n\nUses\nIt is for cans."


def test_articles_are_neither_redirects_nor_other_pages(tmp_path, monkeypatch) -> None:
    pytest.importorskip("mwparserfromhell")
    folder = tmp_path / "gensim" / "test" / "test_data"
    folder.mkdir(parents=True)
    (tmp_path / "gensim" / "__init__.py").write_text("raise AssertionError('imported')")
    pages = [("Tin", "0", ""), ("Tinn", "0", "<redirect title='Tin'/>"), ("Talk", "1", ""), ("Lead", "0", "")]
    text = "".join(PAGE.format(title=title, ns=ns, more=more, text=f"About {title}.") for title, ns, more in pages)
    xml = f"<mediawiki xmlns='http://www.mediawiki.org/xml/export-0.10/'>{text}</mediawiki>"
    (folder / _FILE).write_bytes(bz2.compress(xml.encode()))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert list(WikipediaArticles().documents(None)) == ["Tin\n\nAbout Tin.", "Lead\n\nAbout Lead."]


def test_without_gensim_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"requirements/benchmarks\.txt"):
        WikipediaArticles().check()
