"""Bad input: each incorrect command line gives one message, before any training, and changes no file."""

import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from recipe_cases import recipe_text
from typer.testing import CliRunner, Result

from srtrl.cli import app
from srtrl.features.adapters import Adapter, save_adapter
from srtrl.recipe.file import RecipeError, load_recipe

COMMANDS = """
generate policy --prompts garbage => garbage:1: not JSON: 'utf-16-le'
generate policy --prompts garbage.parquet => garbage.parquet: cannot read this Parquet file after row 0
generate policy --prompt 1 rollout.max_new_tokens=4294967296 => rollout.max_new_tokens: expected less than 2^31, found
generate policy => no prompts: give --prompt TEXT or --prompts FILE.jsonl
generate policy --prompts nowhere.jsonl => cannot read nowhere.jsonl: No such file or directory
generate policy --prompts rows.jsonl => rows.jsonl:2: expected {"prompt": TEXT} or {"messages": [...]}, found
generate policy --prompt '' => the tokenizer gives no tokens for the prompt ''
generate policy --prompt 1+1 rollout.max_prompt_tokens=2 => prompt '0' has 3 tokens, and rollout.max_prompt_tokens is 2:
generate policy --prompt 1 --samples 0 => num_samples: eval.num_samples: should be greater than or equal to 1
generate policy --prompt 1 --chat => the tokenizer has no chat template
generate policy --prompt 1 rollout.kv_memory_gib=1e-6 => GiB hold 0 pages, but one sequence of 128
generate policy --prompt 1 rollout.slots=1000000000 => rollout.slots: should be 'auto' or should be less than or
generate ./nowhere --prompt 1 => ./nowhere: not a local folder
generate garbage --prompt 1 => garbage: a file; expected a folder in Hugging Face layout
generate folder --prompt 1 => folder: no config.json; expected a model folder in Hugging
generate bundled:x --prompt 1 => bundled:x: no such bundled model; bundled are: tiny, tools
generate merges --prompt 1 => merges: transformers reads no tokenizer from this folder: Token `a` out of vocabulary
generate text --prompt 1 => text/config.json: vocab_size is 'x'; expected an integer from 1 to 1,048,576
generate end --prompt 1 => end/config.json: eos_token_id is 1000000000000; expected an
generate dora --prompt 1 => dora/adapter_config.json: use_dora is True, supported: False
generate other --prompt 1 => other: tensor model.layers.0.self_attn.k_proj.lora_B has shape [32, 32]; by rank
generate head --prompt 1 => head: unexpected tensors lm_head.lora_A, lm_head.lora_B; supported: LoRA of the layers
generate ranks --prompt 1 => ranks/adapter_config.json: r is 'x'
generate orphan --prompt 1 => ./nowhere: not a local folder
generate itself --prompt 1 => itself/adapter_config.json: base_model_name_or_path is './itself'; expected a model that
generate chain --prompt 1 => chain/adapter_config.json: base_model_name_or_path is './circle'; expected a model that
generate circle --prompt 1 => circle/adapter_config.json: base_model_name_or_path is './chain'; expected a model that
generate alpha --prompt 1 => alpha/adapter_config.json: lora_alpha is nan; expected a number above 0
generate zero --prompt 1 => zero/adapter_config.json: r is 0; expected a number above 0
generate rank --prompt 1 => rank: tensor model.layers.0.self_attn.q_proj.lora_A has shape [32, 32]; by rank 8 and ./pol
generate nested --prompt 1 => nested/config.json: no readable JSON: maximum recursion depth exceeded
generate base --prompt 1 => base/config.json: rope_theta is 'x'; expected a number from 1e-12 to
generate piped --prompt 1 => piped/generation_config.json: a pipe, a socket or a device; expected a regular file
generate gone --prompt 1 => gone/tokenizer.json: a link to nowhere, which is not there
generate length --prompt 1 => length: transformers reads no tokenizer from this folder: '>' not supported between
generate calls --prompt 1 --chat => the tokenizer's chat template refuses: maximum recursion depth exceeded (Recurs
generate number --prompt 1 --chat => the tokenizer's chat template refuses: Can't compile non template nodes (TypeErr
generate words --prompt x => the tokenizer refuses the prompts: WordLevel error: Missing [UNK] token
generate half --prompt 1 --chat => the text of the prompt '0' has half of a surrogate pair, which is no character
generate named --prompt 1 --chat => the tokenizer's chat templates are rag, tool_use, without a default: set task.opt
generate policy --prompts pipe.yaml => pipe.yaml: a pipe, a socket or a device; expected a regular file
generate policy --prompts gone.yaml => gone.yaml: a link to nowhere, which is not there
eval => Missing argument 'MODEL_OR_RUN'.
eval policy => policy is not a run folder: name what to evaluate, with
eval policy --task x => --task: task.name: `x` is not in srtrl/tasks/
eval policy --task math => --task: task.options: name the prompts: `train`, `eval` or
eval policy --task arithmetic --only gsm8k => --only and --data-dir belong to --suite NAME
eval policy --suite math --task math => --task and --suite: choose one
eval policy --suite math --only gsm8 => --only: no benchmark `gsm8`, did you mean `gsm8k`?
eval policy --suite mth => --suite: mth is neither a suite, did you mean `math`?
eval policy --suite garbage => garbage: cannot read the recipe: not UTF-8 ('utf-8'
eval policy --task arithmetic --step 1 => --step: policy is not a run folder (it has no recipe.yaml)
eval policy --task arithmetic --output nowhere/rows.jsonl => --output: there is no folder nowhere; expected
eval run --step 7 => run has no checkpoint of step 7; there: step_000002
report nowhere => nowhere: no such folder; expected the folder of a run, such as
report policy => policy is not the folder of a run: it has no recipe.yaml and
report silent => silent/metrics.jsonl has no complete row yet: there is nothing to show
trie quiet => quiet/rollouts has no step_*.parquet: no step of the run has ended yet
rollouts run --prompt arithmetic-train-0-99 => has no rollouts of `arithmetic-train-0-99`, did you mean `arithmetic
rollouts run --step 9 => --step 9: run has rollouts of the steps 1
rollouts run --sort x => Invalid value for '--sort': Value error, 'x' is not one of
compare run --metric x => run has not logged `x`; there: accuracy, clip_share/..., data/...
bench rollout --model-shape smal => --model-shape: no shape 'smal', did you mean `small`
bench rollout --model-shape tiny --trace samples.jsonl --history 1 => --history: expected a share of at least 0 and
bench rollout --model-shape tiny --trace texts.jsonl => prompt is a text; give --tokenizer DIR
bench rollout --model-shape tiny --trace samples.jsonl => --trace: token id 9999 is not in the model's vocabulary of 320
bench rollout --model-shape tiny --trace long.jsonl => but the model was made for 4096
bench rollout --trace nowhere => nowhere
compare run --out foreign.svg => --out: foreign.svg exists, and is not from this command: rename it
eval policy --task arithmetic --output rows.jsonl => --output: rows.jsonl exists, and is kept: rename it, name
report foreign => report: foreign/report.html exists, and is not from this command: rename it
report holes => step_000001.parquet: expected a Parquet file, found a folder
export run 'o\udcff' => 'o\\udcff': expected a name of printable characters
generate chat --prompt 1 --chat => the tokenizer's chat template refuses: Range too big
generate policy --prompt 1 "rollout.stop_strings=['']" => rollout.stop_strings.0: should have at least 1 character
compare run --out curve.png => --out: expected a file name that ends in .svg, found
export run new --adapter => --adapter: run has none, for its recipe has no model.lora: leave the option out
export run /dev/null/x => /dev/null/x: /dev/null is a file, expected a folder
export run folder => folder exists and is not an empty folder: delete it, or
bench rolout => No such command 'rolout'. Did you mean 'rollout'?
bench rollout --slots 1,,2 => --slots: expected counts like 8,32,128, at most 65536, found
bench rollout --drafters none,nome => --drafters: `nome` is not in srtrl/drafters/, did you mean
replay empty.jsonl => empty.jsonl: no rows; expected rollouts as .jsonl or .parquet
replay run --drafter os:system => --drafter: `os:system` is no drafter; expected a subclass of
replay run --drafter-options min_score=2 => --drafter-options: min_score: should be less than 1, found 2
replay run --max-tokens 1 => run: nothing to decode: each sample has one token
replay run --history nan => --history: expected a share of at least 0 and below 1, found
tool python nowhere.py => tool python: nowhere.py is not a file; give the path of a file
show-config => show-config needs a RECIPE, or --help-fields
train run => run: cannot read the recipe: it is the folder of a run; --resume continues it
train recipe --resume => recipe: cannot read the recipe: No such file or directory, did you mean `recipe.yaml`?
train folder => folder: cannot read the recipe: Is a directory
train run/recipe.yaml name=run output_dir=. => run exists: --resume continues that run
generate policy --prompt 1 --temperature 0 => a value of the recipe is given as rollout.temperature=VALUE or ev
train recipe.yaml --lr 0.1 => No such option: --lr; a value of the recipe is given as train.learning_rate=VALUE
CHECK PROMPTS eval.every_steps=2 => task.options.eval: task prompts has no held-out problems: name some in task.options
CHECK PROMPTS eval.before_and_after=true => task.options.eval: task prompts has no held-out problems
CHECK PROMPTS rollout.max_prompt_tokens=1 => task.options.train: 1 of 1 prompts are longer than
CHECK PROMPTS task.options.prompt_field=text => prompts.jsonl:1: no field `text`; its fields are prompt
CHECK 'task={name: "flawed:Bare"}' => task.name: `flawed:Bare` is no task, it lacks `Options`, `check_options`:
CHECK 'task={name: "flawed:Slim"}' => lacks `train_prompts`, `eval_prompts`, `load_report`, `verifier`, `solution`
CHECK 'task={name: "flawed:Short"}' => task.name: raised TypeError: Short.__init__() got an unexpected keyword argument
CHECK 'task={name: "flawed:Deaf"}' => task.options.words: none of them fits
CHECK 'task={name: "flawed:Silent"}' => correct, and the task flawed:Silent has no verifier: name other
train --resume folder => folder/recipe.yaml: cannot read the recipe: No such file or
train recipe.yaml --resume --overwrite => --resume and --overwrite exclude each other: continue the run
train recipe.yaml --checkpoint 3 => --checkpoint needs --resume; to begin a new run from it
train ./recipe.yaml output_dir=LONG => output_dir: [Errno 36] File name too long
train ./recipe.yaml task.options.x=CONTROL => not valid YAML: unacceptable character #x0001
train many.yaml => ... and 20 more
train ./recipe.yaml 'task.options={max_operations: 2, max_operand: 2}' => different train problems of this difficulty
train missing.yaml 'task.options={train: {file: [x]}}' => task.options.train.file: unknown key, did you mean `files`
train missing.yaml 'task.options={train: {files: [rows.csv]}}' => train.files.0: expected a .jsonl or .parquet file
train missing.yaml task.options.train.hub=x/y => give either `files`
train missing.yaml task.options.train.split=train => belong to `hub`
train missing.yaml 'task.options={train: {hub: openai/gsm8k}}' => `split` is missing
train missing.yaml task.options.prompt_template=problem => prompt_template must contain {problem}
CHECK PROMPTS task.options.system_prompt=x => override `task.options.system_prompt=x`: task.options.system_prompt: needs
CHECK PROMPTS 'task.options.chat_template_options={x: 1}' => task.options.chat_template_options: needs chat_template
train missing.yaml task.options.answer_pattern='"####.*"' => must have exactly one group, it has 0
train missing.yaml task.options.answer_pattern='(.)' task.options.answer_boxed=true => and answer_boxed are different
train critic.yaml critic.value_loss=flawed:only_loss => critic.value_loss: `flawed:only_loss` must return (token_loss,
train missing.yaml => missing.yaml:9: task.options.train.files.0: no file
warm-start recipe.yaml => this recipe has no `warm_start` section (at least
warm-start recipe.yaml 'warm_start={output: .}' => warm_start.output: . holds the current folder, expected another one
warm-start recipe.yaml 'warm_start={output: /proc/x}' => warm_start.output: /proc/x cannot be written
warm-start recipe.yaml 'warm_start={output: folder}' => warm_start.output: folder exists and is not empty; use
warm-start recipe.yaml 'warm_start={output: link}' => warm_start.output: link exists and is not empty
show-config pipe.yaml => pipe.yaml: a pipe, a socket or a device; expected a regular file
show-config /dev/zero => /dev/zero: a pipe, a socket or a device; expected a regular file
show-config gone.yaml => gone.yaml: a link to nowhere, which is not there
train missing.yaml 'task.options={train: {files: [pipe.jsonl]}}' => train.files.0: pipe.jsonl: a pipe, a socket or a
train missing.yaml 'task.options={train: {files: [gone.jsonl]}}' => train.files.0: gone.jsonl: a link to nowhere, which
show-config broken.yaml => broken.yaml:1:8: not valid YAML
show-config mine.yaml => mine.yaml: model: is missing
train quikstart => No such file or directory, did you mean `quickstart`?; recipes that come with srtrl: d
train recipes/ppo_tiny.yaml => No such file or directory, did you mean `ppo_tiny`?
"""
"""Command line => a part of the message; the names are those of files and folders in `place`, LONG is a long one."""
CHANGES = """
x => expected section.key=value
name=../x => name: should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'
output_dir=garbage/x => output_dir: garbage/x: garbage is a file, expected a folder
eval.temperature=1e-44 => eval.temperature: expected 0 (greedy) or at least 1e-06, found 1e-44
rollout.temperature=1e-44 => should be greater than or equal to 0.000001, found 1e-44; greedy samples are those of
algorithm.use_kl_in_reward=false => unknown key, of another trainer: leave it out where it is false
algorithm.kl_loss_type=low_var_kl => for "low_var_kl" k3
algorithm.loss_agg_mode=token-mean => set algorithm.reduction, for "token-mean" token_mean
dataset_name=x => set task.options.train to {hub: NAME, split: train}
device=tpu => device: should be 'auto', 'cpu' or 'cuda', found "tpu"
model.path=garbage => model.path: garbage: a file; expected a folder in Hugging Face
model.lora.rank=17 => model.lora.rank: expected at most 16, the smallest side of the matrices
'model.lora={rank: 100000, targets: [q_proj]}' => model.lora.rank: expected at most 32, the smallest side of the matr
model.path=./lacking => model.path: lacking: no safetensors weights; another format (pytorch_model.bin) is not
model.lora.targets=[x] => model.lora.targets: should be 'all_linear' or should be 'q_proj',
critic.lora={} => critic.lora: a critic always learns all its weights
model.tokenizer=./folder => model.tokenizer: ./folder holds no tokenizer (tokenizer.json
task.name=arithmetics => task.name: `arithmetics` is not in srtrl/tasks/, did you mean
task.name=os:system => task.name: `os:system` is no task, it lacks `Options`, `check_options`: make it a sub
'task.options={x: 1}' => task.options.x: unknown key
'task.options={min_operations: 9}' => task.options: min_operations (9) is above max_operations
'task.options={max_value: 5, max_operand: 9}' => task.options: max_value (5) is below max_operand (9)
'rollout.environment={name: calculatr}' => did you mean `calculator`
'rollout.environment={name: "os:system"}' => `os:system` is no environment
'rollout.environment={name: calculator, options: {a: 1}}' => environment.options.a: unknown key
'rollout.environment={name: calculator, format: text}' => `text` finds no calls
'rewards=[{name: x}]' => rewards.0: `x` is not in srtrl/tasks/rewards.py
'rewards=[{name: "exits:reward"}]' => rewards.0: `exits:reward`: cannot import exits: SystemExit
'rewards=[{name: "mute:reward"}]' => cannot import mute: mute.Mute: <exception str() failed>
'rewards=[{name: "hides:reward"}]' => hides raised RuntimeError: no reward (hides.py:2, __getattr__)
algorithm.loss=ppo_clp => algorithm.loss: `ppo_clp` is not in
algorithm.loss=flawed:only_loss => algorithm.loss: `flawed:only_loss` must return (token_loss, metric
algorithm.loss=flawed:float_metric => a tensor of shape (4,); mine: float 0.5
algorithm.loss=flawed:scalar => must return one number per token, a tensor of shape (4,); its loss:
algorithm.loss=flawed:detached => `flawed:detached` returned a loss without gradient (detached?)
algorithm.loss=flawed:raises => `flawed:raises`, tried on made-up data, raised KeyError: 'x' (flawed.
'algorithm.loss_options={entropy: 1}' => algorithm.loss_options.entropy: the trainer gives it
algorithm.advantage=flawed:listed => tensor of shape (2, 4), that of its first argument; it returned:
'algorithm.advantage_options={alpha: 1}' => advantage_options: `group_relative` cannot be called with
'algorithm.filters=["flawed:listed_mask"]' => a bool for each of the 2 groups, a tensor; it returned:
'algorithm.filter_options={alpha: 1}' => algorithm.filter_options: no filter declares an argument `al
algorithm.reduction=flawed:detached_sum => `flawed:detached_sum` returned a loss without gradient (detached?)
algorithm.reduction=flawed:no_reduction => one number, a tensor of shape (); it returned: Tensor
algorithm.kl.estimator=flawed:mean_kl => one number per token, a tensor of shape (4,); it returned: T
rollout.drafter=flawed:Lists => `propose` must return DraftTrees, it returned: list [[1, 2]]
rollout.drafter=flawed:ListsInTrees => proposed incorrect draft trees; expected 1 trees of at most
rollout.drafter=flawed:Empty => raised NotImplementedError: the drafter flawed.Empty has no `propose`
'rewards=[{name: "flawed:trl"}]' => rewards.0: `flawed:trl` takes `completions`, as a reward of anoth
'rewards=[{name: "flawed:marked"}]' => `flawed:marked` is a coroutine function, of which all samples
'log.trackers=[tensorbord]' => log.trackers: tensorbord is not installed
rollout.drafter=collections:Counter => rollout.drafter: `collections:Counter` is no drafter
'rollout.drafter_options={min_score: 2}' => rollout.drafter_options.min_score: should be less than
rollout.max_new_tokens=65 => rollout.max_new_tokens: max_prompt_tokens + max_new_tokens =
train.num_step=4 => train.num_step: unknown key, did you mean `num_steps`?
train.num_steps= => no value; write train.num_steps=null for none or train.num_steps="''" for an empty
train.num_steps=[ => not valid YAML: while parsing a flow node, expected the node content, but found
num_train_epochs=3 => set train.num_steps to rows x passes / rollout.num_prompts
learning_rate=1e-5 => did you mean `train.learning_rate`?
actor_rollout_ref.rollout.n=5 => a section of verl
train..num_steps=1 => expected section.key=value
train.num_steps.x=1 => train.num_steps: is 3, which has no item `x`
rewards.0.weight=2 => rewards: should be a valid list, found {"0": {"weight": 2}}
train.attention=fa3 => train.attention: should be 'auto' or 'fa2', found "fa3"
algorithm.advantage=gae => algorithm.advantage: gae needs a critic: add a section `critic: {}`
critic={} => critic: algorithm.advantage group_relative uses no critic
algorithm.advantage=flawed:wrong_tokens => flawed:wrong_tokens(rewards)
algorithm.advantage=flawed:unmarked_tokens => algorithm.advantage: flawed:unmarked_tokens takes values or a mask
algorithm.advantage=flawed:tokens algorithm.loss=gspo => algorithm.loss: gspo needs one advantage per response
algorithm.loss=flawed:needy_loss => cannot be called with (4 arguments, clip_low=..., clip_high=
algorithm.loss=dual_clip 'OPTIONS={ratio_kap: 3}' => got an unexpected keyword argument 'ratio_kap'; it is
algorithm.loss=dual_clip 'OPTIONS={clip_low: 0.1}' => algorithm.loss_options.clip_low: set algorithm.clip_low
algorithm.loss=dual_clip 'OPTIONS={ratio_cap: 0.5}' => algorithm.loss_options.ratio_cap: expected a number above
algorithm.loss=dual_clip 'OPTIONS={ratio_cap: high}' => algorithm.loss_options: `dual_clip` with
algorithm.loss=flawed:loss 'OPTIONS={power: 0}' => algorithm.loss_options.power: expected at least 1, found 0
algorithm.filters='["flawed:old_filter"]' => algorithm.filters.0: `flawed:old_filter` cannot be called with (2 argu
PARTIAL 'rollout.environment={name: "environment_cases:Echo"}' => has no `replay`
'rewards=[{name: "flawed:tlr"}]' => has no `tlr`, did you mean `trl`
'rewards=[{name: "flawed:RATE"}]' => has a value that cannot be called: `RATE`
'rewards=[{name: "no_such_module:f"}]' => cannot import no_such_module
'rewards=[{name: "broken:f"}]' => ModuleNotFoundError: No module named 'not_there' (broken.py:1, <module>)
'rewards=[{name: "typo:f"}]' => line 1 def f(:
'rewards=[{name: "flawed.deeper:f"}]' => is not a package; looked in
'rewards=[{name: "flawed:"}]' => is not a name of the form package.module:attribute
"""
"""Overrides of `train recipe.yaml` => a part of the message, which names one of them as its place."""
CONFLICTS = """
train.micro_batch_tokens=127 => train.micro_batch_tokens=128
    train.micro_batch_tokens: expected at least 64
model.lora={} train.sharding=fsdp2 => train.sharding=ddp
    train.sharding: with model.lora each rank keeps whole weights
train.mini_batch_prompts=3 => train.mini_batch_prompts=4
    train.mini_batch_prompts: expected a divisor
algorithm.advantage=gae critic={} critic.mini_batch_prompts=3 => critic={}
    critic.mini_batch_prompts: expected a divisor
algorithm.advantage=gae critic={} critic.warmup_steps=3 => critic={}
    critic.warmup_steps: expected fewer than train.num_steps (3)
rollout.dynamic_sampling=true => algorithm.filters=[drop_uniform]
    rollout.dynamic_sampling: replaces
rollout.dynamic_sampling=true algorithm.filters=[drop_uniform] rollout.max_draws=7 => rollout.max_draws=8
    rollout.max_draws: expected at least rollout.num_prompts (8), found 7
rollout.num_samples=1 => algorithm.advantage=reinforce_plus_plus
    rollout.num_samples: expected at least 2 with algorithm.advantage group_relative
rollout.num_samples=1 algorithm.filters=[drop_uniform] algorithm.advantage=reinforce_plus_plus => rollout.num_samples=2
    algorithm.filters: would drop every group
algorithm.importance_cap=2 => algorithm.old_logprobs=recompute
    algorithm.importance_cap: compares
rollout.mode=partial => algorithm.old_logprobs=recompute
    algorithm.old_logprobs: some log-probs of the decoder are of earlier policies with rollout.mode
algorithm.kl.coefficient=0.1 algorithm.kl.estimator=k1 => algorithm.kl.placement=reward
    algorithm.kl.estimator: k1 in the loss
algorithm.loss=policy_gradient train.num_epochs=2 => train.num_epochs=1
    train.num_epochs: algorithm.loss policy_gradient has no ratio
algorithm.loss=policy_gradient rollout.num_prompts=4 train.mini_batch_prompts=2 => train.mini_batch_prompts=4
    train.mini_batch_prompts: algorithm.loss policy_gradient has no ratio
'warm_start={output: made, train_tokenizer_vocab_size: 300}' => 'warm_start={output: made}'
    warm_start.train_tokenizer_vocab_size: needs
'warm_start={output: made, HEADS: 2, num_key_value_heads: 1}}' => warm_start.architecture.num_attention_heads=3
    warm_start.architecture.num_attention_heads: expected a divisor of hid
'warm_start={output: made, HEADS: 3, num_key_value_heads: 2}}' => warm_start.architecture.num_key_value_heads=3
    warm_start.architecture.num_key_value_heads: expected a divisor of num_
"""
"""Overrides that are refused => what repairs them; below them the beginning of the key and message."""
HEADS = "architecture: {hidden_size: 9, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads"
FITTING = """
algorithm.advantage=leave_one_out algorithm.loss=policy_gradient
ONE_SAMPLE algorithm.gamma=0.99
algorithm.advantage=gae 'critic={value_loss: squared_error, value_clip: 0.5}'
algorithm.loss=dual_clip 'OPTIONS={ratio_cap: 5}'
algorithm.loss=gspo algorithm.clip_low=3e-4 algorithm.clip_high=4e-4
algorithm.advantage=flawed:tokens algorithm.gamma=0.9
algorithm.advantage=flawed:with_critic critic={}
algorithm.loss=flawed:loss 'OPTIONS={power: 3, floor: 1.5}'
algorithm.loss=flawed:open_loss 'OPTIONS={anything: 3}'
algorithm.loss=flawed:needy_loss 'OPTIONS={tau: 0.5}'
PARTIAL 'rollout.environment={name: "environment_cases:Ledger"}'
"""
"""Overrides that fit together."""
ABBREVIATIONS = {
    "LONG": "x" * 5_000,
    "CONTROL": "\x01",
    "ONE_SAMPLE": "rollout.num_samples=1 algorithm.advantage=reinforce_plus_plus",
    "OPTIONS": "algorithm.loss_options",
    "CHECK": "show-config recipe.yaml --check",
    "PROMPTS": """
        'task={name: prompts, options: {train: {files: [prompts.jsonl]}}}' 'rewards=[{name: "flawed:long"}]'
    """,
    "PARTIAL": "rollout.mode=partial algorithm.old_logprobs=recompute",
}
MODELS: dict[str, dict[str, object]] = {
    "text": {"vocab_size": "x"},
    "end": {"eos_token_id": 10**12},
    "base": {"rope_theta": "x"},
}
"""Folders of models with such values in their config."""
ADAPTERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "dora": ("./policy", "model.layers.0.self_attn.q_proj", {"use_dora": True}),
    "other": ("./policy", "model.layers.0.self_attn.k_proj", {}),
    "head": ("./policy", "lm_head", {}),
    "orphan": ("./nowhere", "model.layers.0.self_attn.q_proj", {}),
    "ranks": ("./policy", "model.layers.0.self_attn.q_proj", {"r": "x"}),
    "alpha": ("./policy", "model.layers.0.self_attn.q_proj", {"lora_alpha": math.nan}),
    "zero": ("./policy", "model.layers.0.self_attn.q_proj", {"r": 0}),
    "rank": ("./policy", "model.layers.0.self_attn.q_proj", {"r": 8}),
    "itself": ("./itself", "model.layers.0.self_attn.q_proj", {}),
    "chain": ("./circle", "model.layers.0.self_attn.q_proj", {}),
    "circle": ("./chain", "model.layers.0.self_attn.q_proj", {}),
}
"""Folders of adapters: base model, module, and values in the config."""
TEMPLATES: dict[str, object] = {
    "calls": "{% macro call() %}{{ call() }}{% endmacro %}{{ call() }}",
    "number": 5,
    "half": "{{ '\\ud800' }}",
    "named": [{"name": "rag", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}],
}
"""Folders of models with such chat templates."""
FLAWED = """
from srtrl.algorithms.advantages import token_level
from srtrl.drafters.base import DrafterBase
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.recipe.schema import Section
from srtrl.tasks.base import TaskBase
from srtrl.tasks.reward_input import batched

def only_loss(logprobs, *_, **__): return -logprobs
def float_metric(logprobs, *_, **__): return -logprobs, {"mine": 0.5}
def scalar(logprobs, *_, **__): return -logprobs.mean(), {}
def detached(logprobs, *_, **__): return -logprobs.detach(), {}
def raises(logprobs, *_, **__): return {}["x"]
def listed(rewards): return rewards.tolist()
def listed_mask(rewards, correct): return [True] * len(rewards)
def detached_sum(token_loss, index, **_): return token_loss.detach().sum()
def no_reduction(token_loss, index, **_): return token_loss
def mean_kl(logprobs, ref_logprobs): return (logprobs - ref_logprobs).mean()
def unmarked_tokens(token_rewards, values, mask, *, group_index, gamma, lam): return token_rewards
def needy_loss(logprobs, old, advantages, index, *, clip_low, clip_high, tau): return -advantages * logprobs / tau, {}
def open_loss(logprobs, old, advantages, index, *, clip_low, clip_high, **options): return -advantages * logprobs, {}
def old_filter(rewards): return rewards[:, 0] > 0
def trl(completions, **_): return [1.0]
def long(sample): return sample.num_tokens

def loss(logprobs, old, advantages, index, *, clip_low, clip_high, power=2, floor=0.0):
    if power < 1:
        raise ValueError(f"algorithm.loss_options.power: expected at least 1, found {power}")
    return -advantages * logprobs ** power, {}

@token_level
def wrong_tokens(rewards): return rewards
@token_level
def tokens(token_rewards, values, mask, *, group_index, gamma, lam): return token_rewards
@token_level(needs_values=True)
def with_critic(token_rewards, values, mask, *, group_index, gamma, lam): return token_rewards - values

@batched
async def marked(samples): return [1.0 for _ in samples]

class Bare: pass
class Slim:
    Options = Section
    check_options = staticmethod(print)
    def __init__(self, options, *, tokenizer, max_prompt_tokens): pass
class Short(TaskBase):
    def __init__(self, options, tokenizer): pass
class Silent(TaskBase): pass
class Deaf(TaskBase):
    def __init__(self, options, **given): raise ValueError("task.options.words: none of them fits")

RATE = 3
class Empty(DrafterBase): pass
class Lists(DrafterBase):
    def propose(self, *_): return [[1, 2]]
class ListsInTrees(DrafterBase):
    def propose(self, *_): return DraftTrees(token_ids=[1], parents=[-1], scores=[0.5], offsets=[0, 1])
"""
"""Functions and classes of a user, most with one mistake each."""


