"""From texts and messages to what the policy reads: the tokenizer's chat template, and tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from srtrl.resolve import Caught
from srtrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
"""`{"role": "user", "content": "..."}`, and what else the tokenizer's chat template reads."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is no character."""
TOKENIZER_CHUNK = 1024
"""Texts given to the tokenizer at once: enough to use its threads, few enough to bound its memory."""


def apply_chat_template(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Sequence[list[Message]],
    options: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
) -> list[str]:
    """The text of each list of messages; the template adds special tokens and the start of the answer.

    Args:
        tokenizer: Any tokenizer of transformers.
        conversations: The messages of each prompt, the user's last.
        options: Further arguments of the template.
        add_generation_prompt: Whether the start of the answer is added.

    Raises:
        ValueError: the tokenizer has no chat template, or the template refuses the messages.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ValueError("the tokenizer has no chat template: use plain texts, or the tokenizer of a model for chats")
    if isinstance(template, dict) and "default" not in template and not {"chat_template", "tools"} & options.keys():
        choice = "task.options.chat_template_options={chat_template: NAME}"
        raise ValueError(f"the tokenizer's chat templates are {', '.join(template)}, without a default: set {choice}")
    with Caught() as caught:
        texts = tokenizer.apply_chat_template(
            list(conversations), tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
        return [str(text) for text in texts]
    reason = f"{caught.error} ({type(caught.error).__name__})"
    raise ValueError(f"the tokenizer's chat template refuses: {reason}") from caught.error


def tokenise(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt], *, add_special_tokens: bool = True
) -> list[Prompt]:
    """The same prompts with the token ids of their texts.

    Args:
        tokenizer: Any tokenizer of transformers.
        prompts: Their `token_ids` are not read.
        add_special_tokens: Add what the tokenizer itself adds, such as BOS; False where a chat template has done it.

    Raises:
        ValueError: a text has no tokens, or the tokenizer ends each text with its end token (the policy would have to
            continue after the end).
    """
    tokenised: list[Prompt] = []
    for start in range(0, len(prompts), TOKENIZER_CHUNK):
        chunk = prompts[start : start + TOKENIZER_CHUNK]
        texts = [prompt.text for prompt in chunk]
        for prompt in chunk:
            if SURROGATE.search(prompt.text):
                found = "half of a surrogate pair, which is no character: look at its row and the templates"
                raise ValueError(f"the text of the prompt {prompt.prompt_id!r} has {found}")
        with Caught() as caught:
            encoded = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        if caught.error is not None:
            raise ValueError(f"the tokenizer refuses the prompts: {caught.error}") from caught.error
        for prompt, ids in zip(chunk, encoded, strict=True):
            tokenised.append(replace(prompt, token_ids=tuple(ids)))
    for prompt in tokenised:
        if not prompt.token_ids:
            raise ValueError(f"the tokenizer gives no tokens for the prompt {prompt.text[:80]!r}")
    end, ids = tokenizer.eos_token_id, [prompt.token_ids for prompt in tokenised]
    # A tokenizer whose BOS and EOS are the same token may open every text with it.
    if add_special_tokens and end is not None and ids and all(len(one) > 1 and one[-1] == end for one in ids):
        raise ValueError(
            f"the tokenizer ends every prompt with its end token {tokenizer.eos_token!r}; "
            "set add_eos_token to false in its tokenizer_config.json"
        )
    return tokenised
