"""Bad settings are refused before any work, with the nearest valid name."""

import dataclasses

import pytest

from ldm_jax import Config, load_config
from ldm_jax.command_line import parse_train_arguments
from ldm_jax.config import from_json, to_json
from ldm_jax.config_checks import flatten
from ldm_jax.errors import InputError
from tests.rig import ROOT, refusal, tiny_config


@pytest.mark.parametrize(
  "path",
  sorted(set((ROOT / "configs").glob("*.py")) - set((ROOT / "configs").glob("compare_*.py"))),
  ids=lambda p: p.stem,
)
def test_every_config_file_is_valid_and_survives_json(path):
  config = load_config(path)
  assert from_json(to_json(config)) == config
  assert path.read_text().startswith('"""')


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ("--model.widht 64", r"unknown setting --model.widht; did you mean --model.width\?"),
    ("--model.steps 64", r"unknown setting --model.steps; did you mean --train.steps\?"),
    ("--learning_rate 1e-3", r"did you mean --optimizer.learning_rate\?"),
    ("--workdri x", r"did you mean --workdir\?"),
    ("--model.mixer.groups 7", r"model.mixer.groups = 7 does not divide model.width = 128"),
    ("--model.heads 3", "model.heads = 3 does not divide model.width = 128"),
    ("--model.heads 128", "heads of odd width 1"),
    ("--model.kv-heads 3", "model.kv_heads = 3 does not divide model.heads = 4"),
    ("--model.kv-heads 0", "model.kv_heads must be at least 1"),
    ("--model.mixer.key-dim 0", "model.mixer.key_dim must be at least 1, got 0"),
    ("--model.mixer.block-size 0", "model.mixer.block_size must be at least 1, got 0"),
    ("--model.mixer.streams 0", "model.mixer.streams must be at least 1, got 0"),
    (
      "--model.mixer.rule outer --model.mixer.forgetting False",
      "forgetting = False changes nothing",
    ),
    ("--model.mixer.write_every 13", "write_every = 13 is more than the 12 sublayers"),
    ("--model.mixer.min-forgetting 1.0", "min_forgetting must be between 0 and 1"),
    ("--model.mixer.min-forgetting 0.99", "forgetting_init = 0.98 must be above"),
    ("--model.mixer.alpha 0", "model.mixer.alpha must be above 0"),
    ("--model.vocab-size 256", "too small for data.source = stdlib"),
    ("--train.accumulate 3", "train.accumulate = 3 does not divide data.batch_size = 8"),
    ("--model.mixer.alpha 2000", "model.mixer.alpha must be above 0 and at most 100"),
    ("--data.seed 4294967296", "data.seed must be at least 0 and below"),
    ("--train.steps 0", "train.steps must be at least 1"),
    ("--train.depth_metrics_every -1", "train.depth_metrics_every must be at least 0, got -1"),
    ("--train.profile_steps -1", "train.profile_steps must be at least 0, got -1"),
    ("--train.profile_start -1", "train.profile_start must be at least 0, got -1"),
    ("--train.profile_start 5", r"profile_start = 5 traces nothing without train.profile_steps"),
    (
      "--train.profile_start 299 --train.profile_steps 2",
      "profile_start = 299 and train.profile_steps = 2 end beyond train.steps = 300",
    ),
    ("--optimizer.learning-rate nan", "optimizer.learning_rate must be a finite number"),
    ("--optimizer.learning-rate -1", "optimizer.learning_rate must be positive"),
    ("--optimizer.beta1 1", "optimizer.beta1 must be at least 0 and below 1"),
    ("--mesh.data 0", "mesh.data must be at least 1, or -1"),
    ("--config nowhere.py", "config file nowhere.py does not exist"),
    (f"--config {ROOT}/configs/ldm_tyni.py", r"the nearest is .*ldm_tiny.py"),
  ],
)
def test_wrong_settings_are_refused_by_name(arguments, message):
  with pytest.raises(InputError, match=message):
    parse_train_arguments(arguments.split())


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ("--model.width 1e2", "--model.width"),
    ("--optimizer.learning_rate fast", "--optimizer.learning-rate"),
    ("--model.qk_norm false", "'True', 'False'"),
    ("--model.mixer.kind resnet", "'preln', 'ldm', 'attnres', 'hc', 'mhc'"),
    ("--model.mixer.rule newton", "'rls'"),
    ("--train.steps", "--train.steps"),
  ],
)
def test_values_of_the_wrong_type_exit_with_2(arguments, message, capsys):
  with pytest.raises(SystemExit) as stopped:
    parse_train_arguments(arguments.split())
  assert stopped.value.code == 2
  assert message in capsys.readouterr().err