FILES = {
    "empty.jsonl": "",
    "texts.jsonl": '{"prompt": "a", "text": "b"}\n',
    "samples.jsonl": '{"prompt_token_ids": [1], "token_ids": [9999]}\n',
    "long.jsonl": json.dumps({"prompt_token_ids": [1], "token_ids": [1] * 5000}),
    "rows.jsonl": '{"prompt": "1"}\n{"text": "2"}\n',
    "prompts.jsonl": '{"prompt": "1+1="}\n',
    "flawed.py": FLAWED,
    "broken.py": "import not_there\n",
    "exits.py": "import sys\nsys.exit(0)\n",
    "hides.py": "def __getattr__(name):\n    raise RuntimeError('no reward')\n",
    "mute.py": "class Mute(BaseException):\n    def __str__(self): raise ValueError\nraise Mute\n",
    "typo.py": "def f(:\n",
    "broken.yaml": "name: [",
    "mine.yaml": "name: mine",
    "many.yaml": recipe_text() + "".join(f"key_{number}: 1\n" for number in range(30)),
    "foreign.svg": "<svg>years of work</svg>",
    "folder/notes.txt": "years of work",
    "foreign/report.html": "<title>mine</title>",
    "silent/metrics.jsonl": "",
    "chat/chat_template.jinja": "{% for x in range(10**9) %}{% endfor %}",
}


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def place(policy: Path, finished: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder of all cases."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "policy").symlink_to(policy)
    (folder / "link").symlink_to("folder")
    (folder / "folder").mkdir()
    for name in ("run", "foreign", "holes", "quiet", "silent"):
        shutil.copytree(finished(train__num_steps=2), folder / name)
    for name in ("merges", "chat", "nested", "piped", "gone", "length", "lacking", "words", *TEMPLATES, *MODELS):
        shutil.copytree(policy, folder / name)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in ("garbage", "garbage.parquet"):
        (folder / name).write_bytes(bytes(range(255, 10, -1)))
    text = recipe_text(path=policy)
    (folder / "recipe.yaml").write_text(text)
    (folder / "critic.yaml").write_text(text + "\nalgorithm: {advantage: gae}\ncritic: {}\n")
    data = "  options:\n    train:\n      files:\n      - missing.jsonl\n"
    text = text.replace("name: arithmetic", "name: math")
    (folder / "missing.yaml").write_text(text.replace("  options: {num_train: 50, num_eval: 20}\n", data))
    shutil.rmtree(folder / "quiet" / "rollouts")
    (folder / "holes" / "rollouts" / "step_000001.parquet").unlink()
    (folder / "holes" / "rollouts" / "step_000001.parquet").mkdir()
    model = json.loads((policy / "tokenizer.json").read_text())["model"]
    change_json(folder / "merges" / "tokenizer.json", model=model | {"vocab": {}, "merges": [["a", "b"]]})
    for name in ("gone.yaml", "gone.jsonl", "gone/tokenizer.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("nowhere")
    for name in ("pipe.yaml", "pipe.jsonl", "piped/generation_config.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    (folder / "lacking" / "model.safetensors").rename(folder / "lacking" / "pytorch_model.bin")
    (folder / "nested" / "config.json").write_text("[" * 100_000)
    words = {"type": "WordLevel", "vocab": {"1": 0}, "unk_token": "<unk>"}
    change_json(folder / "words" / "tokenizer.json", model=words)
    change_json(folder / "length" / "tokenizer_config.json", model_max_length="x")
    for name, template in TEMPLATES.items():
        change_json(folder / name / "tokenizer_config.json", chat_template=template)
    for name, values in MODELS.items():
        change_json(folder / name / "config.json", **values)
    for name, (base, module, values) in ADAPTERS.items():
        tensors = {f"{module}.lora_{kind}": torch.zeros(32, 32) for kind in "AB"}
        save_adapter(Adapter(base=base, rank=32, alpha=1, tensors=tensors), folder / name)
        change_json(folder / name / "adapter_config.json", **values)
    before, paths = Path.cwd(), list(sys.path)
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path[:] = paths


@pytest.fixture(autouse=True)
def _nothing_changes(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def listing() -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in place.rglob("*")}

    monkeypatch.setattr("srtrl.build.load_task", Mock(side_effect=AssertionError("training begins")))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = listing()
    yield
    assert listing() == before


def written_out(text: str) -> str:
    for name, meaning in ABBREVIATIONS.items():
        text = text.replace(name, meaning)
    return text


def srtrl(command: str) -> Result:
    return CliRunner().invoke(app, shlex.split(written_out(command)))


def refusal(command: str) -> str:
    """The message with which a command is refused."""
    result = srtrl(command)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert len(result.stderr) < 3_000
    assert len(re.findall(r"^(?:error|Error): ", result.stderr, re.MULTILINE)) == 1, result.stderr
    return result.stderr


def parsed(table: str) -> list[list[str]]:
    return [[part.strip() for part in line.split(" => ")] for line in table.strip().splitlines()]


@pytest.mark.parametrize(("command", "message"), parsed(COMMANDS))
def test_bad_input_is_one_message(command: str, message: str) -> None:
    assert message in refusal(command)


@pytest.mark.parametrize(("overrides", "message"), parsed(CHANGES))
def test_a_bad_override_is_one_message_that_names_it(overrides: str, message: str) -> None:
    said = refusal(f"train recipe.yaml {overrides}")
    assert message in said
    assert any(f"override `{override}`: " in said for override in shlex.split(written_out(overrides))), said


@pytest.mark.parametrize("case", re.findall(r"(.*)\n    (.*)\n", CONFLICTS.replace("HEADS", HEADS)), ids="".join)
def test_a_combination_is_refused_and_its_repair_accepted(case: tuple[str, str]) -> None:
    refused, repair = (shlex.split(overrides) for overrides in case[0].split(" => "))
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("recipe.yaml"), refused)
    (found,) = caught.value.problems
    assert f"{found.key}: {found.message}".startswith(case[1])
    assert load_recipe(Path("recipe.yaml"), [*refused, *repair])


@pytest.mark.parametrize("overrides", FITTING.strip().splitlines())
def test_functions_that_fit_pass_the_checks(overrides: str) -> None:
    result = srtrl(f"show-config recipe.yaml {overrides} --check")
    assert (result.exit_code, result.stderr) == (0, "")
