"""The public names of the core and their signatures, against the stored copy in `public_api.json`.

A difference is a decision: when it is meant, say so in CHANGELOG.md and write the copy anew:

    .venv/bin/python tests/test_public_api.py
"""

import enum
import importlib
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import longstep

STORED = Path(__file__).with_name("public_api.json")


def describe_all() -> dict[str, Any]:
    """Every public module of the core: the package, and the modules that it names."""
    modules = {
        name: value
        for name in longstep.__all__
        if inspect.ismodule(value := getattr(longstep, name))
    }
    public = {
        "longstep": longstep,
        **{f"longstep.{name}": module for name, module in modules.items()},
    }
    return {name: describe_module(module) for name, module in sorted(public.items())}


def describe_module(module: ModuleType) -> dict[str, Any]:
    """What each name in `__all__` is."""
    return {name: describe(getattr(module, name), module) for name in sorted(module.__all__)}


def describe(value: Any, module: ModuleType) -> Any:
    """A class with its members, the signature of a function, the type of anything else."""
    if inspect.ismodule(value):
        return f"module {value.__name__}"
    if module is longstep:  # described in full in its own module
        return type(value).__name__
    if inspect.isclass(value):
        return describe_class(value)
    if inspect.isroutine(value):
        return signature_of(value)
    if hasattr(value, "__args__"):
        return f"alias of {value}"
    return f"value of {type(value).__name__}"


def describe_class(cls: type) -> dict[str, Any]:
    """Its bases, how it is called, and its own public attributes."""
    described: dict[str, Any] = {"bases": [base.__name__ for base in cls.__bases__]}
    if issubclass(cls, enum.Enum):
        return described | {"members": {member.name: member.value for member in cls}}
    if "__init__" in vars(cls) and not getattr(cls, "_is_protocol", False):
        described["call"] = signature_of(cls.__init__)
    members: dict[str, str] = {}
    for name, value in sorted(vars(cls).items()):
        if name.startswith("_"):
            continue
        inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(inner):
            members[name] = signature_of(inner)
        else:
            members[name] = "property" if isinstance(value, property) else "attribute"
    return described | ({"members": members} if members else {})


def signature_of(function: Any) -> str:
    """The signature as text; defaults that are objects by their type, for their text holds an address."""
    text = str(inspect.signature(function))
    return re.sub(r"<([\w.]+)[^<>]* at 0x[0-9a-f]+>", r"<\1>", text)


def test_public_names_and_signatures_equal_the_stored_copy() -> None:
    stored, found = json.loads(STORED.read_text(encoding="utf-8")), describe_all()
    changed = {
        f"{module}.{name}": {"stored": old, "found": new}
        for module in sorted({*stored, *found})
        for name in sorted({*stored.get(module, {}), *found.get(module, {})})
        if (old := stored.get(module, {}).get(name)) != (new := found.get(module, {}).get(name))
    }
    assert not changed, (
        f"the public interface changed: {json.dumps(changed, indent=2)}\nif this is meant, note it in "
        "CHANGELOG.md and run: .venv/bin/python tests/test_public_api.py"
    )


def test_every_public_name_is_described_to_the_reader() -> None:
    for module_name, names in describe_all().items():
        module = importlib.import_module(module_name)
        assert module.__doc__, f"`{module_name}` has no docstring"
        for name in names:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value.__doc__, f"`{module_name}.{name}` has no docstring"


if __name__ == "__main__":
    STORED.write_text(json.dumps(describe_all(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"written: {STORED}")
