import warnings

import pytest

from longstep.checks import check_env
from longstep.registration import make

SETTINGS = [
    ("longstep/KeyDoor-v0", {}),
    ("longstep/KeyDoor-v0", {"size": 2, "num_rooms": 1, "style": "plain", "reward": "dense"}),
    ("longstep/Sokoban-v0", {}),
    ("longstep/Sokoban-v0", {"max_pulls": 1, "admissible": "all"}),
    ("longstep/Sokoban-v0", {"observation": "rgb"}),
    ("longstep/Sokoban-v0", {"observation": "tiny_rgb", "dim_room": (7, 7), "num_boxes": 2}),
]


@pytest.mark.parametrize(("env_id", "arguments"), SETTINGS)
def test_built_in_environments_keep_the_rules_of_longstep_and_gymnasium(
    env_id: str, arguments: dict
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for env in (make(env_id, **arguments), make(env_id, **arguments).env):
            report = check_env(env)
            assert report.warnings == ()
            assert report.num_states > 10
