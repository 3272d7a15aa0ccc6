"""Folders appear complete, and leftovers of dead processes are removed or restored."""

import pytest

from libai.checkpoint.durable import new_folder, remove_leftovers


def _names(root):
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("what_was_there", [None, "folder", "link"])
def test_a_folder_appears_whole_in_place_of_what_was_there(tmp_path, what_was_there):
    final, elsewhere = tmp_path / "iter_0000001", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if what_was_there == "folder":
        final.mkdir()
        (final / "old").touch()
    elif what_was_there == "link":
        final.symlink_to(elsewhere)
    before = _names(tmp_path)
    with new_folder(final) as work:
        (work / "x").write_text("new")
        assert [name for name in _names(tmp_path) if not name.startswith(".saving-")] == before
    assert [path.name for path in final.iterdir()] == ["x"]
    assert _names(tmp_path) == ["elsewhere", "iter_0000001"] and _names(elsewhere) == []


def test_what_dead_processes_have_left_is_cleared(tmp_path):
    for name in (
        "keep",
        ".saving-iter_0000003",
        ".deleting-iter_0000001",
        ".replaced-iter_0000002",
        ".hidden",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / ".best.json.ab.tmp").touch()
    remove_leftovers(tmp_path)
    assert _names(tmp_path) == [".hidden", "iter_0000002", "keep"]
