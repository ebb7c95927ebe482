"""`srtrl generate` and `srtrl.generate`: completions of prompts, by the decoder and the environment of training.

The prompts become a task without a verifier, and `run_evals` samples it as it samples the held-out problems of a run.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from srtrl.checks import build_checked
from srtrl.environments.base import count_turns, mark_segments
from srtrl.evaluation.suite import bare_source
from srtrl.ranks import refuse_ranks
from srtrl.recipe.file import Overrides, RecipeSource, read_source
from srtrl.recipe.schema import Recipe, Section, TaskSection
from srtrl.report.rollouts import printable
from srtrl.resolve import cut, first_lines
from srtrl.tasks.base import TaskBase, typed_prompts
from srtrl.tasks.rendering import Message, apply_chat_template, tokenise
from srtrl.tasks.row_task import check_messages
from srtrl.tasks.rows import Row, RowError, RowSource, read_rows
from srtrl.types import FinishReason, Prompt, Rollout, SegmentKind, segment_slices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 256
"""Length limit of completions of a model; those of a run have the run's."""
MAX_PROBLEMS = 3
"""Rows of a file of prompts that a message names."""
PROMPT_FIELDS = ("prompt", "messages", "problem", "question")
"""Fields of a row of that file; the first that it has is the prompt."""
RUN_SECTIONS = ("device", "num_threads", "model", "rollout", "eval")
"""Sections of a run's recipe that decide how it samples."""


class PromptsOptions(Section):
    """The prompts of a command line or of a caller."""

    ids: list[str]
    texts: list[str | list[Message]] = Field(min_length=1)
    """Texts, or messages whose last is the user's."""
    chat_template: bool = False
    """Wrap each text as a user's message in the tokenizer's chat template."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of that template, such as the environment's tools."""
    task: TaskSection | None = None
    """Task of a run; its templates are used."""


class Prompts(TaskBase):
    """A task of given prompts, which nothing grades."""

    Options = PromptsOptions

    def __init__(
        self, options: PromptsOptions, *, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int
    ) -> None:
        given, template_options = options.texts, options.chat_template_options
        if options.chat_template:
            given = [[{"role": "user", "content": text}] if isinstance(text, str) else text for text in given]
        if options.task is not None and not options.chat_template:
            typed = typed_prompts(options.task, given)
            template_options = {**options.task.options.get("chat_template_options", {}), **template_options}
        else:
            typed = [(text, None) if isinstance(text, str) else ("", text) for text in given]
        texts, messages = [text for text, _ in typed], [listed for _, listed in typed if listed is not None]
        if messages and len(messages) < len(texts):
            raise ValueError("prompts: some are messages, others texts: --chat (chat=True) makes messages of all")
        if messages:
            texts = apply_chat_template(tokenizer, messages, template_options)
        prompts = [
            Prompt(prompt_id=prompt_id, text=text, token_ids=(), answer="")
            for prompt_id, text in zip(options.ids, texts, strict=True)
        ]
        self.eval_prompts = tokenise(tokenizer, prompts, add_special_tokens=not messages)
        self.load_report: dict[str, int] = {}
        for prompt in self.eval_prompts:
            if (length := len(prompt.token_ids)) > max_prompt_tokens:
                raise ValueError(
                    f"prompt {prompt.prompt_id!r} has {length} tokens, and rollout.max_prompt_tokens is "
                    f"{max_prompt_tokens}: allow more with rollout.max_prompt_tokens={length}"
                )

    @classmethod
    def check_options(cls, options: PromptsOptions) -> None:
        """All values are allowed."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GeneratedSegment:
    """A part of a completion of several turns."""

    kind: SegmentKind
    """`model`, `observation` (an environment's text) or `boundary` (the text of the format around it)."""
    token_ids: list[int]
    text: str
    logprobs: list[float] | None
    """None if the policy sampled nothing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Generated:
    """One completion of a prompt."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    sample_index: int
    text: str
    """Without special tokens, truncated before a stop string."""
    token_ids: list[int]
    """The end token, if one was sampled, is the last."""
    logprobs: list[float]
    """Log-prob of each token, under the full distribution at the temperature."""
    finish_reason: FinishReason
    """`stop` or `length`."""
    segments: list[GeneratedSegment] = field(default_factory=list)
    """With an environment: the parts of the completion, in order."""
    num_turns: int = 1
    stop_reason: str = ""
    """With an environment: why the turns ended, as in the metrics `environment/stop_<reason>`."""


def generate(
    model_or_run: str,
    prompts: Sequence[str | list[Message]],
    *,
    num_samples: int = 1,
    chat: bool = False,
    raw: bool = False,
    ids: Sequence[str] = (),
    overrides: Overrides = (),
) -> list[list[Generated]]:
    """Complete prompts; on a CPU the same seed gives the same completions.

    Args:
        model_or_run: Hugging Face folder, hub name, `bundled:tiny`, a checkpoint, or the folder of a run (its last
            checkpoint, with the decoder and the environment of its recipe).
        prompts: Texts, or lists of messages such as `{"role": "user", "content": "Hi"}`.
        num_samples: Completions of each.
        chat: Put each text into the model's chat template.
        raw: Of a run, take the texts as they are; by default they go through the templates of its task, so that the
            policy reads what it was trained on. (A task of your own: as they are.)
        ids: A name for each prompt; by default its index.
        overrides: `{"rollout.max_new_tokens": 64, "eval.temperature": 0}`, or as on the command line
            `["rollout.max_new_tokens=64", "device=cuda"]`.

    Returns:
        For each prompt its completions.

    Raises:
        ValueError: the model cannot be loaded, an override is incorrect, or a prompt is empty or too long.
    """
    from srtrl.evaluation.policy import run_evals
    from srtrl.run.progress import reporting_compilation

    refuse_ranks("srtrl generate")
    check_prompts(prompts)
    source, run_task = _source(model_or_run)
    options = prompts_options(prompts, None if raw else run_task, ids=ids, chat=chat)
    source.put(("task",), {"name": "srtrl.generation:Prompts", "options": options}, "prompts")
    source.put(("eval", "num_samples"), num_samples, "num_samples")
    if len(prompts) * num_samples == 1 and run_task is None and not any("rollout." in value for value in overrides):
        # Its own text is all that it could draft from, and loading the drafter's kernels takes longer than that saves.
        source.put(("rollout", "drafter"), "none", "srtrl generate")
    source.override(overrides)
    recipe: Recipe = build_checked(source)
    with reporting_compilation(_print_compiling):
        (outcome,) = run_evals(recipe.model.path, {"generate": recipe})
    return [[generated_of(rollout) for rollout in group.rollouts] for group in outcome.groups]


def check_prompts(prompts: Sequence[str | list[Message]]) -> None:
    """Refuse what is no list of prompts; `ValueError` names the item."""
    if isinstance(prompts, str):
        raise ValueError("prompts: expected a list of texts, found one text")
    if not prompts:
        raise ValueError("prompts: expected at least one")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, list):
            check_messages(prompt, f"prompts.{index}")


