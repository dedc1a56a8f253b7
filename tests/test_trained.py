import chex
import jax
import pytest

from ldm_jax.config import MeshConfig, MixerConfig
from ldm_jax.errors import InputError
from ldm_jax.sharding import make_mesh
from ldm_jax.trained import load_trained
from ldm_jax.training.checkpoint import Checkpointer
from ldm_jax.training.step import init_state
from ldm_jax.training.workdir import save_config
from tests.rig import tiny_config, with_model

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  save_config(workdir, CONFIG)
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  state, checkpointer = init_state(CONFIG, mesh), Checkpointer(workdir, 3)
  states = {}
  for step in (2, 5):
    states[step] = state.replace(
      step=jax.numpy.int32(step), params=jax.tree.map(lambda x, s=step: s * x, state.params)
    )
    checkpointer.save(states[step], {"tokens": 0})
  checkpointer.close()
  return workdir, states


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (4, 1, 1, 1), (1, 2, 2, 2)])
@pytest.mark.parametrize("step", [None, 2])
def test_parameters_load_on_any_mesh(run, shape, step):
  workdir, states = run
  devices = jax.devices()[: shape[0] * shape[1] * shape[2] * shape[3]]
  mesh = make_mesh(MeshConfig(*shape), devices)
  trained = load_trained(workdir, step, mesh=mesh)
  assert trained.step == (step or 5)
  assert trained.config == CONFIG
  chex.assert_trees_all_equal(jax.device_get(trained.params), states[trained.step].params)
  assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(trained.params))


def test_a_step_that_is_not_there_is_named_with_those_that_are(run):
  with pytest.raises(InputError, match=r"step 3 is not in checkpoints, which holds steps 2, 5"):
    load_trained(run[0], 3)
  with pytest.raises(InputError, match="no folder best"):
    load_trained(run[0], folder="best")


def test_a_folder_without_a_run_is_left_as_it_is(tmp_path):
  with pytest.raises(InputError, match=r"no run there, config\.json is missing"):
    load_trained(tmp_path / "misspelt")
  assert not list(tmp_path.iterdir())
  save_config(tmp_path, CONFIG)
  with pytest.raises(InputError, match="no folder checkpoints"):
    load_trained(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, run, capsys):
  save_config(tmp_path, CONFIG)
  checkpointer = Checkpointer(tmp_path, 3)
  for state in run[1].values():
    checkpointer.save(state, {"tokens": 0})
  checkpointer.close()
  for path in (tmp_path / "checkpoints" / "5" / "state").rglob("*"):
    if path.is_file():
      path.write_bytes(b"")
  assert load_trained(tmp_path).step == 2
  printed = capsys.readouterr()
  assert "checkpoint 5" in printed.err
  assert not printed.out  # which may be JSON
  with pytest.raises(InputError, match=r"checkpoint 5 does not load.* set --step to one of 2"):
    load_trained(tmp_path, 5)


@pytest.mark.parametrize(
  "changes", [{"blocks": 1}, {"blocks": 3}, {"mixer": MixerConfig("preln")}, {"mlp_width": 8}]
)
def test_a_config_of_another_model_is_refused(tmp_path, run, changes):
  (tmp_path / "checkpoints").symlink_to(run[0] / "checkpoints")
  save_config(tmp_path, with_model(CONFIG, **changes))
  with pytest.raises(InputError, match=r"checkpoint 5 in .* is not of the model that config\.json"):
    load_trained(tmp_path)
