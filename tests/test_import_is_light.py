"""What an import loads, read from `sys.modules` of a fresh interpreter."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "vllm", "peft", "numba", "zmq", "msgpack", "gymnasium")


def loaded_after(statement: str) -> set[str]:
    """Top-level names of the modules that are loaded after the statement, beyond those of a bare interpreter."""
    script = (
        "import json, sys; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_longstep_loads_nothing_heavy() -> None:
    loaded = loaded_after("import longstep")
    assert "longstep" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_names_of_longstep_load_when_they_are_first_used() -> None:
    assert "gymnasium" in loaded_after("import longstep; longstep.make")


def test_whole_core_works_without_the_heavy_packages() -> None:
    """Every public name of the core, with only gymnasium beside numpy."""
    loaded = loaded_after("import longstep\nfor name in longstep.__all__: getattr(longstep, name)")
    assert loaded.isdisjoint(set(HEAVY) - {"gymnasium"})


@pytest.mark.parametrize(
    "statement",
    [
        "from longstep.cli import main; main(['--help'])",
        "import longstep_trainers.cli",
        "import longstep_trainers.config",
        "import longstep_bindings",
        "import longstep_adapters",
    ],
)
def test_help_and_settings_load_nothing_heavy(statement: str) -> None:
    assert loaded_after(statement).isdisjoint(HEAVY)


def test_importing_leaves_the_process_as_it_was() -> None:
    """No random state, no warning filter, no environment variable changes."""
    script = (
        "import os, random, warnings, numpy as np\n"
        "def state(): return (random.getstate(), str(np.random.get_state()), list(warnings.filters),"
        " dict(os.environ))\n"
        "before = state()\nimport longstep\nassert state() == before\nprint('same')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "same\n"