def prompts_options(
    prompts: Sequence[str | list[Message]],
    task: Mapping[str, Any] | None,
    *,
    ids: Sequence[str] = (),
    chat: bool = False,
) -> dict[str, Any]:
    """Values of `PromptsOptions`: with the templates of a run's `task`, unless it is the user's own."""
    templates = {} if task is None or ":" in task["name"] else {"task": task}
    return {"ids": [*(ids or map(str, range(len(prompts))))], "texts": [*prompts], "chat_template": chat, **templates}


def _source(model_or_run: str) -> tuple[RecipeSource, dict[str, Any] | None]:
    """The recipe of a model, or the same with the sections of a run that decide how it samples; the run's task."""
    from srtrl.evaluation.policy import resolve_eval_source

    model, recipe_path = resolve_eval_source(model_or_run)
    source, task = bare_source(model, max_new_tokens=MAX_NEW_TOKENS), None
    if recipe_path is not None:
        run = read_source(recipe_path)
        source.path, source.origins = run.path, run.origins
        task = run.data["task"]
        source.data |= {name: run.data[name] for name in RUN_SECTIONS if name in run.data}
    source.put(("model", "path"), model, "MODEL_OR_RUN")
    source.put(("rollout", "dynamic_sampling"), False, "srtrl generate")
    source.put(("rewards",), [{"name": "environment"}], "srtrl generate")
    return source, task


def _print_compiling(number: int, _: int) -> None:
    from srtrl.run.progress import COMPILE_MESSAGE

    if number == 1:
        print(COMPILE_MESSAGE, file=sys.stderr)


