"""The commands below `jspec train` and `jspec data`; `jspec.cli` chooses among them."""

from jspec.cli import Command

TRAIN = {
    "eagle3": Command(
        options="train.options:TrainEagle3",
        module="train.commands.train",
        summary="train an EAGLE-3 head",
        description="""\
Train an EAGLE-3 head for a target, from a data file to a folder that serves in
jspec and loads in SGLang, vLLM and the EAGLE repository.

Examples:
  jspec train eagle3 --target smollm2-135m --data answers.jsonl --out runs/head
  jspec train eagle3 --target ./model --data sharegpt.json --out runs/head --dry-run
""",
    ),
    "eagle1": Command(
        options="train.options:TrainEagle1",
        module="train.commands.train",
        summary="train an EAGLE-1 head, which also serves as EAGLE-2",
        description="""\
Train an EAGLE-1 head: it regresses the target's hidden states, and shares the
target's embedding and head.

Examples:
  jspec train eagle1 --target smollm2-135m --data answers.jsonl --out runs/eagle1
""",
    ),
    "medusa": Command(
        options="train.options:TrainMedusa",
        module="train.commands.train",
        summary="train Medusa heads on a frozen target",
        description="""\
Train Medusa heads: one small head for each of the next places, all reading the
target's last hidden state.

Examples:
  jspec train medusa --target smollm2-135m --data answers.jsonl --out runs/medusa
  jspec train medusa --target ./model --data answers.jsonl --out runs/medusa --projection own
""",
    ),
    "mtp": Command(
        options="train.options:TrainMTP",
        module="train.commands.train",
        summary="train a prediction module of a DeepSeek-V3, GLM-4.5 or MiMo target",
        description="""\
Train the multi-token-prediction module of a target (DeepSeek-V3, GLM-4.5, MiMo)
to be run recurrently: the one in its checkpoint, or a first one. The target is
frozen, or trained together with the module.

Examples:
  jspec train mtp --target ./deepseek --data answers.jsonl --out runs/mtp
  jspec train mtp --target ./small --data text.jsonl --out runs/joint --joint --start random
  jspec generate --target runs/mtp/head --drafter mtp --prompt "Hello"
""",
    ),
    "eval": Command(
        options="train.options:Evaluate",
        module="train.commands.evaluate",
        summary="measure a head in the real engine",
        description="""\
Run prompts through the real engine and report tokens a round and acceptance by
depth.

Examples:
  jspec train eval --target smollm2-135m --drafter runs/head/head --prompts mt_bench.jsonl
""",
    ),
}

DATA = {
    "inspect": Command(
        options="train.options:Inspect",
        module="train.commands.inspect",
        summary="look at data as a training run would see it",
        description="""\
Counts, lengths and mask coverage of a data file, and one sample decoded with
its supervised spans marked.

Examples:
  jspec data inspect --target smollm2-135m --data sharegpt.json --sample 3
""",
    ),
    "features": Command(
        options="train.options:Features",
        module="train.commands.features",
        summary="write the target's hidden states for a data file",
        description="""\
Run the frozen target once over a data file and keep its hidden states, for
several epochs and several heads. Goes on where an earlier run ended.

Examples:
  jspec data features --target smollm2-135m --data answers.jsonl --features runs/features
""",
    ),
    "regenerate": Command(
        options="train.options:Regenerate",
        module="train.commands.regenerate",
        summary="let the target answer the prompts of a data file",
        description="""\
Let the target answer the prompts of a data file: heads trained on the target's
own text accept better. Goes on where an earlier run ended.

Examples:
  jspec data regenerate --target smollm2-135m --data sharegpt.json --out answers.jsonl
""",
    ),
}
