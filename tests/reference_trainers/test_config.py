"""Settings: what is refused, what is derived, and files, flags and help that agree with the dataclasses."""

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from longstep.errors import ConfigError
from longstep_trainers.config import (
    ActorConfig,
    AlgorithmConfig,
    EmbeddedModelConfig,
    EnvConfig,
    GenerationConfig,
    GiGPOConfig,
    MemoryConfig,
    ModelConfig,
    PromptConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from longstep_trainers.config_files import (
    dump_config,
    find_config,
    load_config,
    packaged_configs,
    parse_config,
    require_same_run,
    save_config,
)

pytest.importorskip("jsonargparse", reason="needs longstep[trainers]")


def all_keys(config: type, prefix: str = "") -> set[str]:
    """Dotted keys of every setting that is no group."""
    keys: set[str] = set()
    for name, kind in typing.get_type_hints(config).items():
        nested = dataclasses.is_dataclass(kind)
        keys |= all_keys(kind, f"{prefix}{name}.") if nested else {prefix + name}
    return keys


def test_keys_are_those_that_users_type() -> None:
    promised = """
        model.model_path model.use_lora model.lora_r model.lora_alpha model.lora_dropout
        model.lora_target_modules model.dtype env.name env.kwargs env.max_steps env.rollout.n
        env.rollout.batch_size train.total_steps train.num_epochs train.batch_size
        train.learning_rate train.clip_range train.gradient_accumulation_steps train.warmup_steps
        train.eval_every train.save_every train.max_length algorithm.name algorithm.gamma
        algorithm.gigpo.omega algorithm.gigpo.inner_group_size algorithm.gigpo.normalize
        algorithm.gigpo.similarity_threshold generation.temperature generation.max_tokens
        actor.engine actor.num_actors actor.max_staleness seed log_level output_dir
    """
    assert set(promised.split()) <= all_keys(RunConfig)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RolloutConfig(n=-4), r"at least 1, got -4 at `env\.rollout\.n`"),
        (lambda: RolloutConfig(batch_size=0), r"got 0 at `env\.rollout\.batch_size`"),
        (lambda: RolloutConfig(num_groups=0), r"got 0 at `env\.rollout\.num_groups`"),
        (lambda: EnvConfig(name=""), r"empty string at `env\.name`"),
        (lambda: EnvConfig(max_steps=0), r"`env\.max_steps`"),
        (lambda: EnvConfig(reward_scale=float("nan")), r"got nan at `env\.reward_scale`"),
        (lambda: MemoryConfig(name="windw"), r"did you mean `window`\?"),
        (lambda: PromptConfig(max_tokens=0), r"`env\.prompt\.max_tokens`"),
        (lambda: ModelConfig(model_path=""), r"`model\.model_path`"),
        (lambda: ModelConfig(lora_r=0), r"`model\.lora_r`"),
        (lambda: ModelConfig(lora_dropout=1.0), r"\[0\.0, 1\.0\), got 1\.0"),
        (lambda: EmbeddedModelConfig(hidden_size=100, num_heads=3), "got 100 and 3"),
        (lambda: TrainConfig(total_steps=0), r"`train\.total_steps`"),
        (lambda: TrainConfig(learning_rate=0.0), r"above 0, got 0\.0 at `train\.learning_rate`"),
        (lambda: TrainConfig(learning_rate=float("inf")), "got inf"),
        (lambda: TrainConfig(clip_range=1.5), r"`train\.clip_range`"),
        (lambda: TrainConfig(warmup_steps=-1), r"`train\.warmup_steps`"),
        (lambda: TrainConfig(adam_betas=(0.9, 1.0)), r"`train\.adam_betas`"),
        (lambda: AlgorithmConfig(name="gipo"), r"got `gipo`.*did you mean `gigpo`\?"),
        (lambda: AlgorithmConfig(name="sarsa"), "take one of them"),
        (lambda: AlgorithmConfig(gamma=1.1), r"`algorithm\.gamma`"),
        (lambda: GiGPOConfig(omega=-1.0), r"`algorithm\.gigpo\.omega`"),
        (lambda: GiGPOConfig(similarity_threshold=0.0), "similarity_threshold"),
        (lambda: GenerationConfig(temperature=0.0), r"`generation\.temperature`"),
        (lambda: GenerationConfig(top_p=0.0), r"`generation\.top_p`"),
        (lambda: ActorConfig(num_actors=-1), r"at least 0, got -1 at `actor\.num_actors`"),
        (lambda: ActorConfig(engine="vllm"), r"engine `vllm`, got 0 .*--actor\.num_actors 1"),
        (lambda: ActorConfig(max_staleness=1), r"max_staleness.*--actor\.num_actors 1"),
        (
            lambda: ActorConfig(weights_route="wire"),
            r"no `actor\.weights_route`, got `wire` without actors",
        ),
        (
            lambda: ActorConfig(dtype="bfloat16"),
            r"no `actor\.dtype`, got `bfloat16` without actors",
        ),
        (
            lambda: ActorConfig(addresses=["tcp://127.0.0.1:1"], gpu_memory_share=0.9),
            r"no `actor\.gpu_memory_share`, got `0.9` beside `actor\.addresses`",
        ),
        (
            lambda: RunConfig(actor=ActorConfig(num_actors=1, weights_route="cuda")),
            r"expected `actor\.engine` vllm for `actor\.weights_route` cuda",
        ),
        (
            lambda: RunConfig(
                model=ModelConfig(use_lora=True),
                actor=ActorConfig(num_actors=1, engine="vllm", weights_route="cuda"),
            ),
            r"another `actor\.weights_route` than `cuda` with `model\.use_lora`",
        ),
        (
            lambda: ActorConfig(num_actors=1, python="/no/python"),
            r"`/no/python` at `actor\.python`",
        ),
        (lambda: ActorConfig(num_actors=1, gpu_memory_share=1.5), r"`actor\.gpu_memory_share`"),
        (lambda: ActorConfig(num_actors=1, probe_tolerance=0.0), r"`actor\.probe_tolerance`"),
        (
            lambda: ActorConfig(num_actors=3, addresses=["tcp://a:1"]),
            r"`actor\.num_actors` of 0 beside `actor\.addresses`, got 3",
        ),
        (
            lambda: TrainConfig(importance_cap=0.5),
            r"at least 1, got 0\.5 at `train\.importance_cap`",
        ),
        (lambda: ActorConfig(engine="vlm"), r"`actor\.engine`"),
        (lambda: RunConfig(seed=-1), "`seed`"),
        (lambda: RunConfig(log_level="debug"), "got `debug` at `log_level`"),
    ],
)
def test_setting_that_cannot_work_names_its_key(build, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_group_size_must_be_a_multiple_of_the_inner_group_size() -> None:
    rollout = RolloutConfig(n=6)
    gigpo = AlgorithmConfig(gigpo=GiGPOConfig(inner_group_size=4))
    with pytest.raises(ConfigError, match=r"`env\.rollout\.n`.*got 6 and 4"):
        RunConfig(env=EnvConfig(rollout=rollout), algorithm=gigpo)
    # GRPO has no inner groups, and nothing to refuse.
    RunConfig(env=EnvConfig(rollout=rollout), algorithm=AlgorithmConfig(name="grpo"))


def test_prompt_gets_what_the_completion_leaves_of_a_row() -> None:
    train = TrainConfig(max_length=100)
    config = RunConfig(train=train, generation=GenerationConfig(max_tokens=30))
    assert config.prompt_max_tokens == 70
    with pytest.raises(ConfigError, match=r"`train\.max_length` = 100"):
        RunConfig(train=train, generation=GenerationConfig(max_tokens=100))
    with pytest.raises(ConfigError, match=r"`env\.prompt\.max_tokens` = 80"):
        RunConfig(
            train=train,
            env=EnvConfig(prompt=PromptConfig(max_tokens=80)),
            generation=GenerationConfig(max_tokens=30),
        )


def test_actors_are_used_when_started_or_named() -> None:
    assert not ActorConfig().uses_actors
    assert ActorConfig(engine="vllm", num_actors=1).uses_actors
    assert ActorConfig(addresses=["tcp://127.0.0.1:7000"], max_staleness=2).uses_actors


def test_groups_fill_the_environments_and_none_is_dropped() -> None:
    assert RolloutConfig(n=8, batch_size=128).groups_per_iteration == 16
    assert RolloutConfig(n=8, batch_size=100).groups_per_iteration == 13
    assert RolloutConfig(n=8, batch_size=4).groups_per_iteration == 1
    assert RolloutConfig(n=8, batch_size=4, num_groups=5).groups_per_iteration == 5


def test_clip_range_is_symmetric_unless_the_upper_one_is_given() -> None:
    assert (TrainConfig(clip_range=0.1).clip_low, TrainConfig(clip_range=0.1).clip_high) == (
        0.1,
        0.1,
    )
    higher = TrainConfig(clip_range=0.2, clip_range_high=0.28)
    assert (higher.clip_low, higher.clip_high) == (0.2, 0.28)


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1  # type: ignore[misc]


def test_flags_override_files_wherever_they_stand(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("env:\n  rollout: {n: 4}\ntrain: {learning_rate: 1e-3}\nseed: 3\n")
    second.write_text("seed: 5\n")
    config = parse_config(
        [
            "--env.rollout.n",
            "2",
            f"--config={first}",
            "--config",
            str(second),
            "--env.kwargs.size=6",
        ]
    )
    assert config.env.rollout.n == 2
    assert config.train.learning_rate == 1e-3
    assert config.seed == 5
    assert config.env.kwargs == {"size": 6}
    assert config.train.batch_size == TrainConfig().batch_size


def test_values_get_the_types_of_their_fields() -> None:
    config = parse_config(
        [
            "--train.adam_betas=[0.8,0.9]",
            "--model.lora_target_modules=[q_proj,v_proj]",
            "--env.max_steps=null",
            "--generation.constrain=true",
            "--log-level=DEBUG",
        ]
    )
    assert config.train.adam_betas == (0.8, 0.9)
    assert config.model.lora_target_modules == ["q_proj", "v_proj"]
    assert config.env.max_steps is None
    assert config.generation.constrain is True
    assert config.log_level == "DEBUG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env.rolout.n=4"], r"`env\.rolout\.n` .*did you mean `env\.rollout\.n`\?"),
        (["--learning_rate=1"], r"did you mean `train\.learning_rate`\?"),
        (["--xyz=1"], "`longstep train --help` lists the keys"),
        (["--env.rollout.n=4.5"], r"expected int, got 4\.5 at `env\.rollout\.n`"),
        (["--env.max_steps=soon"], r"expected int \| null, got soon at `env\.max_steps`"),
        (["--train.lr_schedule=step"], r"expected one of 'constant', 'linear', 'cosine', got step"),
        (["--env.rollout.n=-4"], r"at least 1, got -4 at `env\.rollout\.n`"),
        (["--env.rollout.n"], "env.rollout.n: expected one argument"),
        (["stray"], "stray"),
        (["--config=nothing"], "expected a YAML file or the name of a packaged one, got `nothing`"),
        (["--config"], "got `` at `--config`"),
    ],
)
def test_wrong_command_line_says_what_is_wrong(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env:\n  rolout: {n: 4}\n", r"`env\.rolout` at `.*did you mean `env\.rollout`\?"),
        ("versions: 1\n", "`versions`"),
        ("env: 3\n", "expected a mapping of keys, got `3` at `env`"),
        ("- 1\n", "at `the top`"),
        ("env: {name: [}\n", "expected YAML"),
        ("train: {batch_size: many}\n", r"expected int, got many at `train\.batch_size`"),
        ("algorithm: {name: gipo}\n", r"did you mean `gigpo`\?"),
        (
            "seed: 1\ntrain: {}\nseed: 2\n",
            r"got `seed` at line 1 and again at line 3 of `.*run\.yaml`",
        ),
        ("env:\n  name: a\n  kwargs: {size: 3, size: 4}\n", r"got `env\.kwargs\.size` at line 3"),
        ("env: {kwargs: {rooms: [{a: 1, a: 2}]}}\n", r"got `env\.kwargs\.rooms\.a`"),
        ("env: &e {name: a}\nenv: *e\n", "each key once, got `env`"),
    ],
)
def test_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_numbers_among_the_environments_arguments_are_those_of_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "env: {kwargs: {penalty: 1e-3, scale: -2.5E4, day: 2026-01-31, size: 3, path: 1e, code: e5}}\n"
        "train: {learning_rate: 1e-3}\n"
    )
    config = load_config(path)
    assert config.env.kwargs == {
        "penalty": 0.001, "scale": -25000.0, "day": "2026-01-31", "size": 3, "path": "1e", "code": "e5",
    }  # fmt: skip
    assert config.train.learning_rate == 0.001


def test_merged_keys_are_not_taken_for_double_ones(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env:\n  kwargs: {a: &base {x: 1, y: 2}, b: {<<: *base, x: 3}}\n")
    assert load_config(path).env.kwargs["b"] == {"x": 3, "y": 2}


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--seed=4", "seed"),
        ("--env.name=longstep/Sokoban-v0", "env.name"),
        ("--env.kwargs.size=4", "env.kwargs"),
        ("--model.embedded.num_layers=1", "model.embedded.num_layers"),
        ("--model.use_lora=true", "model.use_lora"),
    ],
)
def test_settings_of_another_run_are_refused_by_name(tmp_path: Path, flag: str, key: str) -> None:
    saved = save_config(parse_config(["--seed=3", "--env.kwargs.size=3"]), tmp_path / "config.yaml")
    arguments = ["--seed=3", "--env.kwargs.size=3"]
    with pytest.raises(ConfigError, match=rf"of the run that is gone on with.* at `{key}`"):
        require_same_run(parse_config([*arguments, flag]), saved)


def test_what_a_run_may_change_is_said_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = save_config(parse_config(["--seed=3"]), tmp_path / "config.yaml")
    same = ["--seed=3", "--train.total_steps=9", "--output_dir=elsewhere", "--resume=auto"]
    require_same_run(parse_config(same), saved)
    assert caplog.messages == []
    require_same_run(parse_config([*same, "--train.learning_rate=0.5"]), saved)
    assert caplog.messages == ["`train.learning_rate` goes on with 0.5 instead of 5e-06"]
    require_same_run(parse_config(same), tmp_path / "missing.yaml")
    assert "cannot be compared" in caplog.messages[-1]


def test_saved_settings_read_back_equal_and_name_the_versions(tmp_path: Path) -> None:
    config = parse_config(
        [
            "--env.kwargs.size=6",
            "--env.prompt.user=line\n{memory}: é",
            "--train.adam_betas=[0.8,0.9]",
            "--model.lora_target_modules=[q_proj]",
            "--train.learning_rate=5e-06",
        ]
    )
    path = save_config(config, tmp_path / "new" / "config.yaml")
    assert load_config(path) == config
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("# python 3.")
    assert "longstep " in first_line
    assert "torch " in first_line


def test_dump_lists_every_key() -> None:
    import yaml

    def flat(values: dict, prefix: str = "") -> set[str]:
        keys: set[str] = set()
        for name, value in values.items():
            nested = isinstance(value, dict) and prefix + name != "env.kwargs"
            keys |= flat(value, f"{prefix}{name}.") if nested else {prefix + name}
        return keys

    assert flat(yaml.safe_load(dump_config(RunConfig()))) == all_keys(RunConfig)


def test_every_packaged_config_can_be_built() -> None:
    for name, path in packaged_configs().items():
        assert find_config(name) == path
        assert isinstance(load_config(name), RunConfig)


def test_help_shows_the_string_under_each_field() -> None:
    script = "from longstep_trainers.config_files import parse_config; parse_config(['--help'])"
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    for key in all_keys(RunConfig):
        assert f"--{key}" in shown
    words = " ".join(shown.split())
    assert "Group size: trajectories that start from the same task and state." in words
    assert "Passes over the rows of one rollout." in words
