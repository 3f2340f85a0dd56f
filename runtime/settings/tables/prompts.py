"""The tables `data` and `eval`: training prompts, and evaluation sets."""

from typing import Annotated, Any

import msgspec

from runtime.functions.table import EVALUATION, GENERATE, GRADER, METRICS, SOURCE, SOURCE_CLASS
from runtime.settings.reading.access import Harmless, Reads, Running
from runtime.settings.reading.config import Config
from runtime.settings.tables.values import Name, NonNegative, Positive, Text, TopK, TopP

RowBytes = Running[Annotated[int, msgspec.Meta(ge=1, le=64 << 20)]]


class DataConfig(Config, frozen=True, kw_only=True):
    """One source of training prompts: a data file, a function or a class, and the names of its columns."""

    harmless = True

    # Name of the source in events and logs.
    name: Name
    # Data file, JSONL or Parquet. "file@[a:b]" reads only these rows.
    path: Reads[Text | None] = None
    # Function to use instead of `path`: "module:function" or "path/file.py:function". It gets a prompt's number and
    # returns its row. It runs in a process of its own.
    source: Annotated[Text | None, SOURCE] = None
    # Class to use instead of `path`: "module:Class" or "path/file.py:Class". It draws the rows, gets the outcomes of
    # their prompt groups, and has a state that is stored with each issue. It runs in a process of its own.
    source_class: Annotated[Text | None, SOURCE_CLASS] = None
    # Data files for the class in `source_class`, by names of your own. Its constructor gets their rows.
    files: Reads[dict[Name, Text]] = {}
    # Seconds that the class in `source_class` may take for one issue of prompt groups, and the function in `source` for
    # one row. After that the run ends.
    timeout_s: Running[Annotated[float, msgspec.Meta(gt=0)]] = 60.0
    # Column of the prompt: a text or a list of chat messages.
    input_key: Harmless[Text] = "input"
    # Column of the label that graders compare with. By default there is no label.
    label_key: Harmless[Text | None] = None
    # Column of the better response of a preference pair, with "dpo_loss" and "rm_loss": a text, a list of chat messages
    # that follow the prompt, or a whole conversation in a row without the column `input_key`.
    chosen_key: Harmless[Text | None] = None
    # Column of the worse response of a preference pair, in the same form.
    rejected_key: Harmless[Text | None] = None
    # Column of metadata for graders: an object, or a string of JSON.
    metadata_key: Harmless[Text] = "metadata"
    # Column of tools for the chat template: a list, or a string of JSON.
    tool_key: Harmless[Text] = "tools"
    # Render prompts with the tokenizer's chat template.
    apply_chat_template: Harmless[bool] = False
    # Extra arguments of the chat template.
    apply_chat_template_kwargs: Harmless[dict[str, Any]] = {}
    # The response continues the last message of a prompt if that is one of the assistant. By default such a prompt is
    # refused. Not for demonstrations, whose last message is the response.
    continue_final_message: Harmless[bool] = False
    # Grader of the samples: a built-in, "module:function", "path/file.py:function", or a name in `reward.graders`,
    # `reward.judges`, `reward.sums` or `reward.external`. With `algorithm.opd` it may be left out: rewards are 0
    # then.
    rm_type: Annotated[Text | None, GRADER] = None
    # Engine pool of the teacher of these samples, with `algorithm.opd.type = "sglang"`: a name in `engines`. By default
    # "teacher".
    teacher: Name | None = None
    # Share of the prompts that are of this source, relative to the sum of all weights. By default each source
    # contributes in proportion to its size. If one source has a weight, all need one.
    weight: Harmless[Annotated[float, msgspec.Meta(gt=0)] | None] = None
    # Size limit of a row's prompt, label and metadata in bytes. A larger row ends the start with its file and line.
    max_row_bytes: RowBytes = 16 << 20  # expert


class EvalConfig(Config, frozen=True, kw_only=True):
    """One evaluation set. Unset keys take their values from the rollout table and the first data source.

    With "dpo_loss" and "rm_loss" it holds preference pairs, which the trainer evaluates without generating.
    """

    # Name of the set. Its metrics begin with `eval/<name>`.
    name: Name
    # Data file, as in a data source.
    path: Reads[Text]
    # Number of train steps between evaluations.
    interval: Positive
    # Number of samples per prompt. The metric is their mean. Not for preference pairs, like the next four keys.
    n_samples_per_eval_prompt: Positive = 1
    # Sampling temperature; 0 is greedy. By default `rollout.temperature`.
    temperature: NonNegative | None = None
    # Nucleus sampling. By default `rollout.top_p`.
    top_p: TopP | None = None
    # Number of likeliest tokens to sample from. By default `rollout.top_k`.
    top_k: TopK | None = None
    # Maximum response length in tokens. By default `rollout.max_response_len`.
    max_response_len: Positive | None = None
    # Column of the prompt. By default that of the first data source.
    input_key: Harmless[Text | None] = None
    # Column of the label. By default that of the first data source.
    label_key: Harmless[Text | None] = None
    # Column of metadata for graders. By default that of the first data source.
    metadata_key: Harmless[Text | None] = None
    # Column of tools for the chat template. By default that of the first data source.
    tool_key: Harmless[Text | None] = None
    # Render prompts with the tokenizer's chat template. By default as in the first data source.
    apply_chat_template: Harmless[bool | None] = None
    # Extra arguments of the chat template. By default those of the first data source.
    apply_chat_template_kwargs: Harmless[dict[str, Any] | None] = None
    # The response continues the last message of a prompt if that is one of the assistant. By default as in the first
    # data source.
    continue_final_message: Harmless[bool | None] = None
    # Grader of the samples. By default that of the first data source.
    rm_type: Annotated[Text | None, GRADER] = None
    # Async function that generates the samples of this set: "module:function" or "path/file.py:function". By default
    # `rollout.custom_generate`.
    custom_generate: Annotated[Text | None, GENERATE] = None
    # Async function that evaluates this set: it gets all prompts, and decides of which it asks for how many samples, at
    # most `n_samples_per_eval_prompt`: "module:function" or "path/file.py:function". By default each prompt has
    # `n_samples_per_eval_prompt` samples.
    custom_evaluation: Annotated[Text | None, EVALUATION] = None
    # Function that computes further metrics from all graded samples of this set, in a process of its own:
    # "module:function" or "path/file.py:function". They are `eval/<name>/<metric>`.
    custom_metrics: Annotated[Text | None, METRICS] = None
    # Do not evaluate the weights that training starts from.
    skip_eval_before_train: Harmless[bool] = False
