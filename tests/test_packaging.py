"""What the distribution promises: one version, the licence, the commands, and a README that works."""

import importlib
import re
import runpy
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import longstep

ROOT = Path(__file__).parent.parent
PACKAGES = ("longstep", "longstep_adapters", "longstep_bindings", "longstep_trainers")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def readme_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_version_is_the_same_everywhere() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == longstep.__version__ == metadata.version("longstep")


def test_licence_is_the_full_text_that_the_metadata_names() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert project()["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_typed_and_says_what_it_is(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__doc__
    assert Path(str(package.__file__)).with_name("py.typed").is_file()


def test_every_source_root_is_packaged_checked_and_ordered() -> None:
    settings = project()["tool"]
    roots = {
        path.split("/")[1] for path in settings["hatch"]["build"]["targets"]["wheel"]["packages"]
    }
    assert roots == set(PACKAGES)
    assert set(settings["check-wheel-contents"]["toplevel"]) == set(PACKAGES)
    assert set(settings["importlinter"]["root_packages"]) == set(PACKAGES)
    assert set(settings["ruff"]["lint"]["isort"]["known-first-party"]) == set(PACKAGES)


def test_entry_points_lead_to_something() -> None:
    points = project()["project"]["entry-points"]["longstep.commands"]
    places = [*points.values(), *project()["project"]["scripts"].values()]
    for place in places:
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_every_extra_that_an_error_names_exists() -> None:
    extras = set(project()["project"]["optional-dependencies"])
    named = {
        extra
        for folder in ("sdk", "bindings", "adapters", "reference_trainers")
        for path in (ROOT / folder).rglob("*.py")
        for extra in re.findall(r'extra="([a-z_-]+)"', path.read_text(encoding="utf-8"))
    }
    assert named
    assert named <= extras


def test_extra_all_holds_every_extra_that_one_machine_can_use() -> None:
    extras = project()["project"]["optional-dependencies"]
    inside = set(re.findall(r"[a-z]+", extras["all"][0].partition("[")[2]))
    assert inside == set(extras) - {"all", "ray", "vllm"}  # a cluster, a GPU


def test_readme_names_the_two_commands_and_every_extra_it_offers() -> None:
    commands = "\n".join(readme_blocks("bash"))
    assert "make demo" in commands
    assert "make test" in commands
    offered = set(re.findall(r'"longstep\[([a-z]+)\]"', commands))
    assert offered <= set(project()["project"]["optional-dependencies"])


@pytest.mark.parametrize("number", range(3))
def test_readme_example_runs(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "example.py"
    script.write_text(readme_blocks("python")[number], encoding="utf-8")
    try:
        runpy.run_path(str(script), run_name="__main__" if number == 2 else "example")
    finally:
        if "my/Corridor-v0" in longstep.registry:
            longstep.registry.remove("my/Corridor-v0")
    shown = capsys.readouterr().out
    assert ("place", "1.", "48.0")[number] in shown


def run_example(number: int, tmp_path: Path, places: dict[str, str]) -> dict[str, Any]:
    """What an example of README leaves; `places` says what is here, for what a reader has there."""
    text = readme_blocks("python")[number]
    for there, here in places.items():
        assert there in text
        text = text.replace(there, here)
    script = tmp_path / "example.py"
    script.write_text(text, encoding="utf-8")
    return runpy.run_path(str(script), run_name="__main__")


def test_readme_example_of_served_environments_runs(tmp_path: Path) -> None:
    from longstep_bindings.envs import EnvServer, EnvSpec

    spec = EnvSpec(env_id="longstep/KeyDoor-v0")
    with EnvServer(spec, "tcp://127.0.0.1:*", num_workers=2) as server:
        there = ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5601")
        left = run_example(3, tmp_path, dict(zip(there, server.addresses, strict=True)))
    observations = left["observations"]
    assert len(set(observations[:4])) == len(set(observations[4:])) == 1
    assert observations[0] != observations[4]


def test_readme_example_of_actors_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from longstep_trainers.embedded import build_embedded

    model, tokenizer = build_embedded(["Name a color. red blue"], actions=("red", "blue"))
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    left = run_example(4, tmp_path, {"models/smollm2": str(folder)})
    (completion,) = left["completions"]
    assert (completion.request_id, completion.error) == ("first", None)
    assert 1 <= len(completion.token_ids) <= 8
    assert capsys.readouterr().out.endswith(" 0\n")


def test_readme_has_as_many_examples_as_are_run() -> None:
    assert len(readme_blocks("python")) == 5
