"""Folders for weights: what is swept away and what is not, also while others sweep."""

import multiprocessing
import threading
from pathlib import Path

from longstep_bindings.actors import folders
from longstep_bindings.actors.folders import ScratchFolder, sweep


def test_a_folder_stays_while_it_is_open_and_goes_when_it_is_closed(tmp_path):
    folder = ScratchFolder(tmp_path)
    sweep(tmp_path)
    assert folder.path.is_dir()
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def _leave_one(root):
    ScratchFolder(Path(root))  # the process ends with it


def test_a_folder_of_a_process_that_is_gone_is_swept_away(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_leave_one, args=[str(tmp_path)])
    process.start()
    process.join()
    assert len(list(tmp_path.iterdir())) == 1
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_between_the_lock_file_and_the_lock_takes_no_folder(tmp_path, monkeypatch):
    swept = []

    def holds(lock, path):
        if not swept:
            swept.append(path)
            sweep(tmp_path)  # takes the file for a dead process's
            assert not path.exists()
        return real(lock, path)

    real = folders._holds
    monkeypatch.setattr(folders, "_holds", holds)
    folder = ScratchFolder(tmp_path)
    assert folder.path.is_dir()
    assert folder.path != swept[0].parent
    sweep(tmp_path)
    assert folder.path.is_dir()
    folder.close()


def test_many_sweep_while_many_make_folders(tmp_path):
    is_over = threading.Event()

    def keep_sweeping():
        while not is_over.is_set():
            sweep(tmp_path)

    sweepers = [threading.Thread(target=keep_sweeping) for _ in range(2)]
    for sweeper in sweepers:
        sweeper.start()
    try:
        for _ in range(100):
            folder = ScratchFolder(tmp_path)
            (folder.path / "w").write_bytes(b"1")
            folder.close()
    finally:
        is_over.set()
        for sweeper in sweepers:
            sweeper.join()
    assert list(tmp_path.iterdir()) == []
