"""A recipe that gives only what must be given, as text."""

MINIMAL = """\
name: test
model:
  path: bundled:tiny
task:
  name: arithmetic
rollout:
  num_prompts: 8
  num_samples: 4
  max_prompt_tokens: 64
  max_new_tokens: 64
train:
  num_steps: 3
"""


def recipe_text(more: str = "", *, name: str = "test", path: object = "bundled:tiny", num_steps: int = 3) -> str:
    """`MINIMAL` with few problems (drawing the default number takes seconds), and lines `more`."""
    text = MINIMAL.replace("name: test", f"name: {name}").replace("bundled:tiny", str(path))
    text = text.replace("name: arithmetic", "name: arithmetic\n  options: {num_train: 50, num_eval: 20}")
    return text.replace("num_steps: 3", f"num_steps: {num_steps}") + more
