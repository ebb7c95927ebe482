"""Bad input: each incorrect command line gives one message, before any training, and changes no file."""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from recipe_cases import recipe_text
from tiny_run import make_recipe, train
from typer.testing import CliRunner

from srtrl.cli import app
from srtrl.model.weights import Adapter, save_adapter

COMMANDS = """
generate policy --prompts garbage => garbage:1: not JSON: 'utf-16-le'
generate policy --prompts garbage.parquet => garbage.parquet: cannot read this Parquet file after row 0
generate policy --prompt 1 eval.temperature=nan => eval.temperature: should be a valid number, found "nan"
generate policy --prompt 1 eval.temperature=-1 => eval.temperature: should be greater than or equal to 0, found
generate policy --prompt 1 rollout.max_new_tokens=0 => rollout.max_new_tokens: should be greater than or equal to 1
generate policy --prompt 1 rollout.max_new_tokens=4294967296 => rollout.max_new_tokens: expected less than 2^31, found
generate policy => no prompts: give --prompt TEXT or --prompts FILE.jsonl
generate policy --prompts nowhere.jsonl => cannot read nowhere.jsonl: No such file or directory
generate policy --prompts rows.jsonl => rows.jsonl:2: expected {"prompt": TEXT} or {"messages": [...]}, found
generate policy --prompt '' => the tokenizer gives no tokens for the prompt ''
generate policy --prompt 1+1 rollout.max_prompt_tokens=2 => prompt '0' has 3 tokens, and rollout.max_prompt_tokens is 2:
generate policy --prompt 1 --samples 0 => num_samples: eval.num_samples: should be greater than or equal to 1
generate policy --prompt 1 --chat => the tokenizer has no chat template
generate policy --prompt 1 rollout.max_new_tokens=100 => max_prompt_tokens + max_new_tokens = 164 is more than the 128
generate policy --prompt 1 rollout.drafter=os:system => rollout.drafter: `os:system` is no drafter
generate policy --prompt 1 rollout.kv_memory_gib=1e-6 => GiB hold 0 pages, but one sequence of 128
generate policy --prompt 1 eval.top_p=0 => eval.top_p: should be greater than 0, found 0
generate policy --prompt 1 rollout.slots=1000000000 => rollout.slots: should be 'auto' or should be less than or
generate policy --prompt 1 --no-such-option => No such option: --no-such-option
generate ./nowhere --prompt 1 => ./nowhere: not a local folder
generate garbage --prompt 1 => garbage: a file; expected a folder in Hugging Face layout
generate folder --prompt 1 => folder: no config.json; expected a model folder in Hugging
generate bundled:x --prompt 1 => bundled:x: no such bundled model; bundled are: tiny, tools
generate LONG --prompt 1 => [Errno 36] File name too long
generate merges --prompt 1 => merges: transformers reads no tokenizer from this folder: Token `a` out of vocabulary
generate text --prompt 1 => text/config.json: transformers cannot read this config
generate end --prompt 1 => end/config.json: eos_token_id is 1000000000000; expected an
generate dora --prompt 1 => dora/adapter_config.json: use_dora is True, supported: False
generate other --prompt 1 => other: its model.layers.0.self_attn.k_proj.lora_A and lora_B fit no matrix of ./policy
generate head --prompt 1 => head: unexpected tensors lm_head.lora_A, lm_head.lora_B; supported: LoRA of the layers
generate ranks --prompt 1 => ranks/adapter_config.json: r is 'x'
generate orphan --prompt 1 => ./nowhere: not a local folder
generate code --prompt 1 => code/config.json: auto_map is {'AutoModelForCausalLM'
eval => MODEL_OR_RUN is missing: name a model or the folder of a run
eval policy => policy is not a run folder: name what to evaluate, with
eval policy --task x => --task: task.name: `x` is not in srtrl/tasks/
eval policy --task os:system => --task: task.name: `os:system` is no task; expected a class
eval policy --task no_such_module:Task => No module named 'no_such_module'
eval policy --task math => --task: task.options: name the prompts: `train`, `eval` or
eval policy --task arithmetic eval.num_samples=0 => eval.num_samples: should be greater than or equal to 1, found
eval policy --task arithmetic --recipe nowhere => nowhere: cannot read the recipe: No such file or directory
eval policy --task arithmetic --only gsm8k => --only and --data-dir belong to --suite NAME
eval policy --suite math --task math => --task and --suite: choose one
eval policy --suite math --only gsm8 => --only: no benchmark `gsm8`, did you mean `gsm8k`?
eval policy --suite mth => --suite: mth is neither a suite, did you mean `math`?
eval policy --suite nowhere.yaml => --suite: nowhere.yaml is neither a suite
eval policy --suite garbage => garbage: cannot read the recipe: not UTF-8 ('utf-8'
eval policy --task arithmetic --step 1 => --step: policy is not a run folder (it has no recipe.yaml)
eval policy --task arithmetic --output nowhere/rows.jsonl => --output: there is no folder nowhere; expected
eval policy --task arithmetic --output folder => --output: folder is a folder; expected the name of a file
eval run --step 7 => run has no checkpoint of step 7; there: step_000001
eval run rewards=1 => rewards: should be a valid list, found 1
report nowhere => nowhere: no such folder; expected the folder of a run, such as
report policy => policy is not the folder of a run: it has no recipe.yaml and
report silent => silent/metrics.jsonl has no complete row yet: there is nothing to show
trie quiet => quiet/rollouts has no step_*.parquet: no step of the run has ended yet
rollouts run --prompt arithmetic-train-0-99 => has no rollouts of `arithmetic-train-0-99`, did you mean `arithmetic
rollouts run --step 9 => --step 9: run has rollouts of the steps 1
rollouts run --prompt x => --prompt: run has no rollouts of `x`; it has those of
rollouts run --sort x => Invalid value for '--sort': Value error, 'x' is not one of
compare nowhere => nowhere: no such folder; expected the folder of a run, such as
compare run --metric x => run has not logged `x`; there: accuracy, clip_share/..., data/...
bench rollout --model-shape smal => --model-shape: no shape 'smal', did you mean `small`
bench rollout --model-shape tiny --trace samples.jsonl --history 1 => --history: 1 of the samples leaves none to decode
bench rollout --model-shape tiny --trace texts.jsonl => prompt is a text; give --tokenizer DIR
bench rollout --model-shape tiny --trace samples.jsonl => --trace: token id 9999 is not in the model's vocabulary of 320
bench rollout --model-shape tiny --trace long.jsonl => but the model was made for 4096
bench rollout --trace nowhere --json garbage => --json: garbage exists, and is not from this command: rename it, name
bench host --trace nowhere --json folder => --json: folder is a folder; expected the name of a file
bench train recipe.yaml --json nowhere/x.json => --json: there is no folder nowhere; expected the name of a file
compare run --out foreign.svg => --out: foreign.svg exists, and is not from this command: rename it, name another
eval policy --task arithmetic --output rows.jsonl => --output: rows.jsonl exists, and is kept: rename it, name
report foreign => report: foreign/report.html exists, and is not from this command: rename it
report holes => step_000001.parquet: expected a Parquet file, found a folder
rollouts holes => step_000001.parquet: expected a Parquet file, found a folder
export run 'o\udcff' => 'o\\udcff': expected a name of printable characters
generate chat --prompt 1 --chat => the tokenizer's chat template refuses: Range too big
generate policy --prompt 1 "rollout.stop_strings=['']" => rollout.stop_strings.0: should have at least 1 character
compare run --out curve.png => --out: expected a file name that ends in .svg, found
export run garbage => garbage exists and is not an empty folder: delete it, or
export run new --adapter => --adapter: run has none, for its recipe has no model.lora: leave the option out
export run folder => folder exists and is not an empty folder: delete it, or
export folder new => folder is not the folder of a run: it has no recipe.yaml and
export run new --step 9 => run has no checkpoint of step 9; there: step_000001
bench rolout => `rolout` is not in srtrl/bench/, did you mean `rollout`?
bench ../cli => `../cli` is not in srtrl/bench/
bench rollout --slots 1,,2 => --slots: expected counts like 8,32,128, at most 65536, found
bench rollout --drafters none,nome => --drafters: `nome` is not in srtrl/drafters/, did you mean
bench rollout --trace garbage => garbage:1: not JSON:
bench rollout --history 2 => Invalid value for '--history': Input should be less than or
bench host --slots 9999 => --slots: 9999, but there are 1024 samples to decode
replay nowhere => cannot read nowhere: No such file or directory
replay empty.jsonl => empty.jsonl: no rows; expected rollouts as .jsonl or .parquet
replay run --drafter os:system => --drafter: `os:system` is no drafter; expected a subclass of
replay run --drafter-options min_score=2 => --drafter-options: min_score: should be less than 1, found 2
replay run --max-tokens 1 => run: nothing to decode: each sample has one token
replay run --history nan => --history: expected a share of at least 0 and below 1, found
tool python nowhere.py => tool python: nowhere.py is not a file; give the path of a file
show-config => show-config needs a RECIPE, or --help-fields
show-config nowhere => nowhere: cannot read the recipe: No such file or directory
train run => run: cannot read the recipe: Is a directory
train --resume folder => folder/recipe.yaml: cannot read the recipe: No such file or
train recipe.yaml --resume --overwrite => --resume and --overwrite exclude each other: continue the run
train recipe.yaml --checkpoint 3 => --checkpoint needs --resume; to begin a new run from it
train recipe.yaml x => expected section.key=value
train recipe.yaml .=1 => expected section.key=value
train recipe.yaml name=../x => name: should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'
train recipe.yaml output_dir=garbage/x => output_dir: garbage/x: garbage is a file, expected a folder
train recipe.yaml output_dir='""' => output_dir: should have at least 1 character, found ""
train ./recipe.yaml output_dir=LONG => output_dir: [Errno 36] File name too long
train ./recipe.yaml model.path=LONG => model.path: [Errno 36] File name too long
train many.yaml => ... and 20 more
train recipe.yaml eval.temperature=1e-44 => eval.temperature: expected 0 (greedy) or at least 1e-06, found 1e-44
train recipe.yaml rollout.temperature=1e-44 => should be greater than or equal to 0.000001, found 1e-44
train recipe.yaml seed=-1 => seed: should be greater than or equal to 0, found -1
train recipe.yaml device=tpu => device: should be 'auto', 'cpu' or 'cuda', found "tpu"
train recipe.yaml model.path=./nowhere => ./nowhere: not a local folder
train recipe.yaml model.path=garbage => model.path: garbage: a file; expected a folder in Hugging Face
train recipe.yaml model.lora.targets=[x] => model.lora.targets: should be 'all_linear' or should be 'q_proj',
train recipe.yaml 'model.lora={targets: []}' => model.lora.targets: should be 'all_linear' or should have
train recipe.yaml critic.lora={} => critic.lora: a critic always learns all its weights
train recipe.yaml model.tokenizer=./folder => model.tokenizer: ./folder holds no tokenizer (tokenizer.json
train recipe.yaml task.name=arithmetics => task.name: `arithmetics` is not in srtrl/tasks/, did you mean
train recipe.yaml task.name=os:system => task.name: `os:system` is no task; expected a class with
train recipe.yaml task.name=base => task.name: `base` is not in srtrl/tasks/
train recipe.yaml 'task.options={x: 1}' => task.options.x: unknown key
train recipe.yaml 'task.options={num_train: 0}' => task.options.num_train: should be greater than or equal to 1
train recipe.yaml 'task.options={min_operations: 9}' => task.options: min_operations (9) is above max_operations
train recipe.yaml 'task.options={max_value: 5, max_operand: 9}' => task.options: max_value (5) is below max_operand (9)
train ./recipe.yaml 'task.options={max_operations: 2, max_operand: 2}' => different train problems of this difficulty
train missing.yaml 'task.options={train: {file: [x]}}' => task.options.train.file: unknown key, did you mean `files`
train missing.yaml 'task.options={train: {files: [rows.csv]}}' => train.files.0: expected a .jsonl or .parquet file
train missing.yaml task.options.train.hub=x/y => give either `files`
train missing.yaml task.options.train.split=train => belong to `hub`
train missing.yaml 'task.options={train: {hub: openai/gsm8k}}' => `split` is missing
train missing.yaml task.options.prompt_template=problem => prompt_template must contain {problem}
train missing.yaml task.name=prompts task.options.prompt_template='"{x}"' => must contain {prompt}, found '{x}'
train missing.yaml task.name=prompts task.options.problem_field=x => unknown key, did you mean `prompt_field`
train missing.yaml task.options.system_prompt=x => system_prompt needs chat_template
train missing.yaml 'task.options.chat_template_options={x: 1}' => chat_template_options needs chat_template
train missing.yaml task.options.answer_pattern='"####.*"' => must have exactly one group, it has 0
train missing.yaml task.options.answer_pattern='(.)' task.options.answer_boxed=true => and answer_boxed are different
train missing.yaml task.options.choices_field=x task.options.answer_boxed=true => and answer_boxed are different ways
train recipe.yaml 'rollout.environment={name: calculatr}' => did you mean `calculator`
train recipe.yaml 'rollout.environment={name: "os:system"}' => `os:system` is no environment
train recipe.yaml 'rollout.environment={name: calculator, options: {a: 1}}' => environment.options.a: unknown key
train recipe.yaml 'rollout.environment={name: calculator, format: code_tag}' => did you mean `code_tags`
train recipe.yaml 'rollout.environment={name: calculator, format: "os:system"}' => `os:system` is no subclass of
train recipe.yaml 'rollout.environment={name: calculator, format: text}' => `text` finds no calls
train recipe.yaml 'rewards=[]' => rewards: should have at least 1 item after validation, not 0
train recipe.yaml 'rewards=[{name: x}]' => rewards.0: `x` is not in srtrl/tasks/rewards.py
train recipe.yaml 'rewards=[{name: "os:nothing"}]' => rewards.0: `os:nothing`: os has no `nothing`
train recipe.yaml 'rewards=[{name: "exits:reward"}]' => rewards.0: `exits:reward`: cannot import exits: SystemExit
train recipe.yaml 'rewards=[{name: "leaves:reward"}]' => cannot import leaves: GeneratorExit (leaves.py:1, <module>)
train recipe.yaml 'rewards=[{name: "mute:reward"}]' => cannot import mute: mute.Mute: <exception str() failed>
train recipe.yaml 'rewards=[{name: "hides:reward"}]' => hides raised RuntimeError: no reward (hides.py:2, __getattr__)
train recipe.yaml algorithm.advantage=os:system => `os:system`, tried on made-up data, raised TypeError
train recipe.yaml algorithm.advantage=builtins:len => builtins:len must return a tensor of shape (2, 4)
train recipe.yaml algorithm.loss=ppo_clp => algorithm.loss: `ppo_clp` is not in
train recipe.yaml 'algorithm.loss_options={x: 1}' => algorithm.loss_options: `ppo_clip` cannot be called with (4
train recipe.yaml 'algorithm.filters=[x]' => algorithm.filters.0: `x` is not in
train recipe.yaml algorithm.loss=flawed:only_loss => algorithm.loss: `flawed:only_loss` must return (token_loss, metric
train recipe.yaml algorithm.loss=flawed:triple => must return (token_loss, metrics), a tensor and a dictionary of
train recipe.yaml algorithm.loss=flawed:float_metric => a tensor of shape (4,); mine: float 0.5
train recipe.yaml algorithm.loss=flawed:scalar => must return one number per token, a tensor of shape (4,); its loss:
train recipe.yaml algorithm.loss=flawed:detached => `flawed:detached` returned a loss without gradient (detached?)
train recipe.yaml algorithm.loss=flawed:raises => `flawed:raises`, tried on made-up data, raised KeyError: 'x' (flawed.
train recipe.yaml algorithm.loss=flawed:needs_reference => cannot be called with (4 arguments, clip_low=..., clip_high=
train recipe.yaml 'algorithm.loss_options={entropy: 1}' => algorithm.loss_options.entropy: the trainer gives it
train recipe.yaml algorithm.advantage=flawed:listed => tensor of shape (2, 4), that of its first argument; it returned:
train recipe.yaml algorithm.advantage=flawed:per_group => its first argument; it returned: Tensor of shape (2,)
train recipe.yaml 'algorithm.advantage_options={alpha: 1}' => advantage_options: `group_relative` cannot be called with
train recipe.yaml 'algorithm.filters=["flawed:listed_mask"]' => a bool for each of the 2 groups, a tensor; it returned:
train recipe.yaml 'algorithm.filters=["flawed:float_mask"]' => it returned: Tensor of shape (2,), torch.float64
train recipe.yaml 'algorithm.filter_options={alpha: 1}' => algorithm.filter_options: no filter declares an argument `al
train recipe.yaml algorithm.reduction=flawed:no_reduction => one number, a tensor of shape (); it returned: Tensor
train recipe.yaml algorithm.kl.estimator=flawed:mean_kl => one number per token, a tensor of shape (4,); it returned: T
train critic.yaml critic.value_loss=flawed:only_loss => critic.value_loss: `flawed:only_loss` must return (token_loss,
train recipe.yaml rollout.drafter=flawed:Lists => `propose` must return DraftTrees, it returned: list [[1, 2]]
train recipe.yaml rollout.drafter=flawed:ListsInTrees => proposed incorrect draft trees; expected 1 trees of at most
train recipe.yaml rollout.drafter=flawed:Short => `flawed:Short`, tried on made-up data, raised TypeError
train recipe.yaml rollout.drafter=flawed:Empty => raised NotImplementedError: the drafter flawed.Empty has no `propose`
train recipe.yaml 'rewards=[{name: "flawed:trl"}]' => rewards.0: `flawed:trl` takes `completions`, as a reward of anoth
train recipe.yaml 'rewards=[{name: "flawed:verl"}]' => here it takes one sample and returns one number: `def verl(sampl
train recipe.yaml 'rewards=[{name: "flawed:marked"}]' => `flawed:marked` is a coroutine function, of which all samples
train recipe.yaml 'log.trackers=[tensorbord]' => log.trackers: tensorbord is not installed
train recipe.yaml rollout.drafter=collections:Counter => rollout.drafter: `collections:Counter` is no drafter
train recipe.yaml 'rollout.drafter_options={min_score: 2}' => rollout.drafter_options.min_score: should be less than
train recipe.yaml rollout.max_new_tokens=65 => rollout.max_new_tokens: max_prompt_tokens + max_new_tokens =
train missing.yaml => missing.yaml:9: task.options.train.files.0: no file
warm-start recipe.yaml => this recipe has no `warm_start` section (at least
warm-start recipe.yaml 'warm_start={output: .}' => warm_start.output: . holds the current folder, expected another one
warm-start recipe.yaml 'warm_start={output: /proc/x}' => warm_start.output: /proc/x cannot be written
warm-start recipe.yaml 'warm_start={output: folder}' => warm_start.output: folder exists and is not empty; use
warm-start recipe.yaml 'warm_start={output: link}' => warm_start.output: link exists and is not empty
warm-start recipe.yaml 'warm_start={output: garbage/x}' => warm_start.output: garbage/x: garbage is a file, expected
"""
"""Command line => a part of the message; the names are those of files and folders in `place`, LONG is a long one."""
CASES = [tuple(line.split(" => ")) for line in COMMANDS.strip().splitlines()]
MODELS: dict[str, dict[str, object]] = {
    "text": {"vocab_size": "x"},
    "end": {"eos_token_id": 10**12},
    "code": {"auto_map": {"AutoModelForCausalLM": "os.system"}},
}
"""Folders of models with such values in their config."""
ADAPTERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "dora": ("./policy", "model.layers.0.self_attn.q_proj", {"use_dora": True}),
    "other": ("./policy", "model.layers.0.self_attn.k_proj", {}),
    "head": ("./policy", "lm_head", {}),
    "orphan": ("./nowhere", "model.layers.0.self_attn.q_proj", {}),
    "ranks": ("./policy", "model.layers.0.self_attn.q_proj", {"r": "x"}),
}
"""Folders of adapters: base model, module, and values in the config."""
FLAWED = """
from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.tasks.reward_input import batched

def only_loss(logprobs, *_, **__): return -logprobs
def triple(logprobs, *_, **__): return -logprobs, {}, {}
def float_metric(logprobs, *_, **__): return -logprobs, {"mine": 0.5}
def scalar(logprobs, *_, **__): return -logprobs.mean(), {}
def detached(logprobs, *_, **__): return -logprobs.detach(), {}
def raises(logprobs, *_, **__): return {}["x"]
def needs_reference(logprobs, old, advantages, index, *, clip_low, clip_high, ref_logprobs): return -logprobs, {}
def listed(rewards): return rewards.tolist()
def per_group(rewards): return rewards.mean(dim=1)
def listed_mask(rewards, correct): return [True] * len(rewards)
def float_mask(rewards, correct): return rewards.mean(dim=1)
def no_reduction(token_loss, index, **_): return token_loss
def mean_kl(logprobs, ref_logprobs): return (logprobs - ref_logprobs).mean()
def trl(completions, **_): return [1.0]
def verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0

@batched
async def marked(samples): return [1.0 for _ in samples]

class Empty(DrafterBase): pass
class Lists(DrafterBase):
    def propose(self, slots, max_nodes): return [[1, 2]]
class ListsInTrees(DrafterBase):
    def propose(self, slots, max_nodes): return DraftTrees(token_ids=[1], parents=[-1], scores=[0.5], offsets=[0, 1])
class Short(DrafterBase):
    def propose(self, slots): return DraftTrees.empty(len(slots))
"""
"""Functions and classes of a user with one mistake each."""


