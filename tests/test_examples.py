"""docs/examples: each program runs, and does what its first lines say."""

import json
import sys
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest
import torch
from task_cases import Rows, prompt_of, to_grade
from tiny_run import train
from transformers import LlamaConfig, LlamaForSequenceClassification

from srtrl.environments.base import Turn
from srtrl.metrics import read_metrics
from srtrl.model.folders import load_tokenizer
from srtrl.recipe.file import load_recipe
from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.tasks.grading import Grader
from srtrl.tasks.reward_input import RewardInput
from srtrl.types import Grade, Prompt

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "docs" / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module that the test names, imported where it lies, so that `game:Sticks` is found."""
    num_threads = torch.get_num_threads()
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend(FOLDER)
    yield import_module(request.param)
    del sys.modules[request.param]
    torch.set_num_threads(num_threads)


def rewards_of(recipe: Path, runs: Path, *overrides: str) -> list[float]:
    """The mean rewards of the steps of a run."""
    overrides = (f"output_dir={runs}", "eval.before_and_after=false", *overrides)
    folder = train(load_recipe(recipe, overrides)).folder
    return [row["reward/mean"] for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]


@pytest.mark.parametrize("example", ["game"], indirect=True)
def test_the_best_moves_win_the_game_and_a_move_against_the_rules_ends_it(example: Any) -> None:
    def play(sticks: int, moves: str) -> tuple[str, float]:
        opponent = example.Opponent(None, None)
        opponent.start(Prompt(prompt_id="", text="", token_ids=(1,), answer=str(sticks)))
        while True:
            move = moves or str(opponent.sticks % 4)
            step = opponent.step(Turn(index=0, text=f"I take {move}.", token_ids=(1,)))
            if step.is_done:
                return step.stop_reason, step.reward
            assert step.observation == f"\n{opponent.sticks} left.\n"

    assert {play(sticks, "") for sticks in example.STARTS} == {("won", 1.0)}
    assert play(9, "4") == play(9, "0") == play(9, "no") == ("illegal", 0.0)
    assert play(6, "1") == play(9, "2") == ("lost", example.LOST)


class Judge(BaseHTTPRequestHandler):
    """A server that likes an answer of 42, and has no opinion of an empty one."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = body["messages"][0]["content"].rpartition("Answer: ")[2]
        said = {"42": "Mark: 8", "": "I cannot say"}.get(answer, "1")
        reply = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(200 if self.path == "/v1/chat/completions" else 404)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


def grades_of(reward: str, texts: Sequence[str], **options: Any) -> list[Grade]:
    rewards = [RewardSection(name=reward, options=options)]
    with Grader(Rows(None), rewards, GradingSection()) as grader:
        return grader.collect([grader.submit(to_grade(prompt_of("42"), text, "stop", len(text))) for text in texts])


@pytest.mark.parametrize("example", ["judges"], indirect=True)
def test_a_judge_over_http_gives_marks(example: Any) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        grades = grades_of("judges:over_http", ["42", "41", ""], url=f"{url}/v1")
        [lost] = grades_of("judges:over_http", ["42"], url=url)
        server.shutdown()
    assert [grade.reward for grade in grades] == [0.8, 0.1, 0.0]
    assert [grade.outcome for grade in grades] == ["graded", "graded", "error"]
    assert "no mark in 'I cannot say'" in grades[2].detail
    assert (lost.outcome, "404" in lost.detail) == ("error", True)


@pytest.mark.parametrize("example", ["judges"], indirect=True)
def test_a_sequence_classifier_scores_a_sample_as_alone(example: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.pad_token = tokenizer.eos_token
    sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "num_labels": 1}
    config = LlamaConfig(pad_token_id=tokenizer.pad_token_id, **sizes)
    for part in (tokenizer, LlamaForSequenceClassification(config)):  # type: ignore[no-untyped-call]
        part.save_pretrained(tmp_path)
    texts = ["42", "a longer text", "x"]
    grades = grades_of("judges:classifier", texts, path=str(tmp_path), batch_size=2)
    alone = [grades_of("judges:classifier", [text], path=str(tmp_path))[0].reward for text in texts]
    assert [grade.reward for grade in grades] == pytest.approx(alone, rel=1e-4)
    assert len(set(alone)) == 3


class Sums(list[dict[str, Any]]):
    """As a data set of reasoning-gym."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


def stub_create_dataset(name: str, *, seed: int, size: int, max_terms: int) -> Sums:
    assert (name, seed, max_terms) == ("chain_sum", 0, 2)
    return Sums({"question": f"{index} + 1 =", "answer": str(index + 1), "metadata": {}} for index in range(size))


def test_problems_of_reasoning_gym_are_judged_by_its_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package."""
    gym, utils = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.utils")
    gym.create_dataset = stub_create_dataset  # type: ignore[attr-defined]
    utils.extract_answer = lambda text: text.partition("<answer>")[2].partition("<")[0] or None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", utils)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "reasoning", raising=False)
    example = import_module("reasoning")
    options = example.ReasoningOptions(dataset="chain_sum", difficulty={"max_terms": 2}, num_train=5, num_eval=3)
    task = example.Task(options, tokenizer=load_tokenizer("bundled:tiny"), max_prompt_tokens=400)
    assert [len(task.train_prompts), len(task.eval_prompts)] == [5, 3]
    assert len({prompt.prompt_id for prompt in (*task.train_prompts, *task.eval_prompts)}) == 8
    prompt = task.eval_prompts[0]
    assert prompt.text.endswith("between <answer> and </answer>.\n")
    right, scores = prompt.answer, []
    for text in (f"so <answer>{right}</answer> it is", f"thus\n{right}", "<answer>x</answer>", ""):
        sample = RewardInput(
            prompt=prompt, text=text, correct=None, finish_reason="stop", num_tokens=9, max_new_tokens=9
        )
        scores.append(example.score(sample))
    assert scores[:2] == [1, 1]
    assert max(scores[2:]) < 0.1
    del sys.modules["reasoning"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", ["game"], indirect=True)
def test_a_policy_learns_the_game(example: Any, tmp_path: Path) -> None:
    rewards = rewards_of(FOLDER / "game.yaml", tmp_path)
    assert rewards[0] < 0.2
    assert sum(rewards[-5:]) / 5 > 0.8
