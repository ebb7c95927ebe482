"""`srtrl bench rollout`: our decoder against others, or its drafters against each other; same weights, same tokens."""

from pathlib import Path

import typer

from srtrl.bench import rollout_options as options
from srtrl.bench.rollout_options import Peer, RolloutBench


def command(
    context: typer.Context,
    *,
    peer: options.Peers = None,
    drafters: options.Drafters = None,
    control: options.Control = False,
    model: options.ModelName = None,
    model_shape: options.ModelShape = "small",
    slots: options.Slots = "0",
    sequences: options.Sequences = "8,32,128",
    lengths: options.Spread = "both",
    equal_tokens: options.EqualTokens = 128,
    longest_tokens: options.LongestTokens = 256,
    samples: options.Samples = None,
    prompts: options.PromptsFile = None,
    prompt_tokens: options.PromptTokens = (16, 128),
    prompts_used: options.PromptsUsed = None,
    max_tokens: options.MaxTokens = None,
    draft_budget: options.DraftBudget = None,
    price_as: options.PriceAs = None,
    trace: options.Trace = None,
    tokenizer_folder: options.TokenizerFolder = None,
    history: options.History = None,
    trace_note: options.TraceNote = None,
    epochs: options.Epochs = None,
    step_prompts: options.StepPrompts = None,
    policy_change: options.PolicyChange = None,
    run_ahead: options.RunAhead = None,
    kv_memory_gib: options.KvMemory = 4.0,
    repeats: options.Repeats = 5,
    precision: options.Precision = None,
    max_minutes: options.MaxMinutes = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    threads: options.Threads = None,
    json_file: options.JsonFile = None,
    write_docs: options.WriteDocs = None,
) -> None:
    """Measure whole rollouts: prefill, decoding and sampling, from the prompts to the tokens of all sequences."""
    mode = options.choose_mode(_given(context))
    counts = options.parse_counts("--slots", slots, least=0)
    bench = RolloutBench(
        mode=mode,
        model=model,
        shape=model_shape,
        slots=counts,
        kv_memory_gib=kv_memory_gib,
        repeats=repeats,
        precision=precision,
        max_minutes=max_minutes,
        seed=seed,
        dtype=dtype,
        device=device,
        num_threads=threads,
        peers=tuple(dict.fromkeys(peer or Peer)),
        num_sequences=options.parse_counts("--sequences", sequences),
        lengths=lengths,
        equal_tokens=equal_tokens,
        longest_tokens=longest_tokens,
        num_samples=samples or (8 if mode == "live" else 1),
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        drafters=options.parse_names("--drafters", drafters or "none,srt"),
        control=control,
        num_prompts=options.parse_prompts_used(prompts_used, len(counts)),
        max_tokens=max_tokens,
        draft_budget=options.parse_draft_budget(draft_budget),
        price_as=price_as,
        trace=trace,
        tokenizer=tokenizer_folder,
        history=history or 0.0,
        trace_note=trace_note,
        num_epochs=epochs or 3,
        step_prompts=step_prompts,
        policy_change=policy_change or 0.0,
        run_ahead=options.parse_names("--run-ahead", run_ahead or "off", ("off", "uncoupled", "coupled")),
    )
    _check_and_run(bench, json_file, write_docs)


def _check_and_run(bench: RolloutBench, json_file: Path | None, write_docs: Path | None) -> None:
    """Everything that can be known to be wrong is found before anything is measured."""
    _check(bench)
    options.check_output("--json", json_file)
    options.check_output("--write-docs", write_docs)
    _run(bench, json_file, write_docs)


def _given(context: typer.Context) -> set[str]:
    """Parameters that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _check(bench: RolloutBench) -> None:
    least, most = bench.prompt_tokens
    if not 1 <= least <= most:
        raise ValueError(f"--prompt-tokens: expected 1 <= LEAST <= MOST, found {least} {most}")
    if bench.kv_memory_gib <= 0:
        raise ValueError(f"--kv-memory-gib: expected a number above 0, found {bench.kv_memory_gib}")
    if bench.precision is not None and not (0 < bench.precision < 1 and bench.repeats >= 3):
        raise ValueError(
            f"--precision: expected a share like 0.02 and --repeats of at least 3, found {bench.precision:g} and "
            f"{bench.repeats}"
        )
    if bench.max_minutes is not None and (bench.precision is None or bench.max_minutes <= 0):
        raise ValueError(f"--max-minutes: expected a number above 0, beside --precision; found {bench.max_minutes:g}")
    if bench.mode == "peers" and len(bench.slots) > 1:
        raise ValueError(f"--slots: one number here, found {len(bench.slots)}; several are for --drafters")


def _run(bench: RolloutBench, json_file: Path | None, write_docs: Path | None) -> None:
    from srtrl.bench.rollout_run import measure
    from srtrl.bench.tables import print_document, put_section
    from srtrl.metrics import write_atomic

    document = measure(bench)
    print_document(document)
    if json_file is not None:
        write_atomic(json_file, document.to_json())
    if write_docs is not None:
        put_section(write_docs, document.to_markdown())