def test_values_reach_the_config_with_their_types_and_dashes_are_underscores():
  arguments = {
    "--optimizer.learning-rate": "1e-4",
    "--model.qk_norm": "True",
    "--model.mixer.key-dim": "4",
    "--model.kv_heads": "2",
    "--model.mixer.memory_dtype": "bfloat16",
    "--workdir": "here",
  }
  config, workdir = parse_train_arguments([f"{key}={value}" for key, value in arguments.items()])
  assert config.optimizer.learning_rate == 1e-4
  assert config.model.qk_norm is True
  assert (config.model.mixer.key_dim, config.model.kv_heads) == (4, 2)
  assert config.model.mixer.memory_dtype == "bfloat16"
  assert str(workdir) == "here"
  _, default = parse_train_arguments(["--config", str(ROOT / "configs" / "preln_tiny.py")])
  assert str(default) == "runs/preln_tiny"


def test_help_lists_every_setting(capsys):
  with pytest.raises(SystemExit) as stopped:
    parse_train_arguments(["--help"])
  assert stopped.value.code == 0
  text = capsys.readouterr().out.replace("-", "_")
  for name in flatten(Config()):
    assert f"__{name}" in text


@pytest.mark.parametrize(
  ("body", "message"),
  [
    ("ModelConfig(widht=3)", "ModelConfig has no setting 'widht'; did you mean 'width'"),
    ("dataclasses.replace(ModelConfig(), block=3)", "did you mean 'blocks'"),
    ("ModelConfig(width='128')", "model.width: expected int, got '128'"),
    ("ModelConfig(blocks=True)", "model.blocks: expected int, got True"),
    ("ModelConfig(rope_theta='1e4')", "model.rope_theta: expected float"),
    ("ModelConfig(mixer=None)", "model.mixer: expected MixerConfig, got None"),
    ("ModelConfig(mixer=MixerConfig(kind='ldn'))", "model.mixer.kind: expected one of preln, ldm"),
    ("1 / 0", "ZeroDivisionError: division by zero"),
  ],
)
def test_broken_config_files_are_refused_with_their_name(tmp_path, body, message):
  path = tmp_path / "mine.py"
  path.write_text(
    "import dataclasses\nfrom ldm_jax import Config, ModelConfig, MixerConfig\n"
    f"def get_config():\n  return Config(model={body})\n"
  )
  with pytest.raises(InputError, match="mine.py: .*" + message):
    load_config(path)


def test_a_config_file_without_get_config_or_with_another_result_is_refused(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text("x = 1\n")
  with pytest.raises(InputError, match=r"has no get_config\(\)"):
    load_config(path)
  path.write_text("def get_config():\n  return {}\n")
  with pytest.raises(InputError, match="must return a Config"):
    load_config(path)


def test_config_files_import_their_neighbours_and_folders_do_not_mix(tmp_path):
  for name, steps in (("a", 11), ("b", 12)):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "base.py").write_text(f"steps = {steps}\n")
    (folder / "mine.py").write_text(
      "import dataclasses, base\nfrom ldm_jax import Config\n"
      "from ldm_jax.config import TrainConfig\n"
      "def get_config():\n  return Config(train=TrainConfig(steps=base.steps))\n"
    )
    assert load_config(folder / "mine.py").train.steps == steps


def test_json_with_an_unknown_setting_is_refused():
  text = to_json(tiny_config()).replace('"width"', '"widht"')
  with pytest.raises(InputError, match="no setting 'widht'"):
    from_json(text)
  for text in ("null", "[]", '{"model": 3}', "{"):
    with pytest.raises(InputError, match=r"JSON"):
      from_json(text)


def test_a_bad_setting_exits_with_2_and_one_message_before_any_work(tmp_path):
  command = ("--workdir", tmp_path / "run", "--model.mixer.groups", "7")
  assert refusal(ROOT / "train.py", *command) == (
    "error: model.mixer.groups = 7 does not divide model.width = 128; change one of them"
  )
  assert not (tmp_path / "run").exists()


def test_configs_are_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    Config().train.steps = 3
