"""Child processes that are killed with all that they started: nothing stays, also not what only their system knows of."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longstep_bindings import reaper
from longstep_bindings.actors.folders import ScratchFolder
from longstep_bindings.launch import Child
from longstep_bindings.testing import kill, wait_until

SHARED_MEMORY = Path("/dev/shm")

CHILD = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory

def rest(semaphore):
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    semaphore = context.Semaphore(1)
    memory = SharedMemory(create=True, size=64)
    process = context.Process(target=rest, args=[semaphore])
    process.start()
    with open(sys.argv[1] + ".part", "w") as file:
        print("sem." + semaphore._semlock.name[1:], memory.name, file=file)
    import os
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    time.sleep(600)
"""

PARENT = """
import sys, time
from longstep_bindings import reaper
from longstep_bindings.actors.folders import ScratchFolder
from longstep_bindings.launch import Child

child = Child([sys.executable, sys.argv[1], sys.argv[2]])
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "child.py"
    path.write_text(CHILD)
    return path


def names_told(path):
    wait_until(path.exists)
    names = path.read_text().split()
    assert all((SHARED_MEMORY / name).exists() for name in names), names
    return names


def test_a_child_that_is_killed_leaves_no_semaphore_and_no_shared_memory(script, tmp_path):
    child = Child([sys.executable, str(script), str(tmp_path / "told")])
    try:
        names = names_told(tmp_path / "told")
    finally:
        child.end()
    assert not [name for name in names if (SHARED_MEMORY / name).exists()]


def test_a_child_whose_leader_was_killed_leaves_nothing_either(script, tmp_path):
    child = Child([sys.executable, str(script), str(tmp_path / "told")])
    try:
        names = names_told(tmp_path / "told")
        kill(child.pid)
        wait_until(lambda: child.has_exited)
    finally:
        child.end()
    assert not [name for name in names if (SHARED_MEMORY / name).exists()]


def test_the_children_of_a_parent_that_is_killed_leave_nothing(script, tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(script), str(tmp_path / "told")]
    with subprocess.Popen(command, env={**os.environ}) as parent:
        try:
            names = names_told(tmp_path / "told")
        finally:
            kill(parent.pid)
    wait_until(lambda: not [name for name in names if (SHARED_MEMORY / name).exists()])


def test_a_reaper_that_starts_after_its_parents_death_still_reads_whom_to_end():
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as sleeper:
        command = [sys.executable, reaper.__file__, str(sleeper.pid)]  # not its parent
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as late:
            late.stdin.write(b"+ %d\n" % sleeper.pid)
            late.stdin.flush()
            try:
                assert sleeper.wait(60.0) == -signal.SIGKILL
                assert late.wait(60.0) == 0
            finally:
                sleeper.kill()


FORKING = """
import multiprocessing, sys, time
from longstep_bindings.launch import Child

def use_a_child():
    Child(["sleep", "0"]).end(5.0)

if __name__ == "__main__":
    child = Child(["sleep", "600"])
    fork = multiprocessing.get_context("fork").Process(target=use_a_child)
    fork.start()
    fork.join()
    assert fork.exitcode == 0
    time.sleep(3.0)  # in which a reaper of the fork's would act
    assert not child.has_exited
    child.end()
"""


def test_a_fork_with_children_of_its_own_leaves_those_of_its_parent_alone(tmp_path):
    (tmp_path / "forking.py").write_text(FORKING)
    subprocess.run([sys.executable, str(tmp_path / "forking.py")], check=True, timeout=60.0)


def test_a_reaper_leaves_weights_alone_that_another_process_of_the_same_id_holds(monkeypatch):
    folder = ScratchFolder(SHARED_MEMORY)
    try:
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(SHARED_MEMORY))
        reaper.remove_folders(os.getpid())
        assert folder.path.is_dir()
        os.close(folder._lock)  # as when its process ends
        folder._lock = -1
        reaper.remove_folders(os.getpid())
        assert not folder.path.exists()
    finally:
        folder.close()
