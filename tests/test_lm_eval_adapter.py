"""The harness gets from the adapter what the model gives when it is asked directly."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from ldm_jax.errors import InputError
from ldm_jax.lm_eval_adapter import LdmJaxLM
from ldm_jax.trained import load_trained
from tests.rig import save_run, tiny_config, with_model

PAIRS = [
  ("def f", "(x): return"),
  ("", "import"),
  ("trailing space ", "moved"),
  ("a context that is longer than the thirty-two tokens of the model", " end"),
  ("x", "y"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  config = with_model(tiny_config("preln"), blocks=1)
  return save_run(tmp_path_factory.mktemp("run"), config)


@pytest.fixture(scope="module")
def lm(run):
  return LdmJaxLM(str(run), batch_size=2)


@pytest.fixture(scope="module")
def logits(run):
  trained = load_trained(run)
  forward = jax.jit(lambda tokens: trained.model.apply({"params": trained.params}, tokens))

  def of(ids):
    row = np.zeros((1, 32), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(jax.nn.log_softmax(forward(jnp.asarray(row))[0, : len(ids), :257]))

  return of


def instances(kind, arguments):
  return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


def direct(logits, context, continuation):
  ids = [256, *context.encode(), *continuation.encode()][-33:]
  logs, count = logits(ids[:-1]), len(continuation)
  targets = ids[-count:]
  return logs[np.arange(len(ids) - 1 - count, len(ids) - 1), targets], logs[-count:].argmax(-1)


def test_loglikelihoods_are_those_of_the_full_forward_pass(lm, logits):
  found = lm.loglikelihood(instances("loglikelihood", PAIRS))
  for (context, continuation), (total, greedy) in zip(PAIRS, found, strict=True):
    moved = len(context) - len(context.rstrip())
    continuation = context[len(context) - moved :] + continuation
    nats, best = direct(logits, context.rstrip(), continuation)
    np.testing.assert_allclose(total, nats.sum(), atol=1e-4)
    assert greedy == (best.tolist() == list(continuation.encode()))


def test_the_greedy_continuation_is_told(lm, logits):
  (text,) = lm.generate_until(instances("generate_until", [("def f", {"max_gen_toks": 1})]))
  best = logits([256, *b"def f"])[-1].argmax()
  assert text.encode() == bytes([best]) or best >= 128
  if best < 128:
    ((_, greedy),) = lm.loglikelihood(instances("loglikelihood", [("def f", text)]))
    assert greedy


def test_rolling_loglikelihoods_predict_each_token_once(lm, logits):
  text = "".join(map(chr, range(40, 120)))
  ids, total = [256, *text.encode()], 0.0
  # Windows of 32 tokens; the last one begins earlier, so that it is full too.
  for start, count in ((0, 32), (32, 32), (48, 16)):
    part = ids[start : start + 33]
    logs = logits(part[:-1])
    total += logs[np.arange(32 - count, 32), part[33 - count :]].sum()
  found = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,), ("",)]))
  np.testing.assert_allclose(found, [total, 0.0], atol=1e-4)


def test_texts_end_before_the_strings_that_end_them(lm):
  long = "a prompt that is much longer than the context of the model " * 2
  plain = {"max_gen_toks": 12, "until": []}
  requests = [
    ("def f", plain),
    (long, plain),
    ("def f", {**plain, "do_sample": True, "temperature": 1}),
  ]
  whole, cut, sampled = lm.generate_until(instances("generate_until", requests))
  assert whole != sampled
  assert cut
  end = whole[3:5]
  (found,) = lm.generate_until(
    instances("generate_until", [("def f", {**plain, "until": ["\x00\x01", end]})])
  )
  assert found == whole[: whole.index(end)]


def test_what_the_adapter_does_not_know_is_refused(run):
  with pytest.raises(InputError, match="dtype"):
    LdmJaxLM(str(run), dtype="float32")
  with pytest.raises(InputError, match="max_length=33"):
    LdmJaxLM(str(run), max_length=33)


def test_the_harness_runs_a_task_from_a_file(run, lm, tmp_path):
  documents = [{"question": f"q{n}", "choices": ["a", "bc"], "answer": n % 2} for n in range(6)]
  (tmp_path / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in documents))
  (tmp_path / "local.yaml").write_text(
    f"""task: local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {tmp_path / "test.jsonl"}
  cache_dir: {tmp_path / "cache"}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""
  )
  manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
  results = simple_evaluate(
    model="ldm_jax",
    model_args=f"workdir={run},batch_size=2",
    tasks=["local"],
    task_manager=manager,
    bootstrap_iters=0,
  )
  requests = [(line["question"], f" {choice}") for line in documents for choice in line["choices"]]
  scores = [total for total, _ in lm.loglikelihood(instances("loglikelihood", requests))]
  expected = np.mean(
    [(scores[2 * n + 1] > scores[2 * n]) == line["answer"] for n, line in enumerate(documents)]
  )
  assert math.isclose(results["results"]["local"]["acc,none"], expected)
