"""Text data sets: tokenized, truncated and padded when a batch is requested."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stagewright.errors import DataMissing, UsageError
from stagewright.extras import require
from stagewright.zoo.model import Batch, Model, TextInput
from stagewright.zoo.quiet import quiet_transformers
from stagewright.zoo.tasks.samples import Samples


class TextSamples(Samples):
    """One or two sentences per sample, padded to the model's sequence length."""

    def __init__(self, table: Any, columns: tuple[str, ...], inputs: TextInput, tokenizer: Any) -> None:
        self.labels = table.column("label").to_numpy()
        self._columns = [table.column(name) for name in columns]
        self._inputs = inputs
        self._tokenizer = tokenizer

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return token ids, attention mask, token types if the model has them, and classes."""
        texts = [[column[index].as_py() for index in indices] for column in self._columns]
        encoded = self._tokenizer(
            *texts,
            padding="max_length",
            truncation=True,
            max_length=self._inputs.sequence_length,
            return_tensors="pt",
            return_token_type_ids=self._inputs.num_token_types > 1,
        )
        kwargs = {"attention_mask": encoded["attention_mask"]}
        if self._inputs.num_token_types > 1:
            kwargs["token_type_ids"] = encoded["token_type_ids"]
        target = torch.from_numpy(self.labels[list(indices)].astype(np.int64))
        return Batch(args=(encoded["input_ids"],), kwargs=kwargs, target=target)


def load_tokenizer(task: str, model: Model, inputs: TextInput, folder: Path | None) -> Any:
    """Load the tokenizer in `folder`, or the one that came with the model's weights."""
    require("transformers", f"the task {task!r}")
    import transformers

    folder = folder if folder is not None else inputs.tokenizer
    if folder is None:
        raise DataMissing(
            f"the task {task!r} needs a tokenizer, but the model {model.name!r} comes without; give a "
            "folder with tokenizer.json as tokenizer=DIR (--tokenizer DIR), or a folder with weights and tokenizer as "
            "weights=DIR (--weights DIR)"
        )
    if not folder.is_dir():
        raise DataMissing(f"the tokenizer folder {str(folder)!r} does not exist")
    try:
        with quiet_transformers():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # tokenizers and transformers raise different errors for a wrong folder
        raise UsageError(f"the folder {str(folder)!r} contains no readable tokenizer") from error
    if len(tokenizer) > inputs.vocabulary_size:
        raise UsageError(
            f"the tokenizer in {str(folder)!r} has {len(tokenizer)} tokens, but the model {model.name!r} "
            f"has only {inputs.vocabulary_size}; use the tokenizer of that model"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
