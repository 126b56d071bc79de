from __future__ import annotations

from pathlib import Path

import pytest

from gsq_module.export.folder import MARKER_FILE, check_destination, replaced_folder


def write(destination: Path, text: str, then_raise: BaseException | None = None) -> None:
    with replaced_folder(destination) as folder:
        (folder / "weights").write_text(text)
        if then_raise is not None:
            raise then_raise


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "models" / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    return source


def test_the_source_is_never_a_destination(source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(source)
    linked_parent = tmp_path / "linked_parent"
    linked_parent.symlink_to(source.parent)
    for destination in (
        source,
        link,
        linked_parent / "source",
        source / "export",
        source.parent,
        source / ".." / "source",
    ):
        with pytest.raises(ValueError, match="source model"):
            check_destination(source, destination)
        with pytest.raises(ValueError, match="source model"):
            check_destination(link, destination)
    check_destination(source, source.parent / "export")


@pytest.mark.parametrize("suffix", [".partial", ".previous"])
def test_a_source_named_like_the_working_folders_is_not_wiped(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"export{suffix}"
    source.mkdir()
    with pytest.raises(ValueError, match="source model"):
        check_destination(source, tmp_path / "export")


@pytest.mark.parametrize("name", ["export", "export.partial", "export.previous"])
def test_what_others_wrote_is_not_replaced(source: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    check_destination(source, tmp_path / "export")  # an empty folder loses nothing
    (tmp_path / name / "thesis.txt").write_text("three years")
    with pytest.raises(ValueError, match="is not empty"):
        check_destination(source, tmp_path / "export")
    (tmp_path / name / MARKER_FILE).touch()
    check_destination(source, tmp_path / "export")


def test_a_file_is_no_destination(source: Path, tmp_path: Path) -> None:
    (tmp_path / "export").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        check_destination(source, tmp_path / "export")


def test_a_new_folder_replaces_the_old_one(tmp_path: Path) -> None:
    destination = tmp_path / "deep" / "export"
    write(destination, "old")
    (destination / "only_in_old").touch()
    write(destination, "new")
    assert {path.name for path in destination.iterdir()} == {MARKER_FILE, "weights"}
    assert (destination / "weights").read_text() == "new"
    assert [path.name for path in destination.parent.iterdir()] == ["export"]


def test_a_link_to_the_destination_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    write(real, "old")
    link = tmp_path / "link"
    link.symlink_to(real)
    write(link, "new")
    assert link.is_symlink()
    assert (real / "weights").read_text() == "new"


def test_an_exception_leaves_the_old_folder(tmp_path: Path) -> None:
    destination = tmp_path / "export"
    write(destination, "old")
    with pytest.raises(KeyboardInterrupt):
        write(destination, "half", then_raise=KeyboardInterrupt())
    assert (destination / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_failing_swap_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = tmp_path / "export"
    write(destination, "old")
    rename = Path.rename

    def fail_on_the_new_one(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            raise OSError("injected")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_on_the_new_one)
    with pytest.raises(OSError, match="injected"):
        write(destination, "new")
    assert (destination / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_what_a_killed_process_left_is_taken_up(tmp_path: Path) -> None:
    destination = tmp_path / "export"
    write(destination, "old")
    destination.rename(tmp_path / "export.previous")  # killed between the two renames
    (tmp_path / "export.partial").mkdir()
    (tmp_path / "export.partial" / MARKER_FILE).touch()
    (tmp_path / "export.partial" / "half_a_shard").touch()
    with replaced_folder(destination) as folder:
        assert (destination / "weights").read_text() == "old"
        assert [path.name for path in folder.iterdir()] == [MARKER_FILE]
        (folder / "weights").write_text("new")
    assert (destination / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