@pytest.fixture(scope="module")
def place(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder of all cases."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "policy").symlink_to(policy)
    (folder / "folder").mkdir()
    (folder / "folder" / "notes.txt").write_text("years of work")
    (folder / "link").symlink_to("folder")
    (folder / "recipe.yaml").write_text(recipe_text(path=policy))
    text = recipe_text(path=policy).replace("name: arithmetic", "name: math")
    data = "  options:\n    train:\n      files:\n      - missing.jsonl\n"
    (folder / "missing.yaml").write_text(text.replace("  options: {num_train: 50, num_eval: 20}\n", data))
    for name in ("garbage", "garbage.parquet"):
        (folder / name).write_bytes(bytes(range(255, 10, -1)))
    (folder / "empty.jsonl").touch()
    (folder / "texts.jsonl").write_text('{"prompt": "a", "text": "b"}\n')
    (folder / "samples.jsonl").write_text('{"prompt_token_ids": [1], "token_ids": [9999]}\n')
    (folder / "long.jsonl").write_text(json.dumps({"prompt_token_ids": [1], "token_ids": [1] * 5000}))
    (folder / "rows.jsonl").write_text('{"prompt": "1"}\n{"text": "2"}\n')
    train(make_recipe(policy, folder, train__num_steps=1, eval__before_and_after=False, eval__every_steps=None))
    (folder / "flawed.py").write_text(FLAWED)
    critic = "\nalgorithm: {advantage: gae}\ncritic: {}\n"
    (folder / "critic.yaml").write_text(recipe_text(path=policy) + critic)
    (folder / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "leaves.py").write_text("raise GeneratorExit\n")
    (folder / "mute.py").write_text("class Mute(BaseException):\n    def __str__(self): raise ValueError\nraise Mute\n")
    (folder / "hides.py").write_text("def __getattr__(name):\n    raise RuntimeError('no reward')\n")
    (folder / "many.yaml").write_text(recipe_text() + "".join(f"key_{number}: 1\n" for number in range(30)))
    merges = json.loads((policy / "tokenizer.json").read_text())
    merges["model"] |= {"vocab": {}, "merges": [["a", "b"]]}
    (shutil.copytree(policy, folder / "merges") / "tokenizer.json").write_text(json.dumps(merges))
    (folder / "foreign.svg").write_text("<svg>years of work</svg>")
    for name in ("foreign", "holes", "quiet", "silent"):
        shutil.copytree(folder / "run", folder / name)
    (folder / "silent" / "metrics.jsonl").write_text("")
    shutil.rmtree(folder / "quiet" / "rollouts")
    (folder / "foreign" / "report.html").write_text("<title>mine</title>")
    (folder / "holes" / "rollouts" / "step_000001.parquet").unlink()
    (folder / "holes" / "rollouts" / "step_000001.parquet").mkdir()
    (shutil.copytree(policy, folder / "chat") / "chat_template.jinja").write_text(
        "{% for x in range(10**9) %}{% endfor %}"
    )
    for name, values in MODELS.items():
        config = json.loads((policy / "config.json").read_text())
        (shutil.copytree(policy, folder / name) / "config.json").write_text(json.dumps(config | values))
    for name, (base, module, values) in ADAPTERS.items():
        tensors = {f"{module}.lora_{kind}": torch.zeros(32, 32) for kind in "AB"}
        save_adapter(Adapter(base=base, rank=32, alpha=1, tensors=tensors), folder / name)
        config = json.loads((folder / name / "adapter_config.json").read_text())
        (folder / name / "adapter_config.json").write_text(json.dumps(config | values))
    before, paths = Path.cwd(), list(sys.path)
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path[:] = paths


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(("command", "message"), CASES, ids=[command for command, _ in CASES])
def test_bad_input_is_one_message(command: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srtrl.trainer.trainer.Trainer._load_task", Mock(side_effect=AssertionError("training begins")))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = listing(place)
    result = CliRunner().invoke(app, shlex.split(command.replace("LONG", "x" * 5_000)))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr) < 3_000
    assert len(re.findall(r"^(?:error|Error): ", result.stderr, re.MULTILINE)) == 1, result.stderr
    if command.startswith("train recipe.yaml ") and "--" not in command:
        assert f"override `{shlex.split(command)[2]}`: " in result.stderr
    assert listing(place) == before