def generated_of(rollout: Rollout) -> Generated:
    """A rollout as a completion."""
    response, conversation = rollout.response, rollout.conversation
    token_ids, logprobs = response.token_ids.tolist(), response.rollout_logprobs.tolist()
    assert response.finish_reason is not None
    segments = []
    if conversation is not None:
        for (kind, part), text in zip(segment_slices(conversation.segments), conversation.texts, strict=True):
            sampled = logprobs[part] if kind == "model" else None
            segments.append(GeneratedSegment(kind=kind, token_ids=token_ids[part], text=text, logprobs=sampled))
    return Generated(
        prompt_id=rollout.prompt.prompt_id,
        prompt_token_ids=rollout.prompt.token_ids,
        sample_index=rollout.sample_index,
        text=rollout.text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=response.finish_reason,
        segments=segments,
        num_turns=conversation.num_turns if conversation else 1,
        stop_reason=conversation.stop_reason if conversation else "",
    )


# --- The command line -------------------------------------------------------------------------------------------------


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="Hugging Face folder, hub name, `bundled:tiny`, or a run's folder."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SECTION.KEY=VALUE", help="Values of the recipe, such as rollout.slots=8 or rollout.drafter=none."
        ),
    ] = None,
    *,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt's text; may be given more than once.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='.jsonl or .parquet; rows {"prompt": TEXT} or {"messages": [...]}, perhaps with "id".'
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Completions per prompt.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Put each text into the model's chat template.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Of a run: take texts as they are, without its task's templates.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Complete prompts.

    Lengths, temperature, seed and all else are values of the recipe, such as rollout.max_new_tokens=64
    eval.temperature=0 seed=1: of a run its own, of a model 256 tokens at temperature 1. Texts go through the templates
    of the run's task. A run that was trained with an
    environment is completed with it: its tools run, and a completion has several turns
    (rollout.environment=null: one turn).
    """
    rows = _given_prompts(prompts, prompt or ())
    completions = generate(
        model,
        [text for _, text in rows],
        ids=[prompt_id for prompt_id, _ in rows],
        num_samples=samples,
        chat=chat,
        raw=raw,
        overrides=overrides or (),
    )
    for (prompt_id, given), group in zip(rows, completions, strict=True):
        if not as_json:
            text = given if isinstance(given, str) else given[-1]["content"]
            print(f"=== prompt {prompt_id}\n{printable(text)}")
        for completion in group:
            print(_row(completion) if as_json else _shown(completion))


def _given_prompts(file: Path | None, texts: Sequence[str]) -> list[tuple[str, str | list[Message]]]:
    """Id and text (or messages) of every prompt, those of the file first.

    Raises:
        ValueError: there are none, or rows have no text; the message has the places of the first ones.
    """
    prompts: list[tuple[str, str | list[Message]]] = []
    problems = []
    for index, row in enumerate(read_rows(RowSource(files=[str(file)])) if file is not None else ()):
        try:
            prompts.append(_prompt_of(row, str(index)))
        except RowError as error:
            problems.append(f"{row.place}: {error}")
    if problems:
        raise ValueError("\n  ".join(first_lines(problems, MAX_PROBLEMS)))
    prompts += [(str(index), text) for index, text in enumerate(texts, start=len(prompts))]
    if not prompts:
        raise ValueError("no prompts: give --prompt TEXT or --prompts FILE.jsonl")
    return prompts


def _prompt_of(row: Row, default_id: str) -> tuple[str, str | list[Message]]:
    """Id and text, or messages, of a row; `RowError` if it has none."""
    if isinstance(row.fields, RowError):
        raise row.fields
    name = next((name for name in PROMPT_FIELDS if row.fields.get(name) is not None), "")
    prompt = row.fields.get(name)
    if isinstance(prompt, list):
        prompt = check_messages(prompt, name)
    if not isinstance(prompt, str | list):
        expected = '{"prompt": TEXT} or {"messages": [...]}'
        raise RowError(f"expected {expected}, found {cut(str(dict(row.fields)), 80)}")
    return str(row.fields.get("id", default_id)), prompt


def _row(completion: Generated) -> str:
    """A line of JSON; of a single turn without what only several turns have."""
    row = asdict(completion)
    if not completion.segments:
        for name in ("segments", "num_turns", "stop_reason"):
            del row[name]
    return json.dumps(row, ensure_ascii=False)


def _shown(completion: Generated) -> str:
    """A heading and the text, with a line before each of several turns."""
    end = "stopped" if completion.finish_reason == "stop" else "truncated"
    size, text = f"{len(completion.token_ids)} tokens", completion.text
    if completion.segments:
        size += f", {count_turns(completion.num_turns, completion.stop_reason)}"
        text = mark_segments([part.kind for part in completion.segments], [part.text for part in completion.segments])
    return f"--- sample {completion.sample_index}: {size}, {end}\n{printable(text)}"
